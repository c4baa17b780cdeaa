"""LLMEngine's interface without a model: the n-th new token is the last prompt token + n, one in each step."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from python_backend.engine.output import EngineStats, PerfMetrics, RequestOutput, SequenceOutput
from python_backend.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from python_backend.engine.config import EngineConfig
    from python_backend.errors import RequestError
    from python_backend.request import GenerationRequest


class FakeEngine:
    """Counts upwards. Steps by itself every `step_s` seconds once started, or when a test calls `step`."""

    vocab_size = 64
    step_s = 0.005

    def __init__(
        self, checkpoint_dir: Path, config: EngineConfig, on_outputs: Callable[[list[RequestOutput]], None], **_: Any
    ) -> None:
        self.config = config
        self.failure: BaseException | None = None
        self._on_outputs = on_outputs
        self._running: dict[str, tuple[GenerationRequest, list[int]]] = {}
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._cancelled.update(self._running)
        self.step()

    def submit(self, request: GenerationRequest) -> None:
        with self._lock:
            if self.config.max_queue_size and len(self._running) >= self.config.max_queue_size:
                limit = self.config.max_queue_size
                raise Overloaded(f"Maximum queue size of {limit} has been reached, please try again later")
            self._running[request.request_id] = (request, [])

    def cancel(self, request_id: str) -> bool:
        with self._lock:
            self._cancelled.add(request_id)
            return request_id in self._running

    def fail(self, request_id: str, error: RequestError) -> None:
        """End a request with an error."""
        with self._lock:
            request, _ = self._running.pop(request_id)
        self._on_outputs([RequestOutput(request, [], finished=True, error=error)])

    def stats(self) -> EngineStats:
        return EngineStats(active_requests=len(self._running), kv_blocks_max=10, kv_blocks_used=len(self._running))

    def take_mask_times(self) -> list[float]:
        return []

    def step(self) -> None:
        """One token for everything that runs."""
        with self._lock:
            events = [event for entry in list(self._running.values()) if (event := self._advance(*entry))]
            self._cancelled.clear()
        if events:
            self._on_outputs(events)

    def _run(self) -> None:
        while not self._stopping.wait(self.step_s):
            self.step()

    def _advance(self, request: GenerationRequest, tokens: list[int]) -> RequestOutput | None:
        sent = list(tokens)
        reason: Any = None
        if request.request_id in self._cancelled:
            reason = "cancelled"
        elif request.deadline_s is not None and time.monotonic() > request.deadline_s:
            reason = "timeout"
        else:
            token = (request.prompt_ids[-1] + len(tokens) + 1) % self.vocab_size
            if token in request.end_ids:
                reason = "stop"
            else:
                tokens.append(token)
                reason = "length" if len(tokens) == request.sampling.max_tokens else None
        if reason is not None:
            del self._running[request.request_id]
        elif not request.streaming:
            return None
        new = tokens[len(sent) :] if request.streaming else list(tokens)
        context = sent if request.streaming else []
        log_probs = [-0.5] * len(tokens)
        sequence = SequenceOutput(0, new, context, reason, cum_log_prob=sum(log_probs), log_probs=log_probs)
        perf = PerfMetrics(
            request.arrival_ns, request.arrival_ns + 1, request.arrival_ns + 2, time.monotonic_ns(), 1, 1
        )
        return RequestOutput(request, [sequence], finished=reason is not None, perf=perf if reason else None)
