"""XGrammar's compiled part, loaded without its Python layer: that imports torch, which nothing here needs.

Knows nothing of guides.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from python_backend.errors import BuildError

_PREFIX = "xgrammar.tvm_ffi_binding"


@dataclass(frozen=True, slots=True)
class XGrammarLibrary:
    """Its classes, as its C++ code registers them."""

    version: str
    module: Any  # keeps what it registered alive
    tokenizer_info: Any
    compiler: Any
    grammar: Any
    matcher: Any


def is_installed() -> bool:
    """Whether the optional extra is there."""
    return all(importlib.util.find_spec(name) is not None for name in ("xgrammar", "tvm_ffi"))


@cache
def load_library() -> XGrammarLibrary:
    """Load it, once for each process.

    Raises:
        BuildError: it is not installed, or its binary does not load.
    """
    if not is_installed():
        raise BuildError(
            "guided.backend is xgrammar, which is not installed. Run make setup EXTRA=xgrammar, or choose llguidance."
        )
    import tvm_ffi
    from tvm_ffi.libinfo import load_lib_module

    spec = importlib.util.find_spec("xgrammar")
    assert spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    try:
        module = load_lib_module("xgrammar", "xgrammar_bindings", extra_lib_paths=folders)
        classes = [
            tvm_ffi.register_object(f"{_PREFIX}.{name}")(type(name, (tvm_ffi.Object,), {"__slots__": ()}))
            for name in ("TokenizerInfo", "GrammarCompiler", "Grammar", "GrammarMatcher", "CompiledGrammar")
        ]
    except Exception as error:  # whatever the loader finds
        raise BuildError(f"XGrammar's library does not load: {error}") from error
    return XGrammarLibrary(metadata.version("xgrammar"), module, *classes[:4])
