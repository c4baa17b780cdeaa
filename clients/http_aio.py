"""Asynchronous HTTP client: the same calls as clients.http_client, awaited. One event loop per client."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp

from clients import farewell, http_wire, tracing
from clients.answer import Answer
from clients.awaited import AwaitedClient, AwaitedStream
from clients.errors import ClientError, connection_lost, from_http, out_of_time, unreachable
from clients.http_answer import HttpAnswer
from clients.http_client import CONNECT_TIMEOUT_S, CONTROL_TIMEOUT_S, DEFAULT_URL, base_url
from clients.model_info import ModelInfo
from clients.types import Chunk, GenerateRequest

_CONTROL_LIMITS = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S)


class AsyncHttpClient(AwaitedClient["AsyncHttpStream"]):
    """Talks to one model of one server; arguments as for HttpClient. Make it inside the event loop that uses it."""

    def __init__(self, url: str = DEFAULT_URL, *, model: str = "ensemble", stop_model: str = "tensorrt_llm") -> None:
        super().__init__(base_url(url), model, stop_model)
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def stop(self, request_id: str) -> None:
        """End a running request; see HttpClient.stop."""
        await self._control("POST", f"/v2/models/{self.stop_model}/generate", request_id)

    async def _ask_info(self) -> ModelInfo:
        return ModelInfo.parse(json.loads(await self._control("GET", f"/v2/models/{self.model}")))

    async def ready(self) -> bool:
        """Whether the server would answer a request for the model now."""
        try:
            await self._control("GET", f"/v2/models/{self.model}/ready")
        except ClientError:
            return False
        return True

    async def close(self) -> None:
        """Close all connections."""
        await self.session.close()

    async def _send(self, request: GenerateRequest, info: ModelInfo, answer: Answer) -> AsyncHttpStream:
        stream = AsyncHttpStream(self, HttpAnswer(request, info, answer), info.patience(answer.timeout))
        try:
            await stream.open()
        except asyncio.CancelledError:
            # The server may have the request already.
            await asyncio.shield(asyncio.ensure_future(stream.cancel()))
            raise
        return stream

    async def _control(self, method: str, path: str, stop_id: str | None = None) -> bytes:
        body = None if stop_id is None else http_wire.stop_body(stop_id)
        headers = None if stop_id is None else http_wire.headers(stop_id)
        call = self.session.request(method, self.url + path, data=body, headers=headers, timeout=_CONTROL_LIMITS)
        try:
            async with call as reply:
                content = await reply.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise unreachable(self.url, _reason(error)) from None
        if reply.status != 200:
            raise from_http(reply.status, content, self.url)
        return content


class AsyncHttpStream(AwaitedStream):
    """Iterates over the chunks of one answer; leaving its `async with` early cancels the request on the server."""

    def __init__(self, client: AsyncHttpClient, http: HttpAnswer, patience: float | None) -> None:
        self._client = client
        self._http = http
        self._answer = http.answer
        self._limits = aiohttp.ClientTimeout(total=patience, sock_connect=CONNECT_TIMEOUT_S)
        self._reply: aiohttp.ClientResponse | None = None
        self._over = False

    async def open(self) -> None:
        """Send the request and wait until the server takes or refuses it."""
        url = f"{self._client.url}/v2/models/{self._client.model}/{self._http.verb}"
        headers = http_wire.headers(self.request_id) | tracing.headers(self._answer.span)
        try:
            self._reply = await self._client.session.post(
                url, data=self._http.body, headers=headers, timeout=self._limits
            )
            content = b"" if self._reply.status == 200 else await self._reply.read()
        except aiohttp.ClientConnectorError as error:
            self._over = True
            raise unreachable(self._client.url, _reason(error)) from None
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            failure = self._broken(error)
            self._answer.failed(failure)
            await self.cancel()
            raise failure from None
        if self._reply.status != 200:
            self._over = True
            raise from_http(self._reply.status, content, self._client.url)

    async def __anext__(self) -> Chunk:
        try:
            while (chunk := self._http.take()) is None:
                if self._over or self._reply is None:
                    raise StopAsyncIteration
                await self._read(self._reply)
        except ClientError as error:
            self._answer.failed(error)
            await self.cancel()
            raise
        return chunk

    async def cancel(self) -> None:
        """End the request on the server; the iteration then ends quietly. Safe to call twice."""
        if self._over:
            return
        self._over = True
        self._answer.leave()
        await self._stop()
        if self._reply is not None:
            await farewell.insist(self._stop, self._reply.read)
            self._reply.close()

    async def _stop(self) -> None:
        # RuntimeError: the session is closed, so there is nobody to tell.
        with contextlib.suppress(ClientError, RuntimeError):
            await self._client.stop(self.request_id)

    async def _read(self, reply: aiohttp.ClientResponse) -> None:
        try:
            piece = await reply.content.readany()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            if not self._answer.cancelled:
                raise self._broken(error) from None
            return
        if not piece:
            self._over = True
        self._http.feed(piece)

    def _broken(self, error: Exception) -> ClientError:
        if isinstance(error, asyncio.TimeoutError):
            return out_of_time(self._answer.timeout, self._answer.text)
        return connection_lost(self._client.url, _reason(error), self._answer.text)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
