"""Draft-target decoding: the loop by itself, and the model around it before fake engines."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit import fake_pb_utils, fake_triton
from tests.unit.fake_pb_utils import Tensor, TritonError, texts
from tests.unit.fake_triton import Request
from tests.unit.small_tokenizers import small_tokenizer, write_tokenizer_dir
from tests.unit.test_unary import reply
from tests.unit.toy_engine import VOCAB, answer, propose

fake_triton.install()

from python_backend.triton import bls  # noqa: E402
from python_backend.triton.draft_target import Proposal, Verified, rounds  # noqa: E402

END = 2
PROMPT = [40, 41, 42]
TOKENIZER = small_tokenizer("byte_level")


def run_rounds(size: int, max_tokens: int, prompt: list[int] = PROMPT) -> list[Any]:
    def verify(ids: Any, proposal: Proposal) -> Verified:
        return Verified(answer(ids, len(proposal.ids) + 1, END, proposal.ids))

    return list(rounds(prompt, max_tokens, size, lambda ids, n: Proposal(propose(ids, n, END)), verify))


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 20, 33, 34, 35, 80])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_tokens_are_those_of_the_large_model_alone(size: int, max_tokens: int) -> None:
    found = run_rounds(size, max_tokens)
    assert [token for one in found for token in one.ids] == answer(PROMPT, max_tokens, END)
    for one in found:
        assert one.num_accepted <= one.num_proposed <= size
        assert len(one.ids) <= one.num_proposed + 1


def test_a_proposal_that_is_right_saves_steps() -> None:
    found = run_rounds(5, 30)
    assert len(found) < 15
    assert sum(one.num_accepted for one in found) > 12


def test_an_end_right_behind_accepted_tokens_ends_the_loop() -> None:
    found = run_rounds(5, 100)
    assert sum(len(one.ids) for one in found) == 34  # 37 tokens with the prompt, then the end
    assert found[-1].num_accepted == len(found[-1].ids)


def test_a_prompt_that_wants_no_answer_gets_none() -> None:
    assert [one.ids for one in run_rounds(3, 10, prompt=[30] * 37)] == [[]]


# --- the model ----------------------------------------------------------------------------------------------------


class Engines:
    """Answers BLS calls as the models of a repository would."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, np.ndarray]]] = []
        self.failing: dict[str, TritonError] = {}

    def request(self, **options: Any) -> Any:
        engines = self

        class Call:
            def exec(self, decoupled: bool) -> Any:
                assert decoupled
                inputs = {tensor.name(): tensor.as_numpy() for tensor in options["inputs"]}
                engines.calls.append((options["model_name"], inputs))
                error = engines.failing.get(options["model_name"])
                if error is not None:
                    return iter([reply([], error)])
                try:
                    tensors = getattr(engines, f"_{options['model_name']}")(inputs)
                except LookupError as error:
                    return iter([reply([], TritonError(str(error)))])
                wanted = options["requested_output_names"]
                return iter([reply([tensor for tensor in tensors if not wanted or tensor.name() in wanted]), reply([])])

        return Call()

    def of(self, model: str) -> list[dict[str, np.ndarray]]:
        return [inputs for name, inputs in self.calls if name == model]

    def _preprocessing(self, inputs: Any) -> list[Tensor]:
        ids = TOKENIZER.encode(inputs["QUERY"].flat[0].decode())
        end = inputs.get("END_ID", np.array([[END]], np.int32))
        return [
            Tensor("INPUT_ID", np.array([ids], np.int32)),
            Tensor("REQUEST_INPUT_LEN", np.array([[len(ids)]], np.int32)),
            Tensor("OUT_END_ID", end),
            Tensor("OUT_PAD_ID", end),
            Tensor("STOP_WORDS_IDS", np.zeros((1, 2, 0), np.int32)),
        ]

    def _tensorrt_llm(self, inputs: Any) -> list[Tensor]:
        assert inputs["exclude_input_in_output"].all()
        draft = inputs["draft_input_ids"][0].tolist() if "draft_input_ids" in inputs else []
        found = answer(inputs["input_ids"][0].tolist(), inputs["request_output_len"].item(), END, draft)
        log_probs = np.array([[[-0.5] * len(found)]], np.float32)
        return [*self._ids(found), Tensor("output_log_probs", log_probs)]

    def _draft(self, inputs: Any) -> list[Tensor]:
        found = propose(inputs["input_ids"][0].tolist(), inputs["request_output_len"].item(), END)
        return [*self._ids(found), Tensor("generation_logits", np.zeros((1, 1, 8, VOCAB), np.float32))]

    def _ids(self, found: list[int]) -> list[Tensor]:
        padded = np.array([[[*found, -1, -1]]], np.int32)
        return [Tensor("output_ids", padded), Tensor("sequence_length", np.array([[len(found)]], np.int32))]

    def _ensemble(self, inputs: Any) -> list[Tensor]:
        return [Tensor("text_output", texts("from the ensemble"))]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    found = Engines()
    monkeypatch.setattr(fake_pb_utils, "InferenceRequest", found.request)
    return found


def config_of(directory: Path, decoupled: bool = True, **parameters: str) -> dict[str, Any]:
    (directory / "engine").mkdir(exist_ok=True)
    (directory / "engine" / "config.json").write_text(json.dumps({"build_config": {"max_seq_len": 64}}))
    values = {
        "tokenizer_dir": str(write_tokenizer_dir(directory / "tokenizer", "byte_level")),
        "gpt_model_path": str(directory / "engine"), "tensorrt_llm_draft_model_name": "draft", "num_draft_tokens": "5",
        **parameters,
    }  # fmt: skip
    entries = {key: {"string_value": value} for key, value in values.items()}
    return {"parameters": entries, "model_transaction_policy": {"decoupled": decoupled}}


def start(config: dict[str, Any]) -> bls.TritonPythonModel:
    model = bls.TritonPythonModel()
    model.initialize({"model_name": "tensorrt_llm_bls", "model_config": json.dumps(config)})
    return model


@pytest.fixture
def model(engines: Engines, tmp_path: Path) -> Any:
    found = start(config_of(tmp_path))
    yield found
    found.finalize()


def ask(model: bls.TritonPythonModel, max_tokens: int = 20, **tensors: Any) -> Request:
    values = {"text_input": texts("hello world"), "max_tokens": np.array([[max_tokens]], np.int32), **tensors}
    request = Request({name: np.asarray(value) for name, value in values.items()}, "mine")
    model.execute([request])
    return request


def alone(max_tokens: int, prompt: str = "hello world") -> list[int]:
    return answer(TOKENIZER.encode(prompt), max_tokens, END)


def text_of(responses: list[Any]) -> str:
    return "".join(response["text_output"][0].decode() for response in responses)


TRUE = np.ones((1, 1), np.bool_)


def test_an_answer_is_the_large_models(model: Any, engines: Engines) -> None:
    (response,) = ask(model).sender.wait()
    assert response["text_output"][0].decode() == TOKENIZER.decode(alone(20))
    assert len(engines.of("tensorrt_llm")) < 12
    assert max(inputs["draft_input_ids"].size for inputs in engines.of("tensorrt_llm")[:-1]) == 5


def test_pieces_of_a_stream_join_to_the_answer(model: Any) -> None:
    responses = ask(model, stream=TRUE).sender.wait()
    assert len(responses) > 4
    assert text_of(responses) == TOKENIZER.decode(alone(20))


@pytest.mark.parametrize("stream", [False, True])
def test_what_lies_behind_a_stop_word_is_cut(model: Any, stream: bool) -> None:
    whole = TOKENIZER.decode(alone(20))
    word = whole[len(whole) // 2 :][:3]
    responses = ask(model, stop_words=texts([word]), stream=np.array([[stream]])).sender.wait()
    assert text_of(responses) == whole[: whole.index(word) + len(word)]


def test_an_answer_never_goes_beyond_the_engine(model: Any, engines: Engines) -> None:
    prompt = "hello world " * 9
    assert 37 < len(TOKENIZER.encode(prompt)) < 60
    ask(model, max_tokens=500, text_input=texts(prompt)).sender.wait()
    for inputs in engines.of("tensorrt_llm"):
        assert inputs["input_ids"].size + inputs["request_output_len"].item() <= 64 + 1


def test_log_probs_and_counts_come_when_asked_for(model: Any) -> None:
    asked = ("return_log_probs", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens")
    (response,) = ask(model, **dict.fromkeys(asked, TRUE)).sender.wait()
    assert response["output_log_probs"].shape == (1, 1, 20)
    assert response["cum_log_probs"] == pytest.approx(-10)
    assert response["num_input_tokens"] == len(TOKENIZER.encode("hello world"))
    assert response["num_output_tokens"] == 20
    assert 0 < response["acceptance_rate"] < 1
    assert response["total_accepted_draft_tokens"] < response["total_draft_tokens"]
    (response,) = ask(model).sender.wait()
    assert [tensor.name() for tensor in response.output_tensors] == ["text_output"]


def test_sampling_is_for_both_models_only_when_logits_decide(model: Any, engines: Engines) -> None:
    settings = {"temperature": np.array([[0.7]], np.float32), "seed": np.array([[9]], np.uint64)}
    ask(model, **settings, min_tokens=np.array([[6]], np.int32)).sender.wait()
    assert "temperature" not in engines.of("draft")[0]
    target = engines.of("tensorrt_llm")
    assert target[0]["temperature"] == np.float32(0.7)
    seeds = [inputs["seed"].item() for inputs in target]
    assert len(set(seeds)) == len(seeds)
    assert target[0]["min_tokens"].item() == 6
    assert "min_tokens" not in target[-1]
    engines.calls.clear()
    ask(model, **settings, use_draft_logits=TRUE).sender.wait()
    assert engines.of("draft")[0]["temperature"] == np.float32(0.7)
    first = engines.of("tensorrt_llm")[0]
    assert first["draft_logits"].shape == (1, first["draft_input_ids"].size, VOCAB)


def test_adapters_are_the_large_models(model: Any, engines: Engines) -> None:
    ask(model, lora_task_id=np.array([[3]], np.uint64)).sender.wait()
    assert engines.of("tensorrt_llm")[0]["lora_task_id"] == 3
    assert "lora_task_id" not in engines.of("draft")[0]


class Evicting(Engines):
    """Keeps an adapter for two rounds, then drops it; and preprocessing that knows a name."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def _preprocessing(self, inputs: Any) -> list[Tensor]:
        if "LORA_NAME" not in inputs:
            return super()._preprocessing(inputs)
        values = {"TASK_ID": [[9]], "WEIGHTS": [[[1.0]]], "CONFIG": [[[1, 0, 1, 0]]]}
        adapter = [Tensor(f"OUT_LORA_{name}", np.array(value)) for name, value in values.items()]
        return [*super()._preprocessing(inputs), *adapter]

    def _tensorrt_llm(self, inputs: Any) -> list[Tensor]:
        self.left = 2 if "lora_weights" in inputs else self.left - 1
        if self.left < 0:
            raise LookupError(
                "Executor failed process requestId 1 due to the following error: LoRA task 9 not found in cache. "
                "Please send LoRA weights with request"
            )
        return super()._tensorrt_llm(inputs)


@pytest.mark.parametrize("by_name", [True, False])
def test_weights_are_sent_when_the_engines_cache_asks_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_name: bool
) -> None:
    engines = Evicting()
    monkeypatch.setattr(fake_pb_utils, "InferenceRequest", engines.request)
    model = start(config_of(tmp_path))
    own = {
        "lora_task_id": np.array([[9]], np.uint64), "lora_weights": np.ones((1, 1, 1), np.float16),
        "lora_config": np.ones((1, 1, 4), np.int32),
    }  # fmt: skip
    (response,) = ask(model, **({"lora_name": texts("pirate")} if by_name else own)).sender.wait()
    model.finalize()
    assert response["text_output"][0].decode() == TOKENIZER.decode(alone(20))
    asked = ["lora_weights" in inputs for inputs in engines.of("tensorrt_llm")]
    assert asked[:5] == [False, True, False, False, False]
    assert asked[5]
    assert all("lora_task_id" in inputs for inputs in engines.of("tensorrt_llm"))
    assert not any("lora_task_id" in inputs for inputs in engines.of("draft"))


def test_an_id_alone_that_was_evicted_is_the_clients_to_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engines = Evicting()
    monkeypatch.setattr(fake_pb_utils, "InferenceRequest", engines.request)
    model = start(config_of(tmp_path))
    error = ask(model, lora_task_id=np.array([[9]], np.uint64)).sender.error
    model.finalize()
    assert "LoRA task 9 not found in cache" in error.message()
    assert len(engines.of("tensorrt_llm")) == 1


def test_a_failing_draft_model_costs_speed_and_nothing_else(model: Any, engines: Engines) -> None:
    engines.failing["draft"] = TritonError("queue is full", TritonError.UNAVAILABLE)
    (response,) = ask(model).sender.wait()
    assert response["text_output"][0].decode() == TOKENIZER.decode(alone(20))
    assert len(engines.of("draft")) == 1


def test_the_large_models_error_is_passed_on_with_its_code(model: Any, engines: Engines) -> None:
    engines.failing["tensorrt_llm"] = TritonError("queue is full", TritonError.UNAVAILABLE)
    error = ask(model).sender.error
    assert (error.message(), error.code()) == ("queue is full", TritonError.UNAVAILABLE)


def test_the_prompt_comes_first_when_it_is_wanted(model: Any) -> None:
    (response,) = ask(model, exclude_input_in_output=np.zeros((1, 1), np.bool_)).sender.wait()
    assert response["text_output"][0].decode() == "hello world" + TOKENIZER.decode(alone(20))


@pytest.mark.parametrize(
    "tensors",
    [
        {"num_draft_tokens": np.zeros((1, 1), np.int32)},
        {"beam_width": np.array([[2]], np.int32)},
        {"return_context_logits": TRUE},
        {"guided_decoding_guide_type": texts("json"), "stream": TRUE},
        {"text_input": texts("a", "b"), "max_tokens": np.full((2, 1), 4, np.int32)},
    ],
)
def test_what_does_not_speculate_goes_to_the_ensemble(model: Any, engines: Engines, tensors: dict[str, Any]) -> None:
    (response,) = ask(model, **tensors).sender.wait()
    assert response["text_output"].flat[0] == b"from the ensemble"
    ((name, inputs),) = engines.calls
    assert name == "ensemble"
    assert "num_draft_tokens" not in inputs


class Endless(Engines):
    """An ensemble that goes on until the engine is told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = threading.Event()

    def _ensemble(self, inputs: Any) -> list[Tensor]:
        assert self.stopped.wait(5)
        return super()._ensemble(inputs)

    def _tensorrt_llm(self, inputs: Any) -> list[Tensor]:
        assert inputs["stop"].all()
        self.stopped.set()
        return []


def test_what_went_to_the_ensemble_is_stopped_when_its_client_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engines = Endless()
    monkeypatch.setattr(fake_pb_utils, "InferenceRequest", engines.request)
    model = start(config_of(tmp_path))
    request = ask(model, num_draft_tokens=np.zeros((1, 1), np.int32))
    assert not request.sender.final.wait(0.2)
    request.sender.cancelled = True
    request.sender.wait()
    model.finalize()
    assert engines.stopped.is_set()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"num_draft_tokens": np.array([[6]], np.int32)}, "num_draft_tokens is 6; allowed: 0 to 5"),
        ({"num_draft_tokens": np.array([[-1]], np.int32)}, "num_draft_tokens is -1; allowed: 0 to 5"),
        ({"return_context_logits": TRUE}, "context logits are not supported with speculative decoding"),
        ({"beam_width": np.array([[2]], np.int32)}, "not supported with beam_width > 1"),
        ({"guided_decoding_guide_type": texts("json")}, "guided decoding is not supported with speculative"),
        ({"image_url_input": texts("x")}, "image_url_input was sent; the model of this deployment takes text only"),
    ],
)
def test_what_cannot_be_done_is_refused(model: Any, tensors: dict[str, Any], message: str) -> None:
    asked = {"num_draft_tokens": np.array([[3]], np.int32)} | tensors
    assert message in ask(model, **asked).sender.error.message()


def test_a_client_that_is_gone_ends_the_loop(model: Any, engines: Engines) -> None:
    values = {"text_input": texts("hello world"), "max_tokens": np.array([[20]], np.int32)}
    request = Request(values)
    request.sender.cancelled = True
    model.execute([request])
    assert request.sender.error.code() == TritonError.CANCELLED
    assert len(engines.of("tensorrt_llm")) == 1


def test_a_model_that_is_not_decoupled_does_not_stream(engines: Engines, tmp_path: Path) -> None:
    model = start(config_of(tmp_path, decoupled=False))
    assert "only supported if model is deployed using decoupled mode" in ask(model, stream=TRUE).sender.error.message()
    assert ask(model).sender.wait()[0]["text_output"][0].decode() == TOKENIZER.decode(alone(20))
    model.finalize()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_draft_tokens": "${n}"}, "Parameter num_draft_tokens is not set"),
        ({"num_draft_tokens": "few"}, "num_draft_tokens is 'few'"),
        ({"accumulate_tokens": "true"}, "accumulate_tokens is true"),
        ({"gpt_model_path": "/nowhere"}, "/nowhere/config.json is no readable engine configuration"),
    ],
)
def test_a_wrong_parameter_is_the_load_error(parameters: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(fake_pb_utils.TritonModelException, match=message):
        start(config_of(tmp_path, **parameters))
