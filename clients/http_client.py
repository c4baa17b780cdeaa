"""Synchronous HTTP client on Triton's generate endpoints. Safe to use from many threads."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import urllib3

from clients import farewell, http_wire, leftovers, tracing
from clients.answer import Answer
from clients.blocking import BlockingClient, BlockingStream
from clients.errors import (
    ClientError,
    DeadlineExceeded,
    connection_lost,
    from_http,
    out_of_time,
    unreachable,
)
from clients.http_answer import HttpAnswer
from clients.model_info import ModelInfo
from clients.types import Chunk, GenerateRequest

CONNECT_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 5.0
"""For calls that do no work: health, metadata, stop."""

DEFAULT_URL = "http://127.0.0.1:8000"
_PIECE = 65536


def base_url(url: str) -> str:
    """The url with its scheme and without a slash at the end."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


class HttpClient(BlockingClient["HttpStream"]):
    """Talks to one model of one server.

    Args:
        url: of the server's HTTP endpoint.
        model: the model that takes text.
        stop_model: the model that takes stop requests.
    """

    def __init__(self, url: str = DEFAULT_URL, *, model: str = "ensemble", stop_model: str = "tensorrt_llm") -> None:
        super().__init__(base_url(url), model, stop_model)
        self._pool = urllib3.PoolManager(maxsize=64, retries=False)

    def stop(self, request_id: str) -> None:
        """End a running request; an unknown id is no error.

        Raises:
            ClientError: the stop request did not get through.
        """
        self._control("POST", f"/v2/models/{self.stop_model}/generate", request_id)

    def _ask_info(self) -> ModelInfo:
        return ModelInfo.parse(json.loads(self._control("GET", f"/v2/models/{self.model}")))

    def ready(self) -> bool:
        """Whether the server would answer a request for the model now."""
        try:
            self._control("GET", f"/v2/models/{self.model}/ready")
        except ClientError:
            return False
        return True

    def close(self) -> None:
        """Close idle connections."""
        self._pool.clear()

    def _send(self, request: GenerateRequest, info: ModelInfo, answer: Answer) -> HttpStream:
        return HttpStream(self, HttpAnswer(request, info, answer), info.patience(answer.timeout))

    def _control(self, method: str, path: str, stop_id: str | None = None) -> bytes:
        body = None if stop_id is None else http_wire.stop_body(stop_id)
        headers = None if stop_id is None else http_wire.headers(stop_id)
        try:
            reply = self._pool.request(method, self.url + path, body=body, headers=headers, timeout=CONTROL_TIMEOUT_S)
        except urllib3.exceptions.HTTPError as error:
            raise unreachable(self.url, _reason(error)) from None
        if reply.status != 200:
            raise from_http(reply.status, reply.data, self.url)
        return reply.data

    def open(
        self, verb: str, body: bytes, headers: dict[str, str], read_timeout: float | None
    ) -> urllib3.BaseHTTPResponse:
        """POST to the model and return the response unread.

        Raises:
            DeadlineExceeded: nothing within `read_timeout` seconds.
            ClientError: no connection, or refused.
        """
        limits = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=read_timeout)
        try:
            reply = self._pool.request(
                "POST",
                f"{self.url}/v2/models/{self.model}/{verb}",
                body=body,
                headers=headers,
                timeout=limits,
                preload_content=False,
            )
        except urllib3.exceptions.ReadTimeoutError:
            raise DeadlineExceeded("no answer") from None
        except urllib3.exceptions.NewConnectionError as error:
            raise unreachable(self.url, _reason(error)) from None
        except urllib3.exceptions.ConnectTimeoutError:
            raise unreachable(self.url, f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        except urllib3.exceptions.HTTPError as error:
            raise connection_lost(self.url, _reason(error), "") from None
        if reply.status != 200:
            try:
                raise from_http(reply.status, reply.data, self.url)
            finally:
                reply.release_conn()
        return reply


class HttpStream(BlockingStream):
    """Iterates over the chunks of one answer. Leaving it early, in any way, cancels the request on the server."""

    def __init__(self, client: HttpClient, http: HttpAnswer, patience: float | None) -> None:
        self._over = True  # until there is something to cancel
        self._reading = threading.Lock()
        self._client = client
        self._http = http
        self._answer = http.answer
        self._deadline = None if patience is None else time.monotonic() + patience
        try:
            headers = http_wire.headers(self.request_id) | tracing.headers(self._answer.span)
            self._reply = client.open(http.verb, http.body, headers, patience)
        except DeadlineExceeded:
            error = out_of_time(self._answer.timeout)
            self._answer.failed(error)
            self._stop()
            raise error from None
        self._over = False
        leftovers.track(self)

    def __next__(self) -> Chunk:
        try:
            while (chunk := self._http.take()) is None:
                if self._over:
                    raise StopIteration
                self._read()
        except ClientError as error:
            self._answer.failed(error)
            self.cancel()
            raise
        return chunk

    def cancel(self) -> None:
        """End the request on the server; the iteration then ends quietly. Safe from any thread, and twice."""
        if self._over:
            return
        self._over = True
        self._answer.leave()
        if self._stop():
            with farewell.insisting(self._stop, self._shut_down), contextlib.suppress(Exception), self._reading:
                self._reply.drain_conn()
        self._shut_down()

    def _shut_down(self) -> None:
        with contextlib.suppress(ValueError, OSError, RuntimeError):  # the response has just ended by itself
            self._reply.shutdown()

    def _read(self) -> None:
        try:
            self._limit_wait()
            with self._reading:
                piece = self._reply.read1(_PIECE)
        except urllib3.exceptions.ReadTimeoutError:
            raise out_of_time(self._answer.timeout, self._answer.text) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            if not self._answer.cancelled:
                raise connection_lost(self._client.url, _reason(error), self._answer.text) from None
            return
        if self._answer.cancelled:
            return
        if not piece:
            self._over = True
            self._reply.release_conn()
        self._http.feed(piece)

    def _limit_wait(self) -> None:
        """A read may take no longer than what is left of the deadline."""
        if self._deadline is None:
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise out_of_time(self._answer.timeout, self._answer.text)
        if (sock := getattr(self._reply.connection, "sock", None)) is not None:
            sock.settimeout(left)

    def _stop(self) -> bool:
        """Whether the server has been told."""
        with contextlib.suppress(ClientError):
            self._client.stop(self.request_id)
            return True
        return False


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error.__cause__ or error
    return str(cause) or type(cause).__name__
