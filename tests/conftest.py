"""What holds for all tests."""

from __future__ import annotations

import os
import sys

# Tests start hundreds of processes; without caches each would compile anew all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
