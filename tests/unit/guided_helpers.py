"""A constraint backend on a small real tokenizer, and questions to it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from python_backend.errors import RequestError
from python_backend.guided import xgrammar_library
from python_backend.guided.backends import make_backend
from python_backend.guided.guide import check_guide
from python_backend.guided.limits import GuideLimits
from python_backend.request import Guide
from tests.unit.small_tokenizers import fast_tokenizer_json, small_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from python_backend.guided.backend import CompiledGuide, GuideBackend
    from python_backend.text.tokenizer import Tokenizer

VOCAB_SIZE = 512  # more than the tokenizer has, as models do
END_ID = 2  # </s>
NEEDS_XGRAMMAR = pytest.mark.skipif(not xgrammar_library.is_installed(), reason="make setup EXTRA=xgrammar")
LIBRARIES = ["llguidance", pytest.param("xgrammar", marks=NEEDS_XGRAMMAR)]


@cache
def tokenizer() -> Tokenizer:
    return small_tokenizer("byte_level")


@cache
def backend(library: str = "llguidance") -> GuideBackend:
    made = make_backend(library, GuideLimits(), ["<|im_start|>"])
    made.load_tokenizer(fast_tokenizer_json("byte_level"), VOCAB_SIZE, (END_ID,))
    return made


def write_tokenizer_json(directory: Path) -> Path:
    path = directory / "tokenizer.json"
    path.write_text(fast_tokenizer_json("byte_level"), encoding="utf-8")
    return path


@cache
def compiled(kind: str, text: str = "", library: str = "llguidance", **options: Any) -> CompiledGuide:
    made = backend(library)
    return made.compile(made.grammar(check_guide(Guide(kind, text, **options))))


def accepts(kind: str, guide: str, text: str, **options: Any) -> bool:
    """Whether the text, token by token, satisfies the guide."""
    matcher = compiled(kind, guide, **options).start((END_ID,))
    try:
        for token_id in tokenizer().encode(text, add_special_tokens=False):
            matcher.accept(token_id)
    except RequestError:
        return False
    return matcher.is_accepting


def allowed(matcher: Any) -> set[int]:
    """Tokens that may come next."""
    bitmask = np.zeros(VOCAB_SIZE // 32, np.int32)
    matcher.fill(bitmask)
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())
