"""`python -m loadtests`; see loadtests.cli."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    default = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while it imports: an end without a traceback
    import loadtests.patched  # noqa: F401  # isort: skip - before everything that opens sockets
    from loadtests.cli import main  # isort: skip

    signal.signal(signal.SIGINT, default)
    sys.exit(main())
