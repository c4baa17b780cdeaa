"""The constraint backends by name; each is imported when it is asked for, since one of them is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from python_backend.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Collection

    from python_backend.guided.backend import GuideBackend
    from python_backend.guided.limits import GuideLimits

BackendName = Literal["llguidance", "xgrammar"]


def make_backend(name: str, limits: GuideLimits, special_tokens: Collection[str] = ()) -> GuideBackend:
    """A backend without a tokenizer.

    Raises:
        BuildError: there is none of this name, or it is not installed.
    """
    if name == "llguidance":
        from python_backend.guided.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(limits, special_tokens)
    if name == "xgrammar":
        from python_backend.guided.xgrammar_backend import XGrammarBackend

        return XGrammarBackend(limits, special_tokens)
    raise BuildError(f"guided.backend is {name!r}; allowed: llguidance, xgrammar.")
