"""`tensorrt_llm_bls`: text in, text out, with a draft model that proposes tokens for the large one to check.

Streams, unlike upstream's; a request that does not speculate goes to the ensemble. Knows nothing of the loop itself.
"""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.errors import BuildError, InvalidRequest, Overloaded, StackError, Unsupported, out_of_range
from python_backend.text.tokenizer import Tokenizer
from python_backend.triton import pb
from python_backend.triton.bls_answer import Answer
from python_backend.triton.bls_calls import EngineCalls, Models, tokenize
from python_backend.triton.draft_target import rounds
from python_backend.triton.forwarding import Forwarder
from python_backend.triton.parameters import parameters_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_REQUESTS = 256  # a thread each while they run
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_OWN_INPUTS = ("num_draft_tokens", "use_draft_logits")
_IMAGE_INPUTS = ("image_input", "image_bytes_input", "image_url_input", "image_sizes_input", "video_bytes_input")
# Inputs that a loop over separate calls cannot honour; each would start anew with every round.
_NOT_WITH_DRAFTS = {
    "return_context_logits": "context logits are not supported with speculative decoding",
    "return_generation_logits": "generation logits are not supported with speculative decoding",
    "guided_decoding_guide_type": "guided decoding is not supported with speculative decoding",
    "prompt_embedding_table": "prompt tables are not supported with speculative decoding",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlsSettings:
    """The parameters of the model's config.pbtxt."""

    models: Models
    tokenizer_dir: Path
    skip_special_tokens: bool
    max_draft_tokens: int  # also what a request gets that does not say
    max_seq_len: int
    decoupled: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BlsSettings:
        """Read them.

        Raises:
            BuildError: one is missing, or the engine's config.json is.
        """
        wanted = ("tokenizer_dir", "gpt_model_path", "tensorrt_llm_draft_model_name", "num_draft_tokens")
        values = {name: pb.parameter(config, name) for name in wanted}
        for name, value in values.items():
            if not value:
                raise BuildError(f"Parameter {name} is not set; write it in config.pbtxt.")
        if pb.bool_parameter(config, "accumulate_tokens", False):
            raise BuildError("Parameter accumulate_tokens is true; pieces of a stream join by themselves. Remove it.")
        if not values["num_draft_tokens"].isdigit():
            raise BuildError(f"Parameter num_draft_tokens is {values['num_draft_tokens']!r}; allowed: 1 and more.")
        return cls(
            Models(pb.parameter(config, "tensorrt_llm_model_name", "tensorrt_llm"), values[wanted[2]]),
            Path(values["tokenizer_dir"]),
            pb.bool_parameter(config, "skip_special_tokens", True),
            int(values["num_draft_tokens"]),
            _max_seq_len(Path(values["gpt_model_path"]) / "config.json"),
            bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        )


class TritonPythonModel:
    """What Triton's Python backend looks for; one instance serves many requests at once."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer; an error's text becomes the load error."""
        pb.log_to_triton()
        try:
            self._settings = BlsSettings.from_config(json.loads(args["model_config"]))
            self._tokenizer = Tokenizer.from_dir(self._settings.tokenizer_dir)
        except StackError as error:
            raise pb.load_error(error) from None
        self._forwarder = Forwarder(args["model_name"], self._settings.models.target)
        self._pool = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="request")
        self._running = threading.BoundedSemaphore(MAX_REQUESTS)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests in; each is answered later, from a thread of its own."""
        for request in requests:
            if self._running.acquire(blocking=False):
                self._pool.submit(self._answer, request, request.get_response_sender())
            else:
                error = Overloaded(f"{MAX_REQUESTS} requests are running already, please try again later")
                request.get_response_sender().send(pb.error_response(error), flags=_FINAL)

    def finalize(self) -> None:
        """End the threads; Triton has waited for the requests."""
        self._forwarder.close()
        self._pool.shutdown(wait=False)

    def _answer(self, request: Any, sender: Any) -> None:
        try:
            tensors = pb.read_inputs(request)
            self._check(tensors)
            size = self._draft_tokens(tensors)
            last = self._speculate(request, sender, tensors, size) if size else self._forward(request, sender, tensors)
        except Exception as error:  # whatever it is, it concerns this request alone
            last = pb.error_response(error)
        self._running.release()
        try:
            sender.send(last, flags=_FINAL)
        except Exception:
            _log.exception("a response could not be sent")

    def _check(self, tensors: pb.Tensors) -> None:
        for name in ("text_input", "max_tokens"):
            if name not in tensors:
                raise InvalidRequest(f"{name} is missing; a request needs text_input and max_tokens.")
        for name in _IMAGE_INPUTS:
            if name in tensors:
                raise Unsupported(f"{name} was sent; the model of this deployment takes text only. Remove it.")
        if not self._settings.decoupled and np.any(tensors.get("stream", False)):
            raise InvalidRequest("Streaming is only supported if model is deployed using decoupled mode.")

    def _draft_tokens(self, tensors: pb.Tensors) -> int:
        """Tokens to propose in a round; 0 for a request that goes to the large model alone.

        Raises:
            InvalidRequest: more than the engine takes, or asked for together with what a loop cannot do.
        """
        most = self._settings.max_draft_tokens
        asked = pb.read_scalar(tensors, "num_draft_tokens") if "num_draft_tokens" in tensors else None
        if asked is not None and not 0 <= asked <= most:
            raise out_of_range("num_draft_tokens", asked, f"0 to {most}")
        reason = _against_drafts(tensors)
        if reason is None:
            return most if asked is None else int(asked)
        if asked:
            raise InvalidRequest(f"{reason}. Send num_draft_tokens 0, or leave it out.")
        return 0

    def _forward(self, request: Any, sender: Any, tensors: pb.Tensors) -> Any:
        """Pass the ensemble's responses on; returns the last."""
        inputs = [tensor for tensor in request.inputs() if tensor.name() not in _OWN_INPUTS]
        last = None
        with closing(
            self._forwarder.responses(request, sender, inputs, parameters_of(request.parameters()))
        ) as responses:
            for response in responses:
                if response.has_error():
                    return pb_utils.InferenceResponse([], response.error())
                if response.output_tensors():
                    if last is not None:
                        sender.send(last)
                    last = pb_utils.InferenceResponse(response.output_tensors())
        return last if last is not None else pb.response()

    def _speculate(self, request: Any, sender: Any, tensors: pb.Tensors, size: int) -> Any:
        """Send what each round adds when the request streams; returns the last response."""
        prompt = tokenize(tensors)
        ids = prompt["INPUT_ID"].reshape(-1)[: int(prompt["REQUEST_INPUT_LEN"].flat[0])].tolist()
        calls = EngineCalls(self._settings.models, tensors, prompt, request.request_id())
        answer = Answer(self._tokenizer, tensors, ids, self._settings.skip_special_tokens)
        stream = bool(pb.read_scalar(tensors, "stream"))
        left = min(int(pb.read_scalar(tensors, "max_tokens")), self._settings.max_seq_len - len(ids))
        wanted = request.requested_output_names()
        for found in rounds(ids, left, size, calls.propose, calls.verify):
            if sender.is_cancelled():
                return pb_utils.InferenceResponse([], pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED))
            answer.push(found)
            if answer.stopped:
                break
            if stream and answer.has_news:
                sender.send(pb.response(answer.outputs(wanted, final=False)))
        return pb.response(answer.outputs(wanted, final=True))


def _against_drafts(tensors: pb.Tensors) -> str | None:
    """Why a request cannot speculate; None when it can."""
    if tensors["text_input"].shape[0] > 1:
        return "speculative decoding is not supported with batch size > 1"
    for name in ("beam_width", "num_return_sequences"):
        if np.any(tensors.get(name, 1) > np.int32(1)):
            return f"speculative decoding is not supported with {name} > 1"
    for name, reason in _NOT_WITH_DRAFTS.items():
        value = tensors.get(name)
        if value is not None and (value.dtype != np.bool_ or value.any()):
            return reason
    return None


def _max_seq_len(path: Path) -> int:
    """build_config.max_seq_len of the large model's engine."""
    try:
        limit = json.loads(path.read_text(encoding="utf-8"))["build_config"]["max_seq_len"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{path} is no readable engine configuration: {error!r}. Build the engine again.") from error
    return int(limit)
