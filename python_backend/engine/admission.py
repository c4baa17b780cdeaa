"""Checks a request against the limits of this engine, before it costs anything. Knows nothing of queues or threads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from python_backend.errors import InvalidRequest, LimitExceeded, Unsupported, out_of_range

if TYPE_CHECKING:
    from python_backend.engine.block_manager import BlockManager
    from python_backend.engine.config import EngineConfig
    from python_backend.request import GenerationRequest


def admit(request: GenerationRequest, config: EngineConfig, blocks: BlockManager, vocab_size: int) -> None:
    """Refuse what this engine can never serve; lower max_tokens to what max_seq_len leaves, with a warning.

    Raises:
        InvalidRequest: a token id or the bias does not fit the vocabulary.
        Unsupported: generation logits of beams.
        LimitExceeded: the prompt, the beams or the memory needed are over a limit.
    """
    _check_tokens(request, vocab_size)
    length = len(request.prompt_ids)
    if length > config.max_input_len:
        raise LimitExceeded(
            f"Prompt length ({length}) exceeds maximum input length ({config.max_input_len}). "
            f"Shorten the prompt or raise max_input_len in the spec."
        )
    if not config.enable_chunked_context and length > config.max_num_tokens:
        raise LimitExceeded(
            f"Prompt length ({length}) exceeds max_num_tokens ({config.max_num_tokens}) and enable_chunked_context is "
            f"off. Shorten the prompt, or turn chunking on in the spec."
        )
    room = config.max_seq_len - length
    if room < 1:
        raise LimitExceeded(
            f"Prompt length ({length}) leaves no room for output: max_seq_len is {config.max_seq_len} tokens."
        )
    _check_width(request, config)
    if request.sampling.max_tokens > room:
        request.warnings.append(
            f"request_output_len {request.sampling.max_tokens} was lowered to {room}: prompt {length} + output may not "
            f"exceed max_seq_len {config.max_seq_len}."
        )
        request.sampling = dataclasses.replace(request.sampling, max_tokens=room)
    _check_memory(request, config, blocks)
    if request.adapter is not None and request.adapter.rank > config.max_lora_rank:
        raise LimitExceeded(
            f"The adapter has rank {request.adapter.rank}; allowed: up to {config.max_lora_rank} (lora.max_rank of the "
            "spec, 0 = adapters are not served)."
        )


def _check_tokens(request: GenerationRequest, vocab_size: int) -> None:
    ids = np.asarray(request.prompt_ids)
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise out_of_range("A token of input_ids", wrong, f"0 to {vocab_size - 1} (the vocabulary)")
    for end_id in request.end_ids:
        if not 0 <= end_id < vocab_size:
            raise InvalidRequest(f"EndId ({end_id}) is not within acceptable range [-1, {vocab_size}).")
    bias = request.embedding_bias
    if bias is not None and (bias.ndim != 1 or bias.size > vocab_size):
        raise out_of_range("The shape of embedding_bias", list(bias.shape), f"[up to {vocab_size}]")


def _check_width(request: GenerationRequest, config: EngineConfig) -> None:
    width, samples = request.sampling.beam_width, request.sampling.num_return_sequences
    if width > config.max_beam_width:
        raise LimitExceeded(f"beam_width is {width}; allowed: 1 to max_beam_width ({config.max_beam_width}).")
    if width > config.max_batch_size:
        raise LimitExceeded(f"beam_width is {width}; allowed: 1 to max_batch_size ({config.max_batch_size}).")
    if width > 1 and request.return_generation_logits:
        raise Unsupported(
            "return_generation_logits is served with beam_width 1 only; ask for log-probs of beams instead."
        )
    if width == 1 and samples > config.max_batch_size:
        raise LimitExceeded(
            f"num_return_sequences is {samples}; allowed: 1 to max_batch_size ({config.max_batch_size})."
        )


def _check_memory(request: GenerationRequest, config: EngineConfig, blocks: BlockManager) -> None:
    width = request.sampling.beam_width
    tokens = len(request.prompt_ids) + request.sampling.max_tokens
    # Beams share a block until one writes it: the copy takes one more for a moment.
    needed = blocks.blocks_for(tokens) * width + (width > 1)
    if needed > blocks.num_blocks:
        raise LimitExceeded(
            f"The request needs {needed} KV cache blocks ({tokens} tokens, beam_width {width}) and the engine has "
            f"{blocks.num_blocks} of {config.tokens_per_block} tokens. Ask for fewer tokens or raise kv_cache_tokens "
            f"in the spec."
        )
