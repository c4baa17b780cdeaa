"""What runs inside TensorRT-LLM's container imports only what its Dockerfile installs, or the image has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from build_engines.trtllm.image import dockerfile

ROOT = Path(__file__).parents[2]
# Import names of distributions; what upstream's image has anyway; what pip's own start-up brings along.
NAMES = {"pyyaml": "yaml", "tritonclient": "tritonclient", "nvidia-modelopt": "modelopt"}
OF_THE_IMAGE = {"numpy", "typing_extensions", "markupsafe", "pydantic_core", "annotated_types", "typing_inspection"}
OF_TRITONCLIENT = {"google", "grpc", "rapidjson", "_cython_3_0_8", "cython_runtime"}
_SCRIPT = """
import sys
before = set(sys.modules)
from tests.unit import fake_triton
fake_triton.install()
import python_backend.triton.bls, python_backend.triton.preprocess, python_backend.triton.postprocess
import python_backend.triton.unary
import build_engines.cli, build_engines.trtllm.cli, build_engines.trtllm.versions
import build_engines.trtllm.checkpoint_writer, build_engines.checkpoint
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""


def test_nothing_is_imported_that_the_image_does_not_have() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    installed = re.findall(r"'([a-z0-9_-]+)", dockerfile(several_machines=False))
    allowed = {NAMES.get(name, name) for name in installed} | OF_THE_IMAGE | OF_TRITONCLIENT
    ours = {"python_backend", "build_engines", "tests", "triton_python_backend_utils"}
    assert set(done.stdout.split()) - ours <= allowed
