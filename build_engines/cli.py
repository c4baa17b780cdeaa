"""`python -m build_engines`: one command a run. Exit codes: 0 done, 1 wrong input, 2 usage, 3 this machine."""

from __future__ import annotations

import argparse
import errno
import sys
import time
from pathlib import Path

from build_engines.progress import progress_for
from build_engines.trtllm.cli import add_commands, build_for_gpu
from python_backend.errors import BuildError, EnvironmentFault

_ROOT = Path(__file__).resolve().parent.parent
_DEFAULT_SPEC = _ROOT / "build_engines" / "specs" / "smollm2-135m.yaml"
_REASONS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def main(argv: list[str] | None = None) -> int:
    """Run one command; what went wrong is one message on stderr, never a traceback."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except EnvironmentFault as error:
        print(error, file=sys.stderr)
        return 3
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror)
        print(f"{error.filename or 'build'}: {reason}; nothing half-written was kept.", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted; finished steps are kept, the next build goes on from there.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m build_engines", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="spec -> checkpoint -> engine -> model repository")
    build.add_argument("--spec", type=Path, default=_DEFAULT_SPEC, help="YAML file (default: %(default)s)")
    build.add_argument("--target", choices=["cpu", "trtllm", "llmapi"], help="instead of the spec's target")
    build.add_argument("--engines-dir", type=Path, default=_ROOT / "engines", help="default: %(default)s")
    build.add_argument(
        "--dry-run",
        action="store_true",
        help="cpu: only say what would be built; GPU targets: everything but the engine",
    )
    build.set_defaults(run=_build)
    check = commands.add_parser("check", help="check a model repository")
    check.add_argument("repository", type=Path, nargs="?", default=_ROOT / "model_repo", help="default: %(default)s")
    check.add_argument("--not-built", action="store_true", help="do not look for engine and tokenizer directories")
    check.set_defaults(run=_check)
    plan = commands.add_parser("plan", help="memory, KV cache, batch and card arithmetic of a spec; needs no weights")
    plan.add_argument("--spec", type=Path, default=_DEFAULT_SPEC, help="YAML file (default: %(default)s)")
    plan.add_argument("--format", choices=["table", "json"], default="table", help="json: nothing but JSON on stdout")
    plan.add_argument("--svg", type=Path, metavar="FILE", help="also write a picture of the memory by use")
    plan.set_defaults(run=_plan)
    template = commands.add_parser("template", help="write model_repo/*/config.pbtxt anew from the contract")
    template.set_defaults(run=_template)
    add_commands(commands)
    return parser


def _build(arguments: argparse.Namespace) -> int:
    from build_engines.build import Build  # each command pays for its own imports only
    from build_engines.spec import load_spec

    start = time.monotonic()
    spec = load_spec(arguments.spec, arguments.target)
    if spec.deployment.target != "cpu":
        return build_for_gpu(spec, arguments.engines_dir, dry_run=arguments.dry_run)
    build = Build(spec, arguments.engines_dir, progress_for(sys.stderr))
    if arguments.dry_run:
        pending = build.pending()
        print("\n".join(f"would build {build.root / name}" for name in pending) or f"{build.root} is up to date")
        return 0
    outcome = build.run()
    if outcome.ran:
        print(f"built {', '.join(outcome.ran)} in {outcome.root} ({time.monotonic() - start:.1f} s)")
    else:
        print(f"{outcome.root} is up to date")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from build_engines.check import check_repository

    findings = check_repository(arguments.repository, built=not arguments.not_built)
    for finding in findings:
        print(finding)
    print(f"{arguments.repository}: {len(findings)} findings" if findings else f"{arguments.repository}: in order")
    return 1 if findings else 0


def _plan(arguments: argparse.Namespace) -> int:
    from build_engines.plan.engine_plan import EnginePlan
    from build_engines.plan.picture import memory_picture
    from build_engines.plan.report import report
    from build_engines.plan.source_config import source_config
    from build_engines.spec import load_spec

    spec = load_spec(arguments.spec)
    found = report(EnginePlan.of(spec, *source_config(spec)))
    if arguments.svg:
        arguments.svg.write_text(memory_picture(found))
    if arguments.format == "json":
        import json

        print(json.dumps(found, indent=2))
        return 0
    from rich.console import Console

    from build_engines.plan.table import tables

    Console(width=None if sys.stdout.isatty() else 100).print(tables(found))
    return 0


def _template(arguments: argparse.Namespace) -> int:
    from build_engines.repository import TEMPLATES
    from build_engines.templates import GENERATED, template, to_text

    del arguments
    for name in GENERATED:
        path = TEMPLATES / name / "config.pbtxt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_text(template(name)))
        print(path)
    return 0
