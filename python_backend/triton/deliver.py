"""The thread that turns the engine's events into responses, so that the engine never waits for Triton.

Knows nothing of sampling or scheduling; a send costs the process about 0.1 ms.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

import triton_python_backend_utils as pb_utils

from python_backend.triton import pb
from python_backend.triton.tensors import TensorCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from python_backend.engine.output import RequestOutput
    from python_backend.triton.inflight import Answer, InFlight, Part

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_log = logging.getLogger(__name__)


class Deliverer:
    """Sends what the engine gives back.

    Args:
        in_flight: where the answers are found; finished ones are taken out.
        cancel: ends a request in the engine, whose last event still comes.
        on_part_ended: called once for each prompt, with its last event, after its last response was sent.
        on_answer_ended: called before the final response of an answer is sent.
    """

    def __init__(
        self,
        in_flight: InFlight,
        cancel: Callable[[str], object],
        on_part_ended: Callable[[RequestOutput, Part], None],
        on_answer_ended: Callable[[Answer], None],
    ) -> None:
        self._in_flight = in_flight
        self._cancel = cancel
        self._on_part_ended = on_part_ended
        self._on_answer_ended = on_answer_ended
        self._unheard: dict[str, Part] = {}  # still run in the engine, but their answer has ended with an error
        self._tensors = TensorCache()
        self._events: queue.SimpleQueue[list[RequestOutput] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="deliverer", daemon=True)

    @property
    def put(self) -> Callable[[list[RequestOutput]], None]:
        """Takes the events of a step; for the engine's thread, never blocks."""
        return self._events.put

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is in the queue, then end."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (events := self._events.get()) is not None:
            for event in events:
                self._take(event)

    def _take(self, event: RequestOutput) -> None:
        engine_id = event.request.request_id
        answer = self._in_flight.get(engine_id)
        part = self._unheard.get(engine_id) if answer is None else answer.parts.get(engine_id)
        if part is None:  # of a Triton request that was refused when a part of it had been submitted
            return
        for sequence in event.sequences:
            if sequence.finish_reason is not None:
                part.output_tokens += len(sequence.context_ids) + len(sequence.token_ids)
                part.finish_reason = sequence.finish_reason
        if answer is not None:
            self._answer(answer, part, event)
        if event.finished:
            self._unheard.pop(engine_id, None)
            self._count(part, event)

    def _answer(self, answer: Answer, part: Part, event: RequestOutput) -> None:
        if event.error is not None:
            self._fail(answer, part, event.error)
            return
        try:
            self._deliver(answer, part, event)
        except Exception as error:  # one answer that cannot be built or sent must not end all the others
            self._fail(answer, part, error)

    def _deliver(self, answer: Answer, part: Part, event: RequestOutput) -> None:
        arrays = part.responder.arrays(event)
        if arrays is None:
            return
        make = self._tensors.make
        response = pb_utils.InferenceResponse([make(name, array) for name, array in arrays])
        if not event.finished:
            answer.sender.send(response)
            return
        last = self._in_flight.end_part(answer, event.request.request_id)
        if last:
            self._on_answer_ended(answer)
        answer.sender.send(response, flags=_FINAL if last else 0)

    def _fail(self, answer: Answer, part: Part, error: Exception) -> None:
        """One failed prompt ends its whole Triton request, since an error response ends a stream.

        What of it still runs is cancelled, and counted when the engine says that it has ended.
        """
        part.error = error
        for engine_id, running in self._in_flight.drop(answer).items():
            self._unheard[engine_id] = running
            self._cancel(engine_id)
        self._on_answer_ended(answer)
        try:
            answer.sender.send(pb.error_response(error), flags=_FINAL)
        except Exception:
            _log.exception("an error response could not be sent")

    def _count(self, part: Part, event: RequestOutput) -> None:
        try:
            self._on_part_ended(event, part)
        except Exception:
            _log.exception("a request that has ended could not be counted")
