"""`python -m loadtests`; see loadtests.cli."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # begun in the background of a shell
    if not ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while it imports: an end without a traceback
    import loadtests.patched  # noqa: F401  # isort: skip - before everything that opens sockets
    from loadtests.cli import main  # isort: skip

    if not ignored:
        import gevent

        # Thrown where main waits: Python would raise it in whatever runs, and a callback of gRPC loses it.
        gevent.signal_handler(signal.SIGINT, gevent.kill, gevent.getcurrent(), KeyboardInterrupt)
    sys.exit(main())
