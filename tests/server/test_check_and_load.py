"""The repository check against the real Triton: what it passes loads, what it finds does not.

The repository is the one rendered for the C++ backend, whose models are replaced by one that answers with zeros.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.check import check_repository
from build_engines.plan.engine_plan import EnginePlan
from build_engines.plan.source_config import source_config
from build_engines.spec import load_spec
from build_engines.templates import from_text, to_text
from build_engines.trtllm.repository import render_trtllm
from tests.server.launched import LaunchedServer

SPEC = Path(__file__).parents[2] / "build_engines" / "specs" / "llama-3.1-8b-h100.yaml"
_ZEROS = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self._outputs = [
            (o["name"], pb_utils.triton_string_to_numpy(o["data_type"]), [1 if d < 0 else int(d) for d in o["dims"]])
            for o in config["output"]
            if o["data_type"] != "TYPE_BF16"  # numpy lacks it; weights of an adapter, which are optional
        ]
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)

    def execute(self, requests):
        responses = []
        for request in requests:
            rows = len(request.inputs()[0].as_numpy())
            tensors = [self._zeros(rows, *o) for o in self._outputs if o[0] in request.requested_output_names()]
            response = pb_utils.InferenceResponse(tensors)
            if self._decoupled:
                request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            responses.append(response)
        return None if self._decoupled else responses

    def _zeros(self, rows, name, dtype, dims):
        value = np.full([rows, *dims], b"0", object) if dtype == np.object_ else np.zeros([rows, *dims], dtype)
        return pb_utils.Tensor(name, value)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "model_repo"
    place.mkdir()
    spec = load_spec(SPEC)
    render_trtllm(EnginePlan.of(spec, *source_config(spec)), PurePosixPath("/deployments/x"), place)
    # All that would open files of the container.
    for model in ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble_unary", "adapters"):
        (place / model / "1" / "model.py").write_text(_ZEROS)
    change(place, "tensorrt_llm", lambda config: setattr(config, "backend", "python"))
    return place


def change(repository: Path, name: str, edit: Callable[[Any], object]) -> None:
    path = repository / name / "config.pbtxt"
    config = from_text(path.read_text())
    edit(config)
    path.write_text(to_text(config))


def step(config: Any, model: str) -> Any:
    return next(step for step in config.ensemble_scheduling.step if step.model_name == model)


def loads(repository: Path) -> bool:
    launched = LaunchedServer("--model-repository", str(repository))
    try:
        launched.wait_ready(timeout_s=120)
    except AssertionError:
        assert launched.process.returncode == 1, launched.output
        return False
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 0
    return True


def test_what_the_check_passes_loads_and_answers(repository: Path) -> None:
    assert check_repository(repository, built=False) == []
    assert loads(repository)


def leave_a_placeholder(repository: Path) -> None:
    path = repository / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 256", "max_batch_size: ${triton_max_batch_size}", 1))


# A missing model.py is not among them: Triton 2.51 waits for that model without end, which is worse than refusing.
FAULTS: dict[str, Callable[[Path], object]] = {
    "an unfilled placeholder": leave_a_placeholder,
    "another type between steps": lambda r: change(
        r, "ensemble", lambda c: step(c, "tensorrt_llm").input_map.update({"seed": "temperature"})
    ),
    "a step after the decoupled one that takes from another": lambda r: change(
        r, "ensemble", lambda c: step(c, "postprocessing").input_map.update({"TOKENS_BATCH": "_INPUT_ID"})
    ),
    "a tensor that nobody gives": lambda r: change(
        r, "ensemble", lambda c: step(c, "tensorrt_llm").input_map.update({"end_id": "_NOBODY"})
    ),
    "a model that is not there": lambda r: change(
        r, "ensemble", lambda c: setattr(step(c, "postprocessing"), "model_name", "post")
    ),
    "a required input without a wire": lambda r: change(
        r, "ensemble", lambda c: step(c, "postprocessing").input_map.pop("TOKENS_BATCH")
    ),
    "a name that is not the directory's": lambda r: change(r, "preprocessing", lambda c: setattr(c, "name", "pre")),
    "an input that the model does not have": lambda r: change(
        r, "ensemble", lambda c: step(c, "preprocessing").input_map.update({"NO_INPUT": "text_input"})
    ),
    "another shape between steps": lambda r: change(
        r, "ensemble", lambda c: step(c, "tensorrt_llm").input_map.update({"end_id": "_STOP_WORDS_IDS"})
    ),
    "a step that takes fewer at once": lambda r: change(r, "postprocessing", lambda c: setattr(c, "max_batch_size", 2)),
    "an output that no step gives": lambda r: change(
        r, "ensemble", lambda c: step(c, "postprocessing").output_map.update({"OUTPUT": "_text"})
    ),
    "an output of another type": lambda r: change(
        r, "ensemble", lambda c: setattr(c.output[0], "data_type", pb.TYPE_INT64)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_check_finds_does_not_load(repository: Path, fault: str) -> None:
    FAULTS[fault](repository)
    assert check_repository(repository, built=False) != []
    assert not loads(repository)
