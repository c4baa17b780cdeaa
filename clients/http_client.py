"""Synchronous HTTP client on Triton's generate endpoints. Safe to use from many threads."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import urllib3

from clients import farewell, http_wire, leftovers, tracing, wire
from clients.answer import Answer
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
from clients.types import Chunk, GenerateRequest, Prompt, Result

if TYPE_CHECKING:
    from typing_extensions import Self

CONNECT_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 5.0
"""For calls that do no work: health, metadata, stop."""

DEFAULT_URL = "http://127.0.0.1:8000"
_PIECE = 65536


def base_url(url: str) -> str:
    """The url with its scheme and without a slash at the end."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


class HttpClient:
    """Talks to one model of one server.

    Args:
        url: of the server's HTTP endpoint.
        model: the model that takes text.
        stop_model: the model that takes stop requests.
    """

    def __init__(self, url: str = DEFAULT_URL, *, model: str = "ensemble", stop_model: str = "tensorrt_llm") -> None:
        self.url = base_url(url)
        self.model = model
        self.stop_model = stop_model
        self._pool = urllib3.PoolManager(maxsize=64, retries=False)
        self._info: ModelInfo | None = None
        self._info_lock = threading.Lock()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, request_id: str | None = None, **values: Any
    ) -> Result:
        """The whole answer at once.

        Args:
            prompt: text, chat messages or a GenerateRequest; `values` are fields of GenerateRequest.
            timeout: seconds; the server is told, and ends the request itself.
            request_id: must be unique among running requests; made up when absent.

        Raises:
            ClientError: see clients.errors.
        """
        values["stream"] = False
        with self._start(GenerateRequest.of(prompt, **values), timeout, request_id) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, request_id: str | None = None, **values: Any
    ) -> HttpStream:
        """The answer as it is made; returns when the server has taken the request. Otherwise as generate()."""
        return self._start(GenerateRequest.of(prompt, **{**values, "stream": True}), timeout, request_id)

    def stop(self, request_id: str) -> None:
        """End a running request; an unknown id is no error.

        Raises:
            ClientError: the stop request did not get through.
        """
        self._control("POST", f"/v2/models/{self.stop_model}/generate", request_id)

    def info(self) -> ModelInfo:
        """What the model declares; asked once.

        Raises:
            ClientError: the server does not answer or has no such model.
        """
        with self._info_lock:
            if self._info is None:
                self._info = ModelInfo.parse(json.loads(self._control("GET", f"/v2/models/{self.model}")))
            return self._info

    def ready(self) -> bool:
        """Whether the server would answer a request for the model now."""
        try:
            self._control("GET", f"/v2/models/{self.model}/ready")
        except ClientError:
            return False
        return True

    def wait_until_ready(self, timeout: float) -> None:
        """Wait for ready().

        Raises:
            ServerUnavailable: not ready within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.ready():
            if time.monotonic() > deadline:
                raise unreachable(self.url, f"not ready after {timeout:g} s")
            time.sleep(0.1)

    def close(self) -> None:
        """Close idle connections."""
        self._pool.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, request: GenerateRequest, timeout: float | None, request_id: str | None) -> HttpStream:
        info = self.info()
        if not request.stream:
            request = info.with_usage(request)
        answer = Answer(request, request_id or wire.new_request_id(), timeout)
        return HttpStream(self, HttpAnswer(request, info, answer), info.patience(timeout))

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


class HttpStream:
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
            self._stop()
            raise out_of_time(self._answer.timeout) from None
        self._over = False
        leftovers.track(self)

    @property
    def request_id(self) -> str:
        """The id the server knows the request by."""
        return self._answer.request_id

    @property
    def result(self) -> Result:
        """What has arrived so far; the whole answer once the iteration is over."""
        return self._answer.result()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            while (chunk := self._http.take()) is None:
                if self._over:
                    raise StopIteration
                self._read()
        except ClientError:
            self.cancel()
            raise
        return chunk

    def cancel(self) -> None:
        """End the request on the server; the iteration then ends quietly. Safe from any thread, and twice."""
        if self._over:
            return
        self._over = self._answer.cancelled = True
        if self._stop():
            with farewell.insisting(self._stop, self._shut_down), contextlib.suppress(Exception), self._reading:
                self._reply.drain_conn()
        self._shut_down()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        # A loop left by `break` drops its stream without closing it.
        if not sys.is_finalizing():
            self.cancel()

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
