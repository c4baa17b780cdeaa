"""`make lock`: writes requirements/*.txt, full locks with hashes, from pyproject.toml; needs uv on PATH."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = {
    "serve": [],
    "loadtest": ["loadtest"],
    "dev": ["dev", "loadtest", "xgrammar", "tracing"],
    "bench": ["bench"],
    "xgrammar": ["xgrammar"],
    "tracing": ["tracing"],
}
COMMON = ["--universal", "--generate-hashes", "--no-annotate", "--quiet", "--custom-compile-command", "make lock"]
INDEX = ["--default-index", "https://pypi.org/simple"]  # the locks must not depend on this machine's mirrors


def main() -> int:
    """Compiles every lock; the others agree with serve.txt, which comes first. `--upgrade` takes newer releases."""
    uv = shutil.which("uv")
    if uv is None:
        sys.stderr.write("error: uv is not on PATH: pip install uv\n")
        return 3
    upgrade = [argument for argument in sys.argv[1:] if argument == "--upgrade"]
    for name, extras in EXTRAS.items():
        options = [part for extra in extras for part in ("--extra", extra)]
        if name != "serve":
            options += ["-c", "requirements/serve.txt"]
        compile_lock(uv, ["pyproject.toml", "--python-version", "3.10", *options, *upgrade], name)
    compile_lock(uv, ["requirements/numpy-build.in", "--python-version", "3.13", *upgrade], "numpy-build")
    return 0


def compile_lock(uv: str, arguments: list[str], name: str) -> None:
    """Runs uv pip compile into requirements/<name>.txt."""
    output = f"requirements/{name}.txt"
    sys.stderr.write(f"{output}\n")
    subprocess.run([uv, "pip", "compile", *arguments, *COMMON, *INDEX, "-o", output], cwd=ROOT, check=True)


if __name__ == "__main__":
    raise SystemExit(main())
