"""Section `lora` of an engine's config.json, and the registry that it describes. Knows nothing of requests."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from python_backend.lora.modules import BaseModel as AdaptedModel
from python_backend.lora.registry import AdapterRegistry


class LoraFile(BaseModel):
    """What adapters a deployment takes, and where they lie. Paths are absolute."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rank: int = Field(ge=1)
    modules: tuple[str, ...]
    host_cache_bytes: int = Field(ge=1)
    adapters: dict[str, Path] = {}
    owners: dict[str, str] = {}
    directory: Path | None = None
    compile_at_start: bool = False
    base_models: tuple[str, ...] = ()
    checkpoint_hash: str = ""
    prefetch_dir: Path | None = None  # lora_prefetch_dir of config.pbtxt

    def base(self, checkpoint_dir: Path) -> AdaptedModel:
        """What adapters have to fit."""
        config = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8"))
        return AdaptedModel.of(config, self.modules, self.max_rank, self.base_models, self.checkpoint_hash)

    def registry(self, base: AdaptedModel) -> AdapterRegistry:
        """The adapters, checked.

        Raises:
            BuildError: one that is named cannot be served.
        """
        return AdapterRegistry(base, self.adapters, self.directory, self.owners)
