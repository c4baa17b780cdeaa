"""FP8 (E4M3) with one scale per matrix, written in the unified Hugging Face layout that TensorRT-LLM loads as is.

Knows nothing of how activation ranges are measured: they come in as numbers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from build_engines.architectures import linear_names
from build_engines.files import write_json
from build_engines.safetensors_file import TensorPlan, write_checkpoint
from python_backend import __version__
from python_backend.errors import BuildError

if TYPE_CHECKING:
    from build_engines.checkpoint import Checkpoint
    from build_engines.progress import Progress

E4M3_MAX = 448.0  # the largest finite value of float8_e4m3fn
_PATTERNS = np.arange(2**16, dtype=np.uint16)  # every value of a type of two bytes
_TEXT_SUFFIXES = (".json", ".jinja")
_NOT_COPIED = ("config.json", "model.safetensors.index.json")
# Linears that a GPU fuses into one matrix product, which has one scale for all of its rows.
_FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


def write_fp8_checkpoint(source: Checkpoint, amax: dict[str, float], directory: Path, progress: Progress) -> None:
    """Write the FP8 form of a verified checkpoint into an empty directory.

    Args:
        source: the checkpoint in bfloat16, float16 or float32.
        amax: linear name -> largest magnitude of its input; `<k_proj or v_proj>.out` -> of what it puts into the cache.
        directory: where to.
        progress: hears of the bytes written.

    Raises:
        BuildError: a range is missing or no number.
    """
    linears = linear_names(source.config)
    scales = _scales(source, linears, amax)
    plans: list[TensorPlan] = []
    for name, entry in source.tensors.items():
        linear = name.removesuffix(".weight")
        if name.endswith(".weight") and f"{linear}.weight_scale" in scales:
            plans.append(TensorPlan(name, "F8_E4M3", entry.shape, _rounder(source, name, scales)))
        else:
            plans.append(TensorPlan(name, entry.dtype, entry.shape, entry.read))
    plans += [TensorPlan(name, "F32", (), _constant(value)) for name, value in scales.items()]
    with progress.task("FP8 weights", sum(plan.size for plan in plans)) as advance:
        write_checkpoint(directory, plans, advance)
    _write_configs(source, directory)


def to_e4m3(values: NDArray[Any], scale: float) -> NDArray[Any]:
    """float8_e4m3fn nearest to `values / scale`; what lies outside the range becomes its largest value."""
    if values.dtype.itemsize == 2 and values.size > 2 * _PATTERNS.size:  # looking up is four times as fast as rounding
        with np.errstate(over="ignore", invalid="ignore"):  # of patterns that need not be among the values
            table = to_e4m3(_PATTERNS.view(values.dtype), scale)
        return np.take(table.view(np.uint8), values.view(np.uint16)).view(table.dtype)
    scaled = np.clip(values.astype(np.float32) / np.float32(scale), -E4M3_MAX, E4M3_MAX)
    return scaled.astype(ml_dtypes.float8_e4m3fn)


def scale_of(amax: float) -> float:
    """The step that puts `amax` on the largest E4M3 value; 1 where there is nothing to scale."""
    return amax / E4M3_MAX if amax > 0 else 1.0


def _scales(source: Checkpoint, linears: list[str], amax: dict[str, float]) -> dict[str, float]:
    """All scale tensors by name: weight_scale, input_scale, k_scale, v_scale."""
    weight_amax = {linear: _amax(source.tensors[f"{linear}.weight"].read()) for linear in linears}
    scales: dict[str, float] = {}
    for linear in linears:
        group = _fused_with(linear)
        scales[f"{linear}.weight_scale"] = scale_of(max(weight_amax[name] for name in group))
        scales[f"{linear}.input_scale"] = scale_of(max(_range(amax, name) for name in group))
        if linear.endswith(("k_proj", "v_proj")):
            kind = linear[-6]
            # Keys and values below the range need no stretching, and scales under 1 would cost headroom.
            scales[f"{linear}.{kind}_scale"] = max(1.0, scale_of(_range(amax, f"{linear}.out")))
    return scales


def _fused_with(linear: str) -> list[str]:
    layer, name = linear.rsplit(".", 2)[0], ".".join(linear.rsplit(".", 2)[1:])
    group = next((names for names in _FUSED if name in names), (name,))
    return [f"{layer}.{member}" for member in group]


def _range(amax: dict[str, float], name: str) -> float:
    value = amax.get(name)
    if value is None or not np.isfinite(value):
        raise BuildError(f"Calibration gave {value} as the range of {name}; it must be a finite number.")
    return float(value)


def _amax(values: NDArray[Any]) -> float:
    # float32 first: bfloat16 has no fast maximum.
    return float(np.abs(values.astype(np.float32)).max())


def _rounder(source: Checkpoint, name: str, scales: dict[str, float]) -> Any:
    scale = scales[name.removesuffix(".weight") + ".weight_scale"]
    return lambda: to_e4m3(source.tensors[name].read(), scale)


def _constant(value: float) -> Any:
    return lambda: np.array(value, np.float32)


def _write_configs(source: Checkpoint, directory: Path) -> None:
    for file in sorted(source.directory.iterdir()):
        hidden = file.name.startswith(".")
        if file.suffix in _TEXT_SUFFIXES and file.name not in _NOT_COPIED and not hidden:
            shutil.copyfile(file, directory / file.name)
    producer = {"name": "triton-llm-stack", "version": __version__}
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    write_json(directory / "hf_quant_config.json", {"producer": producer, "quantization": quantization})
    stated = {"quant_method": "modelopt", **quantization, "ignore": ["lm_head"], "producer": producer}
    write_json(directory / "config.json", source.config | {"quantization_config": stated})
