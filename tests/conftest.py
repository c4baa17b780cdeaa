"""What holds for all tests."""

from __future__ import annotations

import os
import signal
import sys

# Tests start hundreds of processes; without caches each would compile anew all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests send signals to processes, which would inherit to ignore them from a shell that runs tests in the background.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
