"""What `tensorrt_llm_bls` asks the other models: tokens of a prompt, proposals, and their check.

Knows nothing of the loop that puts them together, nor of text.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.errors import EngineFailure, RequestError
from python_backend.triton import pb
from python_backend.triton.draft_target import Proposal, Verified
from python_backend.triton.responses import responses_to

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREPROCESSING = "preprocessing"
# Inputs of this model by those of preprocessing.
_TO_PREPROCESSING = {
    "QUERY": "text_input",
    "DECODER_QUERY": "decoder_text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
    "LORA_NAME": "lora_name",
    "LORA_TASK_ID": "lora_task_id",
}
# Outputs of preprocessing by the engine's inputs.
_FROM_PREPROCESSING = {
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
    "stop_words_list": "STOP_WORDS_IDS",
    "bad_words_list": "BAD_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
}
# Inputs of this model by the engine's: how the next token is chosen.
_SAMPLING = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
# The adapter is the large model's; the small one has none. What preprocessing gives by the engine's inputs.
_ADAPTER = {"lora_task_id": "OUT_LORA_TASK_ID", "lora_weights": "OUT_LORA_WEIGHTS", "lora_config": "OUT_LORA_CONFIG"}
_EVICTED = "not found in cache"  # in TensorRT-LLM's error for a task id whose weights it does not have (any more)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Models:
    """Names of the engine models."""

    target: str
    draft: str


def call(model: str, tensors: Mapping[str, Any], outputs: Sequence[str], request_id: str = "") -> pb.Tensors:
    """The one response of a model.

    Raises:
        RequestError: what it answered instead, by its code.
    """
    request = pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=[pb.tensor(name, array) for name, array in tensors.items()],
        requested_output_names=list(outputs),
    )
    answer: dict[str, Any] = {}
    for response in responses_to(request):
        if response.has_error():
            raise _as_ours(response.error())
        answer |= {tensor.name(): pb.array_of(tensor) for tensor in response.output_tensors()}
    return answer


def tokenize(tensors: pb.Tensors) -> pb.Tensors:
    """The request's prompt and word lists as preprocessing makes them."""
    inputs = {name: tensors[source] for name, source in _TO_PREPROCESSING.items() if source in tensors}
    adapter = _ADAPTER.values() if "lora_name" in tensors or "lora_task_id" in tensors else ()
    return call(PREPROCESSING, inputs, ("INPUT_ID", "REQUEST_INPUT_LEN", *_FROM_PREPROCESSING.values(), *adapter))


class EngineCalls:
    """Both models for one request.

    Without logits a proposal counts only where it equals what the large model picks, so the small one does best to
    give its most likely tokens; with them both sample alike.
    """

    def __init__(self, models: Models, tensors: pb.Tensors, prompt: pb.Tensors, request_id: str = "") -> None:
        self._models = models
        self._request_id = request_id
        self._use_logits = bool(pb.read_scalar(tensors, "use_draft_logits"))
        self._seed = pb.read_scalar(tensors, "seed")
        self._min_tokens = pb.read_scalar(tensors, "min_tokens") or 0
        self._log_probs = bool(pb.read_scalar(tensors, "return_log_probs"))
        self._prompt_length = int(prompt["REQUEST_INPUT_LEN"].flat[0])
        self._common = {name: prompt[source] for name, source in _FROM_PREPROCESSING.items() if source in prompt}
        self._common["exclude_input_in_output"] = np.ones((1, 1), np.bool_)
        self._sampling = {name: tensors[source] for name, source in _SAMPLING.items() if source in tensors}
        self._adapter = {name: tensors[name] for name in _ADAPTER if name in tensors}
        self._adapter |= {name: prompt[source] for name, source in _ADAPTER.items() if source in prompt}
        self._drafts = True

    def propose(self, ids: Sequence[int], size: int) -> Proposal:
        """Tokens of the small model; none from the moment that it fails: an answer must not depend on it."""
        if not self._drafts:
            return Proposal()
        inputs = self._inputs(ids, size)
        outputs = ["output_ids", "sequence_length"]
        if self._use_logits:
            inputs |= self._sampling | self._seeded(ids) | {"return_generation_logits": np.ones((1, 1), np.bool_)}
            outputs.append("generation_logits")
        try:
            answer = call(self._models.draft, inputs, outputs, self._request_id)
            found = _new_ids(answer)
        except RequestError as error:
            _log.warning("%s failed, going on without drafts: %s", self._models.draft, error)
            self._drafts = False
            return Proposal()
        logits = answer["generation_logits"][0, 0, : len(found)] if self._use_logits and found else None
        return Proposal(found, logits)

    def verify(self, ids: Sequence[int], proposal: Proposal) -> Verified:
        """Tokens of the large model."""
        inputs = self._inputs(ids, len(proposal.ids) + 1) | self._sampling | self._seeded(ids)
        outputs = ["output_ids", "sequence_length"]
        done = len(ids) - self._prompt_length
        if self._min_tokens > done:
            inputs["min_tokens"] = np.array([[self._min_tokens - done]], np.int32)
        if proposal.ids:
            inputs["draft_input_ids"] = np.array([proposal.ids], np.int32)
        if proposal.logits is not None:
            inputs["draft_logits"] = proposal.logits[None]
        if self._log_probs:
            inputs["return_log_probs"] = np.ones((1, 1), np.bool_)
            outputs.append("output_log_probs")
        answer = self._ask_target(inputs, outputs)
        found = _new_ids(answer)
        log_probs = answer["output_log_probs"].reshape(-1)[: len(found)].tolist() if self._log_probs else []
        return Verified(found, log_probs)

    def _ask_target(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> pb.Tensors:
        """The large model's answer. Its cache has an adapter or asks for it: a round then costs no copy of it."""
        adapter = self._adapter
        if adapter.keys() == _ADAPTER.keys():
            try:
                by_id = {"lora_task_id": adapter["lora_task_id"]}
                return call(self._models.target, {**inputs, **by_id}, outputs, self._request_id)
            except RequestError as error:
                if _EVICTED not in str(error):
                    raise
        return call(self._models.target, {**inputs, **adapter}, outputs, self._request_id)

    def _inputs(self, ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return self._common | {
            "input_ids": np.array([ids], np.int32),
            "input_lengths": np.array([[len(ids)]], np.int32),
            "request_output_len": np.array([[max_tokens]], np.int32),
        }

    def _seeded(self, ids: Sequence[int]) -> dict[str, Any]:
        """A seed of its own for every round: the same one would draw the same numbers each time."""
        if self._seed is None:
            return {}
        return {"seed": np.array([[(self._seed + len(ids)) % 2**64]], np.uint64)}


def _as_ours(error: Any) -> RequestError:
    """Another model's error, to be passed on with its code."""
    found = RequestError(error.message())
    codes = ("INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "UNSUPPORTED", "CANCELLED")
    found.code = next((code for code in codes if getattr(pb_utils.TritonError, code) == error.code()), "INTERNAL")
    return found


def _new_ids(answer: pb.Tensors) -> list[int]:
    """The tokens of the one row of an answer."""
    if "output_ids" not in answer or "sequence_length" not in answer:
        raise EngineFailure("The engine's answer has no output_ids. The server's log has the details.")
    length = max(0, int(answer["sequence_length"].flat[0]))
    return [int(token) for token in answer["output_ids"].reshape(-1)[:length]]
