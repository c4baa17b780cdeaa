"""`health`: a small model that says whether a request would be served now, and why not.

It asks every other model a question of its own in the background, so that the answer is there at once even when a model
hangs. Knows nothing of text, tokens or the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from functools import partial
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
LOADING_PERIOD_S = 0.02  # until all was well once: the other models are still being loaded
SETTLED_S = 10.0  # after `initialize` this model asks even when nobody has asked it; Triton needs milliseconds
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
    """Asks the parts, each from a thread of its own, and keeps what they said: one that hangs holds up no other.

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
        self._open_since: dict[str, float] = {}  # questions without an answer, one that failed among them
        self._unknown = set(PARTS)
        self._telling = threading.Lock()  # what `found` is told last has to be what is so

    def ask(self, part: str) -> None:
        """Ask one part once; on any thread, but for each part on one."""
        self._open_since.setdefault(part, self._clock())
        trouble = self._ask(part)
        with self._telling:
            del self._open_since[part]
            self._take(part, trouble)

    def look(self) -> None:
        """Tell of parts that do not answer; somebody calls it again and again."""
        with self._telling:
            for part in self._silent():
                self._found(part, False)

    def reason(self) -> str | None:
        """Why requests should go elsewhere; None when all is well. Waits for nobody."""
        for part, seconds in self._silent().items():
            return f"{part} has not answered for {seconds:.0f} s."
        if self._unknown:
            return "the first round of questions is under way."
        return next((f"{part}: {text}" for part, text in list(self._reasons.items())), None)

    def _silent(self) -> dict[str, float]:
        """For how many seconds each part has not answered that should have by now."""
        now = self._clock()
        return {part: now - since for part, since in list(self._open_since.items()) if now - since > ANSWER_S}

    def _take(self, part: str, trouble: str | None) -> None:
        self._found(part, trouble is None)
        self._unknown.discard(part)
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
        self._closing = self._was_asked = False
        self._initialized_s = time.monotonic()
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._prober = Prober(_ask, HealthMetrics(pb_utils.MetricFamily, labels).set, _end_server)
        self._pollers = [Poller("health", PERIOD_S, self._prober.look)]
        for part in PARTS:
            ask = partial(self._question, part)
            self._pollers.append(Poller(f"health-{part}", PERIOD_S, ask, self._well, LOADING_PERIOD_S))
        for poller in self._pollers:
            poller.start()
        ShutdownWatcher(self._close).start()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request: HEALTHY, or the reason as an error UNAVAILABLE (HTTP 503)."""
        self._was_asked = True
        reason = "the server is shutting down." if self._closing else self._prober.reason()
        if reason is not None:
            return [pb.error_response(Overloaded(f"Not ready: {reason}")) for _ in requests]
        return [pb.response([pb.tensor("HEALTHY", np.array([True]))]) for _ in requests]

    def finalize(self) -> None:
        """Ask no more."""
        self._close()

    def _question(self, part: str) -> None:
        if not self._closing and self._may_ask():
            self._prober.ask(part)

    def _may_ask(self) -> bool:
        """Whether Triton has set this model up: a question before that, out of `initialize` too, takes it down."""
        return self._was_asked or time.monotonic() > self._initialized_s + SETTLED_S

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
