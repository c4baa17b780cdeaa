"""Which Triton requests are running: found by the engine's request ids, by Triton's ids, or all at once.

Knows nothing of tensors or of how a response is built.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from python_backend.request import FinishReason, GenerationRequest
    from python_backend.triton.respond import Responder


@dataclass(slots=True, eq=False)
class Part:
    """One prompt of a Triton request."""

    request: GenerationRequest
    responder: Responder
    output_tokens: int = 0  # of the sequences that have ended
    finish_reason: FinishReason | None = None
    error: Exception | None = None  # that ended its answer
    traceparent: str = ""  # of Triton's span; empty: not traced


@dataclass(slots=True, eq=False)
class Answer:
    """One Triton request that still owes responses."""

    triton_id: str
    sender: Any  # Triton's response sender
    parts: dict[str, Part] = field(default_factory=dict)  # by the engine's request id; those that still run


class InFlight:
    """The table of answers; safe from any thread.

    Triton's request ids need not be unique: whatever is looked up by one finds every answer that has it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_engine_id: dict[str, Answer] = {}
        self._by_triton_id: dict[str, set[Answer]] = {}

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def add(self, answer: Answer) -> None:
        """Enter an answer under the ids of all its parts."""
        with self._lock:
            for engine_id in answer.parts:
                self._by_engine_id[engine_id] = answer
            if answer.triton_id:
                self._by_triton_id.setdefault(answer.triton_id, set()).add(answer)

    def get(self, engine_id: str) -> Answer | None:
        """The answer that an engine request belongs to; None when it is over."""
        return self._by_engine_id.get(engine_id)

    def end_part(self, answer: Answer, engine_id: str) -> bool:
        """Take one prompt out; True when it was the answer's last one, which then is forgotten."""
        with self._lock:
            self._by_engine_id.pop(engine_id, None)
            answer.parts.pop(engine_id, None)
            if answer.parts:
                return False
            self._forget(answer)
            return True

    def drop(self, answer: Answer) -> dict[str, Part]:
        """Take a whole answer out and give the parts that were still running, by the engine's ids."""
        with self._lock:
            running = dict(answer.parts)
            for engine_id in running:
                self._by_engine_id.pop(engine_id, None)
            answer.parts.clear()
            self._forget(answer)
            return running

    def engine_ids_of(self, triton_id: str) -> list[str]:
        """Ids of everything that runs under a Triton request id; empty when nothing does."""
        with self._lock:
            return [engine_id for answer in self._by_triton_id.get(triton_id, ()) for engine_id in answer.parts]

    def answers(self) -> Iterable[Answer]:
        """A snapshot of the answers under way."""
        with self._lock:
            return set(self._by_engine_id.values())

    def _forget(self, answer: Answer) -> None:
        same_id = self._by_triton_id.get(answer.triton_id)
        if same_id is None:
            return
        same_id.discard(answer)
        if not same_id:
            del self._by_triton_id[answer.triton_id]
