"""Commands of `python -m build_engines` that concern GPUs: cut a checkpoint, record and compare versions, migrate."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from build_engines.progress import progress_for
from python_backend.errors import BuildError, EnvironmentFault

if TYPE_CHECKING:
    from build_engines.spec import Spec


def add_commands(commands: Any) -> None:
    """Add the commands to the program's."""
    cut = commands.add_parser("trtllm-checkpoint", help="Hugging Face checkpoint, plain or FP8 -> TensorRT-LLM's")
    cut.add_argument("source", type=Path)
    cut.add_argument("directory", type=Path, help="must not exist")
    for name in ("tp", "pp", "ep"):
        cut.add_argument(f"--{name}", type=int, default=1, help="default: %(default)s")
    cut.set_defaults(run=_cut)
    record = commands.add_parser("record", help="add the engine's version and the tokenizer's hash to versions.json")
    record.add_argument("directory", type=Path, help="engines/<name>")
    record.set_defaults(run=_record)
    verify = commands.add_parser("verify", help="compare versions.json with what is installed and lies there")
    verify.add_argument("directory", type=Path, help="engines/<name>")
    verify.add_argument("--runtime", help="version of TensorRT-LLM (default: the one installed)")
    verify.set_defaults(run=_verify)
    migrate = commands.add_parser(
        "migrate", help="spec or engine config.json for trtllm -> spec for llmapi, and what is lost"
    )
    migrate.add_argument("origin", type=Path, help="a spec (.yaml), or config.json of an engine")
    migrate.add_argument("output", type=Path, help="the new spec (.yaml); the report goes beside it (.md)")
    engine = migrate.add_argument_group("with config.json of an engine")
    engine.add_argument("--weights", help="Hugging Face id or directory of the model it was made from")
    engine.add_argument("--shape", help="directory with that model's config.json, relative to the new spec")
    engine.add_argument("--card", help="what it runs on, for example h100-sxm")
    migrate.set_defaults(run=_migrate)


def build_for_gpu(spec: Spec, engines_dir: Path, *, dry_run: bool) -> int:
    """Make the deployment; the engine too where TensorRT-LLM and a GPU are, else say why not."""
    from build_engines.gpu_build import GpuBuild

    build = GpuBuild(spec, engines_dir, progress_for(sys.stderr))
    ran = build.write()
    print(f"made {', '.join(ran)} in {build.root}" if ran else f"{build.root} is up to date")
    missing = build.missing_tools()
    if dry_run or missing:
        why = "as asked" if dry_run else "; ".join(missing)
        print(f"DRY RUN ({why}): there is no engine yet. On the machine with the GPUs run {build.root / 'build.sh'}")
        return 0
    build.compile()
    print(f"built the engine in {build.root}; {build.root / 'launch.sh'} serves it")
    return 0


def _cut(arguments: argparse.Namespace) -> int:
    from build_engines.checkpoint import Checkpoint
    from build_engines.trtllm.checkpoint_writer import write_trtllm_checkpoint
    from build_engines.trtllm.mapping import Mapping

    mapping = Mapping(arguments.tp, arguments.pp, arguments.ep)
    arguments.directory.mkdir(parents=True)
    write_trtllm_checkpoint(Checkpoint(arguments.source), mapping, arguments.directory, progress_for(sys.stderr))
    print(f"wrote {mapping.world_size} ranks to {arguments.directory}")
    return 0


def _record(arguments: argparse.Namespace) -> int:
    from build_engines.trtllm.versions import record

    record(arguments.directory)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from build_engines.trtllm.versions import findings

    found = findings(arguments.directory, arguments.runtime or _installed())
    for finding in found:
        print(finding, file=sys.stderr)
    return 1 if found else 0


def _migrate(arguments: argparse.Namespace) -> int:
    import yaml

    from build_engines.checkpoint import read_json
    from build_engines.spec import load_spec
    from build_engines.trtllm.migrate import migrate_engine, migrate_spec

    if arguments.origin.suffix == ".json":
        missing = [f"--{name}" for name in ("weights", "shape", "card") if getattr(arguments, name) is None]
        if missing:
            raise BuildError(
                f"{arguments.origin}: an engine does not say where it came from; give {', '.join(missing)}."
            )
        name = arguments.origin.resolve().parent.name
        config = read_json(arguments.origin)
        found = migrate_engine(config, name, arguments.weights, arguments.shape, arguments.card)
    else:
        spec = load_spec(arguments.origin)
        found = migrate_spec(spec.deployment)
        for section, keys in (("source", ("shape", "hf", "gguf")), ("speculative", ("draft_shape",))):
            paths = found.spec.get(section, {})
            for key in (key for key in keys if key in paths):  # as the new file sees it
                paths[key] = os.path.relpath(spec.path(Path(paths[key])), arguments.output.resolve().parent)
    arguments.output.write_text(yaml.safe_dump(found.spec, sort_keys=False))
    report = arguments.output.with_suffix(".md")
    report.write_text(found.report())
    load_spec(arguments.output)  # what was written must be a spec
    print(f"wrote {arguments.output}; {len(found.losses)} things are lost or changed, see {report}")
    return 0


def _installed() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tensorrt_llm")
    except PackageNotFoundError as error:
        raise EnvironmentFault(
            "TensorRT-LLM is not installed here; give --runtime, or run this in its container."
        ) from error
