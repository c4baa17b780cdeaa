"""RoPE scaling as GGUF files carry it, translated back to Hugging Face's `rope_scaling`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build_engines.architectures import Family
from python_backend.errors import BuildError

# What Meta ships with every Llama 3.1, 3.2 and 3.3; only `factor` differs between them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def rope_scaling(
    metadata: dict[str, Any], family: Family, config: dict[str, Any], freqs: NDArray[Any] | None, where: str
) -> dict[str, Any] | None:
    """The `rope_scaling` entry of config.json, or None for plain RoPE.

    Raises:
        BuildError: a kind of scaling that cannot be told apart or is not known; `where` names the file.
    """
    prefix = f"{family.gguf_architecture}.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    if freqs is not None:
        return _llama3(freqs, config, where)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise BuildError(f"{where}: {prefix}type is {kind}; supported: none, linear, yarn, llama3 (rope_freqs.weight).")
    scaling = {"rope_type": kind, "factor": float(metadata.get(prefix + "factor", 1.0))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata[prefix + "original_context_length"]
    return scaling


def llama3_factors(head_dim: int, theta: float, factor: float) -> NDArray[Any]:
    """What each rotary frequency is divided by under Llama 3's scaling, float32 [head_dim / 2]."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    between = 1 / ((1 - smooth) / factor + smooth)
    long, short = wavelength > _LLAMA3_ORIGINAL / _LLAMA3_LOW, wavelength < _LLAMA3_ORIGINAL / _LLAMA3_HIGH
    return np.where(long, factor, np.where(short, 1.0, between)).astype(np.float32)


def _llama3(freqs: NDArray[Any], config: dict[str, Any], where: str) -> dict[str, Any]:
    factor = float(freqs.max())
    expected = llama3_factors(config["head_dim"], config["rope_theta"], factor)
    if freqs.shape != expected.shape or not np.allclose(freqs, expected, rtol=1e-3):
        raise BuildError(f"{where}: tensor rope_freqs.weight is not Llama 3's scaling; no other kind is supported.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }
