"""The cpu target: engine/config.json, which tells our own engine what to load and within which limits.

The one place of this package that may reach into python_backend.engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from build_engines.checkpoint import end_ids, read_json
from build_engines.files import write_json
from python_backend import __version__

if TYPE_CHECKING:
    from build_engines.spec import Spec


def build_config(spec: Spec) -> dict[str, Any]:
    """The engine's limits and switches: the fields of its EngineConfig."""
    limits = spec.deployment.limits.model_dump()
    return {"precision": spec.deployment.precision, **limits, "max_input_len": spec.max_input_len}


def write_engine(directory: Path, spec: Spec, root: Path, hashes: dict[str, str]) -> None:
    """Write config.json of the engine into an empty directory; `root` is the deployment's directory.

    Raises:
        BuildError: a limit of the spec is over what the model can do.
    """
    checkpoint = "checkpoint-fp8" if spec.deployment.precision == "fp8" else "checkpoint"
    config = read_json(root / checkpoint / "config.json")
    check_limits(spec, config)
    write_json(
        directory / "config.json",
        {
            "version": __version__,
            "target": "cpu",
            "pretrained_config": config,
            "build_config": build_config(spec),
            "checkpoint_dir": f"../{checkpoint}",
            "tokenizer_dir": "../checkpoint",
            "end_ids": end_ids(root / "checkpoint"),
            "hashes": hashes,
        },
    )


def check_limits(spec: Spec, config: dict[str, Any]) -> None:
    """Refuse limits that the model itself rules out.

    Raises:
        BuildError: max_seq_len is longer than the model's positions.
    """
    wanted, positions = spec.deployment.limits.max_seq_len, config.get("max_position_embeddings")
    if isinstance(positions, int) and wanted > positions:
        raise spec.error("limits.max_seq_len", f"is {wanted}; the model has max_position_embeddings {positions}.")
