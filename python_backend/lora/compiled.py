"""What adapters have to fit where TensorRT-LLM compiled the engine: sizes, ranks and modules of its config.json.

Knows nothing of adapters themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from python_backend.errors import BuildError
from python_backend.lora.modules import PROJECTIONS, BaseModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class CompiledEngine:
    """An engine that takes adapters."""

    base: BaseModel
    dtype: str  # of its activations, and of the adapters' values: float16, bfloat16, float32

    @classmethod
    def read(cls, engine_dir: Path, names: tuple[str, ...] = ()) -> CompiledEngine:
        """Read config.json of an engine; `names` are what adapters may call its model, none: anything.

        Raises:
            BuildError: the file is missing or not an engine's, or the engine was compiled without adapters.
        """
        path = engine_dir / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            model, build = raw["pretrained_config"], raw["build_config"]
            plugin, lora = build["plugin_config"].get("lora_plugin"), build["lora_config"]
            if not plugin or not lora["lora_target_modules"]:
                raise BuildError(f"{path}: the engine was compiled without lora_plugin. Build it again: build.sh.")
            modules = tuple(module for module in PROJECTIONS if module in lora["lora_target_modules"])
            base = BaseModel.of(_as_hugging_face(model), modules, int(lora["max_lora_rank"]), names)
            return cls(base, str(model["dtype"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BuildError(f"{path} is no readable configuration of an engine: {error!r}. Build it again.") from error


def _as_hugging_face(model: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes by the names of a checkpoint's config.json."""
    return {**model, "head_dim": model.get("head_size")}
