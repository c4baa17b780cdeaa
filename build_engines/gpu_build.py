"""A deployment for GPUs: what can be made here is made, what needs the GPUs is written down as a script.

Knows nothing of formats and flags; those are in build_engines.trtllm.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from build_engines.build import Build
from build_engines.files import digest_of, sha256_file, write_atomic, write_json
from build_engines.plan.engine_plan import EnginePlan
from build_engines.plan.picture import memory_picture
from build_engines.plan.report import report
from build_engines.plan.source_config import source_config
from build_engines.plan.warnings import warnings
from build_engines.steps import STAMP, Step, Workspace
from build_engines.trtllm.adapters import ADAPTERS_DIR, adapter_files, copy_adapters
from build_engines.trtllm.image import DEPLOYMENTS, dockerfile
from build_engines.trtllm.launch import compose, launch_script, machines
from build_engines.trtllm.manifests import as_yaml, manifests
from build_engines.trtllm.mapping import Mapping
from build_engines.trtllm.multi_node import leader_worker_set, stateful_set
from build_engines.trtllm.pipeline import Stage, stages
from build_engines.trtllm.script import build_script
from build_engines.trtllm.versions import rendered
from python_backend.errors import BuildError, EnvironmentFault

if TYPE_CHECKING:
    from build_engines.progress import Progress
    from build_engines.spec import Spec

_HERE = Path(__file__).resolve().parent
_CODE = ("trtllm/*.py", "trtllm/*.json", "plan/*.py", "repository.py", "wiring.py", "templates.py", "quantize.py")
_FILES_OF_SOME = {"compose.yaml", "kubernetes-statefulset.yaml"}  # that not every deployment has


class GpuBuild:
    """engines/<name>/ of a deployment whose target is trtllm or llmapi."""

    def __init__(self, spec: Spec, engines_dir: Path, progress: Progress) -> None:
        self._spec = spec
        self._engines_dir = engines_dir
        self._progress = progress
        self.root = engines_dir.resolve() / spec.name
        self.plan = EnginePlan.of(spec, *source_config(spec))
        self._container_dir = PurePosixPath(DEPLOYMENTS) / spec.name

    def write(self) -> list[str]:
        """Make everything that needs no GPU; returns the names of the directories that were made anew.

        Raises:
            BuildError: the deployment does not fit its cards, a flag does not exist, the source is broken.
            EnvironmentFault: the package that ships the model is not installed.
        """
        self.plan.require_fit()
        for text in warnings(self.plan):
            self._progress.line(f"warning: {text}.")
        workspace = Workspace(self.root)
        ran: list[str] = []
        with workspace.locked():
            for step in self._steps():
                if not workspace.is_current(step):
                    self._progress.line(f"building {self.root / step.name}")
                    workspace.run(step)
                    ran.append(step.name)
            self._write_files()
        return ran

    def missing_tools(self) -> list[str]:
        """What this machine lacks to go on to the engine."""
        found = [] if importlib.util.find_spec("tensorrt_llm") else ["TensorRT-LLM is not installed"]
        return found + ([] if shutil.which("nvidia-smi") else ["there is no NVIDIA GPU"])

    def compile(self) -> None:
        """Run build.sh.

        Raises:
            EnvironmentFault: it failed; what it said stands above.
        """
        done = subprocess.run(["bash", str(self.root / "build.sh")])
        if done.returncode:
            raise EnvironmentFault(f"{self.root / 'build.sh'} failed with exit code {done.returncode}; see above.")

    def _steps(self) -> list[Step]:
        inputs = {"spec": self._digest(), "code": _code_digest()}
        found = [Step("plan", inputs, self._make_plan)]
        if self._has_weights():
            checkpoints = Build(self._spec, self._engines_dir, self._progress).checkpoint_steps()
            found += checkpoints
            source = checkpoints[1] if self._spec.wants_fp8 else checkpoints[0]
            if self._spec.deployment.target == "trtllm":
                cut = {"source": source.key, "parallel": self._spec.deployment.parallel.model_dump()}
                found.append(Step("trtllm-checkpoint", inputs | cut, lambda place: self._make_ranks(source, place)))
        if self._spec.deployment.target == "trtllm" and self._adapters:
            files = inputs | {"files": adapter_files(self._spec)}
            found.append(Step(ADAPTERS_DIR, files, lambda place: copy_adapters(self.plan, place)))
        found.append(Step("model_repo", inputs, self._make_repository))
        return found

    @property
    def _adapters(self) -> bool:
        lora = self._spec.deployment.lora
        return lora is not None and bool(lora.adapters)

    def _has_weights(self) -> bool:
        return self._spec.deployment.source.weights is None

    def _digest(self) -> str:
        return digest_of(self._spec.deployment.model_dump(mode="json"))

    def _make_plan(self, place: Path) -> None:
        found = report(self.plan)
        write_json(place / "plan.json", found)
        (place / "memory.svg").write_text(memory_picture(found))

    def _make_ranks(self, source: Step, place: Path) -> None:
        from build_engines.checkpoint import Checkpoint
        from build_engines.trtllm.checkpoint_writer import write_trtllm_checkpoint

        parallel = self._spec.deployment.parallel
        mapping = Mapping(parallel.tp, parallel.pp, parallel.ep)
        write_trtllm_checkpoint(Checkpoint(self.root / source.name), mapping, place, self._progress)

    def _make_repository(self, place: Path) -> None:
        from build_engines.check import check_repository

        if self._spec.deployment.target == "llmapi":
            from build_engines.trtllm.llmapi import render_llmapi

            render_llmapi(self.plan, self._container_dir, place)
        else:
            from build_engines.trtllm.repository import render_trtllm

            render_trtllm(self.plan, self._container_dir, place)
        findings = check_repository(place, built=False)
        if findings:
            raise BuildError("\n".join(str(finding) for finding in findings))

    def _stages(self) -> list[Stage]:
        if self._spec.deployment.target == "llmapi":
            from build_engines.trtllm.llmapi import llmapi_stages

            return llmapi_stages(self.plan)
        return stages(self.plan)

    def _origin(self) -> str:
        """What the script starts from: the weights by name, or the checkpoint that was made here."""
        stamp = self.root / "trtllm-checkpoint" / STAMP
        return sha256_file(stamp) if stamp.is_file() else str(self._spec.deployment.source.weights)

    def files(self) -> dict[str, str]:
        """The files beside the directories: scripts, container, manifests.

        Raises:
            BuildError: a flag or a combination that the tools do not have.
        """
        deployment, draft = self._spec.deployment, self._spec.deployment.speculative
        found = {
            "build.sh": build_script(
                self._spec.name,
                deployment.target,
                deployment.source.weights,
                self._stages(),
                draft=draft.draft_model if draft and draft.mode == "draft_tokens_external" else None,
                origin=self._origin(),
            ),
            "launch.sh": launch_script(self.plan),
            "Dockerfile": dockerfile(several_machines=machines(self.plan) > 1),
        }
        if machines(self.plan) == 1:
            return found | {"compose.yaml": compose(self.plan), "kubernetes.yaml": as_yaml(manifests(self.plan))}
        return found | {
            "kubernetes.yaml": as_yaml(leader_worker_set(self.plan)),
            "kubernetes-statefulset.yaml": as_yaml(stateful_set(self.plan)),
        }

    def _write_files(self) -> None:
        files = self.files()
        for name in _FILES_OF_SOME - files.keys():  # of an earlier spec
            (self.root / name).unlink(missing_ok=True)
        for name, text in files.items():
            write_atomic(self.root / name, text.encode())
            if name.endswith(".sh"):
                (self.root / name).chmod(0o755)
        if self._has_weights() and not (self.root / "weights").exists():
            (self.root / "weights").symlink_to("checkpoint")  # where the repository looks for the tokenizer
        rendered(self.root, self._digest())  # build.sh records what it made


def _code_digest() -> Any:
    return digest_of([sha256_file(file) for pattern in _CODE for file in sorted(_HERE.glob(pattern))])
