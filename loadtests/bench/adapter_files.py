"""Adapters of random values as Hugging Face PEFT saves them, seeded, and a deployment that has them.

Knows nothing of servers; the sizes are those of the checkpoint's config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file

ATTENTION_QV = ("self_attn.q_proj", "self_attn.v_proj")
ALL = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_MODULES = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Adapters a000, a001, … for one checkpoint."""

    checkpoint: Path
    directory: Path
    seed: int
    rank: int = 8
    projections: tuple[str, ...] = ALL

    def write(self, numbers: range) -> list[str]:
        """Put these adapters into the directory, each at once as a whole; returns their names."""
        self.directory.mkdir(parents=True, exist_ok=True)
        names = [f"a{number:03}" for number in numbers]
        for number, name in zip(numbers, names, strict=True):
            place = self.directory / f".{name}"  # a name that no server looks at
            place.mkdir()
            settings = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.rank, "bias": "none"}
            (place / "adapter_config.json").write_text(json.dumps(settings))
            save_file(self._tensors(number), place / "adapter_model.safetensors")
            place.rename(self.directory / name)
        return names

    def write_spec(self, like: Path, host_cache_bytes: int) -> Path:
        """A spec beside the directory: the deployment of another one with adapters, on the checkpoint that is built."""
        spec: dict[str, Any] = yaml.safe_load(like.read_text())
        lora = {"directory": str(self.directory), "host_cache_bytes": host_cache_bytes, "max_rank": self.rank}
        modules = [module for module, name in zip(_MODULES, ALL, strict=True) if name in self.projections]
        spec |= {"name": "lora-bench", "source": {"hf": str(self.checkpoint)}, "lora": {**lora, "modules": modules}}
        path = self.directory.parent / "spec.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    def host_bytes(self) -> int:
        """What one adapter takes in a server's memory."""
        return sum(4 * values.size for values in self._tensors(0).values())

    def _tensors(self, number: int) -> dict[str, np.ndarray]:
        config = json.loads((self.checkpoint / "config.json").read_text())
        hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        values = config["num_key_value_heads"] * head
        sizes = dict(zip(ALL, ((hidden, heads * head), (hidden, values), (hidden, values), (heads * head, hidden),
                               (hidden, inner), (hidden, inner), (inner, hidden)), strict=True))  # fmt: skip
        random = np.random.default_rng([self.seed, number])
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for projection in self.projections:
                size_in, size_out = sizes[projection]
                stem = f"base_model.model.model.layers.{layer}.{projection}"
                for half, shape in (("A", (self.rank, size_in)), ("B", (size_out, self.rank))):
                    drawn = random.standard_normal(shape, np.float32) * np.float32(0.02)
                    tensors[f"{stem}.lora_{half}.weight"] = drawn.astype(np.float16)
        return tensors
