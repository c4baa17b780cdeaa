"""What a request may ask for and what an answer holds. Field names are the tensor names of the ensemble.

Knows nothing of gRPC or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from clients.log_probs import LogProb
from clients.tool_calls import ToolCall

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Sequence[Message] | GenerateRequest"
"""Text to continue, chat messages, or a whole request."""

DEFAULT_MAX_TOKENS = 128


def _tensor(datatype: str, default: Any = None) -> Any:
    return field(default=default, metadata={"datatype": datatype})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and everything that may be asked of it; a field left at None is not sent.

    Exactly one of `text_input` and `messages` is given.
    """

    text_input: str | None = _tensor("BYTES")
    messages: str | Sequence[Message] | None = _tensor("BYTES")  # chat messages, or their JSON text
    tools: str | Sequence[Message] | None = _tensor("BYTES")  # functions that may be called, in OpenAI's shape
    tool_choice: str | Mapping[str, Any] | None = _tensor("BYTES")  # auto, none, required, or a function's name
    parallel_tool_calls: bool | None = _tensor("BOOL")  # None: several calls in one answer may come
    decoder_text_input: str | None = _tensor("BYTES")
    max_tokens: int = _tensor("INT32", DEFAULT_MAX_TOKENS)
    min_tokens: int | None = _tensor("INT32")
    stream: bool | None = _tensor("BOOL")  # set by the client's stream() and generate()

    temperature: float | None = _tensor("FP32")  # 0 or None: the most likely token
    top_k: int | None = _tensor("INT32")
    top_p: float | None = _tensor("FP32")
    top_p_min: float | None = _tensor("FP32")
    top_p_decay: float | None = _tensor("FP32")
    top_p_reset_ids: int | None = _tensor("INT32")
    seed: int | None = _tensor("UINT64")
    repetition_penalty: float | None = _tensor("FP32")
    presence_penalty: float | None = _tensor("FP32")
    frequency_penalty: float | None = _tensor("FP32")
    no_repeat_ngram_size: int | None = _tensor("INT32")
    embedding_bias_words: Sequence[str] | None = _tensor("BYTES")
    embedding_bias_weights: Sequence[float] | None = _tensor("FP32")

    stop_words: str | Sequence[str] | None = _tensor("BYTES")
    bad_words: str | Sequence[str] | None = _tensor("BYTES")
    end_id: int | None = _tensor("INT32")  # -1: no token ends the answer
    pad_id: int | None = _tensor("INT32")
    exclude_stop_words_in_output: bool | None = _tensor("BOOL")
    exclude_input_in_output: bool | None = _tensor("BOOL")
    timeout_ms: int | None = _tensor("INT32")  # the server then answers with what it has

    num_return_sequences: int | None = _tensor("INT32")
    beam_width: int | None = _tensor("INT32")
    length_penalty: float | None = _tensor("FP32")
    early_stopping: bool | None = _tensor("BOOL")
    beam_search_diversity_rate: float | None = _tensor("FP32")

    guided_decoding_guide_type: str | None = _tensor("BYTES")  # json_schema, json, regex, ebnf_grammar, choice, …
    guided_decoding_guide: str | None = _tensor("BYTES")
    guided_decoding_strict: bool | None = _tensor("BOOL")  # False: do without what cannot be enforced, and say so
    guided_decoding_whitespace: str | None = _tensor("BYTES")  # of JSON: single, compact, free
    guided_decoding_begin_after: str | None = _tensor("BYTES")  # text behind which the structure begins
    guided_decoding_close: bool | None = _tensor("BOOL")  # True: complete before max_tokens
    lora_name: str | None = _tensor("BYTES")
    lora_task_id: int | None = _tensor("UINT64")
    lora_weights: Any = field(default=None, metadata={"datatype": "FP16"})  # array [modules, elements]
    lora_config: Any = field(default=None, metadata={"datatype": "INT32"})  # array [modules, 3 or 4]
    prompt_embedding_table: Any = field(default=None, metadata={"datatype": "FP16"})  # array [rows, hidden]
    prompt_table_extra_id: int | None = _tensor("UINT64")
    prompt_vocab_size: int | None = _tensor("INT32")

    top_logprobs: int | None = _tensor("INT32")  # log-probs with that many alternatives; 0: the chosen token only
    logprobs_mode: str | None = _tensor("BYTES")  # raw, or processed: after temperature, penalties, bans and guide
    top_prompt_logprobs: int | None = _tensor("INT32")  # the same for the prompt's tokens
    return_log_probs: bool | None = _tensor("BOOL")
    return_context_logits: bool | None = _tensor("BOOL")
    return_generation_logits: bool | None = _tensor("BOOL")
    return_perf_metrics: bool | None = _tensor("BOOL")
    return_num_input_tokens: bool | None = _tensor("BOOL")
    return_num_output_tokens: bool | None = _tensor("BOOL")

    def __post_init__(self) -> None:
        if (self.text_input is None) == (self.messages is None):
            raise ValueError("Give exactly one of text_input and messages.")

    @classmethod
    def of(cls, prompt: Prompt, **values: Any) -> GenerateRequest:
        """A request from text, from chat messages, or from another request with some fields replaced.

        Raises:
            TypeError: a keyword is no field of the request.
        """
        unknown = sorted(set(values) - set(DATATYPES))
        if unknown:
            raise TypeError(f"No such request field: {', '.join(unknown)}. Fields: {', '.join(DATATYPES)}.")
        if isinstance(prompt, GenerateRequest):
            return replace(prompt, **values)
        if isinstance(prompt, str):
            return cls(text_input=prompt, **values)
        return cls(messages=prompt, **values)

    def tensors(self) -> dict[str, Any]:
        """What goes over the wire: tensor name -> Python value, unset fields left out."""
        found = {name: value for name in DATATYPES if (value := getattr(self, name)) is not None}
        for name in {"messages", "tools", "tool_choice"} & found.keys():
            if not isinstance(found[name], str):
                found[name] = json.dumps(found[name], ensure_ascii=False)
        if (self.temperature or 0) > 0 and self.top_k is None and self.top_p is None:
            # With neither of them the classic contract is greedy, whatever the temperature.
            found["top_p"] = 1.0
        return found

    @property
    def num_sequences(self) -> int:
        """How many answers the request asks for."""
        return self.num_return_sequences or self.beam_width or 1


DATATYPES: dict[str, str] = {f.name: f.metadata["datatype"] for f in fields(GenerateRequest)}
"""Tensor name -> KServe datatype, in the order of the fields."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of prompt and answer; None when the server was not asked (return_num_*_tokens)."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What arrived at once: new text of one sequence, or with beams the whole text of all of them."""

    text: str
    texts: tuple[str, ...] = ()  # one per beam
    sequence_index: int = 0
    finish_reason: str | None = None  # in a sequence's last chunk
    finish_reasons: tuple[str, ...] = ()  # one per beam
    logprobs: tuple[Sequence[LogProb], ...] = ()  # per beam, one per token of this chunk
    tool_calls: tuple[tuple[Mapping[str, Any], ...], ...] = ()  # per beam, entries of OpenAI's delta.tool_calls
    logprobs_distribution: str | None = None  # raw or processed; in the first chunk
    prompt_logprobs: Sequence[LogProb] = ()  # one per token of the prompt; in one chunk, mostly the first
    warnings: tuple[str, ...] = ()
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None  # of this chunk
    outputs: Mapping[str, Any] = field(default_factory=dict, repr=False)  # every output tensor of the answer, by name


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """One complete answer."""

    text: str
    finish_reason: str | None = None  # stop, length, cancelled, timeout, error; None: the server does not say
    logprobs: Sequence[LogProb] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """All that came back for a request."""

    request_id: str
    sequences: tuple[SequenceResult, ...]
    usage: Usage = Usage()
    warnings: tuple[str, ...] = ()
    logprobs_distribution: str | None = None  # what the log-probs of the answer tell of: raw or processed
    prompt_logprobs: Sequence[LogProb] = ()
    outputs: Mapping[str, Any] = field(default_factory=dict, repr=False)  # other tensors, from the last chunk with each

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.sequences[0].text

    @property
    def finish_reason(self) -> str | None:
        """Why the first sequence ended."""
        return self.sequences[0].finish_reason

    @property
    def logprobs(self) -> Sequence[LogProb]:
        """The first sequence's log-probabilities, when asked for."""
        return self.sequences[0].logprobs

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The first sequence's tool calls."""
        return self.sequences[0].tool_calls
