"""One request through one of the project's clients, timed: an item in, a record out.

Knows nothing of locust, arrivals and stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clients import ClientError, GenerateRequest, GrpcClient, HttpClient, Result
from clients.types import Chunk
from loadtests import clock
from loadtests.records import UNFINISHED, Record
from loadtests.transports import TransportName
from loadtests.workloads import Item

BROKEN_STRUCTURE = "StructureBroken"
"""Error class of an answer that came whole and is not what its structure promised."""

_PERF_EVERY = 8  # one request in so many asks the server for its queue time: ten more tensors in every response


class Exchange:
    """Sends the items of a workload to one server. One channel or pool for all requests of the process.

    Args:
        transport: how to ask.
        http_url: of the server.
        grpc_url: of the server.
        timeout_s: after which a request has failed.
    """

    def __init__(self, transport: TransportName, http_url: str, grpc_url: str, timeout_s: float) -> None:
        self.transport: TransportName = transport
        self.streamed = transport != "http-generate"
        self._client: GrpcClient | HttpClient = (
            GrpcClient(grpc_url) if transport == "grpc-stream" else HttpClient(http_url)
        )
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Ask the server once what it understands, before anything is measured.

        Raises:
            ClientError: the server does not answer.
        """
        self._client.info()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __call__(self, item: Item, pieces: Pieces) -> Record:
        """Send an item and wait for its end. Failures of the request are in the record, never raised.

        Raises:
            BaseException: this user was killed; the stream is then cancelled on the server, and what came of it is in
                `pieces`: see unfinished().
        """
        known = self._known(item, pieces, clock.now() - pieces.intended_at)
        try:
            result = self._ask(self._request(item), pieces.add)
        except ClientError as error:
            return pieces.record(known, error=type(error).__name__, message=str(error))
        except Exception as error:
            return pieces.record(known, error=f"client: {type(error).__name__}", message=str(error))
        problem = item.check(result.text) if item.check and result.finish_reason == "stop" else None
        if problem is not None:
            return pieces.record(known, error=BROKEN_STRUCTURE, message=problem, **_facts(result))
        return pieces.record(known, **_facts(result))

    def unfinished(self, item: Item, pieces: Pieces) -> Record:
        """The record of a request that was still running when the test gave up on it."""
        message = f"no complete answer after {clock.now() - pieces.intended_at:.1f} s, when the test ended"
        return pieces.record(self._known(item, pieces, 0.0), error=UNFINISHED, message=message)

    def _known(self, item: Item, pieces: Pieces, sent_s: float) -> dict[str, Any]:
        return {
            "index": item.index,
            "workload": item.workload,
            "transport": self.transport,
            "intended_at": pieces.intended_at,
            "sent_s": sent_s,
            "streamed": self.streamed,
            "adapter": item.adapter,
            "max_tokens": item.max_tokens,
            "shared_tokens": item.shared_tokens,
        }

    def _request(self, item: Item) -> GenerateRequest:
        understood = self._client.info().inputs
        counts: dict[str, Any] = {
            name: True for name in ("return_num_input_tokens", "return_num_output_tokens") if name in understood
        }
        if "return_perf_metrics" in understood and item.index % _PERF_EVERY == 0:
            counts["return_perf_metrics"] = True
        return GenerateRequest(**item.request_fields(), **counts)

    def _ask(self, request: GenerateRequest, add: Callable[[Chunk], None]) -> Result:
        if not self.streamed:
            return self._client.generate(request, timeout=self._timeout_s)
        with self._client.stream(request, timeout=self._timeout_s) as stream:
            for chunk in stream:
                add(chunk)
            return stream.result


class Pieces:
    """What of a stream has arrived."""

    def __init__(self, intended_at: float) -> None:
        self.intended_at = intended_at
        self._when: list[float] = []
        self._tokens: list[int] = []

    def add(self, chunk: Chunk) -> None:
        """Note a response, at once; one without text and tokens is only the news that all is over."""
        when = clock.now()
        # A server that does not count (upstream's older templates) is taken to send one token at a time.
        tokens = chunk.num_output_tokens if chunk.num_output_tokens is not None else int(bool(chunk.text))
        if chunk.text or tokens:
            self._when.append(when - self.intended_at)
            self._tokens.append(tokens)

    def record(self, known: dict[str, Any], **facts: Any) -> Record:
        """The record of a request that has just ended."""
        if self._tokens and facts.get("output_tokens") is None:
            facts["output_tokens"] = sum(self._tokens)
        return Record(
            **known,
            end_s=clock.now() - self.intended_at,
            chunk_s=tuple(self._when),
            chunk_tokens=tuple(self._tokens),
            **facts,
        )


def _facts(result: Result) -> dict[str, Any]:
    return {
        "prompt_tokens": result.usage.prompt_tokens,
        "output_tokens": result.usage.completion_tokens,
        "finish_reason": result.finish_reason,
        "queue_s": _queue_s(result),
    }


def _queue_s(result: Result) -> float | None:
    arrived, scheduled = (result.outputs.get(name) for name in ("arrival_time_ns", "first_scheduled_time_ns"))
    if arrived is None or scheduled is None:
        return None
    return max(0.0, float(int(scheduled.flat[0]) - int(arrived.flat[0])) / 1e9)
