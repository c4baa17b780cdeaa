"""Holds two constraint backends and an independent judge against each other on one structure.

Texts go through both matchers token by token; random walks show what each would write; and where both have taken the
same tokens, their masks are compared bit by bit.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from python_backend.errors import RequestError
from python_backend.guided.guide import check_guide
from python_backend.request import Guide
from tests.tools.guided_suite import accepts, forms
from tests.tools.oracle_cases import Undecided, mutated
from tests.unit.guided_helpers import END_ID, VOCAB_SIZE, backend, tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.tools.oracle_cases import OracleCase

LIBRARIES = ("llguidance", "xgrammar")
MAX_FORMS = 24  # ways to write one instance that are tried
MAX_TOKENS = 120  # of a walk
_CLOSING_AFTER = 25  # tokens; from there on a walk takes what ends strings and lists when it can
_CLOSERS = '"}],:'


@dataclass(slots=True)
class Tally:
    """Counts over many structures of one source and kind."""

    structures: Counter[str] = field(default_factory=Counter)  # who enforces it: both, neither, one by name
    texts: Counter[str] = field(default_factory=Counter)  # right, over and under by library
    masks: Counter[str] = field(default_factory=Counter)  # the same, or why not
    under: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.structures += other.structures
        self.texts += other.texts
        self.masks += other.masks
        self.under += other.under


def compare(case: OracleCase, rng: random.Random) -> Tally:
    """Everything about one structure."""
    tally = Tally()
    guides = {library: guide for library in LIBRARIES if (guide := _compiled(library, case)) is not None}
    tally.structures["both" if len(guides) == 2 else next(iter(guides), "neither")] += 1
    if not guides:
        return tally
    instances = [(value, valid) for value, valid in case.instances]
    for library, guide in guides.items():
        for text in itertools.islice(_walks(guide, rng), 2):
            _judge_text(case, guides, text, tally, writer=library)
            if case.kind in ("json", "json_schema"):
                instances += [(mutated(json.loads(text), rng), None) for _ in range(3)]
    for value, valid in instances:
        _judge_instance(case, guides, value, valid, tally)
    if len(guides) == 2:
        _compare_masks(guides, rng, tally)
    return tally


def _compiled(library: str, case: OracleCase) -> Any:
    made = backend(library)
    try:
        return made.compile(made.grammar(check_guide(Guide(case.kind, case.guide, whitespace=case.whitespace))))
    except RequestError:
        return None


def _walks(guide: Any, rng: random.Random) -> Iterator[str]:
    """Whole texts that a guide lets through, chosen at random; a walk that comes to no end gives none."""
    for _ in range(4):
        matcher, taken = guide.start((END_ID,)), []
        for step in range(MAX_TOKENS):
            options = _allowed(matcher)
            if END_ID in options and (len(options) == 1 or rng.random() < 0.2 or step >= _CLOSING_AFTER):
                yield tokenizer().decode(taken)
                break
            options = [token for token in options if token != END_ID]
            if step >= _CLOSING_AFTER:
                options = [token for token in options if _text(token)[-1:] in _CLOSERS] or options
            if not options:
                break
            taken.append(rng.choice(options))
            matcher.accept(taken[-1])


def _judge_text(case: OracleCase, guides: dict[str, Any], text: str, tally: Tally, writer: str) -> None:
    try:
        problem = case.judge(text)
        text.encode()
    except Undecided:
        return
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        tally.texts[f"under {writer}"] += 1
        tally.under.append(f"{writer} writes {text!r} for {case.guide[:300]}: {problem}")
        return
    for library, guide in guides.items():
        tally.texts[f"right {library}" if library == writer or accepts(guide, text) else f"over {library}"] += 1


def _judge_instance(case: OracleCase, guides: dict[str, Any], value: Any, valid: bool | None, tally: Tally) -> None:
    try:
        plain = json.dumps(value, allow_nan=False)
        valid = case.judge(plain) is None if valid is None else valid
    except (Undecided, ValueError):  # 1e999 was read as infinity, which JSON cannot write
        return
    separators = (",", ":") if case.whitespace == "compact" else (", ", ": ")
    texts = list(itertools.islice(forms(value, separators), MAX_FORMS))
    for library, guide in guides.items():
        written = next((text for text in texts if accepts(guide, text)), None)
        verdict = "right" if (written is not None) == valid else "over" if valid else "under"
        tally.texts[f"{verdict} {library}"] += 1
        if verdict == "under":
            tally.under.append(f"{library} takes {written!r} for {case.guide[:300]}, which is invalid")


def _compare_masks(guides: dict[str, Any], rng: random.Random, tally: Tally) -> None:
    """Walk where both allow it, and name what only one of them does."""
    one, other = (guides[library].start((END_ID,)) for library in LIBRARIES)
    for _ in range(MAX_TOKENS // 2):
        first, second = set(_allowed(one)), set(_allowed(other))
        if first == second:
            tally.masks["the same"] += 1
        for library, only in zip(LIBRARIES, (first - second, second - first), strict=True):
            if only:
                tally.masks[f"{library} alone: {_reason(only)}"] += 1
        options = sorted((first & second) - {END_ID})
        if not options:
            return
        token_id = rng.choice(options)
        one.accept(token_id)
        other.accept(token_id)


def _reason(only: set[int]) -> str:
    """What the tokens that one backend allows alone have in common."""
    if END_ID in only:
        return "the end"
    texts = [_text(token_id) for token_id in only]
    if all("\\" in text for text in texts):
        return "escapes"
    if all(text.strip() != text or not text for text in texts):
        return "white space"
    if all(set(text) <= set("0123456789.eE+-") for text in texts):
        return "numbers"
    return "text"


def _allowed(matcher: Any) -> list[int]:
    bitmask = np.zeros(VOCAB_SIZE // 32, np.int32)
    matcher.fill(bitmask)
    return np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist()


def _text(token_id: int) -> str:
    return tokenizer().decode([token_id])
