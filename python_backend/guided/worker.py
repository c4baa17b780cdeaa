"""The process in which guides are tried first: what exceeds its stack, memory or time ends it and nothing else.

Lines of JSON on standard input and output. Started by `worker_process`; ends when its input does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from python_backend import errors
from python_backend.guided.backend import Grammar, GuideBackend
from python_backend.guided.backends import make_backend
from python_backend.guided.guide import check_guide
from python_backend.guided.limits import GuideLimits
from python_backend.request import Guide


def main() -> None:
    """Serve jobs until standard input ends."""
    settings = json.loads(sys.stdin.readline())
    limits = GuideLimits(**settings["limits"])
    backend = make_backend(settings["backend"], limits, settings["special_tokens"])
    tokenizer_json = Path(settings["tokenizer_file"]).read_text(encoding="utf-8")
    vocab_size, end_ids = settings["vocab_size"], tuple(settings["end_ids"])
    backend.load_tokenizer(tokenizer_json, vocab_size, end_ids)
    os.nice(5)  # never before the engine
    _limit(resource.RLIMIT_AS, _address_space() + limits.compile_memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, int(time.process_time() + limits.compile_cpu_s) + 1)
        reply = try_out(backend, Guide(**json.loads(line)), limits, vocab_size)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def try_out(backend: GuideBackend, guide: Guide, limits: GuideLimits, vocab_size: int) -> dict[str, Any]:
    """Check, translate, compile and walk a little; gives the grammar, or the error that refuses the guide."""
    try:
        grammar = backend.grammar(check_guide(guide, limits))
        started = time.process_time()
        _walk(backend, grammar, limits, vocab_size)
        if time.process_time() - started > limits.compile_cpu_s:
            raise errors.LimitExceeded(
                f"The structure takes more than {limits.compile_cpu_s:g} s to compile. Simplify it, or split it."
            )
    except errors.RequestError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return dataclasses.asdict(grammar)


def _walk(backend: GuideBackend, grammar: Grammar, limits: GuideLimits, vocab_size: int) -> None:
    """Follow one random text, to see what masks cost before the engine has to wait for them."""
    matcher = backend.compile(grammar).start(())
    bitmask = np.zeros(-(-vocab_size // 32), np.int32)
    choose = random.Random(0)
    started = time.process_time()
    for _ in range(limits.probe_tokens):
        matcher.fill(bitmask)
        allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))
        if time.process_time() - started > limits.probe_cpu_s:
            raise errors.LimitExceeded(
                "The structure is too complex: finding out which tokens may come next takes too long. Use shorter "
                "strings, fewer properties and fewer alternatives."
            )
        if not len(allowed):
            return
        matcher.accept(int(allowed[choose.randrange(len(allowed))]))


def _limit(what: int, soft: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _address_space() -> int:
    """Bytes of virtual memory in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
