"""How Triton is started for a deployment: launch.sh, Dockerfile, compose.yaml. Knows nothing of how it was built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from build_engines.plan.report import report
from build_engines.trtllm.versions import CONTAINER

if TYPE_CHECKING:
    from build_engines.plan.engine_plan import EnginePlan

DEPLOYMENTS = "/deployments"  # where the container finds engines/
IMAGE = "triton-llm-stack:26.07"
_SERVER = "/opt/tritonserver/bin/tritonserver"
_PACKAGE_DIR = "/opt/triton-llm-stack"

DOCKERFILE = f"""\
# Triton with TensorRT-LLM and this package. Build it from the repository's root:
#   docker build -f engines/<name>/Dockerfile -t {IMAGE} .
FROM {CONTAINER}
RUN pip install --no-cache-dir 'tokenizers>=0.23' 'jinja2>=3.1.6' 'pyyaml>=6.0.2' 'pydantic>=2.11' 'ml_dtypes>=0.5.4' \\
    'tritonclient[grpc]>=2.73' 'nvidia-modelopt'
COPY python_backend {_PACKAGE_DIR}/python_backend
COPY build_engines {_PACKAGE_DIR}/build_engines
COPY model_repo {_PACKAGE_DIR}/model_repo
# Triton's Python processes do not read PYTHONPATH.
RUN python3 -c "import site; open(site.getsitepackages()[0] + '/triton-llm-stack.pth', 'w').write('{_PACKAGE_DIR}')"
"""


def world_size(plan: EnginePlan) -> int:
    """Ranks of all instances."""
    return plan.cards_per_instance * plan.spec.deployment.parallel.instances


def launch_script(plan: EnginePlan) -> str:
    """launch.sh: versions are compared first, then Triton starts as the deployment's MPI mode wants it.

    leader: a Triton per rank under mpirun; only rank 0 serves, the others load the engine alone. Instances of one rank
    share a Triton. orchestrator: one Triton, which spawns a worker per rank.
    """
    head = (
        "#!/bin/bash\n"
        f"# Serves {plan.spec.name}. Ports: HTTP_PORT, GRPC_PORT, METRICS_PORT.\n"
        "set -euo pipefail\n"
        'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\n'
        "HTTP_PORT=${HTTP_PORT:-8000} GRPC_PORT=${GRPC_PORT:-8001} METRICS_PORT=${METRICS_PORT:-8002}\n"
        'python3 -m build_engines verify "$HERE"\n'
    )
    if plan.spec.deployment.target == "llmapi":  # the LLM API spawns its ranks itself
        return head + f"exec {_triton()}\n"
    if plan.spec.deployment.parallel.mpi == "orchestrator":
        return head + f"export TRTLLM_ORCHESTRATOR=1\nexec mpirun --allow-run-as-root -n 1 {_triton()}\n"
    if plan.cards_per_instance == 1:
        return head + f"exec {_triton()}\n"
    ranks = " : \\\n    ".join(f"-n 1 {_triton(rank)}" for rank in range(plan.cards_per_instance))
    hosts = ""
    if world_size(plan) > plan.spec.deployment.hardware.cards_per_node:
        head += ': "${HOSTFILE:?names the machines, one a line with slots=N}"\n'
        hosts = '--hostfile "$HOSTFILE" -x LD_LIBRARY_PATH -x PATH '
    return head + f"exec mpirun --allow-run-as-root {hosts}\\\n    {ranks}\n"


def _triton(rank: int | None = None) -> str:
    words = [
        _SERVER,
        '--model-repository="$HERE/model_repo"',
        "--disable-auto-complete-config",
        '--http-port="$HTTP_PORT" --grpc-port="$GRPC_PORT" --metrics-port="$METRICS_PORT"',
    ]
    if rank:
        words.append("--model-control-mode=explicit --load-model=tensorrt_llm")
    if rank is not None:
        words.append(f"--backend-config=python,shm-region-prefix-name=prefix{rank}_")
    return " ".join(words)


def compose(plan: EnginePlan) -> str:
    """compose.yaml for one machine: the cards it takes, shared memory for the ranks, a health check."""
    name = plan.spec.name
    service: dict[str, Any] = {
        "image": IMAGE,
        "build": {"context": "../..", "dockerfile": f"engines/{name}/Dockerfile"},
        "command": ["bash", f"{DEPLOYMENTS}/{name}/launch.sh"],
        "volumes": [f".:{DEPLOYMENTS}/{name}:ro"],
        "ports": ["127.0.0.1:8000:8000", "127.0.0.1:8001:8001", "127.0.0.1:8002:8002"],
        "shm_size": f"{max(2, world_size(plan))}gb",
        "ulimits": {"memlock": -1, "stack": 67108864},
        "deploy": {"resources": {"reservations": {"devices": [_devices(plan)]}}},
        "healthcheck": {
            "test": ["CMD", "curl", "-fsS", "http://127.0.0.1:8000/v2/health/ready"],
            "interval": "10s",
            "timeout": "5s",
            "start_period": f"{start_budget_s(plan)}s",
        },
        "stop_grace_period": "60s",
        "restart": "unless-stopped",
    }
    text: str = yaml.safe_dump({"name": name, "services": {"triton": service}}, sort_keys=False)
    return "# docker compose up, after build.sh has run in the same image.\n" + text


def start_budget_s(plan: EnginePlan) -> int:
    """Seconds a start may take: three times what disk and cards need, and two minutes for everything else."""
    seconds: float = report(plan)["cold_start"]["seconds"]
    return 120 + 3 * round(seconds)


def _devices(plan: EnginePlan) -> dict[str, Any]:
    return {
        "driver": "nvidia",
        "count": min(world_size(plan), plan.spec.deployment.hardware.cards_per_node),
        "capabilities": ["gpu"],
    }
