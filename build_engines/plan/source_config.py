"""The config.json of the model that a spec names, found without reading weights. Knows nothing of plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from build_engines.checkpoint import read_json
from build_engines.sources.model_source import ModelSource

if TYPE_CHECKING:
    from build_engines.spec import Spec


def source_config(spec: Spec) -> tuple[dict[str, Any], str]:
    """The model's Hugging Face config, and the file it is from.

    Raises:
        BuildError: the file is no model's.
        EnvironmentFault: the package that ships the model is not installed.
    """
    shape = spec.deployment.source.shape
    if shape is not None:
        path = spec.path(shape) / "config.json"
        return read_json(path), str(path)
    source = ModelSource.of(spec)
    if source.kind == "hf":
        path = source.path / "config.json"
        return read_json(path), str(path)
    from build_engines.sources.gguf import GGUFSource  # numpy and gguf are slow to import

    return GGUFSource(source.path).config, str(source.path)


def draft_config(spec: Spec) -> tuple[dict[str, Any], str] | None:
    """As `source_config`, of a draft model; None when there is none.

    Raises:
        BuildError: the file is no model's.
    """
    draft = spec.deployment.speculative
    if draft is None or draft.draft_shape is None:
        return None
    path = spec.path(draft.draft_shape) / "config.json"
    return read_json(path), str(path)
