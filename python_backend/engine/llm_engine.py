"""The in-flight batching engine: requests in, events out, one step after the other on a thread of its own.

Knows nothing of Triton, tokenizers or grammars.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from python_backend.engine.admission import admit
from python_backend.engine.engine_core import EngineCore
from python_backend.engine.masks import after
from python_backend.engine.scheduler import Batch
from python_backend.errors import EngineFailure, Overloaded, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from python_backend.engine.config import EngineConfig
    from python_backend.engine.masks import FutureMask
    from python_backend.engine.output import EngineStats, RequestOutput
    from python_backend.engine.protocols import TextStop
    from python_backend.engine.request_state import RequestState
    from python_backend.request import GenerationRequest


class LLMEngine:
    """Serves many requests at once; every step computes the next tokens of all that fit."""

    def __init__(
        self,
        checkpoint_dir: Path,
        config: EngineConfig,
        on_outputs: Callable[[list[RequestOutput]], None],
        make_text_stop: Callable[[GenerationRequest], TextStop] | None = None,
    ) -> None:
        """Compile the model and run it once.

        Args:
            checkpoint_dir: Hugging Face layout, plain or FP8.
            on_outputs: gets the events of a step, on the engine's thread while the next step is computed.
            make_text_stop: for requests with stop_texts.
        """
        self.config = config
        self.core = EngineCore(checkpoint_dir, config, on_outputs, make_text_stop)
        self.vocab_size = self.core.vocab_size
        self._wake = threading.Condition()
        self._arrived: deque[tuple[RequestState, FutureMask | None]] = deque()
        self._cancelled: set[str] = set()
        self._stopping = False
        self.failure: BaseException | None = None  # set: the engine is dead and refuses everything
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    def prepare_adapters(self) -> None:
        """Compile what steps with adapters need now, not when the first request has one."""
        self.core.runner.adapted.ask().result()

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel what runs and end the engine's thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: GenerationRequest, masks: FutureMask | None = None) -> None:
        """Take a request, from any thread.

        Args:
            request: the request.
            masks: of a request with a guide; it runs once they are there, and may be cancelled before. The first
                request with an adapter waits in the same way, for graphs that know of adapters.

        Raises:
            InvalidRequest: it does not fit the model or a limit, or its guide is known to be refused.
            Overloaded: max_queue_size requests wait already, or the engine is being stopped.
            EngineFailure: the engine is dead.
        """
        admit(request, self.config, self.core.blocks, self.vocab_size)
        if masks is not None and masks.done() and isinstance(masks.exception(), RequestError):
            raise masks.exception() or AssertionError
        if request.adapter is not None:
            masks = after(self.core.runner.adapted.ask(), masks)
        state = self.core.open(request)
        with self._wake:
            if self.failure is not None:
                raise EngineFailure(f"The engine has failed ({self.failure}); restart the server.")
            if self._stopping:
                raise Overloaded("The server is shutting down; send the request to another one.")
            limit = self.config.max_queue_size
            waiting = len(self._arrived) + len(self.core.scheduler.waiting) + len(self.core.mask_queue)
            if limit and waiting >= limit:
                raise Overloaded(f"Maximum queue size of {limit} has been reached, please try again later")
            self._arrived.append((state, masks))
            self._wake.notify()
        if masks is not None:
            masks.add_done_callback(lambda _: self._notify())

    def cancel(self, request_id: str) -> bool:
        """End all requests of that id as `cancelled`, from any thread; False when there is none."""
        with self._wake:
            known = any(s.request.request_id == request_id for s in self._all_states())
            if known:
                self._cancelled.add(request_id)
                self._wake.notify()
        return known

    def stats(self) -> EngineStats:
        """The state after the last step."""
        return self.core.stats

    def take_mask_times(self) -> list[float]:
        """Seconds of each mask filled since the last call (the last few thousand at most)."""
        times = self.core.masks.times_s
        return [times.popleft() for _ in range(len(times))]

    def _all_states(self) -> list[RequestState]:
        return [*self.core.states.values(), *(state for state, _ in self._arrived)]

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._collect():
                self.core.step()
        except BaseException as failure:  # the thread's last words: without it every request would hang
            self.failure = failure
            for state in self._all_states():
                self.core.fail(state, EngineFailure(f"The engine has failed: {failure}"))
            self.core.publish()
            raise
        for state in self._all_states():
            self.core.end(state, "cancelled")
        self.core.publish()
        self.core.update_stats(Batch())

    def _collect(self) -> bool:
        """Wait for work and take what arrived; False when the engine is to stop."""
        with self._wake:
            while not (self._arrived or self._cancelled or self._stopping or self.core.has_work):
                self.core.update_stats(Batch())
                self._wake.wait(self.core.mask_queue.seconds_left())
            arrived, self._arrived = self._arrived, deque()
            cancelled, self._cancelled = self._cancelled, set()
            for state, masks in arrived:
                self.core.add(state, masks)
        self.core.end_early(cancelled)
        self.core.admit_masked()
        return not self._stopping
