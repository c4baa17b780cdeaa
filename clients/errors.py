"""What can go wrong when talking to a server, and the one place where gRPC and HTTP failures become these errors.

    ClientError
    ├── ServerUnavailable   nobody answers, or the server is not ready
    ├── RequestRefused      the server will not serve this request as it is; sending it again gives the same answer
    ├── QueueFull           the server has no room now; the same request may succeed later
    ├── ServerFailure       the server failed while it ran the request
    ├── DeadlineExceeded    `timeout` ran out; `.text` holds what had arrived
    ├── Cancelled           cancelled by this client or by a stop request
    ├── StreamBroken        the answer ended early or cannot be read; `.text` holds what had arrived
    └── IncompleteAnswer    a structured answer was cut off; `.text` holds what there is

Messages keep the server's own words. Knows nothing of the requests themselves.
"""

from __future__ import annotations

import json

import grpc


class ClientError(Exception):
    """Base of every error that a client raises.

    Attributes:
        text: the part of the answer that had arrived, "" when nothing had.
    """

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class ServerUnavailable(ClientError):
    """Nobody answers at the address, or the server is not ready."""


class RequestRefused(ClientError):
    """The server will not serve this request as it is."""


class QueueFull(ClientError):
    """The server has no room now; try again later."""


class ServerFailure(ClientError):
    """The server failed while it ran the request."""


class DeadlineExceeded(ClientError):
    """The timeout given to this client ran out."""


class Cancelled(ClientError):
    """The request was cancelled before its answer was complete."""


class StreamBroken(ClientError):
    """The answer ended early, or something arrived that is no answer."""


class IncompleteAnswer(ClientError):
    """An answer by a schema was cut off before its structure was complete."""


_GRPC: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: RequestRefused,
    grpc.StatusCode.NOT_FOUND: RequestRefused,
    grpc.StatusCode.UNIMPLEMENTED: RequestRefused,
    grpc.StatusCode.ALREADY_EXISTS: RequestRefused,
    grpc.StatusCode.OUT_OF_RANGE: RequestRefused,
    grpc.StatusCode.FAILED_PRECONDITION: RequestRefused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}
# Triton's words for a full queue, its own and the backend's.
_QUEUE = ("maximum queue size", "queue is full", "queue full", "shutting down")
_CONNECTION = ("failed to connect", "socket closed", "connection re", "goaway", "broken pipe", "dns resolution")
# Failures inside the server that reach an HTTP client with the same status as a refusal.
_FAILURE = ("stub process", "traceback", "executor failed", "internal error", "is not healthy")


def from_grpc(error: grpc.RpcError, url: str, text: str = "") -> ClientError:
    """The typed error for a failed call; `text` is what had arrived before it failed."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        if _has(details, _QUEUE):
            return QueueFull(details, text)
        if not _has(details, _CONNECTION):
            return ServerUnavailable(f"{details} (server at {url})", text)
        return connection_lost(url, details, text) if text else unreachable(url, details)
    kind = _GRPC.get(code, ServerFailure)
    return kind(details or f"The call failed with {code.name}.", text)


def from_message(message: str, text: str = "") -> ClientError:
    """The typed error for an error that came as bare text, inside a stream or an HTTP body."""
    if _has(message, _QUEUE):
        return QueueFull(message, text)
    # A request that has begun to be answered was not refused.
    if text or _has(message, _FAILURE):
        return ServerFailure(message, text)
    return RequestRefused(message, text)


def from_http(status: int, body: bytes, url: str) -> ClientError:
    """The typed error for an HTTP answer other than 200."""
    message = http_message(body)
    if message is None:
        reply = body[:200].decode("utf-8", "replace").strip() or "nothing"
        return StreamBroken(f"{url} answered HTTP {status} with {reply!r}, which is not what Triton sends.")
    if status == 503 and not _has(message, _QUEUE):
        return ServerUnavailable(f"{message} (server at {url})")
    return from_message(message)


def http_message(body: bytes) -> str | None:
    """The text under "error" in a JSON body or a single event; None when there is none."""
    try:
        parsed = json.loads(body.strip().removeprefix(b"data:"))
    except ValueError:
        return None
    message = parsed.get("error") if isinstance(parsed, dict) else None
    return message if isinstance(message, str) else None


def unreachable(url: str, reason: str = "") -> ServerUnavailable:
    """The error when no connection can be made."""
    # gRPC wraps the reason in several layers; the innermost is the one to read.
    reason = reason.rpartition(": ")[2]
    detail = f" ({reason})" if reason else ""
    return ServerUnavailable(f"No server answers at {url}{detail}. Start one with `make serve`, or give another url.")


def connection_lost(url: str, reason: str, text: str) -> StreamBroken:
    """The error when the connection breaks in the middle of an answer."""
    return StreamBroken(f"The connection to {url} broke before the answer was complete ({reason}).", text)


def out_of_time(timeout: float | None, text: str = "") -> DeadlineExceeded:
    """The error when the client's `timeout`, in seconds, ran out."""
    limit = "the server's time limit" if timeout is None else f"{timeout:g} s"
    return DeadlineExceeded(f"No complete answer within {limit}; {len(text)} characters had arrived.", text)


def _has(message: str, words: tuple[str, ...]) -> bool:
    lowered = message.lower()
    return any(word in lowered for word in words)
