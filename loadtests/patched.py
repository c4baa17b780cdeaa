"""Imported first, for its effect: the standard library and gRPC cooperate with gevent, as locust's users need.

Without it a gRPC call stops every other user of the process while it waits.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import grpc.experimental.gevent as grpc_gevent  # noqa: E402 - the patch has to come before everything else

grpc_gevent.init_gevent()
