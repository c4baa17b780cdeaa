"""Entry point of `python -m clients`."""

from __future__ import annotations

import sys

from clients import adapter_list
from clients.cli import main

if __name__ == "__main__":
    sys.exit(adapter_list.main(sys.argv[2:]) if sys.argv[1:2] == ["adapters"] else main())
