"""What becomes of a guide that another engine enforces: its form is checked here, since that engine may not.

The C++ backend ignores an unknown guide type without an error, and the LLM API's model takes no guides at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_backend.errors import Unsupported
from python_backend.guided.guide import check_guide, check_kind

if TYPE_CHECKING:
    from python_backend.request import Guide

KINDS: dict[str, tuple[str, ...]] = {
    "trtllm": ("json", "json_schema", "regex", "ebnf_grammar"),
    "llmapi": (),
}


def check_for_target(guide: Guide, target: str) -> None:
    """Refuse what the target would ignore, and what no target can make sense of.

    Raises:
        InvalidRequest: the kind is unknown, or the guide is malformed.
        Unsupported: the target does not enforce this kind.
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
    check_guide(guide)
