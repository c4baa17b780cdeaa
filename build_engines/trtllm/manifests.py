"""Kubernetes manifests of a deployment that fits one machine.

Probes have the budgets of the plan. Knows nothing of how the deployment was built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from build_engines.trtllm.launch import DEPLOYMENTS, IMAGE, start_budget_s, world_size

if TYPE_CHECKING:
    from build_engines.plan.engine_plan import EnginePlan

_PROBE_PERIOD_S = 10
_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


class _Plain(yaml.SafeDumper):
    """Equal parts are written out each time: nobody edits anchors by hand."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        del data
        return True


def manifests(plan: EnginePlan) -> list[dict[str, Any]]:
    """The objects: a volume claim for engines/<name>, what runs, and the service in front of it.

    None when the ranks need several machines: those are started by launch.sh with a hostfile.
    """
    if world_size(plan) > plan.spec.deployment.hardware.cards_per_node:
        return []
    name = plan.spec.name.replace(".", "-").replace("_", "-")
    return [_claim(plan, name), _deployment(plan, name), _service(name)]


def as_yaml(objects: list[dict[str, Any]]) -> str:
    """The objects as one file for kubectl."""
    text: str = yaml.dump_all(objects, Dumper=_Plain, sort_keys=False)
    return text


def _claim(plan: EnginePlan, name: str) -> dict[str, Any]:
    weights = plan.memory().weights * plan.cards_per_instance
    size = -(-3 * weights // (1 << 30))  # the model as published, quantised, and compiled
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": f"{size}Gi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def _deployment(plan: EnginePlan, name: str) -> dict[str, Any]:
    labels = {"app": name}
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two of them would need twice the cards
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": _pod(plan, name)},
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": labels}, "spec": spec}


def _pod(plan: EnginePlan, name: str) -> dict[str, Any]:
    cards = world_size(plan)
    container: dict[str, Any] = {
        "name": "triton",
        "image": IMAGE,
        "command": ["bash", f"{DEPLOYMENTS}/{plan.spec.name}/launch.sh"],
        "resources": {"limits": {"nvidia.com/gpu": cards}},
        "ports": [{"name": kind, "containerPort": port} for kind, port in _PORTS.items()],
        **_probes(plan),
        "volumeMounts": [
            {"name": "deployment", "mountPath": f"{DEPLOYMENTS}/{plan.spec.name}", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [
            {"name": "deployment", "persistentVolumeClaim": {"claimName": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(2, cards)}Gi"}},
        ],
    }


def _probes(plan: EnginePlan) -> dict[str, Any]:
    ready = {"httpGet": {"path": "/v2/health/ready", "port": "http"}, "periodSeconds": _PROBE_PERIOD_S}
    live = {"httpGet": {"path": "/v2/health/live", "port": "http"}, "periodSeconds": _PROBE_PERIOD_S}
    return {
        "startupProbe": ready | {"failureThreshold": -(-start_budget_s(plan) // _PROBE_PERIOD_S)},
        "readinessProbe": ready | {"failureThreshold": 1},
        "livenessProbe": live | {"failureThreshold": 3, "timeoutSeconds": 5},
    }


def _service(name: str) -> dict[str, Any]:
    ports = [{"name": kind, "port": port, "targetPort": kind} for kind, port in _PORTS.items()]
    spec = {"selector": {"app": name}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
