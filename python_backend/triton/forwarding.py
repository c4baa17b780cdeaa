"""Requests that a model passes on to the ensemble, and stops in the engine when their clients are gone.

Triton tells an ensemble nothing of its clients; the model in front of it is asked instead. Knows nothing of tensors.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend import bls_threads
from python_backend.triton.cancel import CancelWatcher
from python_backend.triton.responses import responses_to

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

ENSEMBLE = "ensemble"
_STOPPERS = 3
_STOP_PERIOD_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Call:
    """A request under way, known to the engine as `request_id`."""

    request_id: str
    done: threading.Event = field(default_factory=threading.Event)


class Forwarder:
    """Passes requests on from the threads of its owner.

    Args:
        model: the owner's name, for requests without an id.
        engine: the model that takes stops.
    """

    def __init__(self, model: str, engine: str) -> None:
        self.limit = bls_threads.for_long_answers()  # requests under way at once; further ones wait
        self._engine = engine
        self._own_ids = (f"{model}-{os.getpid()}-{number}" for number in itertools.count())
        self._places = threading.BoundedSemaphore(self.limit)
        self._stoppers = ThreadPoolExecutor(_STOPPERS, thread_name_prefix="stop")
        self._watcher = CancelWatcher(_STOP_PERIOD_S, self._stop_later)
        self._watcher.start()

    def close(self) -> None:
        """End the threads; takes some milliseconds."""
        self._watcher.stop()
        self._stoppers.shutdown(wait=False)

    def responses(
        self, request: Any, sender: Any, inputs: Sequence[Any], parameters: Mapping[str, Any]
    ) -> Generator[Any, None, None]:
        """The ensemble's responses as they come, errors among them; none for a client that was gone before.

        To be exhausted or closed before the final response is sent (see CancelWatcher).

        Args:
            request: whose id, timeout and wanted outputs are passed on.
            sender: is asked whether the client is gone.
            inputs: the tensors to pass on.
            parameters: likewise.
        """
        # An id of the client's makes its own `stop` requests work; without one, ours still can stop the call.
        call = _Call(request.request_id() or next(self._own_ids))
        forwarded = pb_utils.InferenceRequest(
            model_name=ENSEMBLE,
            request_id=call.request_id,
            inputs=list(inputs),
            requested_output_names=list(request.requested_output_names()),
            timeout=request.timeout(),
            parameters=dict(parameters),
        )
        with self._places:
            if sender.is_cancelled():  # while it waited
                return
            self._watcher.watch(call, sender)
            try:
                yield from responses_to(forwarded)
            finally:
                self._watcher.forget(call)
                call.done.set()

    def _stop_later(self, call: _Call) -> None:
        self._stoppers.submit(self._stop, call)

    def _stop(self, call: _Call) -> None:
        """Stop a call whose client is gone; again until it is over, since it may not have reached the engine yet."""
        while True:
            try:
                for _ in responses_to(self._stop_request(call.request_id)):
                    pass
            except Exception as error:
                _log.warning("request %s could not be stopped: %s", call.request_id, error)
            if call.done.wait(_STOP_PERIOD_S):
                return

    def _stop_request(self, request_id: str) -> Any:
        zero = np.zeros((1, 1), np.int32)
        inputs = [pb_utils.Tensor(name, zero) for name in ("input_ids", "input_lengths", "request_output_len")]
        inputs.append(pb_utils.Tensor("stop", np.ones((1, 1), np.bool_)))
        return pb_utils.InferenceRequest(
            model_name=self._engine, request_id=request_id, inputs=inputs, requested_output_names=["output_ids"]
        )
