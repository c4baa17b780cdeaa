"""Adapters as the tensors of a request: `lora_weights` [R, L] and `lora_config` [R, 3 or 4], one row per linear.

A row of `lora_config` is [module id, layer, rank] or [module id, layer, rank, is_dora]; a row of `lora_weights` holds
A [rank, in] and B [out, rank] (scaled) behind each other, then zeros. Error texts are upstream's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from python_backend.errors import BuildError, InvalidRequest, Unsupported
from python_backend.lora.adapter import MAX_VALUE, Adapter, LowRank
from python_backend.lora.modules import FUSED, MODULE_IDS, MODULE_NAMES, MODULE_OF, PROJECTIONS

if TYPE_CHECKING:
    from python_backend.lora.modules import BaseModel


def to_rows(adapter: Adapter, dtype: np.dtype | type = np.float16) -> tuple[np.ndarray, np.ndarray]:
    """`lora_weights` [R, L] of `dtype` and `lora_config` int32 [R, 4].

    Raises:
        BuildError: a value is too large for `dtype`.
    """
    keys = [(MODULE_IDS[MODULE_OF[name]], layer, len(part.a), 0) for (layer, name), part in adapter.parts.items()]
    flat = [np.concatenate([part.a.ravel(), part.b.ravel()]) for part in adapter.parts.values()]
    weights = np.zeros((len(flat), max(map(len, flat))), dtype)
    with np.errstate(over="ignore"):  # told apart below
        for row, values in zip(weights, flat, strict=True):
            row[: len(values)] = values
    if not np.isfinite(weights.astype(np.float32)).all():
        raise BuildError(f"The adapter has values over the largest {np.dtype(dtype)}; convert it to another type.")
    return weights, np.array(keys, np.int32)


def from_rows(weights: np.ndarray, config: np.ndarray, base: BaseModel, task_id: int) -> Adapter:
    """The adapter that a request brings.

    Raises:
        InvalidRequest: sizes, ranks, modules or values do not fit.
        Unsupported: a row is DoRA.
    """
    if weights.ndim != 2 or config.ndim != 2 or len(weights) != len(config):
        raise InvalidRequest(
            f"Expected dim1 lora_weights and lora_keys to have the same size; lora_weights has shape "
            f"{list(weights.shape)}, lora_config {list(config.shape)}."
        )
    if config.shape[1] not in (3, 4):
        raise InvalidRequest(f"Expected dim2 of lora_keys to have a size in [3, 4]; it is {config.shape[1]}.")
    parts: dict[tuple[int, str], LowRank] = {}
    for row, key in zip(weights, config.tolist(), strict=True):
        for place, part in _row(row, key, base):
            if place in parts:
                raise InvalidRequest(f"lora_config names module {key[0]} of layer {key[1]} twice; send each row once.")
            parts[place] = part
    if not parts:
        raise InvalidRequest("lora_weights has no rows; send at least one.")
    return Adapter(task_id, parts)


def _row(row: np.ndarray, key: list[int], base: BaseModel) -> list[tuple[tuple[int, str], LowRank]]:
    """The linears of one row: one, or those that upstream computes as one."""
    module_id, layer, rank, *dora = key
    module = MODULE_NAMES.get(module_id, str(module_id))
    modules = FUSED.get(module, (module,))
    if not all(part in PROJECTIONS and part in base.modules for part in modules):
        raise InvalidRequest(
            f"lora module {module} not enabled for this model; enabled: "
            f"{', '.join(f'{m} ({MODULE_IDS[m]})' for m in base.modules)}."
        )
    if any(dora):
        raise Unsupported(f"lora_config marks {module} of layer {layer} as DoRA, which is not served; send LoRA only.")
    if not 0 <= layer < base.num_layers:
        raise InvalidRequest(f"lora_config names layer {layer}; allowed: 0 to {base.num_layers - 1}.")
    if not 1 <= rank <= base.max_rank:
        raise InvalidRequest(
            f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank ({base.max_rank}); allowed: 1 to "
            f"{base.max_rank}."
        )
    projections = [PROJECTIONS[part] for part in modules]
    size_in, sizes_out = base.sizes[projections[0]][0], [base.sizes[projection][1] for projection in projections]
    border, used = rank * size_in, rank * (size_in + sum(sizes_out))
    if len(row) < used:
        raise InvalidRequest(
            f"lora_weights has to few values for {module}: layer {layer} of rank {rank} needs {used}, got {len(row)}."
        )
    values = row[:used].astype(np.float32)
    a, b = values[:border].reshape(rank, size_in), values[border:].reshape(-1, rank)
    whole = LowRank(a, b)
    if whole.count_unusable():
        raise InvalidRequest(
            f"lora_weights of {module}, layer {layer}, has values that are NaN, infinite or over {MAX_VALUE:g}."
        )
    parts = np.split(b, np.cumsum(sizes_out)[:-1])
    return [((layer, projection), LowRank(a, part)) for projection, part in zip(projections, parts, strict=True)]
