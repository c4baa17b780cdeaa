"""A structural tag as a grammar in llguidance's Lark dialect. Knows nothing of other guides."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from python_backend.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from python_backend.guided.guide import CheckedGuide, StructuralTag


def tag_lark(guide: CheckedGuide, schemas: Sequence[dict[str, Any]], special_ids: Mapping[str, int]) -> str:
    """The grammar.

    Args:
        guide: of kind structural_tag.
        schemas: of its tags, in order, with options for the backend.
        special_ids: token ids by text; where a trigger is one of them, those of `begin` and `end` stand for themselves.

    Raises:
        Unsupported: some triggers are special tokens and others are not.
    """
    special = [tag.trigger in special_ids for tag in guide.tags]
    if any(special) and not all(special):
        raise Unsupported("The triggers of a structural_tag must be all special tokens or all plain text.")
    written = "\0".join(tag.begin + tag.end for tag in guide.tags)
    atoms = {text: token_id for text, token_id in special_ids.items() if text in written} if all(special) else {}
    names = [f"tag_{index}" for index in range(len(guide.tags))]
    lines = ["%llguidance {}", "TAG_TEXT: /(.|\\n)*/", f"tag: {' | '.join(names)}"]
    if guide.separator is not None:
        more = "" if guide.stop_after_first else f"({_text(guide.separator, atoms)} tag)*"
        lines.append(f"start: tag {more}")
    else:
        lines += [f"start: {'tag | tag_end' if guide.stop_after_first else 'tag* tag_end'}", "tag_end: TAG_TEXT"]
    for name, tag, schema in zip(names, guide.tags, schemas, strict=True):
        lines += _tag(name, tag, schema, atoms, free=guide.separator is None)
    return "\n".join(lines) + "\n"


def _tag(name: str, tag: StructuralTag, schema: dict[str, Any], atoms: Mapping[str, int], *, free: bool) -> list[str]:
    rest = f"%json {json.dumps(schema)} {_text(tag.end, atoms)}"
    if not free:
        return [f"{name}: {_text(tag.begin, atoms)} {rest}"]
    behind = _text(tag.begin[len(tag.trigger) :], atoms)
    if atoms:
        return [f"{name}: TAG_TEXT {_text(tag.trigger, atoms)} {behind} {rest}"]
    # Lazy: free text ends with the first trigger in it.
    return [f"{name}_trigger[lazy]: TAG_TEXT {json.dumps(tag.trigger)}", f"{name}: {name}_trigger {behind} {rest}"]


def _text(text: str, atoms: Mapping[str, int]) -> str:
    """Text as strings, and as tokens where it holds special ones."""
    if not atoms:
        return json.dumps(text) if text else ""
    pattern = "|".join(re.escape(atom) for atom in sorted(atoms, key=len, reverse=True))
    parts = re.split(f"({pattern})", text)
    return " ".join(f"<[{atoms[part]}]>" if part in atoms else json.dumps(part) for part in parts if part)
