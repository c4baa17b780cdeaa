"""Requests and their adapters: by name, by id, with tensors; what is kept, healed, changed and refused."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from python_backend.errors import BuildError, InvalidRequest, NotFound, Overloaded, Unsupported
from python_backend.lora.modules import ALL_MODULES
from python_backend.lora.peft import read_peft
from python_backend.lora.registry import task_id_of
from python_backend.lora.rows import to_rows
from tests.unit import fake_triton
from tests.unit.engine_driver import FAMILIES, make_request
from tests.unit.tiny_adapters import base_of, random_tensors, write_peft

fake_triton.install()

from python_backend.triton.adapters import AdapterService, refuse_adapters  # noqa: E402
from python_backend.triton.lora_file import LoraFile  # noqa: E402

BASE = base_of(FAMILIES / "llama")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(4):
        write_peft(tmp_path / f"a{number}", random_tensors(BASE, seed=number))
    return tmp_path


def service(root: Path, adapters: int = 2, **settings: Any) -> AdapterService:
    size = read_peft(root / "a0", BASE, 1).nbytes
    return AdapterService(
        LoraFile(max_rank=8, modules=ALL_MODULES, host_cache_bytes=size * adapters, directory=root, **settings),
        FAMILIES / "llama",
    )


def ask(service: AdapterService, request_id: str = "r", **tensors: Any):
    prompt = make_request(request_id, [1])
    service.attach([prompt], {name: np.array(value) for name, value in tensors.items()})
    return prompt


def named(name: str) -> dict[str, Any]:
    return {"lora_name": np.array([[name.encode()]], object)}


def rows(root: Path, number: int = 0) -> dict[str, np.ndarray]:
    weights, config = to_rows(read_peft(root / f"a{number}", BASE, 1), np.float32)
    return {"lora_weights": weights[None], "lora_config": config[None]}


def test_a_request_by_name_gets_the_adapter_and_its_id(root):
    prompt = ask(service(root), **named("a1"))
    assert prompt.lora_task_id == task_id_of("a1")
    assert prompt.adapter.version == prompt.cache_salt == read_peft(root / "a1", BASE, 9).version
    assert ask(service(root), **named("")).adapter is None
    assert ask(service(root)).adapter is None


def test_after_an_eviction_a_request_by_name_succeeds_without_the_client_noticing(root):
    served = service(root)
    for name in ("a0", "a1", "a2", "a3") * 3:
        prompt = ask(served, name, **named(name))
        assert prompt.adapter.task_id == task_id_of(name)
        served.release(name)
    assert served._cache.stats().evictions == 10


def test_adapters_in_use_stay_and_a_request_that_finds_no_room_is_told_to_come_back(root):
    served = service(root)
    for name in ("a0", "a1"):
        ask(served, name, **named(name))
    with pytest.raises(Overloaded, match=r"PEFT Cache is full. Could not store taskId="):
        ask(served, "x", **named("a2"))
    served.release("a0")
    served.release("a0")
    ask(served, "x", **named("a2"))


def test_weights_come_once_and_then_the_id_is_enough_until_it_is_evicted(root):
    served = service(root)
    with pytest.raises(NotFound, match=r"LoRA task 7 not found in cache. Please send LoRA weights with request"):
        ask(served, lora_task_id=[[7]])
    first = ask(served, "1", lora_task_id=[[7]], **rows(root))
    again = ask(served, "2", lora_task_id=[[7]])
    ignored = ask(served, "3", lora_task_id=[[7]], **rows(root, 1))
    assert first.adapter is again.adapter is ignored.adapter
    for request_id in "123":
        served.release(request_id)
    for name in ("a0", "a1"):
        ask(served, name, **named(name))
    with pytest.raises(NotFound, match="LoRA task 7 not found"):
        ask(served, lora_task_id=[[7]])


def test_a_registered_adapter_is_found_by_its_id_as_well(root):
    assert ask(service(root), lora_task_id=[[task_id_of("a2")]]).adapter.task_id == task_id_of("a2")


def test_a_changed_adapter_is_loaded_again_while_the_old_one_is_in_use(root):
    served = service(root)
    old = ask(served, "old", **named("a0"))
    write_peft(root / "a0", random_tensors(BASE, seed=77))
    os.utime(root / "a0" / "adapter_model.safetensors", ns=(5, 5))
    new = ask(served, "new", **named("a0"))
    assert old.adapter.version != new.adapter.version
    assert old.cache_salt != new.cache_salt
    assert old.lora_task_id == new.lora_task_id


@pytest.mark.parametrize(
    ("tensors", "kind", "text"),
    [
        ({"lora_weights": np.zeros((1, 1, 4))}, InvalidRequest, "lora_task_id must be set for LoRA inference"),
        (
            {"lora_task_id": [[1]], "lora_weights": np.zeros((1, 1, 4))},
            InvalidRequest,
            "Request for LoRA inference must have both lora_weights and lora_keys",
        ),
        ({"lora_task_id": [[1]], **named("a0")}, InvalidRequest, "lora_name was sent with lora_task_id"),
        (named("a9"), NotFound, "'a9' is not registered. Did you mean a"),
    ],
)
def test_contradictions_and_unknown_names_are_refused(root, tensors, kind, text):
    with pytest.raises(kind, match=text):
        ask(service(root), **tensors)


def test_a_batch_in_which_one_adapter_is_refused_holds_none(root):
    served = service(root, adapters=1)
    prompts = [make_request(str(i), [1]) for i in range(2)]
    with pytest.raises(NotFound):
        served.attach(prompts, {"lora_name": np.array([[b"a0"], [b"nobody"]], object)})
    ask(served, **named("a1"))  # there is room


def test_a_deployment_without_adapters_says_so():
    refuse_adapters({**named("")})
    with pytest.raises(NotFound, match="'me' is not registered: this deployment has no adapters"):
        refuse_adapters(named("me"))
    with pytest.raises(Unsupported, match="Input lora_task_id is not supported"):
        refuse_adapters({"lora_task_id": np.array([[1]])})


class Family:
    """Counts what a metric family is told."""

    GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
    told: Counter

    def __init__(self, told: Counter):
        self.told = told

    def __call__(self, *, name: str, description: str, kind: str):
        told = self.told

        class Made:
            def Metric(self, labels: dict[str, str], **_: Any):
                key = (name, labels.get("adapter") or labels.get("result") or "")

                class Series:
                    def set(self, value):
                        told[key] = value

                    def increment(self, value):
                        told[key] += value

                    observe = increment

                return Series()

        return Made()


def test_metrics_tell_what_is_loaded_evicted_and_used_by_whom(root):
    served, told = service(root), Counter()
    served.start(Family(told), {})
    for name in ("a0", "a1", "a0", "a2"):
        ask(served, name, **named(name))
        served.release(name, 5)
    ask(served, "x", lora_task_id=[[7]], **rows(root))
    served.release("x", 3)
    served.update()
    assert told["llm_lora_adapters", ""] == 2
    assert told["llm_lora_evictions_total", ""] == 2
    assert told["llm_lora_requests_total", "a0"] == 2
    assert told["llm_lora_tokens_total", "a0"] == 10
    assert told["llm_lora_tokens_total", "other"] == 3
    assert told["llm_lora_load_seconds", ""] > 0


def test_adapters_that_came_while_the_server_runs_are_counted_by_name_up_to_a_limit(root, monkeypatch):
    served, told = service(root), Counter()
    served.start(Family(told), {})
    for name in ("late", "later"):
        write_peft(root / name, random_tensors(BASE, seed=9))
        ask(served, name, **named(name))
        monkeypatch.setattr("python_backend.telemetry.adapters.MAX_NAMES", 5)
        served.release(name, 5)
    assert told["llm_lora_tokens_total", "late"] == 5
    assert told["llm_lora_tokens_total", "later"] == 0
    assert told["llm_lora_tokens_total", "other"] == 5


def test_prefetched_adapters_are_there_for_the_first_request_that_gives_their_id(root, tmp_path):
    weights, config = to_rows(read_peft(root / "a1", BASE, 1), np.float32)
    for task_id in ("7", "8", "9"):
        (tmp_path / "p" / task_id).mkdir(parents=True)
        np.save(tmp_path / "p" / task_id / "model.lora_weights.npy", weights[None])
        np.save(tmp_path / "p" / task_id / "model.lora_config.npy", config[None])
    assert ask(service(root, 3, prefetch_dir=tmp_path / "p"), lora_task_id=[[7]]).adapter.task_id == 7
    with pytest.raises(BuildError, match=r"its adapters up to task id 9 take more than lora.host_cache_bytes"):
        service(root, 2, prefetch_dir=tmp_path / "p")
