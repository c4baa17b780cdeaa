"""A fake server that answers at a set pace, over HTTP and gRPC, so that what a load test says can be checked."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.unit.client_fakes import FakeServer, Seen, Step, send


class PacedServer(FakeServer):
    """Sends `max_tokens` tokens, the first after `ttft_s` and the others `tpot_s` apart.

    Args:
        failing: every so many-th request ends with an error after its first tokens; 0: none.
        slots: how many are answered at once; the others wait.
    """

    def __init__(self, ttft_s: float = 0.02, tpot_s: float = 0.002, *, failing: int = 0, slots: int = 64) -> None:
        super().__init__()
        self.ttft_s, self.tpot_s, self._failing = ttft_s, tpot_s, failing
        self.frozen_until = 0.0
        self._slots = _Slots(slots)
        self._count = 0

    def freeze(self, seconds: float) -> None:
        """Answer nothing for a while; what is under way stops as well."""
        self.frozen_until = time.monotonic() + seconds

    def take(self, seen: Seen) -> Any:
        if seen.model == "preprocessing":
            return [Step("send", {"REQUEST_INPUT_LEN": np.array([[len(seen.tensors["QUERY"].split())]], np.int32)})]
        if seen.model == "tensorrt_llm":
            return super().take(seen)
        self.seen.append(seen)
        self._count += 1
        tokens = int(np.ravel(seen.tensors["max_tokens"])[0])
        if not np.ravel(seen.tensors.get("stream", False))[0]:
            return list(self._whole(tokens))
        return self._stream(tokens, self._failing > 0 and self._count % self._failing == 0)

    def _whole(self, tokens: int) -> Iterator[Step]:
        with self._slots:
            self._pause(self.ttft_s + tokens * self.tpot_s)
        yield send("word " * tokens, "length", **_counts(tokens))

    def _stream(self, tokens: int, fails: bool) -> Iterator[Step]:
        with self._slots:
            self._pause(self.ttft_s)
            for number in range(tokens):
                if fails and number == 3:
                    yield Step("error", message="the engine fell over")
                    return
                yield send("word ", "length" if number == tokens - 1 else None, **_counts(1))
                self._pause(self.tpot_s)

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        while (left := self.frozen_until - time.monotonic()) > 0:
            time.sleep(left)


class _Slots:
    """First come, first served, as at a real server; a semaphore lets who comes just then go first."""

    def __init__(self, free: int) -> None:
        self._lock = threading.Lock()
        self._free, self._waiting = free, deque[threading.Event]()

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._free += 1


def _counts(tokens: int) -> dict[str, Any]:
    return {"num_input_tokens": np.array([[11]], np.int32), "num_output_tokens": np.array([[tokens]], np.int32)}
