"""Requests, sequences and a slow reference in float64 for the tests of the sampler, straight from the definitions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from python_backend.engine.sequence import Sequence
from python_backend.request import GenerationRequest, SamplingParams

REQUEST_FIELDS = {
    "end_ids", "stop_words", "bad_words", "embedding_bias", "return_log_probs", "top_logprobs", "prompt_ids",
}  # fmt: skip


def make_sequence(output_ids: tuple[int, ...] | list[int] = (), index: int = 0, **options: Any) -> Sequence:
    """A sequence whose request has the given sampling parameters and request fields."""
    fields = {name: options.pop(name) for name in REQUEST_FIELDS & options.keys()}
    fields.setdefault("prompt_ids", [1])
    options.setdefault("max_tokens", 100)
    sequence = Sequence(GenerationRequest("r", sampling=SamplingParams(**options), **fields), index=index)
    sequence.token_ids.extend(output_ids)
    return sequence


def processed(logits: np.ndarray, sequence: Sequence) -> np.ndarray:
    """Bias, temperature and penalties as defined, without the bans; float64 [vocab]."""
    request, sampling = sequence.request, sequence.request.sampling
    out = logits.astype(np.float64)
    if request.embedding_bias is not None:
        out[: len(request.embedding_bias)] += request.embedding_bias
    if sampling.temperature:
        out /= sampling.temperature
    for token_id, count in Counter(sequence.token_ids).items():
        value = out[token_id]
        value = value * sampling.repetition_penalty if value < 0 else value / sampling.repetition_penalty
        out[token_id] = value - sampling.presence_penalty - sampling.frequency_penalty * count
    return out


def distribution(logits: np.ndarray, sequence: Sequence) -> np.ndarray:
    """The exact distribution that the sampler has to draw from; float64 [vocab]."""
    sampling = sequence.request.sampling
    values = processed(logits, sequence)
    order = np.argsort(-values, kind="stable")
    probabilities = np.exp(values - values.max())
    probabilities /= probabilities.sum()
    if sampling.top_k:
        probabilities[order[sampling.top_k :]] = 0
        probabilities /= probabilities.sum()
    if 0 < sampling.top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= sampling.top_p]] = 0
        probabilities /= probabilities.sum()
    return probabilities
