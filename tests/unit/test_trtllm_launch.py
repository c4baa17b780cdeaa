"""How deployments are started: ranks on one machine and several, and manifests against Kubernetes' own schemas."""

from __future__ import annotations

import os
import re
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from build_engines.spec import load_spec
from build_engines.trtllm.image import dockerfile
from build_engines.trtllm.launch import compose, launch_script, start_budget_s
from build_engines.trtllm.manifests import as_yaml, manifests, object_name
from build_engines.trtllm.multi_node import leader_worker_set, stateful_set
from python_backend.errors import BuildError
from tests.unit.test_trtllm_target import GPU_SPECS, SPECS, configs_of, dry_run, plan_of, spec_file

KUBERNETES = ("1.29", "1.37")
BIG = SPECS / "llama-3.1-405b-h100-tp8-pp2.yaml"
# What the API reference of leaderworkerset.x-k8s.io/v1 says of the fields that are used; templates are pods.
LEADER_WORKER_SET = {
    "type": "object", "required": ["apiVersion", "kind", "metadata", "spec"], "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"}, "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object", "required": ["leaderWorkerTemplate"], "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": {"properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}},
                "leaderWorkerTemplate": {
                    "type": "object", "required": ["workerTemplate"], "additionalProperties": False,
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": ["Default", "None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]
                        },
                        "leaderTemplate": {"type": "object", "required": ["spec"]},
                        "workerTemplate": {"type": "object", "required": ["spec"]},
                    },
                },
            },
        },
    },
}  # fmt: skip


def two_machines(directory: Path, *more: tuple[str, str]) -> Path:
    cards = ("card: h100-sxm", "card: h100-sxm\n  cards_per_node: 4")
    return spec_file(directory, "llama-3.3-70b-h100-tp4", ("pp: 1", "pp: 2"), cards, *more)


# --- launch.sh ----------------------------------------------------------------------------------------------------


def test_a_triton_runs_for_each_rank_and_only_the_first_loads_everything() -> None:
    script = launch_script(plan_of(SPECS / "llama-3.3-70b-h100-tp4.yaml"))
    lines = [line for line in script.splitlines() if "-n 1" in line]
    assert len(lines) == 4
    assert "--load-model" not in lines[0]
    assert all("--model-control-mode=explicit --load-model=tensorrt_llm" in line for line in lines[1:])
    assert [re.findall(r"prefix\d_", line) for line in lines] == [[f"prefix{rank}_"] for rank in range(4)]
    assert all("--disable-auto-complete-config" in line for line in lines)
    assert "hostfile" not in script


def test_the_orchestrator_spawns_its_own_workers(tmp_path: Path) -> None:
    spec = spec_file(tmp_path, "llama-3.3-70b-h100-tp4", ("ep: 1}", "ep: 1, mpi: orchestrator}"))
    script = launch_script(plan_of(spec))
    assert "TRTLLM_ORCHESTRATOR=1" in script
    assert script.count("-n 1") == 1


def test_two_instances_have_cards_of_their_own(tmp_path: Path) -> None:
    spec = spec_file(tmp_path, "llama-3.3-70b-h100-tp2", ("ep: 1}", "ep: 1, instances: 2}"))
    with pytest.raises(BuildError, match=r"parallel.instances: is 2; of 2 ranks each, only parallel.mpi orchestrator"):
        load_spec(spec)
    spec.write_text(spec.read_text().replace("instances: 2}", "instances: 2, mpi: orchestrator}"))
    config = configs_of(dry_run(spec, tmp_path))["tensorrt_llm"]
    assert config.parameters["gpu_device_ids"].string_value == "0,1;2,3"
    assert config.instance_group[0].count == 2
    (container,) = manifests(plan_of(spec))[1]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_small_instances_share_one_triton(tmp_path: Path) -> None:
    plan = plan_of(spec_file(tmp_path, "qwen2.5-7b-h100", ("ep: 1}", "ep: 1, instances: 3}")))
    assert "mpirun" not in launch_script(plan)
    (devices,) = yaml.safe_load(compose(plan))["services"]["triton"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["count"] == 3


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("two", [("ep: 1}", "ep: 1, mpi: orchestrator}")], "parallel.mpi: is orchestrator, which spawns workers"),
        ("two", [("ep: 1}", "ep: 1, instances: 2}")], "parallel.instances: is 2; one deployment holds 1 of 8 cards"),
        ("two", [("cards_per_node: 4", "cards_per_node: 6")], "parallel.tp: is 4; over several machines it must"),
        ("two", [("cards_per_node: 4", "cards_per_node: 2")], "parallel.tp: is 4; allowed: up to cards_per_node"),
        ("one", [("ep: 1}", "ep: 1, instances: 9}")], "parallel.instances: is 9; one deployment holds 8 of 1 cards"),
    ],
)  # fmt: skip
def test_what_machines_cannot_share_is_refused(
    name: str, changes: list[tuple[str, str]], message: str, tmp_path: Path
) -> None:
    spec = two_machines(tmp_path, *changes) if name == "two" else spec_file(tmp_path, "qwen2.5-7b-h100", *changes)
    with pytest.raises(BuildError, match=message):
        load_spec(spec)


def run_launch(plan: Any, directory: Path, *arguments: str, **environment: str) -> tuple[str, Path]:
    """launch.sh with every program it calls replaced by one that writes down how it was called."""
    bin_dir, calls = directory / "ompi" / "bin", directory / "calls"
    bin_dir.mkdir(parents=True)
    for name in ("mpirun", "ssh", "sshd", "python3"):
        stub = f'#!/bin/sh\necho {name} "$@" >> {calls}\n'
        if name == "mpirun":  # the file is gone when the script is
            stub += 'while [ "$1" != --hostfile ]; do shift; done; cat "$2" >> ' + f"{calls}\n"
        (bin_dir / name).write_text(stub)
        (bin_dir / name).chmod(0o755)
    keys = directory / "keys"
    keys.mkdir()
    (keys / "id_ed25519").write_text("private")
    (keys / "id_ed25519.pub").write_text("ssh-ed25519 AAAA")
    script = launch_script(plan).replace("/usr/sbin/sshd", "sshd").replace("/etc/mpi-ssh", str(keys))
    (directory / "launch.sh").write_text(script.replace("/run/sshd", str(directory / "run")))
    variables = {"PATH": f"{bin_dir}:{os.environ['PATH']}", "HOME": str(directory), **environment}
    done = subprocess.run(
        ["bash", str(directory / "launch.sh"), *arguments], env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return calls.read_text(), directory


GROUPS = {
    "a LeaderWorkerSet": {"LWS_LEADER_ADDRESS": "big-0.big.default", "LWS_GROUP_SIZE": "2"},
    "a StatefulSet": {"MPI_HOSTS": "big-0.big.default big-0-1.big.default", "POD_INDEX": "0"},
}


@pytest.mark.parametrize("environment", GROUPS.values(), ids=GROUPS)
def test_the_leader_waits_for_the_others_and_starts_all_ranks(environment: dict[str, str], tmp_path: Path) -> None:
    calls, home = run_launch(plan_of(BIG), tmp_path, **environment, NCCL_IB_HCA="mlx5")
    lines = calls.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["python3", "sshd", "ssh", "ssh"]
    assert lines[0].startswith("python3 -m build_engines verify")
    mpirun = lines[4].split()
    assert mpirun[mpirun.index("--prefix") + 1] == str(tmp_path / "ompi")
    assert "-x PATH -x LD_LIBRARY_PATH -x NCCL_IB_HCA" in lines[4]
    assert lines[4].count("-n 1 ") == 16
    assert lines[5:] == ["big-0.big.default slots=8", "big-0-1.big.default slots=8"]
    assert (home / ".ssh" / "id_ed25519").stat().st_mode & 0o077 == 0
    assert (home / ".ssh" / "known_hosts").read_text() == "[*]:2222 ssh-ed25519 AAAA\n"


@pytest.mark.parametrize(("arguments", "environment"), [(["worker"], {}), ([], {"POD_INDEX": "1"})], ids=["lws", "sts"])
def test_a_worker_lends_its_cards(arguments: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    calls, _ = run_launch(plan_of(BIG), tmp_path, *arguments, **environment)
    assert "sshd -p 2222" in calls
    assert " -D -e" in calls
    assert "mpirun" not in calls


def test_without_kubernetes_a_hostfile_names_the_machines(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=4\nb slots=4\n")
    calls, _ = run_launch(plan_of(two_machines(tmp_path)), tmp_path, HOSTFILE=str(hostfile))
    assert "ssh" not in calls.replace("mpi-ssh", "")
    assert calls.endswith("a slots=4\nb slots=4\n")
    nothing = {key: value for key, value in os.environ.items() if key != "HOSTFILE"}
    script = (tmp_path / "launch.sh").read_text().replace("python3 -m build_engines", "true")
    done = subprocess.run(["bash", "-c", script], env=nothing, capture_output=True, text=True)
    assert "names the machines, one a line with slots=4" in done.stderr


def test_the_llm_api_gets_its_ranks_from_mpirun_on_several_machines(tmp_path: Path) -> None:
    spec = spec_file(
        tmp_path, "deepseek-v3-h200-tp8", ("pp: 1", "pp: 2"), ("card: h200-sxm", "card: h200-sxm\n  cards_per_node: 8")
    )
    script = launch_script(plan_of(spec))
    assert "-n 16 trtllm-llmapi-launch /opt/tritonserver/bin/tritonserver" in script
    assert "mpirun" not in launch_script(plan_of(SPECS / "deepseek-v3-h200-tp8.yaml"))


# --- manifests ----------------------------------------------------------------------------------------------------


def validate(found: dict[str, Any]) -> None:
    """Hold an object against the schemas; the pods of a LeaderWorkerSet as those of a StatefulSet."""
    if found["kind"] == "LeaderWorkerSet":
        jsonschema.validate(found, LEADER_WORKER_SET)
        template = found["spec"]["leaderWorkerTemplate"]
        for role in ("leaderTemplate", "workerTemplate"):
            labels = template[role]["metadata"]["labels"]
            spec = {"serviceName": "x", "selector": {"matchLabels": labels}, "template": template[role]}
            validate({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "x"}, "spec": spec})
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(found, version, strict=True)


def objects_of(place: Path) -> list[list[dict[str, Any]]]:
    return [list(yaml.safe_load_all(path.read_text())) for path in sorted(place.glob("kubernetes*.yaml"))]


@pytest.mark.parametrize("spec", [path for path in GPU_SPECS if "smollm" not in path.stem], ids=lambda path: path.stem)
def test_every_manifest_satisfies_kubernetes(spec: Path) -> None:
    plan = plan_of(spec)
    files = [leader_worker_set(plan), stateful_set(plan)] if spec == BIG else [manifests(plan)]
    for objects in files:
        for found in yaml.safe_load_all(as_yaml(objects)):
            validate(found)


def test_the_schemas_find_what_is_wrong() -> None:
    deployment, group = manifests(plan_of(GPU_SPECS[0]))[1], leader_worker_set(plan_of(BIG))[1]
    broken = deepcopy(deployment)
    broken["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["failureTreshold"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(broken)
    broken = deepcopy(group)
    broken["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Always"
    with pytest.raises(jsonschema.ValidationError):
        validate(broken)
    broken = deepcopy(group)
    broken["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(broken)


def test_probes_have_the_time_that_the_plan_says_a_start_takes() -> None:
    plan = plan_of(SPECS / "llama-3.3-70b-h100-tp4.yaml")
    claim, deployment, service = manifests(plan)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= start_budget_s(plan) >= 120 + 3 * 24  # 72.7 GB at 3
    assert container["readinessProbe"]["exec"]["command"][-1].endswith("/v2/models/health/infer")
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    service = yaml.safe_load(compose(plan))["services"]["triton"]
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 4


def test_a_group_has_a_machine_for_each_pod_and_clients_reach_the_leader_alone() -> None:
    plan = plan_of(BIG)
    claim, group, service = leader_worker_set(plan)
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    leader, worker = (template[role]["spec"]["containers"][0] for role in ("leaderTemplate", "workerTemplate"))
    assert leader["command"] + ["worker"] == worker["command"]
    for container in (leader, worker):
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert worker["readinessProbe"]["tcpSocket"] == {"port": "ssh"}
    assert "httpGet" not in worker["livenessProbe"]
    assert leader["startupProbe"]["failureThreshold"] * 10 >= 2 * start_budget_s(plan)
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    mounted = {volume["name"]: volume for volume in template["workerTemplate"]["spec"]["volumes"]}
    assert mounted["deployment"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mounted["ssh-keys"]["secret"]["secretName"] == f"{object_name(plan)}-ssh"


def test_pods_of_a_stateful_set_know_each_other_by_name() -> None:
    _, between, ranks, service = stateful_set(plan_of(BIG))
    container = ranks["spec"]["template"]["spec"]["containers"][0]
    hosts = {entry["name"]: entry.get("value") for entry in container["env"]}["MPI_HOSTS"]
    peers = between["metadata"]["name"]
    assert ranks["spec"]["serviceName"] == peers
    assert hosts.split() == [f"{ranks['metadata']['name']}-{index}.{peers}" for index in range(2)]
    assert between["spec"]["clusterIP"] == "None"
    assert between["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"]["apps.kubernetes.io/pod-index"] == "0"


@pytest.mark.parametrize("name", ["llama-3.3-70b", "3b_model.", "x" * 100])
def test_any_name_of_a_deployment_becomes_one_that_kubernetes_takes(name: str, tmp_path: Path) -> None:
    spec = spec_file(tmp_path, "qwen2.5-7b-h100", ("name: qwen2.5-7b-h100", f"name: {name}"))
    found = object_name(plan_of(spec))
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found)
    assert len(f"{found}-ranks-0-10") <= 63


def test_files_of_another_number_of_machines_go_away(tmp_path: Path) -> None:
    spec = spec_file(tmp_path, "llama-3.3-70b-h100-tp4")
    place = dry_run(spec, tmp_path)
    assert (place / "compose.yaml").exists()
    assert "openssh-server" not in (place / "Dockerfile").read_text()
    two_machines(tmp_path)
    dry_run(spec, tmp_path)
    assert not (place / "compose.yaml").exists()
    assert [len(objects) for objects in objects_of(place)] == [4, 3]
    assert "openssh-server" in (place / "Dockerfile").read_text()
    assert dockerfile(several_machines=True) == (place / "Dockerfile").read_text()
