"""`ensemble_unary`: the ensemble for clients that make plain KServe calls, which Triton refuses on a decoupled model.

Forwards each request to `ensemble` and sends its one response when it is there. Knows nothing of text or tokens.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from python_backend.errors import InvalidRequest, Overloaded
from python_backend.telemetry import tracing
from python_backend.telemetry.refusals import Refusals
from python_backend.triton import pb
from python_backend.triton.forwarding import Forwarder
from python_backend.triton.health import HEALTH
from python_backend.triton.parameters import parameters_of
from python_backend.triton.trace import TRACEPARENT, traceparent_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENGINE = "tensorrt_llm"
MAX_REQUESTS = 512  # forwarded or waiting for that; more than the engine's queue takes by default
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_ENSEMBLE_PREFIX = re.compile(r"^in ensemble '[^']*', ")

_log = logging.getLogger(__name__)


class TritonPythonModel:
    """What Triton's Python backend looks for; one instance serves many requests at once."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the threads."""
        pb.log_to_triton()
        self._traces = bool(os.environ.get(tracing.ENDPOINT))
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._refusals = Refusals(pb_utils.MetricFamily, labels)
        self._num_calls = 0
        self._lock = threading.Lock()
        self._forwarder = Forwarder(args["model_name"], ENGINE)
        self._pool = ThreadPoolExecutor(self._forwarder.limit, thread_name_prefix="call")

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
            self._pool.submit(self._forward, request, sender, traceparent_of(request) if self._traces else "")

    def finalize(self) -> None:
        """End the threads; Triton has waited for the requests."""
        self._forwarder.close()
        self._pool.shutdown(wait=False)

    def _count(self, change: int) -> None:
        with self._lock:
            if change > 0 and self._num_calls >= MAX_REQUESTS:
                raise Overloaded(f"{MAX_REQUESTS} unary requests are running already, please try again later")
            self._num_calls += change

    def _forward(self, request: Any, sender: Any, traceparent: str) -> None:
        parameters = parameters_of(request.parameters()) | ({TRACEPARENT: traceparent} if traceparent else {})
        try:
            response = _the_response(self._forwarder.responses(request, sender, request.inputs(), parameters))
        except Exception as error:
            response = pb.error_response(error)
        self._count(-1)
        try:
            sender.send(response, flags=_FINAL)
        except Exception:
            _log.exception("a response could not be sent")


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
