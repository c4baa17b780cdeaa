"""`make check`: every static check of the project, all of them even when one fails; exit code 1 when any did."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PACKAGES = ("python_backend", "build_engines", "clients", "loadtests", "scripts", "model_repo", "tests")
MAX_LINES = 300
MAX_LINES_OF_TESTS = 450  # tables of cases

CHECKS = {
    "lint": [[str(BIN / "ruff"), "check", "--quiet", "."]],
    "format": [[str(BIN / "ruff"), "format", "--check", "--quiet", "."]],
    "types": [[sys.executable, "-m", "mypy"]],
    "imports": [[str(BIN / "lint-imports"), "--no-cache"]],
    "model repository": [[sys.executable, "-m", "build_engines", "check"]],
}


def main() -> int:
    """Runs the checks; shows the output of those that fail, and one line for each."""
    failed = [name for name, commands in CHECKS.items() if not passes(name, commands)]
    problems = length_problems(load_settings())
    report("file lengths", not problems, "\n".join(problems), 0.0)
    return 1 if failed or problems else 0


def passes(name: str, commands: list[list[str]]) -> bool:
    """True when every command of the check exits with 0."""
    started = time.monotonic()
    output = ""
    ok = True
    for command in commands:
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        output += done.stdout
        ok = ok and done.returncode == 0
    report(name, ok, output, time.monotonic() - started)
    return ok


def report(name: str, ok: bool, output: str, seconds: float) -> None:
    """One line for a check that holds, its whole output for one that does not."""
    if not ok:
        sys.stdout.write(output.rstrip() + "\n")
    sys.stdout.write(f"{'ok    ' if ok else 'FAILED'} {name} ({seconds:.1f} s)\n")
    sys.stdout.flush()


def load_settings() -> dict[str, Any]:
    """The project's own section of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)["tool"]["triton-llm-stack"])


def length_problems(settings: dict[str, Any]) -> list[str]:
    """Python files over the limit without a reason, and reasons for files that need none."""
    allowed: dict[str, str] = settings["long-files"]
    long: dict[str, str] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            limit = MAX_LINES_OF_TESTS if package == "tests" else MAX_LINES
            if lines > limit:
                long[str(path.relative_to(ROOT))] = f"{lines} lines, {limit} allowed"
    problems = [f"{path}: {problem}" for path, problem in long.items() if path not in allowed]
    return problems + [f"{path}: allowed to be long, but is not" for path in allowed if path not in long]


if __name__ == "__main__":
    raise SystemExit(main())
