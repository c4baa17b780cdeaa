"""The container: upstream's, with this package in it. Knows nothing of deployments."""

from __future__ import annotations

from build_engines.trtllm.versions import CONTAINER

DEPLOYMENTS = "/deployments"  # where the container finds engines/
IMAGE = "triton-llm-stack:26.07"
_PACKAGE_DIR = "/opt/triton-llm-stack"
_SSH = """\
# The ranks of several machines are started over ssh.
RUN apt-get update && apt-get install -y --no-install-recommends openssh-server openssh-client && \\
    rm -rf /var/lib/apt/lists/*
"""


def dockerfile(*, several_machines: bool) -> str:
    """The Dockerfile; `several_machines`: with what mpirun needs to reach the others."""
    return f"""\
# Triton with TensorRT-LLM and this package. Build it from the repository's root:
#   docker build -f engines/<name>/Dockerfile -t {IMAGE} .
FROM {CONTAINER}
{_SSH if several_machines else ""}\
RUN pip install --no-cache-dir 'tokenizers>=0.23' 'jinja2>=3.1.6' 'pyyaml>=6.0.2' 'pydantic>=2.11' 'ml_dtypes>=0.5.4' \\
    'tritonclient[grpc]>=2.73' 'nvidia-modelopt'
COPY python_backend {_PACKAGE_DIR}/python_backend
COPY build_engines {_PACKAGE_DIR}/build_engines
COPY model_repo {_PACKAGE_DIR}/model_repo
# Triton's Python processes do not read PYTHONPATH.
RUN python3 -c "import site; open(site.getsitepackages()[0] + '/triton-llm-stack.pth', 'w').write('{_PACKAGE_DIR}')"
"""
