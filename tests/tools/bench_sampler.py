"""Times the sampler per row and prints a table; run by hand: python -m tests.tools.bench_sampler [vocab]."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from python_backend.engine.sampler import Sampler
from python_backend.engine.sequence import Sequence
from python_backend.request import GenerationRequest, SamplingParams

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy + log-probs": {"return_log_probs": True},
    "greedy + top 5 log-probs": {"return_log_probs": True, "top_logprobs": 5},
    "greedy + mask": {"mask": True},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8 + log-probs": {"temperature": 0.8, "return_log_probs": True},
    "temperature 0.8 + mask": {"temperature": 0.8, "mask": True},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "penalties, greedy": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "penalties, temperature 0.8": {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "temperature": 0.8},
}
REQUEST_FIELDS = {"return_log_probs", "top_logprobs"}


def microseconds_per_row(vocab: int, batch: int, options: dict[str, Any], repeats: int = 15) -> float:
    """Best of `repeats` runs over fresh rows that look like a language model's."""
    rng = np.random.default_rng(0)
    options = dict(options)
    mask = options.pop("mask", False)
    request_options = {name: options.pop(name) for name in REQUEST_FIELDS & options.keys()}
    sampling = SamplingParams(
        max_tokens=100,
        seed=1,
        **(options if "temperature" in options or "top_p" in options else {"top_k": 1} | options),
    )
    prompt = rng.integers(0, vocab, 500).tolist()
    sequences = [Sequence(GenerationRequest(str(i), prompt, sampling, **request_options)) for i in range(batch)]
    logits = (rng.standard_normal((batch, vocab)) * 2.5).astype(np.float32)
    logits[:, :200] += rng.exponential(3.0, (batch, 200)).astype(np.float32)
    bitmasks = rng.integers(-(2**31), 2**31, (batch, -(-vocab // 32))).astype(np.int32) if mask else None
    sampler = Sampler(vocab)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        sampler.sample(logits, sequences, bitmasks)
        best = min(best, time.perf_counter() - start)
    return best / batch * 1e6


def main() -> None:
    vocab = int(sys.argv[1]) if len(sys.argv) > 1 else 49152
    sys.stdout.write(f"{'microseconds per row, vocabulary ' + str(vocab):48s}{'batch 1':>10s}{'batch 32':>10s}\n")
    for name, options in CASES.items():
        figures = [microseconds_per_row(vocab, batch, options) for batch in (1, 32)]
        sys.stdout.write(f"{name:48s}" + "".join(f"{figure:10.1f}" for figure in figures) + "\n")


if __name__ == "__main__":
    main()
