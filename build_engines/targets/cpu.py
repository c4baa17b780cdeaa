"""The cpu target: engine/config.json, which tells our own engine what to load and within which limits.

The one place of this package that may reach into python_backend.engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from build_engines.checkpoint import end_ids, read_json
from build_engines.files import write_json
from python_backend import __version__
from python_backend.errors import BuildError
from python_backend.lora.modules import ALL_MODULES, BaseModel
from python_backend.lora.registry import AdapterRegistry

if TYPE_CHECKING:
    from build_engines.progress import Advance, Progress
    from build_engines.spec import Spec

Mode = Literal["bf16", "fp8_weights", "fp8"]


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
            "build_config": spec.build_config,
            "guided": spec.deployment.guided.model_dump(mode="json", exclude={"backend"}),
            **lora_section(spec, config, hashes["checkpoint"]),
            "checkpoint_dir": f"../{checkpoint}",
            "tokenizer_dir": "../checkpoint",
            "end_ids": end_ids(root / "checkpoint"),
            "hashes": hashes,
        },
    )


def lora_section(spec: Spec, config: dict[str, Any], checkpoint_hash: str) -> dict[str, Any]:
    """Section `lora` with absolute paths, every named adapter checked against the model; empty without adapters.

    Raises:
        BuildError: a module is not served on a CPU, or an adapter does not fit.
    """
    lora = spec.deployment.lora
    if lora is None:
        return {}
    unserved = [module for module in lora.modules if module not in ALL_MODULES]
    if unserved:
        raise spec.error("lora.modules", f"has {unserved[0]}; served on cpu: {', '.join(ALL_MODULES)}.")
    adapters = {name: spec.path(entry.path) for name, entry in lora.named.items()}
    directory = None if lora.directory is None else spec.path(lora.directory)
    if directory is not None and not directory.is_dir():
        raise spec.error("lora.directory", f"no directory {directory}.")
    try:
        base = BaseModel.of(config, lora.modules, lora.max_rank, lora.base_models, checkpoint_hash)
        AdapterRegistry(base, adapters)
    except BuildError as error:
        raise spec.error("lora.adapters", str(error)) from error
    section = {
        "max_rank": lora.max_rank,
        "modules": list(lora.modules),
        "host_cache_bytes": lora.host_cache_bytes,
        "adapters": {name: str(path) for name, path in adapters.items()},
        "owners": {name: entry.owner for name, entry in lora.named.items() if entry.owner},
        "directory": None if directory is None else str(directory),
        "compile_at_start": lora.compile_at_start,
        "base_models": list(lora.base_models),
        "checkpoint_hash": checkpoint_hash,
    }
    return {"lora": section}


def collect_amax(checkpoint_dir: Path, token_batches: list[list[int]], progress: Progress) -> dict[str, float]:
    """Largest magnitude of every linear's input, and of the keys and values (`<linear>.out`), over the texts."""
    with progress.task("calibrating", len(token_batches), "texts") as advance:
        return dict(_calibration().collect_amax(checkpoint_dir, token_batches, lambda _done: advance(1)))


def measure_quality(checkpoint: Path, fp8: Path, token_ids: list[int], progress: Progress) -> dict[Mode, float]:
    """Perplexity of the text with bf16 weights, with FP8 weights, and with FP8 weights and activations."""
    found: dict[Mode, float] = {}
    runs: tuple[tuple[Mode, Path], ...] = (("bf16", checkpoint), ("fp8_weights", fp8), ("fp8", fp8))
    for mode, directory in runs:
        with progress.task(f"perplexity {mode}", len(token_ids), "tokens") as advance:
            # The engine reports the tokens done so far, a bar wants what was added.
            steps = _Steps(advance)
            found[mode] = float(_calibration().perplexity(directory, token_ids, mode, progress=steps))
    return found


class _Steps:
    """Turns totals into additions."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._done = 0

    def __call__(self, done: int) -> None:
        self._advance(done - self._done)
        self._done = done


def _calibration() -> Any:
    from python_backend.engine import calibration  # loads OpenVINO

    return calibration


def check_limits(spec: Spec, config: dict[str, Any]) -> None:
    """Refuse limits that the model itself rules out.

    Raises:
        BuildError: max_seq_len is longer than the model's positions.
    """
    wanted, positions = spec.deployment.limits.max_seq_len, config.get("max_position_embeddings")
    if isinstance(positions, int) and wanted > positions:
        raise spec.error("limits.max_seq_len", f"is {wanted}; the model has max_position_embeddings {positions}.")
