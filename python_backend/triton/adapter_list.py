"""`adapters`: a small model that tells which adapters may be named. Looks at the files anew for each request.

Only in repositories whose spec has a section lora.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_backend.errors import BuildError, StackError
from python_backend.lora.modules import BaseModel
from python_backend.lora.registry import AdapterRegistry
from python_backend.triton import pb
from python_backend.triton.settings import read_lora

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from python_backend.lora.registry import Registered


class TritonPythonModel:
    """What Triton loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the registry; an error's text becomes the load error."""
        pb.log_to_triton()
        try:
            lora, checkpoint_dir = read_lora(Path(pb.parameter(json.loads(args["model_config"]), "gpt_model_path")))
            if lora is None:
                raise BuildError("The engine was built without adapters; remove the model adapters.")
            config = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8"))
            base = BaseModel.of(config, lora.modules, lora.max_rank)
            self._registry = AdapterRegistry(base, lora.adapters, lora.directory)
        except StackError as error:
            raise pb.load_error(error) from None

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request: ADAPTERS, a JSON object for each adapter."""
        self._registry.refresh()
        texts = [json.dumps(describe(entry)) for entry in self._registry.entries()]
        return [pb.response([pb.text_tensor("ADAPTERS", texts)]) for _ in requests]


def describe(entry: Registered) -> dict[str, Any]:
    """What a person or a program wants to know of an adapter."""
    return {
        "name": entry.name,
        "task_id": entry.task_id,
        "rank": entry.rank,
        "modules": list(entry.modules),
        "bytes": entry.nbytes,
        "hash": entry.content_hash,
        "base_model": entry.base_model,
    }
