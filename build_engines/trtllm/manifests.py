"""Kubernetes manifests of a deployment that fits one machine, and the parts that several machines need as well.

Probes have the budgets of the plan. Knows nothing of how the deployment was built.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from build_engines.files import digest_of
from build_engines.trtllm.image import DEPLOYMENTS, IMAGE
from build_engines.trtllm.launch import cards_per_machine, readiness, start_budget_s

if TYPE_CHECKING:
    from build_engines.plan.engine_plan import EnginePlan

Object = dict[str, Any]
_PROBE_PERIOD_S = 10
_MAX_NAME = 50  # of the 63 allowed: pods of a set get endings
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


class _Plain(yaml.SafeDumper):
    """Equal parts are written out each time: nobody edits anchors by hand."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        del data
        return True


def object_name(plan: EnginePlan) -> str:
    """The deployment's name as Kubernetes allows it for a service; a long one ends in a digest."""
    name = re.sub(r"[^a-z0-9]", "-", plan.spec.name).strip("-")
    if not name[0].isalpha():
        name = f"llm-{name}"
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 9]}-{digest_of(name)[:8]}"


def manifests(plan: EnginePlan) -> list[Object]:
    """The objects for one machine: a volume claim for engines/<name>, what runs, and the service in front of it."""
    return [claim(plan), _deployment(plan), service(plan, {"app": object_name(plan)})]


def as_yaml(objects: list[Object]) -> str:
    """The objects as one file for kubectl."""
    text: str = yaml.dump_all(objects, Dumper=_Plain, sort_keys=False)
    return text


def claim(plan: EnginePlan) -> Object:
    """The volume that holds engines/<name>: the model as published, quantised, and compiled."""
    weights = plan.memory().weights * plan.cards_per_instance
    size = -(-3 * weights // (1 << 30))
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": f"{size}Gi"}}}
    name = object_name(plan)
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def service(plan: EnginePlan, selector: dict[str, str]) -> Object:
    """What clients talk to."""
    ports = [{"name": kind, "port": port, "targetPort": kind} for kind, port in PORTS.items()]
    spec = {"selector": selector, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": object_name(plan)}, "spec": spec}


def pod(plan: EnginePlan) -> Object:
    """The pod that serves: its cards, the volume, memory that the ranks share, and probes."""
    cards = cards_per_machine(plan)
    place = f"{DEPLOYMENTS}/{plan.spec.name}"
    container: Object = {
        "name": "triton",
        "image": IMAGE,
        "command": ["bash", f"{place}/launch.sh"],
        "resources": {"limits": {"nvidia.com/gpu": cards}},
        "ports": [{"name": kind, "containerPort": port} for kind, port in PORTS.items()],
        **probes(plan),
        "volumeMounts": [
            {"name": "deployment", "mountPath": place, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [
            {"name": "deployment", "persistentVolumeClaim": {"claimName": object_name(plan)}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(2, cards)}Gi"}},
        ],
    }


def probes(plan: EnginePlan) -> Object:
    """A start may take what the plan says; after it, readiness falls at once and liveness after half a minute."""
    return {
        "startupProbe": _ready(plan) | {"failureThreshold": start_failures(plan)},
        "readinessProbe": _ready(plan) | {"failureThreshold": 1},
        "livenessProbe": _get("live") | {"failureThreshold": 3, "timeoutSeconds": 5},
    }


def _ready(plan: EnginePlan) -> Object:
    """Asks the model `health`, where the repository has it: Triton's own readiness says only that its process lives."""
    if plan.spec.deployment.target == "llmapi":
        return _get("ready")
    return {"exec": {"command": readiness(plan)}, "periodSeconds": _PROBE_PERIOD_S, "timeoutSeconds": 6}


def _get(what: str) -> Object:
    return {"httpGet": {"path": f"/v2/health/{what}", "port": "http"}, "periodSeconds": _PROBE_PERIOD_S}


def start_failures(plan: EnginePlan) -> int:
    """Failed start-up probes after which a start is given up."""
    return -(-start_budget_s(plan) // _PROBE_PERIOD_S)


def _deployment(plan: EnginePlan) -> Object:
    name = object_name(plan)
    labels = {"app": name}
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two of them would need twice the cards
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod(plan)},
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": labels}, "spec": spec}
