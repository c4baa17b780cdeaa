"""Times masks over seeded random walks through varied structures, for the demo vocabulary and a synthetic larger one.

`python -m tests.tools.bench_masks TOKENIZER_JSON [--vocabulary 128000]` prints percentiles in microseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from python_backend.errors import RequestError
from python_backend.guided.guide import check_guide
from python_backend.guided.llguidance_backend import LLGuidanceBackend
from python_backend.request import Guide
from tests.server.guided_cases import cases

MAX_TOKENS = 100


def widened(tokenizer_json: str, size: int, seed: int = 0) -> str:
    """A byte-level BPE tokenizer with merges of random neighbours added until it has `size` tokens."""
    layout = json.loads(tokenizer_json)
    vocabulary, merges = layout["model"]["vocab"], layout["model"]["merges"]
    special = {token["content"] for token in layout["added_tokens"]}
    short = [token for token in vocabulary if len(token) <= 6 and token not in special]
    choose = random.Random(seed)
    used = {token["id"] for token in layout["added_tokens"]} | set(vocabulary.values())
    next_id = max(used) + 1
    while next_id < size:
        left, right = choose.choice(short), choose.choice(short)
        if left + right not in vocabulary:
            vocabulary[left + right] = next_id
            merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
            next_id += 1
    return json.dumps(layout)


def walk(backend: LLGuidanceBackend, count: int, vocab_size: int, end_id: int) -> dict[str, list[float]]:
    """Microseconds of compiling, starting, masks and forced tokens of `count` structures."""
    times: dict[str, list[float]] = {"compile": [], "start": [], "mask": [], "forced": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        times[name].append((time.perf_counter() - started) * 1e6)
        return result

    choose = random.Random(0)
    bitmask = np.zeros(-(-vocab_size // 32), np.int32)
    for case in cases(seed=11, count=count):
        guide = check_guide(Guide(case.kind, case.guide, whitespace=case.whitespace))
        compiled = timed("compile", lambda guide=guide: backend.compile(backend.grammar(guide)))
        matcher = timed("start", lambda compiled=compiled: compiled.start((end_id,)))
        for _ in range(MAX_TOKENS):
            try:
                timed("mask", lambda matcher=matcher: matcher.fill(bitmask))
            except RequestError:
                break
            allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed != end_id]
            if not len(allowed):
                break
            matcher.accept(int(choose.choice(allowed)))
            for token_id in timed("forced", matcher.forced_tokens):
                matcher.accept(token_id)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer_json", type=Path)
    parser.add_argument("--vocabulary", type=int, help="widen the tokenizer to so many tokens")
    parser.add_argument("--structures", type=int, default=200)
    arguments = parser.parse_args()
    text = arguments.tokenizer_json.read_text(encoding="utf-8")
    if arguments.vocabulary:
        text = widened(text, arguments.vocabulary)
    layout = json.loads(text)
    size = max([*layout["model"]["vocab"].values(), *(token["id"] for token in layout["added_tokens"])]) + 1
    backend = LLGuidanceBackend()
    end_id = layout["added_tokens"][0]["id"]
    backend.load_tokenizer(text, size, (end_id,))
    print(f"{size} tokens, {arguments.structures} structures; microseconds")
    for name, values in walk(backend, arguments.structures, size, end_id).items():
        p50, p99 = np.percentile(values, [50, 99])
        print(f"{name:8} n {len(values):6}  p50 {p50:8.1f}  p99 {p99:9.1f}  max {max(values):9.1f}")


if __name__ == "__main__":
    main()
