"""From the input tensors of `tensorrt_llm` to requests for the engine: every value checked, every default resolved.

Knows nothing of Triton's request objects, of the engine or of text.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from python_backend.errors import InvalidRequest, LimitExceeded, Unsupported, out_of_range
from python_backend.guided.guide import check_kind
from python_backend.request import GenerationRequest, Guide, SamplingParams
from python_backend.text.words import MAX_WORDS, clean_words, unpack_words
from python_backend.triton.fields import Fields
from python_backend.triton.inputs import check_retention, refuse_unserved
from python_backend.triton.log_prob_inputs import ask_log_probs
from python_backend.triton.parameters import check_request_type, unknown_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from python_backend.triton.limits import ServingLimits


def is_stop(tensors: Mapping[str, NDArray[Any]]) -> bool:
    """Whether this request only asks to cancel the ones in flight with its id."""
    stop = tensors.get("stop")
    return stop is not None and bool(stop.any())


def parse_requests(
    tensors: Mapping[str, NDArray[Any]],
    limits: ServingLimits,
    new_id: Callable[[], str],
    parameters: Mapping[str, Any] | None = None,
    timeout_us: int = 0,
) -> list[GenerationRequest]:
    """One request for each prompt of the batch.

    Args:
        tensors: the inputs by name, with their batch dimension (scalars [B] or [B, 1], lists [B, N]).
        limits: of this deployment.
        new_id: gives each prompt an id that is unique in the engine.
        parameters: Triton's request parameters.
        timeout_us: Triton's own timeout of the request in microseconds, 0 for none.

    Raises:
        RequestError: names the tensor, its value and what is allowed.
    """
    parameters = parameters or {}
    fields = Fields(tensors, _batch_size(tensors))
    check_retention(tensors)
    refuse_unserved(tensors)
    check_request_type(parameters)
    if fields.batch_size > 1 and not limits.decoupled:
        raise InvalidRequest(
            "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
        )
    notes = unknown_parameters(parameters)
    requests = [_parse_row(fields, row, limits, timeout_us, new_id()) for row in range(fields.batch_size)]
    for request in requests:
        ask_log_probs(request, fields, request.batch_index, parameters)
        request.warnings.extend(notes)
    return requests


def _parse_row(fields: Fields, row: int, limits: ServingLimits, timeout_us: int, request_id: str) -> GenerationRequest:
    warnings = fields.texts("warnings_in", row)
    prompt_ids = _prompt(fields, row, limits)
    sampling = _sampling(fields, row, _output_len(fields, row, len(prompt_ids), limits, warnings))
    _check_sequences(sampling, limits)
    _check_defaults_of_other_models(fields, row, len(prompt_ids))

    def flag(name: str, default: bool = False) -> bool:
        return bool(fields.scalar(name, row, default))

    streaming = flag("streaming")
    if streaming and not limits.decoupled:
        raise InvalidRequest("Streaming is only supported if model is deployed using decoupled mode.")
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=sampling,
        streaming=streaming,
        end_ids=_end_ids(fields, row, limits.vocab_size),
        stop_words=_words(fields, "stop_words_list", row, limits.vocab_size),
        stop_texts=tuple(clean_words(fields.texts("stop_words", row), "stop_words")),
        exclude_stop_words=flag("exclude_stop_words_in_output"),
        bad_words=_words(fields, "bad_words_list", row, limits.vocab_size),
        embedding_bias=_embedding_bias(fields, row, limits.vocab_size),
        exclude_input=flag("exclude_input_in_output", limits.exclude_input_in_output),
        return_log_probs=flag("return_log_probs"),
        return_context_logits=flag("return_context_logits"),
        return_generation_logits=flag("return_generation_logits"),
        return_perf_metrics=flag("return_perf_metrics"),
        return_num_input_tokens=flag("return_num_input_tokens"),
        return_num_output_tokens=flag("return_num_output_tokens"),
        guide=_guide(fields, row, sampling),
        tool_format="".join(fields.texts("tool_format", row)),
        batch_index=row,
        batch_size=fields.batch_size,
        deadline_s=_deadline(fields.scalar("timeout_ms", row, 0), timeout_us),
        warnings=warnings,
    )


def _guide(fields: Fields, row: int, sampling: SamplingParams) -> Guide | None:
    kind, text = (fields.texts(f"guided_decoding_{name}", row) for name in ("guide_type", "guide"))
    calls = "".join(fields.texts("tool_guide", row))
    if calls:
        kind, text = ["structural_tag"], [calls]
    if not kind:
        if text:
            raise InvalidRequest("guided_decoding_guide was sent without guided_decoding_guide_type; send both.")
        return None
    check_kind(kind[0])
    if calls and sampling.beam_width > 1:
        raise Unsupported(
            f"beam_width is {sampling.beam_width}; a request with tools is served with 1 only. "
            "Ask for samples with num_return_sequences."
        )
    whitespace = fields.texts("guided_decoding_whitespace", row) or ["single"]
    if calls and whitespace[0] != "single":
        raise InvalidRequest(f"guided_decoding_whitespace is {whitespace[0]!r}; tool calls are written with single.")
    strict = bool(fields.scalar("guided_decoding_strict", row, True))
    begin_after = fields.texts("guided_decoding_begin_after", row) or [""]
    close = bool(fields.scalar("guided_decoding_close", row, False))
    return Guide(kind[0], text[0] if text else "", strict, whitespace[0], begin_after[0], close)


def _batch_size(tensors: Mapping[str, NDArray[Any]]) -> int:
    input_ids = tensors.get("input_ids")
    if input_ids is None:
        raise InvalidRequest("inputTokens or encoderInputFeatures tensor not provided: send input_ids [B, N].")
    if input_ids.ndim != 2 or not input_ids.shape[0]:
        raise InvalidRequest(
            f"Invalid size for tensor input_ids: shape {list(input_ids.shape)}; send [B, N] token ids."
        )
    return int(input_ids.shape[0])


def _prompt(fields: Fields, row: int, limits: ServingLimits) -> list[int]:
    ids = fields.row("input_ids", row)
    assert ids is not None  # _batch_size has seen it
    length = fields.scalar("input_lengths", row)
    if length is None:
        raise InvalidRequest("input_lengths is not present in the request: send the number of tokens of each prompt.")
    if not 0 < length <= ids.size:
        raise out_of_range("input_lengths", length, f"1 to {ids.size} (the width of input_ids)")
    longest = min(limits.max_input_len, limits.max_seq_len - 1)
    if length > longest:
        raise LimitExceeded(
            f"Prompt length ({length}) exceeds maximum input length ({longest}). Set log level to info and check "
            "TRTGptModel logs for how maximum input length is set"
        )
    ids = ids[:length]
    _check_tokens("input_ids", ids, limits.vocab_size)
    return list(map(int, ids.tolist()))


def _output_len(fields: Fields, row: int, prompt_len: int, limits: ServingLimits, warnings: list[str]) -> int:
    asked = fields.scalar("request_output_len", row)
    if asked is None:
        raise InvalidRequest("request_output_len is not present in the request: send how many tokens to generate.")
    room = limits.max_seq_len - prompt_len
    if asked > room:
        warnings.append(
            f"request_output_len was lowered from {asked} to {room}: the prompt has {prompt_len} tokens and "
            f"prompt and output share max_seq_len ({limits.max_seq_len})."
        )
    return int(min(asked, room))


def _sampling(fields: Fields, row: int, max_tokens: int) -> SamplingParams:
    def value(name: str, default: Any) -> Any:
        return fields.scalar(name, row, default)

    beam_width = value("beam_width", 1)
    return SamplingParams(
        max_tokens=max_tokens,
        beam_width=beam_width,
        num_return_sequences=value("num_return_sequences", max(1, beam_width)),  # all beams unless fewer are asked for
        temperature=value("temperature", None),
        top_k=value("runtime_top_k", 0),
        top_p=value("runtime_top_p", 0.0),
        top_p_min=value("runtime_top_p_min", 1e-6),
        top_p_decay=value("runtime_top_p_decay", 1.0),
        top_p_reset_id=value("runtime_top_p_reset_ids", -1),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        no_repeat_ngram_size=value("no_repeat_ngram_size", 0),
        min_tokens=value("min_tokens", 0),
        seed=value("seed", None),
        length_penalty=value("len_penalty", 1.0),
        early_stopping=bool(value("early_stopping", True)),
        beam_search_diversity_rate=value("beam_search_diversity_rate", 0.0),
    )


def _check_sequences(sampling: SamplingParams, limits: ServingLimits) -> None:
    if sampling.beam_width > limits.max_beam_width:
        raise LimitExceeded(
            f"beam_width is {sampling.beam_width}; allowed: 1 to max_beam_width ({limits.max_beam_width}). "
            "Raise max_beam_width in the deployment's spec to serve wider beams."
        )
    if sampling.num_return_sequences > limits.max_batch_size:
        raise LimitExceeded(
            f"num_return_sequences is {sampling.num_return_sequences}; allowed: 1 to max_batch_size "
            f"({limits.max_batch_size}). Send several requests."
        )
    if sampling.num_return_sequences > 1 and sampling.beam_width == 1 and not limits.decoupled:
        raise InvalidRequest(
            "num_return_sequences > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
        )


def _check_defaults_of_other_models(fields: Fields, row: int, prompt_len: int) -> None:
    """Preprocessing always sends a decoder prompt of one pad token and all-zero extra ids; no more is served."""
    decoder_len = fields.scalar("decoder_input_lengths", row, 1)
    decoder_ids = fields.row("decoder_input_ids", row)
    pad_id = fields.scalar("pad_id", row)
    is_pad = decoder_ids is None or decoder_ids.size == 0 or pad_id is None or decoder_ids.reshape(-1)[0] == pad_id
    if decoder_len > 1 or not is_pad:
        raise Unsupported(
            "Input decoder_input_ids is not supported: only decoder-only models are served here. "
            "Leave decoder_input_ids out, or send one pad token as preprocessing does."
        )
    extra_ids = fields.row("prompt_table_extra_ids", row)
    if extra_ids is None:
        return
    if extra_ids.size < prompt_len:
        raise InvalidRequest(
            f"inputTokenExtraIds vector size ({extra_ids.size}) must be the same as input token vector size "
            f"({prompt_len})."
        )
    if extra_ids.any():
        raise Unsupported(
            "Input prompt_table_extra_ids is not supported: it marks tokens of a prompt table, and only text models "
            "are served here. Leave it out."
        )


def _end_ids(fields: Fields, row: int, vocab_size: int) -> tuple[int, ...]:
    several = fields.row("end_ids", row)
    given = [fields.scalar("end_id", row, -1)] if several is None else several.reshape(-1).tolist()
    for end_id in given:
        if not -1 <= end_id < vocab_size:
            raise InvalidRequest(f"EndId ({end_id}) is not within acceptable range [-1, {vocab_size}).")
    return tuple(dict.fromkeys(int(end_id) for end_id in given if end_id >= 0))


def _words(fields: Fields, name: str, row: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    packed = fields.row(name, row)
    if packed is None:
        return ()
    words = unpack_words(packed, name)
    if len(words) > MAX_WORDS:
        raise LimitExceeded(f"{name} has {len(words)} words; at most {MAX_WORDS} are allowed.")
    for word in words:
        _check_tokens(name, np.asarray(word), vocab_size)
    return tuple(words)


def _check_tokens(name: str, ids: NDArray[Any], vocab_size: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise out_of_range(f"A token of {name}", wrong, f"0 to {vocab_size - 1} (the model's vocabulary)")


def _embedding_bias(fields: Fields, row: int, vocab_size: int) -> NDArray[Any] | None:
    """float32 [vocab_size]: a tokenizer may know fewer tokens than the model has logits, never more."""
    given = fields.row("embedding_bias", row)
    if given is None or given.size == 0:
        return None
    if given.ndim != 1 or given.size > vocab_size:
        raise InvalidRequest(
            f"embedding_bias has shape {list(given.shape)}; allowed: [N] with N up to {vocab_size} "
            "(the model's vocabulary), one value for each token."
        )
    if np.isnan(given).any() or np.isposinf(given).any():
        raise out_of_range("embedding_bias", "NaN or +inf", "finite numbers, and -inf to ban a token")
    bias = np.zeros(vocab_size, np.float32)
    bias[: given.size] = given
    return bias


def _deadline(timeout_ms: int, timeout_us: int) -> float | None:
    if timeout_ms < 0:
        raise out_of_range("timeout_ms", timeout_ms, ">= 0 (0 = no timeout)")
    timeouts = [seconds for seconds in (timeout_ms / 1e3, timeout_us / 1e6) if seconds > 0]
    return time.monotonic() + min(timeouts) if timeouts else None
