"""`health`: a small model that says whether a request would be served now, and why not.

It asks every other model a question of its own in the background, so that the answer is there at once even when a model
hangs. Knows nothing of text, tokens or the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.errors import Overloaded
from python_backend.telemetry.health import PARTS, HealthMetrics
from python_backend.telemetry.poller import Poller
from python_backend.triton import pb
from python_backend.triton.cancel import ShutdownWatcher
from python_backend.triton.responses import responses_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HEALTH = "health"  # request parameter: of a `stop`, answer whether the engine serves; elsewhere, no client's request
PERIOD_S = 1.0
LOADING_PERIOD_S = 0.05  # until all was well once: the other models are still being loaded
ANSWER_S = 10.0  # a model that takes longer for a question hangs
_DEAD = "is not healthy"  # Triton 2.51 of a model whose process has ended; it never starts it again
_NOT_LOADED = ("unknown model", "not at ready state")  # Triton 2.51 of a model that is still being loaded
_NOT_SERVING = "the engine does not serve: "
_ROUNDS_OF_DEATH = 2

_log = logging.getLogger(__name__)


def not_serving(reason: str) -> Overloaded:
    """The engine's answer to `health` when it should get no requests."""
    return Overloaded(_NOT_SERVING + reason)


class Prober:
    """Asks all parts, one after the other, and keeps what they said.

    Args:
        ask: sends the question of one part; returns what is wrong with it, None when it lives and serves.
        found: called with each part and whether it is well.
        dead: called once, when a model's process has ended for good.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ask: Callable[[str], str | None],
        found: Callable[[str, bool], None],
        dead: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._found, self._dead, self._clock = ask, found, dead, clock
        self._reasons: dict[str, str] = {}
        self._deaths = dict.fromkeys(PARTS, 0)
        self._asking: tuple[str, float] | None = None
        self._rounds = 0

    def round(self) -> None:
        """Ask every part once."""
        for part in PARTS:
            self._asking = (part, self._clock())
            trouble = self._ask(part)
            self._asking = None
            self._take(part, trouble)
        self._rounds += 1

    def reason(self) -> str | None:
        """Why requests should go elsewhere; None when all is well."""
        asking = self._asking
        if asking is not None and self._clock() - asking[1] > ANSWER_S:
            return f"{asking[0]} has not answered for {self._clock() - asking[1]:.0f} s."
        if not self._rounds:
            return "the first round of questions is under way."
        return next((f"{part}: {text}" for part, text in list(self._reasons.items())), None)

    def _take(self, part: str, trouble: str | None) -> None:
        self._found(part, trouble is None)
        if trouble is None:
            self._deaths[part] = 0
            self._reasons.pop(part, None)
            return
        self._reasons[part] = trouble
        self._deaths[part] = self._deaths[part] + 1 if _DEAD in trouble else 0
        if self._deaths[part] == _ROUNDS_OF_DEATH:
            self._dead(part)


class TritonPythonModel:
    """What Triton loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start asking; the other models may not be loaded yet."""
        pb.log_to_triton()
        self._closing = False
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._prober = Prober(_ask, HealthMetrics(pb_utils.MetricFamily, labels).set, _end_server)
        self._poller = Poller("health", PERIOD_S, self._round, until=self._well, eager_s=LOADING_PERIOD_S)
        self._poller.start()
        ShutdownWatcher(self._close).start()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request: HEALTHY, or the reason as an error UNAVAILABLE (HTTP 503)."""
        reason = "the server is shutting down." if self._closing else self._prober.reason()
        if reason is not None:
            return [pb.error_response(Overloaded(f"Not ready: {reason}")) for _ in requests]
        return [pb.response([pb.tensor("HEALTHY", np.array([True]))]) for _ in requests]

    def finalize(self) -> None:
        """Ask no more."""
        self._close()

    def _round(self) -> None:
        if not self._closing:
            self._prober.round()

    def _well(self) -> bool:
        return self._prober.reason() is None

    def _close(self) -> None:
        self._closing = True


def _end_server(part: str) -> None:
    """Triton goes on calling itself ready: end it, so that its own probe says no and a supervisor starts it anew."""
    _log.critical("The process of model %s has ended and Triton cannot start it again; the server stops.", part)
    os.kill(os.getppid(), signal.SIGTERM)


def _ask(part: str) -> str | None:
    tensors, output, parameters = _QUESTIONS[part]
    request = pb_utils.InferenceRequest(
        model_name=part,
        request_id="health",
        inputs=[pb_utils.Tensor(name, array) for name, array in tensors.items()],
        requested_output_names=[output],
        parameters=parameters,
    )
    for response in responses_to(request):
        if response.has_error():
            text = str(response.error().message())
            # A model that is busy, or refuses the question, lives. BLS gives every error the code INTERNAL.
            if any(words in text for words in (_NOT_SERVING, _DEAD, *_NOT_LOADED)) or text.startswith(
                pb.INTERNAL_ERROR
            ):
                return text.partition(_NOT_SERVING)[2] or text
    return None


def _one(value: object, dtype: Any = np.int32) -> np.ndarray:
    return np.array([[value]], dtype)


_QUESTIONS: dict[str, tuple[dict[str, np.ndarray], str, dict[str, Any]]] = {
    "preprocessing": ({"QUERY": _one(b"health", object), "REQUEST_OUTPUT_LEN": _one(1)}, "REQUEST_INPUT_LEN", {}),
    # A stop of what does not run: the C++ backend answers it as well, and knows nothing of the parameter.
    "tensorrt_llm": (
        {
            "input_ids": _one(0),
            "input_lengths": _one(0),
            "request_output_len": _one(0),
            "stop": _one(True, np.bool_),
        },
        "output_ids",
        {HEALTH: True},
    ),
    "postprocessing": ({"TOKENS_BATCH": _one([0]), "SEQUENCE_LENGTH": _one(1)}, "OUTPUT", {}),
    # It refuses to stream, which costs nothing behind it.
    "ensemble_unary": (
        {"text_input": _one(b"", object), "max_tokens": _one(1), "stream": _one(True, np.bool_)},
        "text_output",
        {HEALTH: True},
    ),
}
