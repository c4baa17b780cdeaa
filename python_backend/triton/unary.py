"""`ensemble_unary`: the ensemble for clients that make plain KServe calls, which Triton refuses on a decoupled model.

Forwards each request to `ensemble` and sends its one response when it is there. Knows nothing of text or tokens.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.errors import InvalidRequest, Overloaded
from python_backend.telemetry import tracing
from python_backend.telemetry.refusals import Refusals
from python_backend.triton import pb
from python_backend.triton.cancel import CancelWatcher
from python_backend.triton.health import HEALTH
from python_backend.triton.parameters import parameters_of
from python_backend.triton.responses import responses_to
from python_backend.triton.trace import TRACEPARENT, traceparent_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENSEMBLE = "ensemble"
ENGINE = "tensorrt_llm"
MAX_REQUESTS = 512  # forwarded or waiting for that; more than the engine's queue takes by default
# Triton's Python backend has 32 threads (its thread-pool-size) for what a model asks of others, one for each question
# until its last response. Were all of them taken by calls, no stop would get through before a call has ended by itself.
MAX_FORWARDED = 28
_STOPPERS = 3
_STOP_PERIOD_S = 0.05
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_ENSEMBLE_PREFIX = re.compile(r"^in ensemble '[^']*', ")

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Call:
    """One client request that is being forwarded under `forwarded_id`."""

    request: Any
    sender: Any
    forwarded_id: str
    traceparent: str = ""  # of Triton's span; empty: not traced
    done: threading.Event = field(default_factory=threading.Event)


class TritonPythonModel:
    """What Triton's Python backend looks for; one instance serves many requests at once."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the threads."""
        pb.log_to_triton()
        self._traces = bool(os.environ.get(tracing.ENDPOINT))
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._refusals = Refusals(pb_utils.MetricFamily, labels)
        self._own_ids = (f"{args['model_name']}-{os.getpid()}-{number}" for number in itertools.count())
        self._num_calls = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(MAX_FORWARDED, thread_name_prefix="call")
        self._stoppers = ThreadPoolExecutor(_STOPPERS, thread_name_prefix="stop")
        self._watcher = CancelWatcher(_STOP_PERIOD_S, self._stop_later)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests in; each is answered later, from a thread of its own."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                _check_one_response(request)
                self._count(1)
            except Exception as error:
                if HEALTH not in parameters_of(request.parameters()):  # which asks for a refusal
                    self._refusals.count(error)
                sender.send(pb.error_response(error), flags=_FINAL)
                continue
            # An id of the client's makes its own `stop` requests work; without one, ours still can stop the call.
            forwarded_id = request.request_id() or next(self._own_ids)
            call = Call(request, sender, forwarded_id, traceparent_of(request) if self._traces else "")
            self._pool.submit(self._forward, call)

    def finalize(self) -> None:
        """End the threads; Triton has waited for the requests."""
        self._watcher.stop()
        self._pool.shutdown(wait=False)
        self._stoppers.shutdown(wait=False)

    def _count(self, change: int) -> None:
        with self._lock:
            if change > 0 and self._num_calls >= MAX_REQUESTS:
                raise Overloaded(f"{MAX_REQUESTS} unary requests are running already, please try again later")
            self._num_calls += change

    def _forward(self, call: Call) -> None:
        if call.sender.is_cancelled():  # while it waited
            response = pb.response()
        else:
            self._watcher.watch(call, call.sender)
            try:
                response = _the_response(responses_to(_ensemble_request(call)))
            except Exception as error:
                response = pb.error_response(error)
            self._watcher.forget(call)
        call.done.set()
        self._count(-1)
        try:
            call.sender.send(response, flags=_FINAL)
        except Exception:
            _log.exception("a response could not be sent")

    def _stop_later(self, call: Call) -> None:
        self._stoppers.submit(self._stop, call)

    def _stop(self, call: Call) -> None:
        """Stop a call whose client is gone; again until it is over, since it may not have reached the engine yet."""
        while True:
            try:
                for _ in responses_to(_stop_request(call.forwarded_id)):
                    pass
            except Exception as error:
                _log.warning("request %s could not be stopped: %s", call.forwarded_id, error)
            if call.done.wait(_STOP_PERIOD_S):
                return


def _check_one_response(request: Any) -> None:
    """Refuse what has several responses.

    Raises:
        InvalidRequest: stream, or several prompts or sequences.
    """
    tensors = {tensor.name(): tensor for tensor in request.inputs()}
    if "stream" in tensors and tensors["stream"].as_numpy().any():
        raise InvalidRequest("Streaming is only supported if model is deployed using decoupled mode.")
    if "max_tokens" not in tensors:
        raise InvalidRequest("max_tokens is missing; send how many tokens may be generated.")
    if tensors["max_tokens"].as_numpy().size > 1:
        raise InvalidRequest(
            "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
        )
    several = "num_return_sequences" in tensors and (tensors["num_return_sequences"].as_numpy() > 1).any()
    if several and not ("beam_width" in tensors and (tensors["beam_width"].as_numpy() > 1).any()):
        raise InvalidRequest(
            "num_return_sequences > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
        )


def _ensemble_request(call: Call) -> Any:
    request, parameters = call.request, parameters_of(call.request.parameters())
    if call.traceparent:
        parameters[TRACEPARENT] = call.traceparent
    return pb_utils.InferenceRequest(
        model_name=ENSEMBLE,
        request_id=call.forwarded_id,
        inputs=request.inputs(),
        requested_output_names=list(request.requested_output_names()),
        timeout=request.timeout(),
        parameters=parameters,
    )


def _stop_request(request_id: str) -> Any:
    zero = np.zeros((1, 1), np.int32)
    inputs = [pb_utils.Tensor(name, zero) for name in ("input_ids", "input_lengths", "request_output_len")]
    inputs.append(pb_utils.Tensor("stop", np.ones((1, 1), np.bool_)))
    return pb_utils.InferenceRequest(
        model_name=ENGINE, request_id=request_id, inputs=inputs, requested_output_names=["output_ids"]
    )


def _the_response(responses: Any) -> Any:
    """The one response with outputs, or the error, of a forwarded request."""
    answer = None
    for response in responses:
        if response.has_error():
            error = response.error()
            text = _ENSEMBLE_PREFIX.sub("", error.message())
            answer = pb_utils.InferenceResponse([], pb_utils.TritonError(text, error.code()))
        elif answer is None and response.output_tensors():
            answer = pb_utils.InferenceResponse(response.output_tensors())
    return answer if answer is not None else pb.response()
