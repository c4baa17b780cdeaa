"""`python -m loadtests`: there are no load tests in this version; says so, and what there is instead."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.stderr.write("Load tests with an SLO are not part of this version. `make bench` measures speed and latency.\n")
    sys.exit(2)
