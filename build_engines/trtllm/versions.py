"""Which versions a deployment was made for, and one clear sentence for each that differs where it is loaded."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from build_engines.checkpoint import read_json
from build_engines.files import sha256_file, write_json
from build_engines.trtllm.tool import flag_table
from python_backend import __version__
from python_backend.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

CONTAINER = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
FILE = "versions.json"
_KEYS = ("stack", "container", "spec", "built", "tokenizer", "engine")


@dataclass(frozen=True, slots=True)
class Versions:
    """What must agree between the machine that built and the one that serves."""

    spec: str  # digest of the deployment that the files here were made from
    built: str | None = None  # the same of the one that the engine was compiled from; None until it is there
    tokenizer: str | None = None  # digest of tokenizer.json; None until it is there
    engine: str | None = None  # TensorRT-LLM that compiled the engine; None until it is there

    def write(self, directory: Path) -> None:
        """Record them beside what they are about."""
        write_json(
            directory / FILE,
            {
                "stack": __version__,
                "container": CONTAINER,
                "tensorrt_llm": flag_table()["version"],
                "spec": self.spec,
                "built": self.built,
                "tokenizer": self.tokenizer,
                "engine": self.engine,
            },
        )


def record(directory: Path) -> None:
    """Add what the build made to the record: the engine's version and the tokenizer's digest.

    Raises:
        BuildError: there is no record, or the engine's config.json is broken.
    """
    spec = _read(directory)["spec"]
    Versions(spec, spec, _tokenizer(directory), _engine(directory)).write(directory)


def rendered(directory: Path, spec: str) -> None:
    """Record that the files beside the engine were made anew, from `spec`; what is said of the engine stays."""
    built = engine = None
    tokenizer = _tokenizer(directory)
    if (directory / "engine").exists():
        with contextlib.suppress(BuildError):  # none that can be read: the engine counts as not recorded
            found = _read(directory)
            built, tokenizer, engine = found["built"], found["tokenizer"], found["engine"]
    Versions(spec, built, tokenizer, engine).write(directory)


def findings(directory: Path, runtime: str) -> list[str]:
    """What does not agree with the record when TensorRT-LLM `runtime` loads the deployment in `directory`.

    Raises:
        BuildError: there is no record, or a file is broken.
    """
    recorded = _read(directory)
    found: list[str] = []
    engine = _engine(directory)
    if engine is not None and engine != runtime:
        found.append(
            f"{directory / 'engine'}: compiled with TensorRT-LLM {engine}, this container has {runtime}: "
            f"serve it in {recorded['container']}, or compile it again here."
        )
    if engine != recorded["engine"]:
        found.append(_differs(directory / "engine", "engine version", recorded["engine"], engine))
    if recorded["built"] not in (None, recorded["spec"]):
        found.append(
            f"{directory / 'engine'}: compiled from another spec ({recorded['built'][:12]}) than model_repo was made "
            f"from ({recorded['spec'][:12]}): run {directory / 'build.sh'} again."
        )
    if recorded["stack"] != __version__:
        found.append(_differs(directory / "model_repo", "version of this package", recorded["stack"], __version__))
    tokenizer = _tokenizer(directory)
    if tokenizer != recorded["tokenizer"]:
        found.append(_differs(directory / "weights", "tokenizer", recorded["tokenizer"], tokenizer))
    return found


def _read(directory: Path) -> dict[str, Any]:
    """The record, whole."""
    found = read_json(directory / FILE)
    missing = [key for key in _KEYS if key not in found]
    if missing:
        raise BuildError(
            f"{directory / FILE}: {', '.join(missing)} missing; make the deployment again: make build-engines."
        )
    return found


def _differs(path: Path, what: str, recorded: Any, now: Any) -> str:
    return f"{path}: the {what} was {recorded} when this was built and is {now} now: build it again."


def _engine(directory: Path) -> str | None:
    path = directory / "engine" / "config.json"
    return str(read_json(path).get("version")) if path.is_file() else None


def _tokenizer(directory: Path) -> str | None:
    path = directory / "weights" / "tokenizer.json"
    return sha256_file(path) if path.is_file() else None
