"""Entry point of `python -m clients`."""

from __future__ import annotations

import sys

from clients.cli import main

if __name__ == "__main__":
    sys.exit(main())
