"""Token masks inside the engine: waiting for those still being made, and filling those of a step.

Knows nothing of grammars.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from python_backend.engine.protocols import BudgetMask, ForkableMask
from python_backend.errors import EngineFailure, RequestError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from python_backend.engine.protocols import TokenMask
    from python_backend.engine.request_state import RequestState
    from python_backend.engine.sequence import Sequence

MakeMask: TypeAlias = "Callable[[], TokenMask | None]"
FutureMask: TypeAlias = "Future[MakeMask]"
"""Gives a function that makes one mask for each sequence, or the RequestError that refuses the request."""

_MAX_TIMES = 4096


class MaskQueue:
    """Requests whose masks are not there yet; they wait beside the others, not before them."""

    def __init__(self) -> None:
        self._waiting: list[tuple[RequestState, FutureMask]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, state: RequestState, masks: FutureMask) -> None:
        """Take a request in."""
        self._waiting.append((state, masks))

    def remove(self, state: RequestState) -> None:
        """Forget a request that has ended; no error when it is not here."""
        self._waiting = [entry for entry in self._waiting if entry[0] is not state]

    @property
    def is_due(self) -> bool:
        """Whether a request can go on, or is over its deadline."""
        now = time.monotonic()
        return any(masks.done() or _seconds_left(state, now) <= 0 for state, masks in self._waiting)

    def seconds_left(self) -> float | None:
        """Until the first deadline; None when there is none."""
        now = time.monotonic()
        times = [_seconds_left(state, now) for state, _ in self._waiting]
        soonest = min(times, default=np.inf)
        return None if soonest == np.inf else max(0.0, soonest)

    def pop_ready(self) -> list[tuple[RequestState, FutureMask]]:
        """Requests whose masks can be made now, or never."""
        ready = [entry for entry in self._waiting if entry[1].done()]
        if ready:
            self._waiting = [entry for entry in self._waiting if not entry[1].done()]
        return ready


def after(graphs: Future[Any], masks: FutureMask | None) -> FutureMask | None:
    """`masks`, but not before the graphs of adapters are compiled: a request that needs both waits for both."""
    if graphs.done() and graphs.exception() is None:
        return masks
    both: FutureMask = Future()

    def take_masks(done: FutureMask) -> None:
        if (failure := done.exception()) is not None:
            both.set_exception(failure)
        else:
            both.set_result(done.result())

    def take_graphs(done: Future[Any]) -> None:
        if (failure := done.exception()) is not None:
            both.set_exception(EngineFailure(f"The graphs for adapters cannot be compiled: {failure}"))
        elif masks is None:
            both.set_result(lambda: None)
        else:
            masks.add_done_callback(take_masks)

    graphs.add_done_callback(take_graphs)
    return both


def attach_masks(state: RequestState, masks: FutureMask, filler: MaskFiller) -> RequestError | None:
    """Give each sequence of a request, or its beam search, a mask; the error when there is none to give."""
    failure = masks.exception()
    if failure is not None:
        return failure if isinstance(failure, RequestError) else EngineFailure(f"The guide failed: {failure}")
    try:
        for group in state.groups:
            if group.beams is not None:
                group.beams.constrain(_forkable(masks.result()()), filler.fill_one)
                continue
            for sequence in group.sequences:
                sequence.mask = masks.result()()
                sequence.budget = sequence.mask if isinstance(sequence.mask, BudgetMask) else None
    except RequestError as error:
        return error
    return None


def _forkable(mask: TokenMask | None) -> ForkableMask | None:
    if mask is None or isinstance(mask, ForkableMask):
        return mask
    raise Unsupported(f"Beams need a mask that can be forked; {type(mask).__name__} cannot.")


@dataclass(slots=True)
class StepMasks:
    """Masks of the sequences that choose a token in a step."""

    bitmasks: NDArray[np.int32] | None = None  # [n, ceil(vocab / 32)]; None: nothing is constrained
    errors: dict[int, RequestError] = field(default_factory=dict)  # by row


class MaskFiller:
    """Fills the masks of a step; `times_s` takes the seconds of each, for whoever empties it."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self.times_s: deque[float] = deque(maxlen=_MAX_TIMES)

    def fill_one(self, mask: TokenMask) -> np.ndarray:
        """What a mask allows now, int32 [ceil(vocab / 32)].

        Raises:
            RequestError: that cannot be found out.
        """
        bitmask = np.full(self._num_words, -1, np.int32)
        self._fill(mask, bitmask)
        return bitmask

    def fill(self, sequences: list[Sequence]) -> StepMasks:
        """Allowed tokens of every sequence, in order."""
        found = StepMasks()
        if all(sequence.mask is None for sequence in sequences):
            return found
        found.bitmasks = np.full([len(sequences), self._num_words], -1, np.int32)
        for row, sequence in enumerate(sequences):
            if sequence.mask is None:
                continue
            try:
                self._fill(sequence.mask, found.bitmasks[row])
            except RequestError as error:
                found.errors[row] = error
        return found

    def _fill(self, mask: TokenMask, bitmask: np.ndarray) -> None:
        started = time.perf_counter()
        try:
            mask.fill(bitmask)
        finally:
            self.times_s.append(time.perf_counter() - started)


def _seconds_left(state: RequestState, now: float) -> float:
    deadline = state.request.deadline_s
    return np.inf if deadline is None else deadline - now
