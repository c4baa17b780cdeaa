"""Kubernetes manifests of a deployment over several machines: a LeaderWorkerSet, or a StatefulSet where there is none.

The leader's pod starts the ranks of all pods over ssh (see mpi_hosts); clients talk to the leader alone. The key pair
is a Secret that whoever deploys makes: a private key has no place in a file that is kept.
"""

from __future__ import annotations

import shlex
from copy import deepcopy
from typing import TYPE_CHECKING

from build_engines.trtllm.image import DEPLOYMENTS
from build_engines.trtllm.launch import machines, readiness
from build_engines.trtllm.manifests import Object, claim, object_name, pod, service
from build_engines.trtllm.mpi_hosts import SSH_KEYS, SSH_PORT

if TYPE_CHECKING:
    from build_engines.plan.engine_plan import EnginePlan

_INDEX_LABEL = "apps.kubernetes.io/pod-index"  # since Kubernetes 1.28
_WORKER_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"


def leader_worker_set(plan: EnginePlan) -> list[Object]:
    """The objects for clusters with the LeaderWorkerSet controller: when one pod fails, the whole group starts anew."""
    name = object_name(plan)
    labels = {"app": name}
    template = {
        "size": machines(plan),
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": {"metadata": {"labels": labels}, "spec": _leader(plan)},
        "workerTemplate": {"metadata": {"labels": labels}, "spec": _worker(plan)},
    }
    group = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": f"{name}-ranks", "labels": labels},
        "spec": {"replicas": 1, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": template},
    }
    return [claim(plan), group, service(plan, labels | {_WORKER_LABEL: "0"})]


def stateful_set(plan: EnginePlan) -> list[Object]:
    """The objects for any cluster: pod 0 leads, its peers are found by name."""
    name = object_name(plan)
    labels, peers = {"app": name}, f"{name}-ranks"
    spec = _leader(plan)
    container = spec["containers"][0]
    hosts = " ".join(f"{peers}-{index}.{peers}" for index in range(machines(plan)))
    container["env"] = [
        {"name": "MPI_HOSTS", "value": hosts},
        {"name": "POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{_INDEX_LABEL}']"}}},
    ]
    # One template for both kinds of pod: each asks what the pod itself has.
    ready, live = shlex.join(readiness(plan)), "curl -fsS http://127.0.0.1:8000/v2/health/live"
    for kind, command in (("startupProbe", ready), ("readinessProbe", ready), ("livenessProbe", live)):
        container[kind] = _either(container[kind], command)
    ranks = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": peers, "labels": labels},
        "spec": {
            "replicas": machines(plan),
            "serviceName": peers,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    # Peers have to find each other before they are ready.
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    ssh = {"ports": [{"name": "ssh", "port": SSH_PORT}]}
    between = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": peers}, "spec": headless | ssh}
    return [claim(plan), between, ranks, service(plan, labels | {_INDEX_LABEL: "0"})]


def _either(probe: Object, command: str) -> Object:
    script = f'if [ "$POD_INDEX" = 0 ]; then {command}; else exec 3<>/dev/tcp/127.0.0.1/{SSH_PORT}; fi'
    return {"exec": {"command": ["bash", "-c", script]}, **_timing(probe), "timeoutSeconds": 6}


def _timing(probe: Object) -> Object:
    return {key: value for key, value in probe.items() if key not in ("httpGet", "exec")}


def _leader(plan: EnginePlan) -> Object:
    spec = deepcopy(pod(plan))
    container = spec["containers"][0]
    container["startupProbe"]["failureThreshold"] *= 2  # first the other machines have to come
    container["ports"].append({"name": "ssh", "containerPort": SSH_PORT})
    container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # pinned memory, for RDMA
    container["volumeMounts"].append({"name": "ssh-keys", "mountPath": SSH_KEYS, "readOnly": True})
    keys = {"secretName": f"{object_name(plan)}-ssh", "defaultMode": 0o400}
    spec["volumes"].append({"name": "ssh-keys", "secret": keys})
    return spec


def _worker(plan: EnginePlan) -> Object:
    spec = _leader(plan)
    container = spec["containers"][0]
    container["name"] = "worker"
    container["command"] = ["bash", f"{DEPLOYMENTS}/{plan.spec.name}/launch.sh", "worker"]
    container["ports"] = [port for port in container["ports"] if port["name"] == "ssh"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        container[kind] = {"tcpSocket": {"port": "ssh"}} | _timing(container[kind])
    return spec
