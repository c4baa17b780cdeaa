"""Times masks along the answers to a seeded sample of everyday schemas, for the demo vocabulary and a larger one.

`python -m tests.tools.bench_masks TOKENIZER_JSON [--vocabulary 128000] [--backend xgrammar]` prints percentiles in
microseconds; `--json` prints them for loadtests.bench. `--random` chooses tokens at random instead.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from python_backend.errors import RequestError
from python_backend.guided.backends import make_backend
from python_backend.guided.guide import check_guide
from python_backend.guided.limits import GuideLimits
from python_backend.request import Guide
from tests.tools.everyday_schemas import sample

MAX_TOKENS = 100  # of a random walk


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


class Clock:
    """Microseconds by what was timed: wall time, or this thread's processor time on a machine that others use."""

    def __init__(self, cpu: bool) -> None:
        self.times: dict[str, list[float]] = {"compile": [], "start": [], "mask": [], "forced": []}
        self._now = time.thread_time_ns if cpu else time.perf_counter_ns

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        """The call's result."""
        started = self._now()
        result = call()
        self.times[name].append((self._now() - started) / 1e3)
        return result


def run(name: str, tokenizer_json: str, count: int, *, choose_at_random: bool, cpu: bool) -> dict[str, Any]:
    """Percentiles for `count` structures."""
    layout = json.loads(tokenizer_json)
    size = max([*layout["model"]["vocab"].values(), *(token["id"] for token in layout["added_tokens"])]) + 1
    end_id = layout["added_tokens"][0]["id"]
    backend = make_backend(name, GuideLimits())
    backend.load_tokenizer(tokenizer_json, size, (end_id,))
    tokenizer, clock = Tokenizer.from_str(tokenizer_json), Clock(cpu)
    refused = 0
    for schema, answer in sample(seed=11, count=count):
        guide = check_guide(Guide("json_schema", schema))
        try:
            compiled = clock.timed("compile", lambda guide=guide: backend.compile(backend.grammar(guide)))
        except RequestError:
            refused += 1
            continue
        matcher = clock.timed("start", lambda compiled=compiled: compiled.start((end_id,)))
        tokens = tokenizer.encode(answer, add_special_tokens=False).ids
        _walk(matcher, None if choose_at_random else iter(tokens), clock, size, end_id)
    found = {"vocabulary": size, "structures": count, "refused": refused, "version": backend.version}
    for what, values in clock.times.items():
        p50, p99 = np.percentile(values, [50, 99]) if values else (0.0, 0.0)
        found[what] = {"n": len(values), "p50_us": float(p50), "p99_us": float(p99), "max_us": max(values, default=0.0)}
    return found


def _walk(matcher: Any, tokens: Iterator[int] | None, clock: Clock, size: int, end_id: int) -> None:
    choose = random.Random(0)
    bitmask = np.zeros(-(-size // 32), np.int32)
    for _ in range(MAX_TOKENS if tokens is None else size):
        try:
            clock.timed("mask", lambda: matcher.fill(bitmask))
        except RequestError:
            return
        if tokens is None:
            allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed != end_id]
            token_id = int(choose.choice(allowed)) if len(allowed) else None
        else:
            token_id = next(tokens, None)
        if token_id is None:
            return
        matcher.accept(token_id)
        forced = clock.timed("forced", matcher.forced_tokens)
        if tokens is None:
            for forced_id in forced:
                matcher.accept(forced_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer_json", type=Path)
    parser.add_argument("--vocabulary", type=int, help="widen the tokenizer to so many tokens")
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--structures", type=int, default=100)
    parser.add_argument("--random", action="store_true", help="tokens chosen at random among the allowed ones")
    parser.add_argument("--cpu", action="store_true", help="processor time, for a machine that others use as well")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    text = arguments.tokenizer_json.read_text(encoding="utf-8")
    if arguments.vocabulary:
        text = widened(text, arguments.vocabulary)
    found = run(arguments.backend, text, arguments.structures, choose_at_random=arguments.random, cpu=arguments.cpu)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{found['vocabulary']} tokens, {found['structures']} structures, {found['refused']} refused; microseconds")
    for name in ("compile", "start", "mask", "forced"):
        one = found[name]
        print(f"{name:8} n {one['n']:6}  p50 {one['p50_us']:8.1f}  p99 {one['p99_us']:9.1f}  max {one['max_us']:9.1f}")


if __name__ == "__main__":
    main()
