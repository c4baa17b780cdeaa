"""Requests that lack an input: Triton only counts them, another one in its place passes, and the model has to see it.

In an ensemble such a request would have no step that can ever run, and no answer.
"""

from __future__ import annotations

import urllib.error

import numpy as np
import pytest

from tests.server.wire import ask_one, events, post, tensor

MODELS = {
    "ensemble": {"text_input": [["hello"]], "max_tokens": [[4]]},
    "ensemble_unary": {"text_input": [["hello"]], "max_tokens": [[4]]},
    "preprocessing": {"QUERY": [["hello"]], "REQUEST_OUTPUT_LEN": [[4]]},
    "tensorrt_llm": {"input_ids": [[504, 3575]], "input_lengths": [[2]], "request_output_len": [[4]]},
    "postprocessing": {"TOKENS_BATCH": [[[504, 3575]]], "SEQUENCE_LENGTH": [[2]]},
}
SPARE = {
    "ensemble": {"temperature": [[1.0]]},
    "ensemble_unary": {"temperature": [[1.0]]},
    "preprocessing": {"END_ID": [[2]]},
    "tensorrt_llm": {"temperature": [[1.0]]},
    "postprocessing": {"TEXT_CUT": [[0]], "SEQUENCE_INDEX": [[0]]},
}
TOLD_AS = {"input_ids": "inputTokens", "text_input": "text_input", "QUERY": "text_input"}


@pytest.mark.parametrize(("model", "missing"), [(model, name) for model, inputs in MODELS.items() for name in inputs])
def test_a_missing_input_is_named_at_once(server, model: str, missing: str) -> None:
    inputs = {name: value for name, value in MODELS[model].items() if name != missing} | SPARE[model]
    reply = ask_one(server, model, [tensor(name, value) for name, value in inputs.items()])
    assert TOLD_AS.get(missing, missing) in reply.error, reply
    assert "Internal" not in reply.error


@pytest.mark.parametrize("model", ["ensemble", "ensemble_unary"])
def test_generate_says_it_as_well(server, model: str) -> None:
    status, answer = post(server, f"{model}/generate", {"text_input": "hello"})
    assert status >= 400
    assert "max_tokens" in answer["error"]


def test_generate_stream_says_it_as_well(server) -> None:
    with pytest.raises(urllib.error.HTTPError) as found:
        list(events(server, "ensemble", {"text_input": "hello"}))
    assert "max_tokens" in found.value.read().decode()


def test_a_request_of_nothing_is_answered(server) -> None:
    assert "text_input" in ask_one(server, "ensemble", [tensor("stream", np.array([[False]]))]).error
