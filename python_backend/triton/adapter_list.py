"""`adapters`: a small model that tells which adapters may be named. Looks at the files anew for each request.

Only in repositories whose spec has a section lora.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_backend.errors import BuildError, StackError
from python_backend.triton import pb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from python_backend.lora.registry import AdapterRegistry, Registered


class TritonPythonModel:
    """What Triton loads. It reads nothing before somebody asks: hundreds of adapters take seconds to check."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Keep where the engine lies."""
        pb.log_to_triton()
        config = json.loads(args["model_config"])
        self._engine_dir = Path(pb.parameter(config, "gpt_model_path"))
        self._file = pb.parameter(config, "lora_registry")  # with engines that do not know names
        self._registry: AdapterRegistry | None = None

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request: ADAPTERS, a JSON object for each adapter."""
        try:
            registry = self._registry = self._registry or _open_registry(self._engine_dir, self._file)
        except StackError as error:
            return [pb.error_response(error) for _ in requests]
        registry.refresh()
        found = [describe(entry, by_version=bool(self._file)) for entry in registry.entries()]
        found += [{"name": name, "state": "refused", "reason": reason} for name, reason in registry.refused()]
        texts = [json.dumps(entry) for entry in found]
        return [pb.response([pb.text_tensor("ADAPTERS", texts)]) for _ in requests]


def _open_registry(engine_dir: Path, file: str) -> AdapterRegistry:
    # Imports take longer than the rest of the start.
    if file:
        from python_backend.triton.named_adapters import open_registry

        return open_registry(Path(file), engine_dir)[2]
    from python_backend.triton.settings import read_lora

    lora, checkpoint_dir = read_lora(engine_dir)
    if lora is None:
        raise BuildError("The engine was built without adapters; remove the model adapters.")
    return lora.registry(lora.base(checkpoint_dir))


def describe(entry: Registered, *, by_version: bool = False) -> dict[str, Any]:
    """What a person or a program wants to know of an adapter; `by_version`: its task id changes with its content."""
    return {
        "name": entry.name,
        "task_id": entry.version_id if by_version else entry.task_id,
        "rank": entry.rank,
        "modules": list(entry.modules),
        "bytes": entry.nbytes,
        "hash": entry.content_hash,
        "base_model": entry.base_model,
        "owner": entry.owner,
        "state": "ready",
    }
