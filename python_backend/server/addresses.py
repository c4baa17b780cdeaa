"""Where the server listens: one host, three ports. Knows nothing of Triton."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

from python_backend.errors import EnvironmentFault

_NAMES = {"http": "HTTP_PORT", "grpc": "GRPC_PORT", "metrics": "METRICS_PORT"}


@dataclass(frozen=True, slots=True)
class Addresses:
    """Ports on one host; 0 stands for "any free one" until `settled`."""

    host: str
    http: int
    grpc: int
    metrics: int

    def settled(self) -> Addresses:
        """The same addresses with every 0 replaced, all of them checked to be free.

        Raises:
            EnvironmentFault: a port is taken, named twice, or may not be used.
        """
        sockets: dict[str, socket.socket] = {}
        try:
            for name in _NAMES:  # all are held until the last is found, so that none is handed out twice
                sockets[name] = self._hold(name)
            return replace(self, **{name: held.getsockname()[1] for name, held in sockets.items()})
        finally:
            for held in sockets.values():
                held.close()

    def _hold(self, name: str) -> socket.socket:
        port: int = getattr(self, name)
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            held.bind((self.host, port))
            held.listen()
        except OSError as error:
            held.close()
            raise EnvironmentFault(
                f"{name} port {port} on {self.host} cannot be used ({error.strerror}):"
                f" stop what uses it, or choose another with {_NAMES[name]}={(port or 8000) + 10}."
            ) from None
        return held

    def __str__(self) -> str:
        return f"http://{self.host}:{self.http} grpc://{self.host}:{self.grpc} metrics=http://{self.host}:{self.metrics}/metrics"
