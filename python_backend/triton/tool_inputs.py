"""Tools of a request on their way through the models: read in preprocessing, enforced as a guide, parsed at the end.

Only moves tensors; what they mean is decided in python_backend.text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from python_backend.errors import InvalidRequest, Unsupported
from python_backend.text.output import piece_text
from python_backend.text.tool_calls import piece_calls
from python_backend.text.tool_formats import FORMATS, tools_guide
from python_backend.text.tool_requests import parse_tools
from python_backend.triton import pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from python_backend.text.output import Piece
    from python_backend.text.tokenizer import Tokenizer
    from python_backend.text.tool_formats import ToolFormat
    from python_backend.text.tool_requests import ToolRequest


def read_tools(tensors: pb.Tensors, target: str) -> list[ToolRequest | None]:
    """The tools of each batch element; empty where the request has none.

    Raises:
        InvalidRequest: they are malformed, or come without messages or together with a guide.
        Unsupported: this target cannot enforce them.
    """
    rows = pb.read_texts(tensors, "TOOLS")
    if rows is None:
        for name in ("TOOL_CHOICE", "PARALLEL_TOOL_CALLS"):
            if name in tensors:
                raise InvalidRequest(f"{name.lower()} was sent without tools; send both.")
        return []
    if any(len(row) != 1 for row in rows):
        raise InvalidRequest("TOOLS needs shape [B, 1]: one JSON list for each batch element.")
    choices = pb.read_texts(tensors, "TOOL_CHOICE") or [[""]] * len(rows)
    parallel = np.broadcast_to(np.reshape(tensors.get("PARALLEL_TOOL_CALLS", True), -1), len(rows)).tolist()
    if len(choices) != len(rows):
        raise InvalidRequest(f"tool_choice has {len(choices)} rows for {len(rows)} lists of tools; send one row each.")
    asked = zip(rows, choices, parallel, strict=True)
    found = [parse_tools(row[0], "".join(choice), bool(many)) for row, choice, many in asked]
    if "MESSAGES" not in tensors:
        raise InvalidRequest("tools need messages: they are shown to the model by its chat template.")
    if any(found) and target != "cpu":
        raise Unsupported(f"Target {target} cannot enforce tool calls. Leave tools out, or use target cpu.")
    if any(found) and "GUIDED_DECODING_GUIDE_TYPE" in tensors:
        raise InvalidRequest("tools and guided_decoding_guide_type exclude each other: tools are a structure, too.")
    return found


def tool_outputs(tools: Sequence[ToolRequest | None], tool_format: ToolFormat) -> dict[str, npt.NDArray[Any]]:
    """The guide that makes the engine write calls of these tools, and what reads them afterwards."""
    if not any(tools):
        return {}
    guides = ["" if request is None else tools_guide(request, tool_format) for request in tools]
    return {"TOOL_GUIDE": _texts(guides), "TOOL_FORMAT": _texts([tool_format.name if g else "" for g in guides])}


def texts_and_calls(
    tokenizer: Tokenizer, pieces: Sequence[Piece], format_name: str, skip_special: bool
) -> tuple[list[str], list[str]]:
    """Text and tool calls of each sequence of a response; no calls at all for a request without tools."""
    if not format_name:
        return [piece_text(tokenizer, piece, skip_special) for piece in pieces], []
    if format_name not in FORMATS:
        raise InvalidRequest(f"TOOL_FORMAT is {format_name!r}; allowed: {', '.join(FORMATS)}.")
    found = [piece_calls(tokenizer, piece, FORMATS[format_name], skip_special) for piece in pieces]
    return [text for text, _ in found], [calls for _, calls in found]


def _texts(texts: Sequence[str]) -> npt.NDArray[Any]:
    """BYTES [B, 1]."""
    array = np.empty((len(texts), 1), dtype=object)
    array[:, 0] = [text.encode() for text in texts]
    return array
