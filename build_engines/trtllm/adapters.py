"""Adapters by name before an engine that knows task ids alone: their files in the deployment, and who resolves them.

Knows nothing of how a name becomes tensors; that is preprocessing's.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from build_engines.files import sha256_file, write_json
from build_engines.trtllm.pbtxt import set_parameters
from build_engines.wiring import NAMED_ADAPTERS
from python_backend.errors import BuildError
from python_backend.lora.labels import LABELS_FILE
from python_backend.lora.modules import PROJECTIONS, BaseModel
from python_backend.lora.peft import CONFIG_FILE, WEIGHTS_FILE
from python_backend.lora.registry import AdapterRegistry

if TYPE_CHECKING:
    from pathlib import Path, PurePosixPath

    from build_engines.plan.engine_plan import EnginePlan
    from build_engines.spec import Spec

ADAPTERS_DIR = "adapters"  # of a deployment
_FILE = "adapters.json"
_FILES = (CONFIG_FILE, WEIGHTS_FILE, LABELS_FILE)


def name_adapters(spec: Spec, deployment_dir: PurePosixPath, directory: Path, configs: dict[str, Any]) -> None:
    """Write which adapters there are beside preprocessing in `directory`, and lead their tensors through it.

    Args:
        spec: with a section lora.
        deployment_dir: where the container finds the deployment.
        directory: the repository.
        configs: ModelConfigs by name, to be changed.
    """
    lora = spec.deployment.lora
    assert lora is not None
    section = {
        "max_rank": lora.max_rank,
        "modules": list(lora.modules),
        "host_cache_bytes": lora.host_cache_bytes,
        "adapters": {name: str(deployment_dir / ADAPTERS_DIR / name) for name in lora.named},
        "owners": {name: entry.owner for name, entry in lora.named.items() if entry.owner},
        "directory": None if lora.directory is None else str(deployment_dir / lora.directory),
        "base_models": list(lora.base_models),
    }
    write_json(directory / "preprocessing" / "1" / _FILE, section)
    place = deployment_dir / "model_repo" / "preprocessing" / "1" / _FILE
    for name in ("preprocessing", "adapters"):
        set_parameters(configs[name], lora_registry=place)
    steps = {step.model_name: step for step in configs["ensemble"].ensemble_scheduling.step}
    for wires in NAMED_ADAPTERS:
        steps[wires.model].input_map.update(wires.inputs)
        steps[wires.model].output_map.update(wires.outputs)


def prefetch_directory(spec: Spec, deployment_dir: PurePosixPath) -> str:
    """Where the container finds converted adapters to load at start; empty without."""
    lora = spec.deployment.lora
    return "" if lora is None or lora.prefetch_directory is None else str(deployment_dir / lora.prefetch_directory)


def adapter_files(spec: Spec) -> dict[str, str]:
    """Digests of the adapters' files, by their place in the deployment.

    Raises:
        BuildError: a directory that the spec names has no adapter in it.
    """
    lora, found = spec.deployment.lora, dict[str, str]()
    for name, entry in ({} if lora is None else lora.named).items():
        source = spec.path(entry.path)
        if not (source / CONFIG_FILE).is_file():
            raise spec.error(f"lora.adapters.{name}", f"{source} has no {CONFIG_FILE}; name a PEFT directory.")
        found |= {f"{name}/{file}": sha256_file(source / file) for file in _FILES if (source / file).is_file()}
    return found


def copy_adapters(plan: EnginePlan, place: Path) -> None:
    """Copy the adapters that the spec names into an empty directory.

    Raises:
        BuildError: one of them does not fit the model, or what the engine is compiled for.
    """
    spec, lora, shape = plan.spec, plan.spec.deployment.lora, plan.shape
    assert lora is not None
    sizes = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.num_layers,
    }
    modules = tuple(module for module in lora.modules if module in PROJECTIONS)
    try:
        base = BaseModel.of(sizes, modules, lora.max_rank, lora.base_models)
        AdapterRegistry(base, {name: spec.path(entry.path) for name, entry in lora.named.items()})
    except BuildError as error:
        raise spec.error("lora.adapters", str(error)) from error
    for name, entry in lora.named.items():
        (place / name).mkdir()
        for file in _FILES:
            if (spec.path(entry.path) / file).is_file():
                shutil.copyfile(spec.path(entry.path) / file, place / name / file)
