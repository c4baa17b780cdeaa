"""The ways to ask a server.

Knows nothing of how each is done; see loadtests.exchange.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

TransportName: TypeAlias = Literal["grpc-stream", "http-stream", "http-generate"]
TRANSPORTS: tuple[TransportName, ...] = ("grpc-stream", "http-stream", "http-generate")
