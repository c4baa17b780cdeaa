"""`python -m loadtests`; see loadtests.cli."""

from __future__ import annotations

import loadtests.patched  # noqa: F401  # isort: skip - before everything that opens sockets
import sys

from loadtests.cli import main

if __name__ == "__main__":
    sys.exit(main())
