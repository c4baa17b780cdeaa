"""Adapters on the real server: by name and as tensors, in one batch, evicted, changed, removed, counted."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import clients
from clients import adapter_list
from clients.grpc_client import GrpcClient
from clients.http_client import HttpClient
from clients.types import GenerateRequest
from python_backend.lora.peft import read_peft
from python_backend.lora.registry import task_id_of
from python_backend.lora.rows import to_rows
from python_backend.telemetry.dashboard import expressions
from tests.server.launched import ROOT, LaunchedServer, assert_nothing_left
from tests.server.promql import unanswered
from tests.server.wire import metric, metrics_text, wait_until
from tests.unit.tiny_adapters import base_of, random_tensors, write_peft

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.launched import ServerAddresses

CHECKPOINT = ROOT / "engines" / "smollm2-135m" / "checkpoint"
PROMPT = "The best thing about the sea is"
NAMES = ("a0", "a1", "a2")
SPEC = """
name: adapters
precision: exact
source: {{hf: {checkpoint}}}
limits: {{max_seq_len: 512, kv_cache_tokens: 4096, max_batch_size: 16}}
lora:
  compile_at_start: true
  directory: {directory}
  host_cache_bytes: {bytes}
  max_rank: 16
  modules: [attn_q, attn_k, attn_v, attn_dense, mlp_h_to_4h, mlp_gate, mlp_4h_to_h]
"""


@dataclass
class Deployment:
    """A server whose cache holds two adapters of the three in `directory`."""

    addresses: ServerAddresses
    directory: Path

    def ask(self, **values: object) -> str:
        request = GenerateRequest.of(PROMPT, max_tokens=12, end_id=-1, **values)
        with GrpcClient(self.addresses.grpc) as client:
            return client.generate(request, timeout=200).text


def write_adapter(directory: Path, seed: int) -> Path:
    tensors = random_tensors(base_of(CHECKPOINT), rank=4, seed=seed, size=0.08)
    return write_peft(directory, tensors, np.float16, lora_alpha=4)


@pytest.fixture(scope="module")
def deployment(server: ServerAddresses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    del server  # it has built the checkpoint
    root = tmp_path_factory.mktemp("lora")
    directory = root / "adapters"
    for seed, name in enumerate(NAMES):
        write_adapter(directory / name, seed)
    (directory / "a0" / "serving.json").write_text('{"owner": "team a"}')
    shutil.copytree(directory / "a1", directory / "broken")
    (directory / "broken" / "adapter_model.safetensors").write_bytes(b"cut")
    size = read_peft(directory / "a0", base_of(CHECKPOINT), 1).nbytes
    (root / "spec.yaml").write_text(SPEC.format(checkpoint=CHECKPOINT, directory=directory, bytes=2 * size))
    launched = LaunchedServer("--spec", str(root / "spec.yaml"), "--engines-dir", str(root / "engines"))
    try:
        yield Deployment(launched.wait_ready(timeout_s=280), directory)
        launched.signal(signal.SIGTERM)
        assert launched.wait() == 0, launched.output
    finally:
        launched.process.kill()


@pytest.fixture(scope="module")
def alone(deployment: Deployment) -> dict[str, str]:
    """What each adapter answers by itself, and the model without one."""
    answers = {name: deployment.ask(lora_name=name) for name in NAMES} | {"": deployment.ask()}
    assert len(set(answers.values())) == 4
    return answers


def test_different_adapters_and_none_in_one_batch_answer_as_they_do_alone(deployment, alone):
    names = ["a0", "", "a1", "a0"] * 4
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: deployment.ask(**({"lora_name": name} if name else {})), names))
    assert answers == [alone[name] for name in names]


def test_a_structure_holds_whatever_the_adapter(deployment):
    colours = {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["red", "blue"]'}
    assert all(deployment.ask(lora_name=name, **colours) in ("red", "blue") for name in NAMES)


def test_more_adapters_than_the_cache_holds_are_served_in_turn(deployment, alone):
    evicted = metric(deployment.addresses, "llm_lora_evictions_total")
    for _ in range(2):
        assert {name: deployment.ask(lora_name=name) for name in NAMES} == {name: alone[name] for name in NAMES}
    wait_until(lambda: metric(deployment.addresses, "llm_lora_evictions_total") >= evicted + 4)
    assert metric(deployment.addresses, "llm_lora_adapters") == 2
    assert metric(deployment.addresses, "llm_lora_requests_total", adapter="a0") >= 3
    assert metric(deployment.addresses, "llm_lora_load_seconds_count") >= 6


def test_every_query_of_the_dashboard_about_adapters_finds_its_series(deployment):
    about = [text for text in expressions() if "llm_lora_" in text]
    assert len(about) >= 9
    assert unanswered(about, metrics_text(deployment.addresses)) == []


@pytest.mark.parametrize("columns", [3, 4])
def test_weights_and_keys_are_sent_once_and_then_the_id_alone(deployment, alone, columns):
    weights, config = to_rows(read_peft(deployment.directory / "a2", base_of(CHECKPOINT), 1))
    task_id = 1000 + columns
    first = deployment.ask(lora_task_id=task_id, lora_weights=weights, lora_config=config[:, :columns])
    assert first == deployment.ask(lora_task_id=task_id) == alone["a2"]


def test_an_id_that_is_not_cached_needs_its_weights(deployment):
    with pytest.raises(clients.ClientError, match=r"LoRA task 4711 not found in cache. Please send"):
        deployment.ask(lora_task_id=4711)


def test_an_unknown_name_is_answered_with_close_ones(deployment):
    with (
        HttpClient(deployment.addresses.http) as client,
        pytest.raises(clients.RequestRefused, match=r"'a9' is not registered. Did you mean a"),
    ):
        client.generate(GenerateRequest.of(PROMPT, max_tokens=2, lora_name="a9"))


def test_adapters_come_change_and_go_while_the_server_runs(deployment, alone):
    late = deployment.directory / "late"
    shutil.copytree(deployment.directory / "a1", late)
    assert deployment.ask(lora_name="late") == alone["a1"]
    write_adapter(late, seed=2)
    os.utime(late / "adapter_model.safetensors", ns=(7, 7))
    assert deployment.ask(lora_name="late") == alone["a2"]
    shutil.rmtree(late)
    with pytest.raises(clients.ClientError, match="'late' is not registered"):
        deployment.ask(lora_name="late")


@pytest.mark.parametrize("removed", [False, True])
def test_an_adapter_that_changes_or_goes_while_a_stream_uses_it_leaves_the_stream_alone(deployment, alone, removed):
    place = deployment.directory / f"passing{removed:d}"
    shutil.copytree(deployment.directory / "a1", place)
    request = GenerateRequest.of(PROMPT, max_tokens=80, end_id=-1, lora_name="a1")
    with GrpcClient(deployment.addresses.grpc) as client:
        expected = client.generate(request, timeout=120).text
        stream = client.stream(dataclasses.replace(request, lora_name=place.name))
        first = next(iter(stream)).text
        if removed:
            shutil.rmtree(place)
            with pytest.raises(clients.ClientError, match="is not registered"):
                deployment.ask(lora_name=place.name)
        else:
            write_adapter(place, seed=2)
            os.utime(place / "adapter_model.safetensors", ns=(9, 9))
            assert deployment.ask(lora_name=place.name) == alone["a2"]
        assert first + "".join(chunk.text for chunk in stream) == expected
    shutil.rmtree(place, ignore_errors=True)


def test_the_server_lists_names_with_ids_and_ranks(deployment):
    (first, *_, last) = found = adapter_list.adapters(deployment.addresses.grpc)
    assert [entry["name"] for entry in found] == [*NAMES, "broken"]
    assert (first["task_id"], first["rank"], first["owner"], first["state"]) == (task_id_of("a0"), 4, "team a", "ready")
    assert last["state"] == "refused"
    assert "not a whole safetensors file (3 bytes)" in last["reason"]
    url = f"http://{deployment.addresses.http}/v2/models/adapters/infer"
    with urllib.request.urlopen(urllib.request.Request(url, b'{"inputs": []}'), timeout=30) as reply:
        (output,) = json.load(reply)["outputs"]
    assert [json.loads(text) for text in output["data"]] == found


def test_the_command_prints_them_or_says_that_there_are_none(deployment, monkeypatch, capsys):
    assert adapter_list.main(["--url", deployment.addresses.grpc]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"a0\tready\ttask id {task_id_of('a0')}\trank 4\tattn_q, attn_k, attn_v")
    assert first.endswith("\towner team a")
    assert last.startswith("broken\trefused: ")
    assert adapter_list.main(["--url", "127.0.0.1:1"]) == 3
    monkeypatch.setattr(adapter_list, "_MODEL", "nothing_of_that_name")
    assert adapter_list.main(["--url", deployment.addresses.grpc]) == 1
    assert "this server has no adapters" in capsys.readouterr().err


def chat(server: ServerAddresses, question: str, **values: object) -> list[str]:
    request = GenerateRequest(messages=[{"role": "user", "content": question}], **{"max_tokens": 24, **values})
    with GrpcClient(server.grpc) as client:
        return [sequence.text for sequence in client.generate(request, timeout=280).sequences]


def test_the_shipped_adapters_change_answers_as_they_say(server):
    question = "What is the capital of Portugal?"
    assert chat(server, question, lora_name="pirate")[0].startswith("Arr")
    assert json.loads(chat(server, question, lora_name="json", max_tokens=40)[0])["question"] == question
    assert "Arr" not in chat(server, question)[0]


def test_an_adapter_goes_with_samples_beams_and_a_guide(server):
    question = "What is the capital of France?"
    samples = chat(server, question, lora_name="pirate", num_return_sequences=3, temperature=0.3, seed=1)
    assert [text[:3] for text in samples] == ["Arr"] * 3
    assert chat(server, question, lora_name="pirate", beam_width=2)[0].startswith("Arr")
    guide = {
        "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": "Arr, (matey|sir)! It is [A-Z][a-z]{2,8}\\.",
    }
    assert chat(server, question, lora_name="pirate", **guide) == ["Arr, matey! It is Paris."]


TRY_IT = (ROOT / "docs" / "lora.md").read_text().split("## Try it")[1].split("## Serve adapters")[0]


@pytest.mark.parametrize(("kind", "code"), re.findall(r"```(bash|python)\n(.*?)```", TRY_IT, flags=re.DOTALL))
def test_what_the_page_tells_to_try_works(kind: str, code: str, server: ServerAddresses):
    code = re.sub(r"make serve.*", "", code).replace("localhost:8000", server.http)
    code = code.replace("127.0.0.1:8001", server.grpc).replace(
        "-m clients --chat", f"-m clients --url {server.grpc} --chat"
    )
    code = code.replace("-m clients adapters", f"-m clients adapters --url {server.grpc}")
    command = ["bash", "-euo", "pipefail", "-c", code] if kind == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Arr" in done.stdout


def test_a_server_that_is_told_to_stop_while_it_compiles_for_adapters_stops_cleanly(server):
    del server  # it has built the deployment
    launched = LaunchedServer()
    try:
        addresses = launched.wait_ready(timeout_s=280)
        with GrpcClient(addresses.grpc) as client, client.stream(
            GenerateRequest.of(PROMPT, max_tokens=2, lora_name="json")
        ):  # fmt: skip
            time.sleep(1)
            launched.signal(signal.SIGTERM)
            assert launched.wait() == 0, launched.output
        assert_nothing_left(launched, addresses, within_s=1)
    finally:
        launched.process.kill()
