"""Runs any of the four clients in the same way, so that one test can hold for all of them."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import pytest

import clients
from clients import Chunk, Result

KINDS = ("grpc", "grpc_aio", "http", "http_aio")
EVERY_CLIENT = pytest.mark.parametrize("kind", KINDS)


class HasUrls(Protocol):
    """A server under test."""

    @property
    def grpc_url(self) -> str: ...

    @property
    def http_url(self) -> str: ...


def make_client(kind: str, server: HasUrls, **options: Any) -> Any:
    classes: dict[str, Any] = {
        "grpc": clients.GrpcClient,
        "grpc_aio": clients.AsyncGrpcClient,
        "http": clients.HttpClient,
        "http_aio": clients.AsyncHttpClient,
    }
    return classes[kind](server.grpc_url if kind.startswith("grpc") else server.http_url, **options)


def stream(
    kind: str, server: HasUrls, prompt: Any, *, leave_after: int = 0, **values: Any
) -> tuple[list[Chunk], Result]:
    """All chunks and the result; `leave_after` chunks the stream is left."""

    async def run() -> tuple[list[Chunk], Result]:
        chunks: list[Chunk] = []
        async with make_client(kind, server) as client, await client.stream(prompt, **values) as answer:
            async for chunk in answer:
                chunks.append(chunk)
                if len(chunks) == leave_after:
                    break
        return chunks, answer.result

    if kind.endswith("aio"):
        return asyncio.run(run())
    chunks: list[Chunk] = []
    with make_client(kind, server) as client, client.stream(prompt, **values) as answer:
        for chunk in answer:
            chunks.append(chunk)
            if len(chunks) == leave_after:
                break
    return chunks, answer.result


def generate(kind: str, server: HasUrls, prompt: Any, *, model: str = "ensemble", **values: Any) -> Result:
    async def run() -> Result:
        async with make_client(kind, server, model=model) as client:
            return await client.generate(prompt, **values)

    if kind.endswith("aio"):
        return asyncio.run(run())
    with make_client(kind, server, model=model) as client:
        return client.generate(prompt, **values)
