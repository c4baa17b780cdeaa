"""How Triton is started for a deployment: launch.sh and compose.yaml. Knows nothing of how it was built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from build_engines.plan.report import report
from build_engines.trtllm.image import DEPLOYMENTS, IMAGE
from build_engines.trtllm.mpi_hosts import MPI_HOSTS
from python_backend import bls_threads

if TYPE_CHECKING:
    from build_engines.plan.engine_plan import EnginePlan

_SERVER = "/opt/tritonserver/bin/tritonserver"
_HEAD = """\
#!/bin/bash
# Serves {name}. Ports: HTTP_PORT, GRPC_PORT, METRICS_PORT.
set -euo pipefail
HERE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
HTTP_PORT=${{HTTP_PORT:-8000}} GRPC_PORT=${{GRPC_PORT:-8001}} METRICS_PORT=${{METRICS_PORT:-8002}}
python3 -m build_engines verify "$HERE"
"""


def world_size(plan: EnginePlan) -> int:
    """Ranks of all instances."""
    return plan.cards_per_instance * plan.spec.deployment.parallel.instances


def machines(plan: EnginePlan) -> int:
    """Machines that serve together; instances that do not fit one machine are refused with the spec."""
    return -(-world_size(plan) // plan.spec.deployment.hardware.cards_per_node)


def cards_per_machine(plan: EnginePlan) -> int:
    """Cards that each of them gives."""
    return min(world_size(plan), plan.spec.deployment.hardware.cards_per_node)


def launch_script(plan: EnginePlan) -> str:
    """launch.sh: versions are compared first, then Triton starts as the deployment's MPI mode wants it.

    leader: a Triton per rank under mpirun, on one machine or several; only rank 0 serves, the others load the engine
    alone. Instances of one rank share a Triton. orchestrator: one Triton, which spawns a worker per rank. The LLM API
    spawns its ranks itself on one machine, and is given them by mpirun on several.
    """
    parallel, llmapi = plan.spec.deployment.parallel, plan.spec.deployment.target == "llmapi"
    head = _HEAD.format(name=plan.spec.name)
    hosts = ""
    if machines(plan) > 1:
        head += MPI_HOSTS.format(budget_s=start_budget_s(plan), slots=cards_per_machine(plan))
        hosts = '--prefix "$prefix" --hostfile "$HOSTFILE" $exports '
    if llmapi and hosts:
        ranks = f"-n {plan.cards_per_instance} trtllm-llmapi-launch {_triton(plan)}"
    elif llmapi or (parallel.mpi == "leader" and plan.cards_per_instance == 1):
        return head + f"exec {_triton(plan)}\n"
    elif parallel.mpi == "orchestrator":
        return head + f"export TRTLLM_ORCHESTRATOR=1\nexec mpirun --allow-run-as-root -n 1 {_triton(plan)}\n"
    else:
        ranks = " : \\\n    ".join(f"-n 1 {_triton(plan, rank)}" for rank in range(plan.cards_per_instance))
    return head + f"exec mpirun --allow-run-as-root {hosts}\\\n    {ranks}\n"


def _triton(plan: EnginePlan, rank: int | None = None) -> str:
    words = [
        _SERVER,
        '--model-repository="$HERE/model_repo"',
        "--disable-auto-complete-config",
        '--http-port="$HTTP_PORT" --grpc-port="$GRPC_PORT" --metrics-port="$METRICS_PORT"',
    ]
    if not rank and plan.spec.deployment.target != "llmapi":
        words.append(bls_threads.option(plan.spec.deployment.limits.max_batch_size))
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
            "test": ["CMD", *readiness(plan)],
            "interval": "10s",
            "timeout": "6s",
            "start_period": f"{start_budget_s(plan)}s",
        },
        "stop_grace_period": "60s",
        "restart": "unless-stopped",
    }
    text: str = yaml.safe_dump({"name": name, "services": {"triton": service}}, sort_keys=False)
    return "# docker compose up, after build.sh has run in the same image.\n" + text


def readiness(plan: EnginePlan) -> list[str]:
    """The command that succeeds when a request would be served now; llmapi has no model `health` to ask."""
    curl = ["curl", "-fsS", "-m", "5"]
    if plan.spec.deployment.target == "llmapi":
        return [*curl, "http://127.0.0.1:8000/v2/health/ready"]
    return [*curl, "-d", '{"inputs": []}', "http://127.0.0.1:8000/v2/models/health/infer"]


def start_budget_s(plan: EnginePlan) -> int:
    """Seconds a start may take: three times what disk and cards need, and two minutes for everything else."""
    seconds: float = report(plan)["cold_start"]["seconds"]
    return 120 + 3 * round(seconds)


def _devices(plan: EnginePlan) -> dict[str, Any]:
    return {"driver": "nvidia", "count": cards_per_machine(plan), "capabilities": ["gpu"]}
