"""`tensorrt_llm` in front of a fake engine: who is answered how, and that nobody harms anybody."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit import fake_pb_utils, fake_triton
from tests.unit.fake_engine import FakeEngine
from tests.unit.fake_triton import MetricFamily, Request
from tests.unit.small_tokenizers import write_tokenizer_dir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

fake_triton.install()

from python_backend import __version__  # noqa: E402
from python_backend.errors import EngineFailure  # noqa: E402
from python_backend.triton import engine_model  # noqa: E402

TritonError = fake_pb_utils.TritonError


class Served:
    """A loaded model and shorthand to call it."""

    def __init__(self, directory: Path, decoupled: bool = True, **parameters: str) -> None:
        engine_dir = directory / "engine"
        engine_dir.mkdir()
        build = {"max_batch_size": 8, "max_seq_len": 64, "max_input_len": 32, "max_queue_size": 4}
        config = {"version": __version__, "target": "cpu", "build_config": build, "checkpoint_dir": "../checkpoint"}
        (engine_dir / "config.json").write_text(json.dumps({**config, "tokenizer_dir": "../tokenizer"}))
        write_tokenizer_dir(directory / "tokenizer", "byte_level")
        values = {"gpt_model_path": str(engine_dir), "gpt_model_type": "inflight_fused_batching"}
        values |= {"guided_decoding_backend": "none", **parameters}
        self.model = engine_model.TritonPythonModel()
        self.model.initialize(
            {
                "model_name": "tensorrt_llm",
                "model_version": "1",
                "model_config": json.dumps(
                    {
                        "parameters": {key: {"string_value": value} for key, value in values.items()},
                        "model_transaction_policy": {"decoupled": decoupled},
                    }
                ),
            }
        )

    def ask(self, prompt: list[int] | None = None, **options: Any) -> Request:
        request = ask(prompt, **options)
        self.model.execute([request])
        return request


def ask(
    prompt: list[int] | None = None, output_len: int = 3, streaming: bool = True, id: str = "", **tensors: Any
) -> Request:
    ids = [1, 2, 3] if prompt is None else prompt
    inputs = {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[output_len]], np.int32),
        "streaming": np.array([[streaming]]),
    }
    outputs = ("output_ids", "sequence_length", "finish_reason", "batch_index", "warnings")
    return Request({**inputs, **{name: np.array(value) for name, value in tensors.items()}}, id, outputs)


def stop(id: str) -> Request:
    return ask([0], output_len=0, streaming=False, id=id, stop=[[True]])


def tokens(request: Request) -> list[int]:
    return [token for response in request.sender.wait() for token in response["output_ids"].reshape(-1).tolist()]


def reason(request: Request) -> bytes:
    return request.sender.wait()[-1]["finish_reason"][0, 0]


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_model, "LLMEngine", FakeEngine)
    monkeypatch.setattr(engine_model.ShutdownWatcher, "start", lambda self: None)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.model.finalize()


def test_a_stream_gives_one_response_for_each_token(served):
    request = served.ask()
    responses = request.sender.wait()
    assert [r["output_ids"].tolist() for r in responses] == [[[[4]]], [[[5]]], [[[6]]]]
    assert ["finish_reason" in r for r in responses] == [False, False, True]
    assert reason(request) == b"length"


def test_an_end_token_is_not_shown_and_the_stream_closes_empty(served):
    request = served.ask(end_id=[[6]], output_len=20)
    assert tokens(request) == [4, 5]
    assert request.sender.responses[-1]["output_ids"].shape == (1, 1, 0)
    assert reason(request) == b"stop"


def test_a_bad_request_gets_its_error_at_once_and_harms_no_other(served):
    good, bad, other = ask(), ask([99999]), ask([10])
    served.model.execute([good, bad, other])
    assert bad.sender.final.is_set()
    assert "A token of input_ids is 99999" in bad.sender.error.message()
    assert bad.sender.error.code() == TritonError.INVALID_ARG
    assert tokens(good) == [4, 5, 6]
    assert tokens(other) == [11, 12, 13]


def test_a_refused_input_has_the_code_unsupported(served):
    request = served.ask(lora_task_id=[[1]])
    assert request.sender.error.code() == TritonError.UNSUPPORTED


def test_a_stop_request_ends_all_with_its_id_and_no_other(served):
    first, second, other = (served.ask(output_len=60, id=id) for id in ("a", "a", "b"))
    stopper = stop("a")
    served.model.execute([stopper])
    (answer,) = stopper.sender.wait()
    assert answer.output_tensors == []
    assert answer.error is None
    assert reason(first) == reason(second) == b"cancelled"
    assert len(tokens(first)) < 60
    assert reason(other) == b"length"


def test_a_stop_of_an_unknown_id_is_answered_empty(served):
    stopper = stop("nobody")
    served.model.execute([stopper])
    (answer,) = stopper.sender.wait()
    assert answer.output_tensors == []
    assert answer.error is None


def test_a_stop_without_an_id_has_upstreams_text(served):
    stopper = stop("")
    served.model.execute([stopper])
    assert stopper.sender.error.message().startswith("Trying to stop a request but request ID is not provided")


def test_a_client_that_is_gone_frees_its_place_within_100_ms(served):
    request = served.ask(output_len=60)
    started = time.monotonic()
    request.sender.cancelled = True
    assert reason(request) == b"cancelled"
    assert time.monotonic() - started < 0.2  # 0.1, and as much again for a busy machine
    assert len(served.model._in_flight) == 0


def test_a_full_queue_is_answered_at_once_and_what_runs_goes_on(served):
    running = [served.ask(output_len=60) for _ in range(4)]
    refused = served.ask()
    assert refused.sender.final.is_set()
    assert refused.sender.error.message() == "Maximum queue size of 4 has been reached, please try again later"
    assert refused.sender.error.code() == TritonError.UNAVAILABLE
    assert all(reason(request) == b"length" for request in running)


def test_a_batch_that_does_not_fit_the_queue_leaves_nothing_behind(served):
    rows = 5
    batch = ask(output_len=60)
    batch.tensors = {name: np.repeat(array, rows, axis=0) for name, array in batch.tensors.items()}
    served.model.execute([batch])
    assert "Maximum queue size of 4" in batch.sender.error.message()
    assert len(served.model._in_flight) == 0
    assert tokens(served_after(served)) == [4, 5, 6]


def served_after(served: Served) -> Request:
    """A request that is taken once the queue has room again."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        request = served.ask()
        if request.sender.wait()[0].error is None:
            return request
        time.sleep(0.01)
    raise AssertionError("the queue stayed full")


def test_every_row_of_a_batch_is_answered_under_its_index_and_the_last_one_is_final(served):
    batch = ask()
    batch.tensors["input_ids"] = np.array([[1, 2, 3], [10, 0, 0]], np.int32)
    batch.tensors["input_lengths"] = np.array([[3], [1]], np.int32)
    batch.tensors["request_output_len"] = np.array([[2], [4]], np.int32)
    batch.tensors["streaming"] = np.array([[True], [True]])
    served.model.execute([batch])
    found: dict[int, list[int]] = {0: [], 1: []}
    for response in batch.sender.wait():
        found[response["batch_index"].item()] += response["output_ids"].reshape(-1).tolist()
    assert found == {0: [4, 5], 1: [11, 12, 13, 14]}


def test_the_timeout_of_a_request_ends_it(served):
    request = served.ask(output_len=60, timeout_ms=[[30]])
    assert reason(request) == b"timeout"


def test_a_parameter_nobody_knows_becomes_a_warning(served):
    request = ask()
    request.params = '{"min_length": 3}'
    served.model.execute([request])
    (warning,) = request.sender.wait()[0]["warnings"][0]
    assert b"min_length" in warning


def test_an_engine_error_ends_its_request_only(served):
    failing, other = served.ask(output_len=60), served.ask(output_len=5)
    engine = served.model._engine
    (engine_id,) = [k for k, (r, _) in engine._running.items() if r.sampling.max_tokens == 60]
    engine.fail(engine_id, EngineFailure("broken"))
    failing.sender.wait()
    assert failing.sender.responses[-1].error.message() == "broken"
    assert len(tokens(other)) == 5


def counted(name: str, value: str) -> float:
    return MetricFamily.values.get((name, tuple(sorted(("tensorrt_llm", "1", value)))), 0)


def test_prompts_of_a_request_that_fails_are_counted_once_each(served):
    def ended() -> dict[str, float]:
        return {reason: counted("llm_requests_total", reason) for reason in ("error", "cancelled", "length")}

    before = ended()
    batch = ask(output_len=60)
    batch.tensors = {name: np.repeat(array, 3, axis=0) for name, array in batch.tensors.items()}
    served.model.execute([batch])
    engine = served.model._engine
    engine.fail(next(iter(engine._running)), EngineFailure("broken"))
    batch.sender.wait()
    served_after(served).sender.wait()
    deadline = time.monotonic() + 5
    expected = {"error": 1, "cancelled": 2, "length": 1}
    while (found := {reason: count - before[reason] for reason, count in ended().items()}) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_finalize_ends_what_runs_quickly(tmp_path):
    served = Served(tmp_path)
    request = served.ask(output_len=60)
    started = time.monotonic()
    served.model.finalize()
    assert time.monotonic() - started < 1
    assert request.sender.final.is_set()
    assert reason(request) == b"cancelled"


def test_a_server_that_is_told_to_end_lets_finish_refuses_and_then_cancels(served):
    running, longer = served.ask(output_len=5), served.ask(output_len=60)
    served.model._close()
    late = served.ask()
    assert late.sender.error.code() == TritonError.UNAVAILABLE
    assert "shutting down" in late.sender.error.message()
    assert len(tokens(running)) == 5
    served.model._cancel_all()
    assert reason(longer) == b"cancelled"


def test_a_question_about_health_is_answered_empty_or_by_the_reason(served):
    stop = {"stop": np.ones((1, 1), np.bool_), "input_ids": np.zeros((1, 1), np.int32)}
    well, ill = (Request(stop, id="health", params='{"health": true}') for _ in range(2))
    served.model.execute([well])
    assert well.sender.wait()[0].error is None
    served.model._close()
    served.model.execute([ill])
    assert ill.sender.error.code() == TritonError.UNAVAILABLE
    assert "the server is shutting down" in ill.sender.error.message()


def test_a_model_that_is_not_decoupled_sends_one_response(tmp_path):
    served = Served(tmp_path, decoupled=False)
    request = served.ask(streaming=False, output_len=4)
    assert tokens(request) == [1, 2, 3, 4, 5, 6, 7]  # exclude_input_in_output is false unless set
    assert len(request.sender.responses) == 1
    refused = served.ask(streaming=True)
    assert refused.sender.error.message() == "Streaming is only supported if model is deployed using decoupled mode."
    served.model.finalize()


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"gpt_model_type": "sometimes"}, "Invalid gpt_model_type sometimes"),
        ({"max_beam_width": "many"}, "max_beam_width of tensorrt_llm is 'many'"),
        ({"max_beam_width": "9"}, "max_beam_width is 9, but the engine was built for 4"),
        ({"max_beam_witdh": "2"}, "Parameter max_beam_witdh of tensorrt_llm is unknown"),
        ({"encoder_model_path": "/x"}, "encoder_model_path is /x, but only decoder-only"),
        ({"decoding_mode": "medusa"}, "decoding_mode of tensorrt_llm is 'medusa'"),
        ({"max_attention_window_size": "16"}, "max_attention_window_size is 16"),
        ({"gpt_model_path": "/nowhere"}, "/nowhere/config.json cannot be read"),
        ({"gpt_model_path": ""}, "gpt_model_path of tensorrt_llm is not set"),
    ],
)
def test_a_wrong_parameter_is_named_when_the_model_loads(tmp_path, parameters, text):
    with pytest.raises(fake_pb_utils.TritonModelException, match=text):
        Served(tmp_path, **parameters)


def test_unfilled_placeholders_and_empty_values_count_as_absent(tmp_path):
    served = Served(tmp_path, max_beam_width="${max_beam_width}", encoder_model_path="", gpu_device_ids="0,1")
    assert tokens(served.ask()) == [4, 5, 6]
    served.model.finalize()
    assert any("gpu_device_ids has no meaning on a CPU" in text for _, text in fake_pb_utils.Logger.lines)


def test_a_dead_engine_gives_clear_errors_and_ends_the_server(served, monkeypatch):
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(engine_model.os, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(FakeEngine, "submit", refuse_as_dead)
    served.model._engine.failure = RuntimeError("out of memory")
    late = served.ask()
    assert late.sender.error.message() == "The engine has failed (out of memory); restart the server."
    assert late.sender.error.code() == TritonError.INTERNAL
    deadline = time.monotonic() + 5
    while not killed and time.monotonic() < deadline:
        time.sleep(0.01)
    served.model._poll()
    assert killed == [(engine_model.os.getppid(), engine_model.signal.SIGTERM)]
    assert "The engine has failed (out of memory)" in served.ask().sender.error.message()


def refuse_as_dead(engine: FakeEngine, request: Any) -> None:
    raise EngineFailure(f"The engine has failed ({engine.failure}); restart the server.")
