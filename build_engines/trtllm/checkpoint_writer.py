"""Writes a TensorRT-LLM checkpoint: config.json and one file per rank, from a Hugging Face checkpoint, plain or FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from build_engines.files import write_json
from build_engines.safetensors_file import write_file
from build_engines.trtllm.checkpoint_config import checkpoint_config, layout_of, num_experts
from build_engines.trtllm.mapping import check_divisible
from build_engines.trtllm.rank_file import RankFile
from python_backend.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

    from build_engines.checkpoint import Checkpoint
    from build_engines.progress import Progress
    from build_engines.trtllm.mapping import Mapping

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_QUANT_METHODS = ("modelopt",)


def write_trtllm_checkpoint(source: Checkpoint, mapping: Mapping, directory: Path, progress: Progress) -> None:
    """Write the checkpoint of a model for `mapping.world_size` ranks into an empty directory.

    Raises:
        BuildError: an architecture or quantisation that is not written, a size that the mapping does not divide,
            a tensor or scale that is missing.
    """
    where, config = str(source.directory / "config.json"), source.config
    layout_of(config, where)
    heads = config["num_attention_heads"]
    sizes = {key: config[key] for key in ("num_attention_heads", "intermediate_size", "num_hidden_layers")}
    check_divisible(
        mapping, sizes | {"num_key_value_heads": config.get("num_key_value_heads") or heads}, num_experts(config)
    )
    found = checkpoint_config(config, where, mapping, _dtype(source), _quantization(source, where))
    write_json(directory / "config.json", found)
    for rank in mapping.ranks():
        plans = RankFile(source, rank).plans()
        with progress.task(f"rank {rank.number}", sum(plan.size for plan in plans)) as advance:
            write_file(directory / f"rank{rank.number}.safetensors", plans, advance)


def _dtype(source: Checkpoint) -> str:
    entry = source.tensors.get("model.norm.weight")
    if entry is None or entry.dtype not in _DTYPES:
        kind = "missing" if entry is None else entry.dtype
        raise BuildError(f"{source.directory}: model.norm.weight is {kind}; it must be one of {', '.join(_DTYPES)}.")
    return _DTYPES[entry.dtype]


def _quantization(source: Checkpoint, where: str) -> dict[str, Any]:
    stated = source.config.get("quantization_config")
    if not stated:
        return {"quant_algo": None, "kv_cache_quant_algo": None}
    method, algo = stated.get("quant_method"), stated.get("quant_algo")
    if method not in _QUANT_METHODS or algo != "FP8":
        raise BuildError(
            f"{where}: quantization_config is {method} {algo}; written are plain checkpoints and FP8 ones of "
            "ModelOpt's layout with a scale per matrix. Start from the unquantised model."
        )
    return {"quant_algo": algo, "kv_cache_quant_algo": stated.get("kv_cache_quant_algo")}
