"""`python -m build_engines`."""

from __future__ import annotations

import sys

from build_engines.cli import main

sys.exit(main())
