"""How the ensemble joins its three models: upstream's maps plus ours. Plain data; knows nothing of protobuf.

Triton's rule behind it: a step after a decoupled model takes inputs from that model only, so all that
postprocessing needs comes out of tensorrt_llm.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step; both maps go from the model's tensor name to the ensemble's."""

    model: str
    inputs: dict[str, str]
    outputs: dict[str, str]


_PREPROCESSING = EnsembleStep(
    "preprocessing",
    inputs={
        "QUERY": "text_input",
        "MESSAGES": "messages",
        "TOOLS": "tools",
        "TOOL_CHOICE": "tool_choice",
        "PARALLEL_TOOL_CALLS": "parallel_tool_calls",
        "LORA_NAME": "lora_name",
        "GUIDED_DECODING_GUIDE_TYPE": "guided_decoding_guide_type",
        "GUIDED_DECODING_GUIDE": "guided_decoding_guide",
        "GUIDED_DECODING_STRICT": "guided_decoding_strict",
        "DECODER_QUERY": "decoder_text_input",
        "REQUEST_OUTPUT_LEN": "max_tokens",
        "BAD_WORDS_DICT": "bad_words",
        "STOP_WORDS_DICT": "stop_words",
        "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
        "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
        "END_ID": "end_id",
        "PAD_ID": "pad_id",
        "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
        "STREAM": "stream",
    },
    outputs={
        "INPUT_ID": "_INPUT_ID",
        "REQUEST_INPUT_LEN": "_REQUEST_INPUT_LEN",
        "DECODER_INPUT_ID": "_DECODER_INPUT_ID",
        "REQUEST_DECODER_INPUT_LEN": "_REQUEST_DECODER_INPUT_LEN",
        "REQUEST_OUTPUT_LEN": "_REQUEST_OUTPUT_LEN",
        "STOP_WORDS_IDS": "_STOP_WORDS_IDS",
        "BAD_WORDS_IDS": "_BAD_WORDS_IDS",
        "EMBEDDING_BIAS": "_EMBEDDING_BIAS",
        "OUT_END_ID": "_PREPROCESSOR_END_ID",
        "OUT_END_IDS": "_PREPROCESSOR_END_IDS",
        "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID",
        "TOOL_GUIDE": "_TOOL_GUIDE",
        "TOOL_FORMAT": "_PREPROCESSOR_TOOL_FORMAT",
        "OUT_PROMPT_TABLE_EXTRA_IDS": "_OUT_PROMPT_TABLE_EXTRA_IDS",
        "WARNINGS": "_PREPROCESSOR_WARNINGS",
    },
)

# Ensemble inputs whose name inside tensorrt_llm differs.
_RENAMED = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "runtime_top_p_min": "top_p_min",
    "runtime_top_p_decay": "top_p_decay",
    "runtime_top_p_reset_ids": "top_p_reset_ids",
    "len_penalty": "length_penalty",
    "streaming": "stream",
}
_SAME_NAME = (
    "exclude_input_in_output",
    "temperature",
    "repetition_penalty",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "num_return_sequences",
    "beam_width",
    "prompt_embedding_table",
    "prompt_vocab_size",
    "lora_task_id",
    "lora_weights",
    "lora_config",
    "lora_name",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
    "guided_decoding_strict",
    "guided_decoding_whitespace",
    "guided_decoding_begin_after",
    "guided_decoding_close",
    "stop_words",
    "exclude_stop_words_in_output",
    "timeout_ms",
    "top_logprobs",
    "logprobs_mode",
    "top_prompt_logprobs",
    "early_stopping",
    "beam_search_diversity_rate",
    "no_repeat_ngram_size",
)
_RESULTS = (
    "cum_log_probs",
    "output_log_probs",
    "context_logits",
    "generation_logits",
    "batch_index",
    "sequence_index",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
    "num_input_tokens",
    "num_output_tokens",
    "finish_reason",
    "warnings",
    "logprobs",
    "logprobs_distribution",
    "prompt_logprobs",
)

_TENSORRT_LLM = EnsembleStep(
    "tensorrt_llm",
    inputs={
        "input_ids": "_INPUT_ID",
        "input_lengths": "_REQUEST_INPUT_LEN",
        "decoder_input_ids": "_DECODER_INPUT_ID",
        "decoder_input_lengths": "_REQUEST_DECODER_INPUT_LEN",
        "request_output_len": "_REQUEST_OUTPUT_LEN",
        "end_id": "_PREPROCESSOR_END_ID",
        "end_ids": "_PREPROCESSOR_END_IDS",
        "pad_id": "_PREPROCESSOR_PAD_ID",
        "tool_guide": "_TOOL_GUIDE",
        "tool_format": "_PREPROCESSOR_TOOL_FORMAT",
        "embedding_bias": "_EMBEDDING_BIAS",
        "stop_words_list": "_STOP_WORDS_IDS",
        "bad_words_list": "_BAD_WORDS_IDS",
        "prompt_table_extra_ids": "_OUT_PROMPT_TABLE_EXTRA_IDS",
        "warnings_in": "_PREPROCESSOR_WARNINGS",
        **_RENAMED,
        **{name: name for name in _SAME_NAME},
    },
    outputs={
        "output_ids": "_TOKENS_BATCH",
        "sequence_length": "_SEQUENCE_LENGTH",
        "detokenize_context": "_DETOKENIZE_CONTEXT",
        "text_cut": "_TEXT_CUT",
        "tool_format": "_TOOL_FORMAT",
        **{name: name for name in _RESULTS},
    },
)

_POSTPROCESSING = EnsembleStep(
    "postprocessing",
    inputs={
        "TOKENS_BATCH": "_TOKENS_BATCH",
        "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH",
        "DETOKENIZE_CONTEXT": "_DETOKENIZE_CONTEXT",
        "TEXT_CUT": "_TEXT_CUT",
        "TOOL_FORMAT": "_TOOL_FORMAT",
        "FINISH_REASON": "finish_reason",
        "BATCH_INDEX": "batch_index",
        "SEQUENCE_INDEX": "sequence_index",
    },
    outputs={"OUTPUT": "text_output", "TOOL_CALLS": "tool_calls"},
)

# Beside the above, where the engine gives logits and postprocessing makes log-probs of them.
DERIVED_LOGPROBS = (
    EnsembleStep(
        "preprocessing",
        inputs={"TOP_LOGPROBS": "top_logprobs", "RETURN_GENERATION_LOGITS": "return_generation_logits"},
        outputs={"OUT_RETURN_GENERATION_LOGITS": "_RETURN_GENERATION_LOGITS"},
    ),
    EnsembleStep("tensorrt_llm", inputs={"return_generation_logits": "_RETURN_GENERATION_LOGITS"}, outputs={}),
    EnsembleStep("postprocessing", inputs={"GENERATION_LOGITS": "generation_logits"}, outputs={"LOGPROBS": "logprobs"}),
)

# Beside the above, where the engine knows adapters by task id alone and preprocessing finds what a name stands for.
NAMED_ADAPTERS = (
    EnsembleStep(
        "preprocessing",
        inputs={"LORA_TASK_ID": "lora_task_id", "LORA_WEIGHTS": "lora_weights", "LORA_CONFIG": "lora_config"},
        outputs={
            "OUT_LORA_TASK_ID": "_LORA_TASK_ID",
            "OUT_LORA_WEIGHTS": "_LORA_WEIGHTS",
            "OUT_LORA_CONFIG": "_LORA_CONFIG",
        },
    ),
    EnsembleStep(
        "tensorrt_llm",
        inputs={"lora_task_id": "_LORA_TASK_ID", "lora_weights": "_LORA_WEIGHTS", "lora_config": "_LORA_CONFIG"},
        outputs={},
    ),
)

ENSEMBLE_STEPS = (_PREPROCESSING, _TENSORRT_LLM, _POSTPROCESSING)
