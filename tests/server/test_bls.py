"""A repository with a draft model in the real Triton, with engines that follow a rule instead of weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from build_engines.check import check_repository
from build_engines.plan.engine_plan import EnginePlan
from build_engines.plan.source_config import source_config
from build_engines.spec import load_spec
from build_engines.templates import from_text, to_text
from build_engines.trtllm.repository import render_trtllm
from tests.server.launched import LaunchedServer, ServerAddresses
from tests.server.wire import ask, text_inputs
from tests.unit.small_tokenizers import small_tokenizer, write_tokenizer_dir
from tests.unit.toy_engine import answer

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "build_engines" / "specs" / "llama-3.3-70b-h100-tp4-draft.yaml"
TOKENIZER = small_tokenizer("byte_level")
PROMPT = "hello world"
_MODEL = """
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, {root!r})
from tests.unit.toy_engine import answer, propose


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            inputs = {{tensor.name(): tensor.as_numpy() for tensor in request.inputs()}}
            ids = inputs["input_ids"].reshape(-1).tolist()
            size, end = (int(inputs[name].flat[0]) for name in ("request_output_len", "end_id"))
            if {is_draft}:
                found = propose(ids, size, end)
            else:
                draft = inputs["draft_input_ids"].reshape(-1).tolist() if "draft_input_ids" in inputs else None
                found = answer(ids, size, end, draft)
            tensors = [
                pb_utils.Tensor("output_ids", np.array([[found + [-1]]], np.int32)),
                pb_utils.Tensor("sequence_length", np.array([[len(found)]], np.int32)),
            ]
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse(tensors), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAddresses]:
    directory = tmp_path_factory.mktemp("draft")
    write_tokenizer_dir(directory / "weights", "byte_level")
    repository = directory / "model_repo"
    repository.mkdir()
    spec = load_spec(SPEC)
    render_trtllm(EnginePlan.of(spec, *source_config(spec)), PurePosixPath(directory), repository)
    assert check_repository(repository, built=False) == []
    for name in ("engine", "draft-engine"):
        (directory / name).mkdir()
        limits = {"max_seq_len": 64, "max_input_len": 63, "max_batch_size": 32}
        (directory / name / "config.json").write_text(json.dumps({"build_config": limits}))
    for name in ("tensorrt_llm", "tensorrt_llm_draft"):
        path = repository / name / "config.pbtxt"
        config = from_text(path.read_text())
        assert config.backend == "tensorrtllm"
        config.backend = "python"
        path.write_text(to_text(config))
        source = _MODEL.format(root=str(ROOT), is_draft=name.endswith("draft"))
        (repository / name / "1" / "model.py").write_text(source)
    launched = LaunchedServer("--model-repository", str(repository))
    yield launched.wait_ready(timeout_s=120)
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 0


def texts_of(server: ServerAddresses, **tensors: Any) -> list[str]:
    """Texts of all responses."""
    replies = ask(server, "tensorrt_llm_bls", text_inputs(PROMPT, 20, **tensors), request_id="mine")
    assert not [reply.error for reply in replies if reply.error]
    return [reply["text_output"][0].decode() for reply in replies if reply.outputs]


def alone(max_tokens: int) -> str:
    return TOKENIZER.decode(answer(TOKENIZER.encode(PROMPT), max_tokens, TOKENIZER.end_ids[0]))


def test_an_answer_with_drafts_is_the_one_without(served: ServerAddresses) -> None:
    assert "".join(texts_of(served)) == alone(20)
    assert "".join(texts_of(served, num_draft_tokens=[[0]])) == alone(20)


def test_an_answer_with_drafts_streams(served: ServerAddresses) -> None:
    pieces = texts_of(served, stream=np.ones((1, 1), np.bool_))
    assert len(pieces) > 3
    assert "".join(pieces) == alone(20)


def test_our_client_talks_to_it(served: ServerAddresses) -> None:
    options = ["--url", served.grpc, "--model", "tensorrt_llm_bls", "--stream", "--max-tokens", "20"]
    command = [sys.executable, "-m", "clients", PROMPT, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert alone(20).strip() in done.stdout.decode()


def test_a_refusal_reaches_the_client(served: ServerAddresses) -> None:
    (reply,) = ask(served, "tensorrt_llm_bls", text_inputs(PROMPT, 20, num_draft_tokens=[[9]]))
    assert "num_draft_tokens is 9; allowed: 0 to 5" in reply.error
