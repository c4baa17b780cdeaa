"""`python -m python_backend.server`."""

from __future__ import annotations

import sys

from python_backend.server.cli import main

sys.exit(main())
