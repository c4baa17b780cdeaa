"""The shape of a decoder-only model, read from a Hugging Face config.json. Knows nothing of weights or compute."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from python_backend.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and constants of one model; names are those of config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int  # tokens, 0 = full attention

    @classmethod
    def load(cls, checkpoint_dir: Path) -> ModelConfig:
        """Read config.json.

        Raises:
            BuildError: the architecture or a feature of it is not served by the CPU engine.
        """
        path = checkpoint_dir / "config.json"
        raw = json.loads(path.read_text())
        architecture = (raw.get("architectures") or ["?"])[0]
        if architecture not in ARCHITECTURES:
            raise BuildError(
                f"{path}: architecture {architecture} is not served on cpu; served: {', '.join(ARCHITECTURES)}."
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise BuildError(f"{path}: hidden_act {raw['hidden_act']} is not served on cpu; served: silu.")
        heads = raw["num_attention_heads"]
        qwen2 = architecture == "Qwen2ForCausalLM"
        windowed = raw.get("use_sliding_window", not qwen2 and architecture != "Qwen3ForCausalLM")
        return cls(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=_rope(raw).get("rope_theta", raw.get("rope_theta", 10000.0)),
            rope_scaling=_rope_scaling(path, raw),
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            qkv_bias=qwen2 or bool(raw.get("attention_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=(raw.get("sliding_window") or 0) if windowed else 0,
        )

    def kv_bytes_per_token(self, bytes_per_value: float) -> float:
        """Bytes of keys and values that one token adds: 2 * layers * kv_heads * head_dim * bytes."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * bytes_per_value

    def inverse_frequencies(self) -> np.ndarray:
        """Rotary frequencies, float32 [head_dim / 2], with rope_scaling applied.

        `llama3` follows the frequency bands published with Llama 3.1: long waves are slowed by `factor`, short ones
        are kept, those between are blended.
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        frequencies: np.ndarray = 1.0 / self.rope_theta**exponents
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies.astype(np.float32)
        factor = float(scaling["factor"])
        if scaling["rope_type"] == "linear":
            return (frequencies / factor).astype(np.float32)
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        blended: np.ndarray = frequencies * (smooth + (1 - smooth) / factor)
        return blended.astype(np.float32)


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 moved theta and scaling into rope_parameters.
    return raw.get("rope_parameters") or {}


def _rope_scaling(path: Path, raw: dict[str, Any]) -> dict[str, Any] | None:
    scaling = raw.get("rope_scaling") or _rope(raw)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise BuildError(f"{path}: rope_scaling type {kind} is not served on cpu; served: default, linear, llama3.")
    return {**scaling, "rope_type": kind}
