"""A GGUF file becomes a Hugging Face checkpoint in bfloat16: names, layouts and metadata translated back.

Knows nothing of specs and targets; tokenizers are next door in gguf_tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from build_engines.architectures import FAMILIES, Family, tensor_shapes
from build_engines.files import write_json
from build_engines.safetensors_file import TensorPlan, write_checkpoint
from build_engines.sources.gguf_rope import rope_scaling
from build_engines.sources.gguf_tokenizer import tokenizer_files
from python_backend.errors import BuildError

if TYPE_CHECKING:
    from gguf import ReaderTensor

    from build_engines.progress import Progress

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NOT_WEIGHTS = {"rope_freqs.weight"}


class GGUFSource:
    """One GGUF file, opened and understood."""

    def __init__(self, path: Path) -> None:
        """Read metadata and the tensor table.

        Raises:
            BuildError: not a GGUF file, truncated, or an architecture we do not build.
        """
        self.path = path
        self.metadata, self._tensors = _open(path)
        self.family = self._family()
        self.config = self._config()

    def write(self, directory: Path, progress: Progress) -> None:
        """Write config, tokenizer and bfloat16 weights into an empty directory.

        Raises:
            BuildError: a tensor is missing, has another shape than the config says, or holds NaN or infinity.
        """
        plans = self._plans()
        write_json(directory / "config.json", self.config)
        for name, content in tokenizer_files(self.metadata, str(self.path)).items():
            write_json(directory / name, content)
        with progress.task("weights", sum(plan.size for plan in plans)) as advance:
            write_checkpoint(directory, plans, advance)

    def _family(self) -> Family:
        architecture = self.metadata.get("general.architecture")
        for family in FAMILIES.values():
            if family.gguf_architecture == architecture:
                if self.metadata.get(f"{architecture}.expert_count"):
                    raise BuildError(f"{self.path}: {architecture} with experts is not supported; use a dense model.")
                return family
        known = sorted({family.gguf_architecture for family in FAMILIES.values()})
        raise BuildError(f"{self.path}: architecture {architecture} is not supported; supported: {', '.join(known)}.")

    def _get(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.family.gguf_architecture}.{key}", default)
        if value is None:
            raise BuildError(f"{self.path}: metadata {self.family.gguf_architecture}.{key} is missing.")
        return value

    def _config(self) -> dict[str, Any]:
        heads, hidden = self._get("attention.head_count"), self._get("embedding_length")
        vocab = self._tensors["token_embd.weight"].shape[-1] if "token_embd.weight" in self._tensors else 0
        config: dict[str, Any] = {
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self._get("feed_forward_length"),
            "max_position_embeddings": self._get("context_length"),
            "num_attention_heads": heads,
            "num_hidden_layers": self._get("block_count"),
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": self._get("attention.key_length", hidden // heads),
            "rms_norm_eps": _shortest(self._get("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._get("rope.freq_base", 10000.0)),
            "rope_scaling": None,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "torch_dtype": "bfloat16",
            "vocab_size": int(vocab),
            "attention_bias": self.family.qkv_bias or "blk.0.attn_output.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
        }
        config["rope_scaling"] = rope_scaling(self.metadata, self.family, config, self._rope_freqs(), str(self.path))
        for key in ("bos", "eos"):
            if (token := self.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
                config[f"{key}_token_id"] = token
        return config

    def _rope_freqs(self) -> NDArray[Any] | None:
        tensor = self._tensors.get("rope_freqs.weight")
        return None if tensor is None else np.asarray(tensor.data, np.float32)

    def _plans(self) -> list[TensorPlan]:
        shapes = tensor_shapes(self.config, str(self.path))
        plans = [TensorPlan(name, "BF16", shape, self._maker(name, shape)) for name, shape in shapes.items()]
        unknown = sorted(set(self._tensors) - {_gguf_name(name) for name in shapes} - _NOT_WEIGHTS)
        if unknown:
            raise BuildError(f"{self.path}: tensor {unknown[0]} has no place in {self.family.architecture}.")
        return plans

    def _maker(self, name: str, shape: tuple[int, ...]) -> Callable[[], NDArray[Any]]:
        tensor = self._tensors.get(_gguf_name(name))
        if tensor is None:
            raise BuildError(f"{self.path}: tensor {_gguf_name(name)} is missing.")
        found = tuple(int(n) for n in reversed(tensor.shape))
        if found != shape:
            raise BuildError(
                f"{self.path}: tensor {tensor.name} has shape {list(found)}; the metadata asks for {list(shape)}."
            )
        return lambda: self._weights(name, tensor)

    def _weights(self, name: str, tensor: ReaderTensor) -> NDArray[Any]:
        from gguf.quants import dequantize  # slow to import

        try:
            values: NDArray[Any] = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise BuildError(f"{self.path}: tensor {tensor.name} is {kind}, which cannot be dequantised.") from error
        if not np.isfinite(values).all():
            raise BuildError(f"{self.path}: tensor {tensor.name} holds NaN or infinity; the file is broken.")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads and self.family.rotary_permuted_in_gguf:
            values = _undo_rotary_permutation(values, self.config[heads])
        return values.astype(ml_dtypes.bfloat16)


def _open(path: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    from gguf import GGUFReader  # slow to import

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: not a whole GGUF file ({error}); download it again.") from error
    metadata = {key: field.contents() for key, field in reader.fields.items() if field.types}
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, index, rest = stem.split(".", 3)
    return f"blk.{index}.{_IN_LAYER[rest]}.{kind}"


def _undo_rotary_permutation(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """llama.cpp rotates neighbouring rows of a head, Hugging Face its two halves: rows (pair, half) -> (half, pair)."""
    rows = values.shape[0]
    paired = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _shortest(value: float) -> float:
    """The number that was meant: 1e-5, where the file's float32 reads 9.999999747378752e-06."""
    return float(str(np.float32(value)))
