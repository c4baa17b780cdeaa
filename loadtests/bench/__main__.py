"""Entry point of `python -m loadtests.bench`."""

from __future__ import annotations

import sys

from loadtests.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
