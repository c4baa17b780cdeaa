"""From a spec to engines/<name>/: which steps there are, and which of them have to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from build_engines.files import HashCache, digest_of, sha256_file, write_json
from build_engines.quality import CALIBRATION_TEXT, QUALITY_TEXT, Quality, token_batches, token_ids
from build_engines.sources.model_source import ModelSource
from build_engines.steps import Step, Workspace

if TYPE_CHECKING:
    from build_engines.progress import Progress
    from build_engines.spec import Spec

_HERE = Path(__file__).resolve().parent
# The code that decides what a step writes: when it changes, the step has to run again.
_CODE = {
    "checkpoint": ("sources/*.py",),
    "checkpoint-fp8": ("quantize.py", "quality.py"),
    "quality": ("quality.py",),
    "engine": ("targets/cpu.py",),
    "model_repo": ("repository.py", "templates.py"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a build did."""

    root: Path
    ran: tuple[str, ...]
    skipped: tuple[str, ...]


class Build:
    """One deployment: its source, its steps, and the directory they fill."""

    def __init__(self, spec: Spec, engines_dir: Path, progress: Progress) -> None:
        self._spec = spec
        self._progress = progress
        self.root = engines_dir.resolve() / spec.name
        self._workspace = Workspace(self.root)

    def pending(self) -> list[str]:
        """Names of the steps that `run` would run, without running them."""
        names: list[str] = []
        for step in self._steps():
            if names or not self._workspace.is_current(step):
                names.append(step.name)
        return names

    def run(self) -> Outcome:
        """Bring everything up to date.

        Raises:
            BuildError: the source, the spec or a result is not what it must be.
            EnvironmentFault: the machine lacks something, disk space for example.
        """
        ran: list[str] = []
        skipped: list[str] = []
        with self._workspace.locked():
            for step in self._steps():
                if self._workspace.is_current(step):
                    skipped.append(step.name)
                    continue
                self._progress.line(f"building {self.root / step.name}")
                self._workspace.run(step)
                ran.append(step.name)
        return Outcome(self.root, tuple(ran), tuple(skipped))

    def checkpoint_steps(self) -> list[Step]:
        """The steps up to the weights that an engine is made from, for any target."""
        source = ModelSource.of(self._spec)
        checkpoint = _step(
            "checkpoint", self._source_inputs(source), lambda place: self._make_checkpoint(source, place)
        )
        steps = [checkpoint]
        if self._spec.wants_fp8:
            fp8 = _step("checkpoint-fp8", self._fp8_inputs(checkpoint), self._make_fp8)
            steps += [fp8, _step("quality", self._quality_inputs(fp8), self._make_quality)]
        return steps

    def _steps(self) -> list[Step]:
        target = self._spec.deployment.target
        if target != "cpu":
            raise self._spec.error("target", f"is {target}; here it is cpu. `make build-engines` makes the others.")
        steps = self.checkpoint_steps()
        checkpoint = steps[0]
        weights = steps[1] if self._spec.deployment.precision == "fp8" else checkpoint
        steps.append(_step("engine", self._engine_inputs(weights), lambda place: self._make_engine(weights, place)))
        steps.append(_step("model_repo", self._repository_inputs(), self._make_repository))
        return steps

    def _source_inputs(self, source: ModelSource) -> dict[str, Any]:
        cache = HashCache(self.root / ".hashes.json")
        files = source.files()
        new = [file for file in files if not cache.knows(file)]
        with self._progress.task("hashing the source", sum(file.stat().st_size for file in new)) as advance:
            hashes = {file.name: cache.sha256(file, advance) for file in files}
        if new and self.root.is_dir():  # a dry run leaves nothing behind
            cache.save()
        place = {} if source.copy or source.kind == "gguf" else {"linked": str(source.path)}
        return {"kind": source.kind, "files": hashes, **place}

    def _engine_inputs(self, checkpoint: Step) -> dict[str, Any]:
        guided = self._spec.deployment.guided.model_dump(mode="json")
        inputs = {"checkpoint": checkpoint.key, "build_config": self._spec.build_config, "guided": guided}
        if self._spec.deployment.lora is not None:
            place = str(self._spec.file.path.parent.resolve())  # adapters' paths start there
            inputs["lora"] = {"place": place, **self._spec.deployment.lora.model_dump(mode="json")}
        return inputs

    def _repository_inputs(self) -> dict[str, Any]:
        from build_engines.repository import TEMPLATES, Settings, template_files

        templates = {str(file.relative_to(TEMPLATES)): sha256_file(file) for file in template_files()}
        return {"templates": templates, "settings": Settings.of(self._spec, self.root).as_data()}

    def _make_checkpoint(self, source: ModelSource, place: Path) -> None:
        from build_engines.checkpoint import Checkpoint
        from build_engines.targets.cpu import check_limits

        source.write(place, self._progress)
        checkpoint = Checkpoint(place)
        check_limits(self._spec, checkpoint.config)
        checkpoint.verify(self._progress)

    def _text(self, own: Path | None, shipped: Path) -> Path:
        return shipped if own is None else self._spec.path(own)

    def _fp8_inputs(self, checkpoint: Step) -> dict[str, Any]:
        wanted = self._spec.deployment.quantization
        text = self._text(wanted.calibration_text, CALIBRATION_TEXT)
        return {"checkpoint": checkpoint.key, "text": sha256_file(text), "tokens": wanted.calibration_tokens}

    def _quality_inputs(self, fp8: Step) -> dict[str, Any]:
        wanted = self._spec.deployment.quantization
        text = self._text(wanted.quality_text, QUALITY_TEXT)
        limits = {"tokens": wanted.quality_tokens, "max_increase": wanted.max_perplexity_increase}
        return {"checkpoint": fp8.key, "text": sha256_file(text), **limits}

    def _make_fp8(self, place: Path) -> None:
        from build_engines.checkpoint import Checkpoint
        from build_engines.quantize import write_fp8_checkpoint
        from build_engines.targets.cpu import collect_amax

        wanted, source = self._spec.deployment.quantization, self.root / "checkpoint"
        text = self._text(wanted.calibration_text, CALIBRATION_TEXT)
        batches = token_batches(text, source / "tokenizer.json", wanted.calibration_tokens)
        amax = collect_amax(source, batches, self._progress)
        write_fp8_checkpoint(Checkpoint(source), amax, place, self._progress)

    def _make_quality(self, place: Path) -> None:
        from build_engines.targets.cpu import measure_quality

        wanted, source = self._spec.deployment.quantization, self.root / "checkpoint"
        text = self._text(wanted.quality_text, QUALITY_TEXT)
        ids = token_ids(text, source / "tokenizer.json", wanted.quality_tokens)
        found = measure_quality(source, self.root / "checkpoint-fp8", ids, self._progress)
        quality = Quality(text.name, len(ids), **found, max_increase=wanted.max_perplexity_increase)
        self._progress.line(f"  {quality.sentence()}")
        quality.check()
        write_json(place / "quality.json", quality.as_data())

    def _make_engine(self, checkpoint: Step, place: Path) -> None:
        from build_engines.targets.cpu import write_engine

        hashes = {
            "spec": digest_of(self._spec.deployment.model_dump(mode="json")),
            "checkpoint": checkpoint.key,
            "tokenizer": sha256_file(self.root / "checkpoint" / "tokenizer.json"),
        }
        write_engine(place, self._spec, self.root, hashes)

    def _make_repository(self, place: Path) -> None:
        from build_engines.repository import Settings, render

        render(Settings.of(self._spec, self.root), place)


def _step(name: str, inputs: dict[str, Any], make: Callable[[Path], None]) -> Step:
    files = sorted(file for pattern in _CODE[name] for file in _HERE.glob(pattern))
    code = digest_of([sha256_file(file) for file in files])
    return Step(name, {**inputs, "code": code}, make)
