"""Adapters by name where the engine knows task ids alone, as TensorRT-LLM's does: a name becomes its three tensors.

A request by name always carries the adapter's rows: no step of an ensemble learns that the engine's cache dropped it.
Knows nothing of prompts.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from python_backend.errors import BuildError, InvalidRequest, Overloaded
from python_backend.lora.choice import refuse_name_with_tensors
from python_backend.lora.compiled import CompiledEngine
from python_backend.lora.rows import to_rows
from python_backend.triton import pb
from python_backend.triton.bfloat16 import BFLOAT16
from python_backend.triton.lora_file import LoraFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    from python_backend.lora.registry import AdapterRegistry, Registered

_OWN = {"LORA_TASK_ID": "OUT_LORA_TASK_ID", "LORA_WEIGHTS": "OUT_LORA_WEIGHTS", "LORA_CONFIG": "OUT_LORA_CONFIG"}
_TYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "float32": np.dtype(np.float32),
}
_WIRE_TYPES = {"TYPE_FP16": "float16", "TYPE_BF16": "bfloat16", "TYPE_FP32": "float32"}


@dataclass(frozen=True, slots=True)
class _Rows:
    weights: npt.NDArray[Any]  # [R, L] in the engine's type
    config: npt.NDArray[np.int32]  # [R, 4]


def open_registry(path: Path, engine_dir: Path) -> tuple[LoraFile, CompiledEngine, AdapterRegistry]:
    """The adapters of a deployment, those that it names checked against its engine.

    Raises:
        BuildError: a file cannot be read, or an adapter that is named does not fit.
    """
    try:
        settings = LoraFile.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise BuildError(f"{path}: no list of adapters ({error}). Build the repository again.") from error
    engine = CompiledEngine.read(engine_dir, settings.base_models)
    return settings, engine, settings.registry(engine.base)


class NamedAdapters:
    """Finds adapters and keeps their rows. Used by one thread."""

    def __init__(self, path: Path, engine_dir: Path, model_config: Mapping[str, Any]) -> None:
        """Check every adapter that the deployment names, and that weights have the engine's type.

        Raises:
            BuildError: one of them cannot be served, or the types differ.
        """
        settings, engine, self._registry = open_registry(path, engine_dir)
        declared = {entry.get("name"): entry.get("data_type") for entry in model_config.get("output", [])}
        wire = str(declared.get("OUT_LORA_WEIGHTS"))
        if _WIRE_TYPES.get(wire) != engine.dtype:
            raise BuildError(
                f"Output OUT_LORA_WEIGHTS is {wire}; adapters have the engine's type, which is {engine.dtype}. "
                "Build the repository again."
            )
        self._dtype = _TYPES[engine.dtype]
        self._limit_bytes = settings.host_cache_bytes
        self._kept: OrderedDict[int, _Rows] = OrderedDict()
        self._kept_bytes = 0

    def outputs(self, tensors: pb.Tensors, batch: int) -> dict[str, npt.NDArray[Any]]:
        """What to send to the engine: the rows of a name or of a registered id, or what the client brought itself.

        Raises:
            NotFound: nobody registered the name; lists close names.
            InvalidRequest: an adapter's files are no longer good, or the tensors contradict each other.
            Overloaded: the files are being written.
        """
        own = {output: tensors[name] for name, output in _OWN.items() if name in tensors}
        names = {name for row in pb.read_texts(tensors, "LORA_NAME") or [] for name in row}
        if any(names):
            if own:
                raise refuse_name_with_tensors()
            if len(names) > 1:
                raise InvalidRequest(
                    f"lora_name differs between the prompts of a request ({', '.join(map(repr, sorted(names)))}); with "
                    "this backend one adapter serves all of them. Send a request for each."
                )
            return self._tensors(self._registry.find(names.pop()), batch)
        known = self._registered(own.get("OUT_LORA_TASK_ID"))
        return own if known is None else self._tensors(self._registry.find(known.name), batch)

    def _registered(self, task_ids: npt.NDArray[Any] | None) -> Registered | None:
        """The adapter that an id is of: nobody but the deployment says what lies under it."""
        if task_ids is None:
            return None
        asked = set(task_ids.reshape(-1).tolist())
        return next((entry for entry in self._registry.entries() if {entry.version_id} == asked), None)

    def _tensors(self, entry: Registered, batch: int) -> dict[str, npt.NDArray[Any]]:
        rows = self._rows(entry)
        return {
            "OUT_LORA_TASK_ID": np.full((batch, 1), entry.version_id, np.uint64),
            "OUT_LORA_WEIGHTS": rows.weights[None] if batch == 1 else np.repeat(rows.weights[None], batch, axis=0),
            "OUT_LORA_CONFIG": rows.config[None] if batch == 1 else np.repeat(rows.config[None], batch, axis=0),
        }

    def _rows(self, entry: Registered) -> _Rows:
        kept = self._kept.get(entry.version_id)
        if kept is not None:
            self._kept.move_to_end(entry.version_id)
            return kept
        adapter = self._registry.load(entry)
        if f"{adapter.version:016x}" != entry.content_hash:  # the engine would keep it under the id of the old
            raise Overloaded(f"lora_name {entry.name!r} changed while it was read, please try again later")
        try:
            rows = _Rows(*to_rows(adapter, self._dtype))
        except BuildError as error:
            raise InvalidRequest(f"lora_name {entry.name!r} cannot be served: {error}") from error
        if rows.weights.nbytes <= self._limit_bytes:
            self._kept[entry.version_id] = rows
            self._kept_bytes += rows.weights.nbytes
        while self._kept_bytes > self._limit_bytes:
            self._kept_bytes -= self._kept.popitem(last=False)[1].weights.nbytes
        return rows
