"""Writes tests/data/golden anew: what a dry run makes of two deployments, kept so that every change of it is read.

python -m tests.tools.make_golden
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path, PurePosixPath

from build_engines.gpu_build import GpuBuild
from build_engines.plan.report import report
from build_engines.progress import Silent
from build_engines.spec import load_spec
from build_engines.trtllm.repository import render_trtllm

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
GOLDEN_SPECS = ("llama-3.3-70b-h100-tp4", "smollm2-135m-l40s")


def golden_files(name: str, scratch: Path) -> dict[str, str]:
    """Files of a deployment by their path in it; `scratch` is an empty directory."""
    build = GpuBuild(load_spec(ROOT / "build_engines" / "specs" / f"{name}.yaml"), scratch / "engines", Silent())
    found = build.files() | {"plan/plan.json": json.dumps(report(build.plan), indent=2) + "\n"}
    render_trtllm(build.plan, PurePosixPath("/deployments") / name, scratch / "model_repo")
    for path in sorted((scratch / "model_repo").glob("*/config.pbtxt")):
        found[path.relative_to(scratch).as_posix()] = path.read_text()
    return found


def main() -> None:
    """Replace the kept files."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in GOLDEN_SPECS:
        with tempfile.TemporaryDirectory() as scratch:
            for file, text in golden_files(name, Path(scratch)).items():
                path = GOLDEN / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)


if __name__ == "__main__":
    main()
