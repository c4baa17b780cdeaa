"""The request after parsing: every default resolved, every value checked. It travels from the border to the engine.

Knows nothing of Triton, tokenizers or the model. Names are those of the tensors of `tensorrt_llm`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from python_backend.errors import InvalidRequest, out_of_range

if TYPE_CHECKING:
    import numpy as np

LogprobsMode = Literal["raw", "processed"]
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `None` means that the request does not ask for it.

    Greedy unless something asks for sampling: see `greedy`.
    """

    max_tokens: int  # request_output_len
    beam_width: int = 1
    num_return_sequences: int = 1
    temperature: float | None = None
    top_k: int = 0  # runtime_top_k, 0 = off
    top_p: float = 0.0  # runtime_top_p, <= 0 or 1 = off
    top_p_min: float = 1e-6
    top_p_decay: float = 1.0
    top_p_reset_id: int = -1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    seed: int | None = None  # None: another output every time
    length_penalty: float = 1.0  # len_penalty
    early_stopping: bool = True
    beam_search_diversity_rate: float = 0.0

    def __post_init__(self) -> None:
        _positive("request_output_len", self.max_tokens)
        _positive("beam_width", self.beam_width)
        _positive("num_return_sequences", self.num_return_sequences)
        _check("temperature", self.temperature, self.temperature is None or self.temperature >= 0, ">= 0")
        _check("runtime_top_k", self.top_k, self.top_k >= 0, ">= 0 (0 = off)")
        _check("runtime_top_p", self.top_p, self.top_p <= 1, "<= 1 (<= 0 = off)")
        _check("runtime_top_p_min", self.top_p_min, 0 < self.top_p_min <= 1, "over 0, up to 1")
        _check("runtime_top_p_decay", self.top_p_decay, 0 < self.top_p_decay <= 1, "over 0, up to 1")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "over 0 (1 = off)")
        _check("presence_penalty", self.presence_penalty, True, "any finite number (0 = off)")
        _check("frequency_penalty", self.frequency_penalty, True, "any finite number (0 = off)")
        _check("no_repeat_ngram_size", self.no_repeat_ngram_size, self.no_repeat_ngram_size >= 0, ">= 0 (0 = off)")
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, ">= 0")
        _check("len_penalty", self.length_penalty, self.length_penalty >= 0, ">= 0")
        diversity = self.beam_search_diversity_rate
        _check("beam_search_diversity_rate", diversity, diversity >= 0, ">= 0 (0 = off)")
        if self.beam_width > 1 and self.num_return_sequences > self.beam_width:
            raise out_of_range(
                "num_return_sequences", self.num_return_sequences, f"1 to beam_width ({self.beam_width})"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken.

        Upstream is greedy whenever neither top_k nor top_p asks for more, and its clients always send
        temperature 1.0. A temperature other than that, or one together with a seed, can only mean sampling.
        """
        if self.temperature == 0 or self.top_k == 1:
            return True
        if self.top_k > 1 or self.top_p > 0:
            return False
        return self.temperature is None or (self.temperature == 1.0 and self.seed is None)


@dataclass(frozen=True, slots=True)
class Guide:
    """A structure that the answer must satisfy (guided_decoding_guide_type and guided_decoding_guide)."""

    kind: str
    text: str = ""
    strict: bool = True
    whitespace: str = "single"  # between JSON tokens: single, compact or free
    begin_after: str = ""  # text behind which the structure begins; "": at once
    close: bool = False  # complete it before max_tokens


@dataclass(slots=True)
class GenerationRequest:
    """One prompt and all that was asked of it; `prompt_ids` are token ids of the served vocabulary."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    streaming: bool = False
    end_ids: tuple[int, ...] = ()  # empty: never ends by a token
    stop_words: tuple[tuple[int, ...], ...] = ()  # as token ids (stop_words_list)
    stop_texts: tuple[str, ...] = ()  # as text (stop_words)
    exclude_stop_words: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: np.ndarray | None = None  # float32 [vocab]
    exclude_input: bool = True
    return_log_probs: bool = False
    top_logprobs: int | None = None  # None: no `logprobs` output; n: n alternatives per token
    logprobs_mode: LogprobsMode = "raw"  # the distribution that `logprobs` tells of
    top_prompt_logprobs: int | None = None  # the same for the prompt's tokens: `prompt_logprobs`, always raw
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_perf_metrics: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    lora_task_id: int | None = None
    adapter: Any = None  # engine.protocols.AdapterWeights of that task id
    guide: Guide | None = None
    tool_format: str = ""  # how tool calls are written, where the guide comes from tools
    batch_index: int = 0
    batch_size: int = 1
    deadline_s: float | None = None  # time.monotonic() seconds
    warnings: list[str] = field(default_factory=list)
    arrival_ns: int = field(default_factory=time.monotonic_ns)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise InvalidRequest(
                "The prompt has no tokens; send at least one token (input_ids, text_input or messages)."
            )

    @property
    def cache_salt(self) -> int:
        """What separates prefix-cache blocks of different adapters, and of an adapter before and after a change."""
        if self.adapter is not None:
            return int(self.adapter.version)
        return -1 if self.lora_task_id is None else self.lora_task_id


def _check(name: str, value: float | None, ok: bool, allowed: str) -> None:
    if not ok or (value is not None and not math.isfinite(value)):
        raise out_of_range(name, value, allowed)


def _positive(name: str, value: int) -> None:
    _check(name, value, value >= 1, ">= 1")
