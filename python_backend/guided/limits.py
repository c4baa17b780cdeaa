"""What a guide may cost; plain data. Knows nothing of any backend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideLimits:
    """Bounds that keep one request's structure from harming others."""

    max_guide_bytes: int = 256 * 1024  # of a JSON schema, structural tag or list of choices, in UTF-8
    max_expression_bytes: int = 16 * 1024  # of a regular expression or a grammar
    max_literal_chars: int = 4096  # of one string that has to appear as it is: each mask walks through all of it
    max_depth: int = 100  # of nested JSON: two of them for each level of objects
    compile_cpu_s: float = 2.0  # processor time of checking, compiling and trying out
    compile_wall_s: float = 20.0  # for the same, as the client sees it, once a worker has begun
    compile_memory_bytes: int = 768 * 1024 * 1024  # address space of a worker beyond what it has at its start
    probe_tokens: int = 24  # tokens walked at random to see what masks cost
    probe_cpu_s: float = 0.6  # processor time of that walk
    max_lexer_states: int = 50_000  # about 2 kB each, shared by all requests with the same guide
    num_workers: int = 2
    max_queued: int = 64  # guides that wait for a worker
    cache_entries: int = 512
    cache_bytes: int = 64 * 1024 * 1024  # estimated: 16 times the grammar's text and 64 kB
