"""Reads an adapter directory as Hugging Face PEFT writes it, and says what is wrong with one.

Knows nothing of the tensors of a request or of how adapters are kept.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from python_backend.errors import BuildError
from python_backend.lora.adapter import MAX_VALUE, Adapter, LowRank
from python_backend.lora.modules import MODULE_OF

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from python_backend.lora.modules import BaseModel

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_KEY = re.compile(r"(?:^|\.)layers\.(\d+)\.(\w+\.\w+)\.lora_([AB])(?:\.\w+)?\.weight$")
_SWITCHES = {  # what changes the arithmetic in a way that is not computed here
    "use_dora": "DoRA",
    "lora_bias": "lora_bias",
    "modules_to_save": "modules_to_save",
    "layer_replication": "layer_replication",
    "fan_in_fan_out": "fan_in_fan_out",
    "trainable_token_indices": "trainable_token_indices",
    "use_qalora": "QALoRA",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """adapter_config.json, as far as it says how the matrices are scaled."""

    path: Path
    rank: int
    alpha: float
    rslora: bool
    alpha_pattern: Mapping[re.Pattern[str], float]
    base_model: str

    @classmethod
    def read(cls, directory: Path) -> PeftConfig:
        """Read and check the file.

        Raises:
            BuildError: it is missing, no JSON, or asks for what is not served.
        """
        path = directory / CONFIG_FILE
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BuildError(f"{path}: {error.strerror}; an adapter directory holds {CONFIG_FILE}.") from error
        except ValueError as error:
            raise BuildError(f"{path}: not JSON ({error}); copy the file again.") from error
        if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
            kind = raw.get("peft_type") if isinstance(raw, dict) else type(raw).__name__
            raise BuildError(f"{path}: peft_type is {kind!r}; served: LORA.")
        for key, name in _SWITCHES.items():
            if raw.get(key):
                raise BuildError(f"{path}: {key} is {raw[key]!r}; {name} is not served. Train the adapter without it.")
        if raw.get("bias", "none") != "none":
            raise BuildError(f"{path}: bias is {raw['bias']!r}; served: none. Train the adapter without biases.")
        rank, alpha = raw.get("r"), raw.get("lora_alpha")
        if not isinstance(rank, int) or rank < 1:
            raise BuildError(f"{path}: r is {rank!r}; allowed: an integer >= 1.")
        if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise BuildError(f"{path}: lora_alpha is {alpha!r}; allowed: a finite number.")
        patterns = {re.compile(rf"(.*\.)?({key})$"): value for key, value in (raw.get("alpha_pattern") or {}).items()}
        return cls(path, rank, alpha, bool(raw.get("use_rslora")), patterns, raw.get("base_model_name_or_path") or "")

    def scale(self, name: str, rank: int) -> float:
        """Factor on B of one linear; `name` is its full name without the `lora_A` part.

        A pattern applies to the names that end in it, as PEFT matches them.
        """
        alpha = next((a for pattern, a in self.alpha_pattern.items() if pattern.match(name)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def read_peft(directory: Path, base: BaseModel, task_id: int) -> Adapter:
    """The adapter of a PEFT directory, checked against the model it has to fit.

    Raises:
        BuildError: names file, tensor and reason.
    """
    config = PeftConfig.read(directory)
    if not base.is_called(config.base_model):
        raise BuildError(
            f"{config.path}: base_model_name_or_path is {config.base_model!r}; this deployment serves "
            f"{', '.join(base.names)} (lora.base_models of the spec). Use an adapter of that model."
        )
    path = directory / WEIGHTS_FILE
    halves: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    for name, values in _read_tensors(path).items():
        layer, projection, half = _place(path, name, base)
        _check_values(path, name, values)
        halves.setdefault((layer, projection), {})[half] = values
    if not halves:
        raise BuildError(f"{path}: has no tensors; train the adapter again.")
    parts = {place: _pair(path, place, found, base, config) for place, found in sorted(halves.items())}
    return Adapter(task_id, parts)


def _place(path: Path, name: str, base: BaseModel) -> tuple[int, str, str]:
    found = _KEY.search(name)
    if found is None:
        why = "DoRA is not served" if "magnitude" in name else "served are lora_A and lora_B of layers' projections"
        raise BuildError(f"{path}: tensor {name} has no place here: {why}.")
    layer, projection, half = int(found[1]), found[2], found[3]
    module = MODULE_OF.get(projection)
    if module is None:
        raise BuildError(f"{path}: tensor {name}: {projection} is not served; served: {', '.join(MODULE_OF)}.")
    if module not in base.modules:
        raise BuildError(
            f"{path}: tensor {name}: lora module {module} not enabled for this model; enabled: "
            f"{', '.join(base.modules)}. Add it to lora.modules of the spec."
        )
    if layer >= base.num_layers:
        raise BuildError(
            f"{path}: tensor {name} is of layer {layer}; the model has {base.num_layers}. "
            "The adapter was trained for another base model."
        )
    return layer, projection, half


def _check_values(path: Path, name: str, values: np.ndarray) -> None:
    if values.ndim != 2:
        raise BuildError(f"{path}: tensor {name} has shape {list(values.shape)}; expected two dimensions.")
    wrong = int(values.size - np.isfinite(values).sum())
    if wrong:
        raise BuildError(f"{path}: tensor {name} has {wrong} values that are NaN or infinite; train the adapter again.")


def _pair(
    path: Path, place: tuple[int, str], halves: Mapping[str, np.ndarray], base: BaseModel, config: PeftConfig
) -> LowRank:
    layer, projection = place
    name = f"model.layers.{layer}.{projection}"
    missing = {"A", "B"} - halves.keys()
    if missing:
        raise BuildError(f"{path}: tensor lora_{missing.pop()} of {name} is missing; copy the file again.")
    a, b = halves["A"], halves["B"]
    size_in, size_out = base.sizes[projection]
    rank = len(a)
    if a.shape[1] != size_in or b.shape != (size_out, rank):
        raise BuildError(
            f"{path}: {name}: lora_A is {list(a.shape)} and lora_B {list(b.shape)}; the model needs [r, {size_in}] and "
            f"[{size_out}, r]. The adapter was trained for another base model"
            + (f" ({config.base_model})." if config.base_model else ".")
        )
    if not 1 <= rank <= base.max_rank:
        raise BuildError(f"{path}: {name} has rank {rank}; allowed: 1 to {base.max_rank} (lora.max_rank of the spec).")
    part = LowRank(np.ascontiguousarray(a), b * np.float32(config.scale(name, rank)))
    if part.count_unusable():
        raise BuildError(f"{path}: {name} has values over {MAX_VALUE:g} once scaled; train the adapter again.")
    return part


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor as float32."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}; an adapter directory holds {WEIGHTS_FILE}.") from error
    length = int.from_bytes(raw[:8], "little")
    try:
        header = json.loads(raw[8 : 8 + length]) if len(raw) >= 8 + length else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise BuildError(f"{path}: not a whole safetensors file ({len(raw)} bytes); copy it again.")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, raw, 8 + length) for name, entry in header.items()}


def _tensor(path: Path, name: str, entry: Mapping[str, Any], raw: bytes, start: int) -> np.ndarray:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise BuildError(f"{path}: the header's entry of tensor {name} is broken; copy the file again.") from error
    dtype = _DTYPES.get(kind)
    if dtype is None:
        raise BuildError(f"{path}: tensor {name} has data type {kind}; readable: {', '.join(_DTYPES)}.")
    if start + end > len(raw):
        raise BuildError(
            f"{path}: tensor {name} ends at byte {start + end}, the file at {len(raw)}: it is truncated; copy it again."
        )
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise BuildError(f"{path}: tensor {name} has {end - begin} bytes, which is not {kind} {shape}.")
    stored = np.frombuffer(raw[start + begin : start + end], np.uint8).view(dtype)
    values: np.ndarray = stored.reshape(shape).astype(np.float32)
    return values
