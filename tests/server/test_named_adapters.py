"""Adapters by name before an engine that knows task ids alone, in the real Triton: bfloat16, evictions, both ways."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from build_engines.check import check_repository
from build_engines.plan.engine_plan import EnginePlan
from build_engines.plan.source_config import source_config
from build_engines.spec import load_spec
from build_engines.templates import from_text, to_text
from build_engines.trtllm.adapters import copy_adapters
from build_engines.trtllm.repository import render_trtllm
from python_backend.lora.peft import read_peft
from python_backend.lora.rows import to_rows
from tests.server.launched import LaunchedServer, ServerAddresses
from tests.server.wire import ask, text_inputs
from tests.unit.lora_engine import described
from tests.unit.small_tokenizers import write_tokenizer_dir
from tests.unit.tiny_adapters import base_of, random_tensors, write_peft

ROOT = Path(__file__).parents[2]
SHAPE = ROOT / "tests" / "data" / "families" / "llama"
BASE = base_of(SHAPE)
MODULES = "[attn_q, attn_k, attn_v, attn_dense, mlp_h_to_4h, mlp_gate, mlp_4h_to_h]"
PROMPT = "hello world"
_SPEC = """\
name: named
target: trtllm
source: {{shape: shape, weights: nowhere}}
hardware: {{card: h100-sxm}}
quantization: {{quant_algo: NO_QUANT}}
limits: {{max_batch_size: 8, max_num_tokens: 512, max_seq_len: 200, max_beam_width: 1, kv_cache_tokens: 4096}}
lora: {{modules: {modules}, max_rank: 8, adapters: {{pirate: peft/pirate, json: peft/json}}, directory: more}}
speculative: {{mode: draft_tokens_external, max_draft_len: 5, draft_model: nowhere, draft_shape: shape}}
"""
_ENGINE = """
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, {root!r})
from python_backend.triton import pb
from tests.unit.lora_engine import LoraEngine
from tests.unit.small_tokenizers import small_tokenizer

tokenizer = small_tokenizer("byte_level")
prompt = len(tokenizer.encode({prompt!r}))
engine = LoraEngine(tokenizer.encode)


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            inputs = pb.read_inputs(request)
            size = int(inputs["request_output_len"].flat[0])
            task_id = pb.read_scalar(inputs, "lora_task_id")
            sender = request.get_response_sender()
            try:
                whole = engine.answer(task_id, inputs.get("lora_weights"), inputs.get("lora_config"))
            except ValueError as error:
                response = pb_utils.InferenceResponse([], pb_utils.TritonError(str(error)))
            else:
                found = whole[inputs["input_ids"].size - prompt :][:size]
                response = pb_utils.InferenceResponse([
                    pb_utils.Tensor("output_ids", np.array([[found + [-1]]], np.int32)),
                    pb_utils.Tensor("sequence_length", np.array([[len(found)]], np.int32)),
                ])
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deployment as a build and a compiler leave it, but for the engine."""
    directory = tmp_path_factory.mktemp("named")
    for seed, name in enumerate(("pirate", "json")):
        write_peft(directory / "peft" / name, random_tensors(BASE, seed=seed))
    model = json.loads((SHAPE / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (directory / "shape").mkdir()
    (directory / "shape" / "config.json").write_text(json.dumps(model))
    (directory / "spec.yaml").write_text(_SPEC.format(modules=MODULES))
    spec = load_spec(directory / "spec.yaml")
    plan = EnginePlan.of(spec, *source_config(spec))
    write_tokenizer_dir(directory / "weights", "byte_level")
    for name in ("adapters", "more", "model_repo"):
        (directory / name).mkdir()
    copy_adapters(plan, directory / "adapters")
    repository = directory / "model_repo"
    render_trtllm(plan, PurePosixPath(directory), repository)
    assert check_repository(repository, built=False) == []
    build = {
        "max_seq_len": 200, "max_input_len": 199, "max_batch_size": 8, "plugin_config": {"lora_plugin": "bfloat16"},
        "lora_config": {"max_lora_rank": 8, "lora_target_modules": MODULES.strip("[]").split(", ")},
    }  # fmt: skip
    for name in ("engine", "draft-engine"):
        (directory / name).mkdir()
        config = {"pretrained_config": model | {"dtype": "bfloat16"}, "build_config": build}
        (directory / name / "config.json").write_text(json.dumps(config))
    for name in ("tensorrt_llm", "tensorrt_llm_draft"):
        path = repository / name / "config.pbtxt"
        config = from_text(path.read_text())
        config.backend = "python"
        path.write_text(to_text(config))
        (repository / name / "1" / "model.py").write_text(_ENGINE.format(root=str(ROOT), prompt=PROMPT))
    return directory


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[ServerAddresses]:
    launched = LaunchedServer("--model-repository", str(place / "model_repo"))
    yield launched.wait_ready(timeout_s=120)
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 0


def answer(server: ServerAddresses, model: str, *more: Any, **tensors: Any) -> str:
    replies = ask(server, model, [*text_inputs(PROMPT, 100, **tensors), *more], request_id="mine")
    errors = [reply.error for reply in replies if reply.error]
    return errors[0] if errors else "".join(r["text_output"].flat[0].decode() for r in replies if r.outputs)


def expected(directory: Path) -> str:
    """What the engine says of an adapter that it has received in bfloat16."""
    return described(*to_rows(read_peft(directory, BASE, 1), ml_dtypes.bfloat16))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_names_work_whatever_the_engines_cache_dropped(served: ServerAddresses, place: Path, model: str) -> None:
    ids = set()
    for name in ("pirate", "json", "pirate", "json"):  # the cache has room for one
        task_id, _, rest = answer(served, model, lora_name=[[name]]).partition(" ")
        assert rest == expected(place / "adapters" / name)
        ids.add(task_id)
    assert len(ids) == 2
    assert answer(served, model) == "base"
    assert "Did you mean pirate?" in answer(served, model, lora_name=[["pirat"]])


def test_an_adapter_that_changes_is_another_one_for_the_engine(served: ServerAddresses, place: Path) -> None:
    write_peft(place / "more" / "late", random_tensors(BASE, seed=7))
    first = answer(served, "ensemble", lora_name=[["late"]])
    assert first.partition(" ")[2] == expected(place / "more" / "late")
    write_peft(place / "more" / "late", random_tensors(BASE, seed=8, rank=3))
    second = answer(served, "ensemble", lora_name=[["late"]])
    assert second.partition(" ")[2] == expected(place / "more" / "late")
    assert first.partition(" ")[0] != second.partition(" ")[0]


def test_a_client_may_bring_its_own_and_then_has_to_bring_it_again(served: ServerAddresses, place: Path) -> None:
    weights, config = to_rows(read_peft(place / "peft" / "json", BASE, 1), ml_dtypes.bfloat16)
    own = grpcclient.InferInput("lora_weights", [1, *weights.shape], "BF16")
    own.set_data_from_numpy(weights[None])
    tensors = {"lora_task_id": np.array([[5]], np.uint64), "lora_config": config[None]}
    found = f"5 {described(weights, config)}"
    assert answer(served, "ensemble", own, **tensors) == found
    assert answer(served, "ensemble", lora_task_id=tensors["lora_task_id"]) == found
    answer(served, "ensemble", lora_name=[["pirate"]])
    gone = answer(served, "ensemble", lora_task_id=tensors["lora_task_id"])
    assert "LoRA task 5 not found in cache. Please send LoRA weights with request" in gone
    assert answer(served, "tensorrt_llm_bls", own, **tensors) == found


def test_the_list_names_them_with_the_ids_that_the_engine_sees(served: ServerAddresses) -> None:
    with grpcclient.InferenceServerClient(served.grpc) as client:
        (*listed,) = map(json.loads, client.infer("adapters", []).as_numpy("ADAPTERS").reshape(-1))
    found = {entry["name"]: entry["task_id"] for entry in listed}
    assert {"pirate", "json"} <= found.keys()
    assert answer(served, "ensemble", lora_name=[["pirate"]]).startswith(f"{found['pirate']} ")
    by_id = answer(served, "ensemble", lora_task_id=np.array([[found["json"]]], np.uint64))
    assert by_id.startswith(f"{found['json']} ")  # the deployment's own, although the client sent no weights
