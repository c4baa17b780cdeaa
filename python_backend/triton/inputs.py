"""What becomes of every input of `tensorrt_llm`: honoured, or refused by name with a reason.

Knows nothing of how a value is read; docs/contract.md is generated from these tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from python_backend.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

HONOURED: dict[str, str] = {
    "input_ids": "token ids of the prompt; rows of a batch are cut to input_lengths",
    "input_lengths": "number of tokens of each prompt",
    "request_output_len": "lowered so that prompt and output fit max_seq_len, which `warnings` then says",
    "num_return_sequences": "samples (seed + index); with beam_width > 1 the n best beams, absent: all",
    "decoder_input_ids": "only the default that preprocessing sends for decoder-only models: one pad token",
    "decoder_input_lengths": "only 1, see decoder_input_ids",
    "end_id": "-1 or absent: no token ends the sequence; end_ids, when sent, takes its place",
    "pad_id": "accepted; nothing is padded inside this engine",
    "stop_words_list": "[2, N] token ids; the stop word stays in the output",
    "bad_words_list": "[2, N] token ids that never appear in this order",
    "embedding_bias": "added to the logits; [B, 0] means none; -inf bans a token",
    "beam_width": "up to max_beam_width",
    "temperature": "0 is greedy",
    "runtime_top_k": "0 is off",
    "runtime_top_p": "0 or less, or 1, is off",
    "runtime_top_p_min": "lower bound of a decaying top_p (read under its own name, unlike upstream's C++ backend)",
    "runtime_top_p_decay": "factor on top_p for each token",
    "runtime_top_p_reset_ids": "token that sets a decayed top_p back",
    "len_penalty": "exponent of the length in the ranking of beams",
    "early_stopping": "a real BOOL here",
    "repetition_penalty": "over 0, 1 is off",
    "min_tokens": "no end token before that many tokens",
    "beam_search_diversity_rate": "0 is off",
    "presence_penalty": "0 is off",
    "frequency_penalty": "0 is off",
    "seed": "same seed, same output; absent: another output every time",
    "top_logprobs": "`logprobs`, with 0 to 20 alternatives for each token",
    "logprobs_mode": "what `logprobs` is about: raw (default) or processed, see docs/logprobs.md",
    "top_prompt_logprobs": "`prompt_logprobs`, with 0 to 20 alternatives for each token; the prompt is computed whole",
    "return_log_probs": "cum_log_probs and output_log_probs",
    "return_context_logits": "context_logits",
    "return_generation_logits": "generation_logits",
    "return_perf_metrics": "kv_cache_*, *_time_ns, acceptance_rate, total_*draft_tokens",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "exclude_input_in_output": "the request's value, else the parameter's",
    "stop": "cancels the requests in flight with this request id",
    "streaming": "one response for every step with new tokens; needs a decoupled model",
    "prompt_table_extra_ids": "only zeros, which preprocessing sends for prompts without a prompt table",
    "guided_decoding_guide_type": "json, json_schema, regex, ebnf_grammar, choice or structural_tag",
    "guided_decoding_guide": "the structure, as docs/guided.md has it; none for json",
    "guided_decoding_strict": "true: refuse what cannot be enforced; false: say so in `warnings`",
    "guided_decoding_whitespace": "between the parts of JSON: single (default), compact or free",
    "guided_decoding_close": "true: the structure is complete before max_tokens, or the request is refused",
    "guided_decoding_begin_after": "text, such as </think>, behind which the structure begins; before it all is free",
    "tool_guide": "a structural_tag that makes calls of the request's tools, as preprocessing gives it",
    "tool_format": "how these calls are written; passed on to postprocessing",
    "end_ids": "every token that ends the sequence; -1 entries are skipped",
    "stop_words": "as text: matched across token borders, what follows is cut exactly",
    "exclude_stop_words_in_output": "cuts the stop word as well",
    "timeout_ms": "time from arrival after which the request ends with finish_reason timeout; 0 is off",
    "warnings_in": "passed on to `warnings`",
    "no_repeat_ngram_size": "0 is off",
    "lora_name": "an adapter of the deployment; refused with close names when nobody registered it",
    "lora_task_id": "an adapter that came before with its weights, or the id of a registered one",
    "lora_weights": "[R, L], any adapter that fits the model; ignored when the id is cached",
    "lora_config": "[R, 3] or [R, 4]: module, layer, rank (and is_dora, 0 only)",
}

_ENCODER = "only decoder-only models are served here"
_MULTIMODAL = "only text models are served here"
_DRAFT = "speculative decoding with tokens from outside is not served by this deployment"
_RETENTION = "the CPU engine evicts KV cache blocks in least-recently-used order only"
_LOOKAHEAD = (
    "Cannot set the request lookahead decoding configuration when model instance lookahead parameters are not set."
)

REFUSED: dict[str, str] = {
    "encoder_input_features": _ENCODER,
    "encoder_output_lengths": _ENCODER,
    "cross_attention_mask": _ENCODER,
    "skip_cross_attn_blocks": _ENCODER,
    "prompt_embedding_table": _MULTIMODAL,
    "prompt_vocab_size": _MULTIMODAL,
    "mrope_rotary_cos_sin": _MULTIMODAL,
    "mrope_position_deltas": _MULTIMODAL,
    "context_phase_params": "prefill and decode run in one engine here; there is no disaggregated serving on a CPU",
    "draft_input_ids": _DRAFT,
    "draft_logits": _DRAFT,
    "draft_acceptance_threshold": _DRAFT,
    "lookahead_window_size": _LOOKAHEAD,
    "lookahead_ngram_size": _LOOKAHEAD,
    "lookahead_verification_set_size": _LOOKAHEAD,
    "retention_token_range_starts": _RETENTION,
    "retention_token_range_ends": _RETENTION,
    "retention_token_range_priorities": _RETENTION,
    "retention_token_range_durations_ms": _RETENTION,
    "retention_decode_priority": _RETENTION,
    "retention_decode_duration_ms": _RETENTION,
}


def refuse_unserved(names: Iterable[str]) -> None:
    """Stop at the first input that this deployment knows and does not serve.

    Raises:
        Unsupported: names the input and says why.
    """
    for name in names:
        reason = REFUSED.get(name)
        if reason is not None:
            raise Unsupported(f"Input {name} is not supported: {reason.rstrip('.')}. Leave the input out.")


def check_retention(tensors: Mapping[str, NDArray[Any]]) -> None:
    """Check the lengths of the retention ranges, so that a mistake is named before the refusal.

    Raises:
        InvalidRequest: two of the lists differ in length.
    """
    starts = tensors.get("retention_token_range_starts")
    if starts is None:
        return
    for what in ("ends", "priorities"):
        tensor = tensors.get(f"retention_token_range_{what}")
        if tensor is None or tensor.size != starts.size:
            raise InvalidRequest(
                f"retention_token_range_{what} must be provided, and have the same length as "
                "retention_token_range_starts"
            )
    durations = tensors.get("retention_token_range_durations_ms")
    if durations is not None and durations.size != starts.size:
        raise InvalidRequest(
            "retention_token_range_durations_ms must have the same length as retention_token_range_starts"
        )
