"""What becomes of a guide that another engine enforces: it is checked here, since that engine does not say a word.

The C++ backend ignores an unknown guide type without an error, and the LLM API's model takes no guides at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_backend.errors import Unsupported
from python_backend.guided.ecma_patterns import PYTHON, PatternProblem, rewritten
from python_backend.guided.gpu_schema import check_schema
from python_backend.guided.guide import check_guide, check_kind
from python_backend.guided.limits import GuideLimits

if TYPE_CHECKING:
    from python_backend.request import Guide

KINDS: dict[str, tuple[str, ...]] = {
    "trtllm": ("json", "json_schema", "regex", "ebnf_grammar"),
    "llmapi": (),
}


def check_for_target(guide: Guide, target: str) -> list[str]:
    """Refuse what the target would ignore, and what no target can make sense of; warnings when that is put up with.

    Raises:
        InvalidRequest: the kind is unknown, or the guide is malformed.
        Unsupported: the target does not enforce this kind, or a part of the guide.
        LimitExceeded: the guide is too large.
    """
    check_kind(guide.kind)
    kinds = KINDS.get(target, ())
    if not kinds:
        raise Unsupported(
            f"guided_decoding_guide_type was sent; target {target} serves no structured output. Leave it out, or use "
            "target trtllm or cpu."
        )
    if guide.kind not in kinds:
        raise Unsupported(
            f"guided_decoding_guide_type {guide.kind} is not enforced by target {target}; allowed: {', '.join(kinds)}."
        )
    limits = GuideLimits()
    checked = check_guide(guide, limits)
    if checked.kind == "json_schema":
        return check_schema(checked.schema, strict=guide.strict, max_literal_chars=limits.max_literal_chars)
    if checked.kind == "regex":
        try:
            rewritten(checked.expression, PYTHON)
        except PatternProblem as problem:
            raise Unsupported(f"The regular expression is not enforced by target {target}: it has {problem}.") from None
    return []
