"""build.sh: the steps of a pipeline as a script that can be run again after any failure. Knows nothing of flags."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from build_engines.files import digest_of
from build_engines.trtllm.tool import flag_table
from build_engines.trtllm.versions import CONTAINER

if TYPE_CHECKING:
    from build_engines.trtllm.pipeline import Stage

_HEAD = """\
#!/bin/bash
# Builds {name} for {target}. Run it inside {container}
# on the machine with the GPUs; what is up to date is not made again.
set -euo pipefail
HERE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
TRTLLM_SOURCE=${{TRTLLM_SOURCE:-$HERE/.tensorrt-llm}}      # examples of release {version}
MODELOPT_SOURCE=${{MODELOPT_SOURCE:-$HERE/.model-optimizer}}  # examples of ModelOpt

say() {{ printf '\\n== %s\\n' "$1"; }}
# A directory is made beside its place and moved there when it is whole.
make_directory() {{ # place, command…
    local place=$1; shift
    [ -e "$place" ] && {{ echo "$place is there"; return; }}
    rm -rf "$place.part"
    "$@" "$place.part"
    mv "$place.part" "$place"
}}

python3 - <<'CHECK'
import sys
try:
    import tensorrt_llm
except ImportError:
    sys.exit("TensorRT-LLM is not installed here; run this inside {container}.")
if tensorrt_llm.__version__ != "{version}":
    sys.exit(f"TensorRT-LLM here is {{tensorrt_llm.__version__}}; this script was written for {version}. "
             "Run it inside {container}.")
CHECK
"""


def build_script(
    name: str, target: str, weights: str | None, stages: list[Stage], *, draft: str | None = None, origin: str = ""
) -> str:
    """The script.

    Args:
        name: of the deployment.
        target: trtllm or llmapi.
        weights: Hugging Face id or directory, None when the checkpoint is in the deployment already.
        stages: what to run.
        draft: as `weights`, of a draft model.
        origin: digest of what the first stage starts from, so that another start makes everything anew.
    """
    version = flag_table()["version"]
    parts = [_HEAD.format(name=name, target=target, container=CONTAINER, version=version)]
    texts = [_text(stage) for stage in stages]
    if any("$TRTLLM_SOURCE" in text for text in texts):
        parts.append(_clone("TensorRT-LLM", "$TRTLLM_SOURCE", f"--branch v{version}"))
    if any("$MODELOPT_SOURCE" in text for text in texts):
        parts.append(_clone("Model-Optimizer", "$MODELOPT_SOURCE", ""))
    for place, source in (("$HERE/weights", weights), ("$HERE/draft-weights", draft)):
        if source is not None:
            parts.append(_fetch(place, source))
    stamp = origin
    for stage in stages:
        text, stamp = _stage(stage, stamp)
        parts.append(text)
    parts.append('say "recording versions"\npython3 -m build_engines record "$HERE"\n')
    return "\n".join(parts)


def _text(stage: Stage) -> str:
    return stage.command if isinstance(stage.command, str) else stage.command.shell()


def _clone(repository: str, place: str, branch: str) -> str:
    url = f"https://github.com/NVIDIA/{repository}.git"
    command = " ".join(word for word in ("git clone --quiet --depth 1", branch, url) if word)
    return f'[ -d "{place}" ] || {command} "{place}"\n'


def _fetch(place: str, source: str) -> str:
    """Weights by id are downloaded, a directory is linked."""
    quoted = shlex.quote(source)
    return (
        f'say "weights: {source}"\n'
        f'if [ -d {quoted} ]; then [ -e "{place}" ] || ln -s "$(realpath {quoted})" "{place}"\n'
        f'else make_directory "{place}" hf download {quoted} --local-dir\nfi\n'
    )


def _stage(stage: Stage, before: str) -> tuple[str, str]:
    """The text of a step, and its stamp: a digest of its command and of all steps before it."""
    text = _text(stage)
    stamp = digest_of([before, text])[:16]
    if not stage.makes:
        return f'say "{stage.title}"\n{text}\n', stamp
    place, part = f'"{stage.makes}"', f'"{stage.makes}.part"'
    return (
        f'say "{stage.title}"\n'
        f'if [ "$(cat {place}/.made-by 2>/dev/null)" != {stamp} ]; then\n'
        f"rm -rf {part}\n{text.replace(place, part)}\n"
        f"printf {stamp} > {part}/.made-by\nrm -rf {place}\nmv {part} {place}\n"
        f"else echo {place} is up to date; fi\n"
    ), stamp
