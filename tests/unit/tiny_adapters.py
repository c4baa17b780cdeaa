"""Random adapters for the tiny models, in memory and as PEFT directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from python_backend.lora.modules import BaseModel

ALL_PROJECTIONS = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


def base_of(checkpoint: Path, **options: Any) -> BaseModel:
    return BaseModel.of(json.loads((checkpoint / "config.json").read_text()), **options)


def random_tensors(
    base: BaseModel,
    *,
    rank: int = 4,
    seed: int = 0,
    projections: tuple[str, ...] = ALL_PROJECTIONS,
    ranks: dict[str, int] | None = None,
    size: float = 0.1,
) -> dict[str, np.ndarray]:
    """PEFT's names and float32 values; both matrices are random, so that the adapter changes something."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(base.num_layers):
        for projection in projections:
            size_in, size_out = base.sizes[projection]
            r = (ranks or {}).get(projection, rank)
            stem = f"base_model.model.model.layers.{layer}.{projection}"
            tensors[f"{stem}.lora_A.weight"] = rng.normal(0, size, (r, size_in)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = rng.normal(0, size, (size_out, r)).astype(np.float32)
    return tensors


def write_peft(directory: Path, tensors: dict[str, np.ndarray], dtype: Any = np.float32, **config: Any) -> Path:
    """An adapter directory as PEFT saves it; `config` changes adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    written = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False, **config}
    (directory / "adapter_config.json").write_text(json.dumps(written))
    save_file({name: values.astype(dtype) for name, values in tensors.items()}, directory / "adapter_model.safetensors")
    return directory
