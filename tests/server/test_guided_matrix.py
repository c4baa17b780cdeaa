"""A structure together with everything else a request may ask for, as docs/guided.md has it in its table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from clients import ClientError, GrpcClient
from tests.server.guided_cases import judge_json
from tests.server.launched import ServerAddresses

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)}
COLOURS = {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["red", "blue"]'}


@pytest.fixture(scope="module")
def client(server: ServerAddresses) -> Iterator[GrpcClient]:
    with GrpcClient(server.grpc) as made:
        yield made


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.5, "top_k": 50, "seed": 1},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"no_repeat_ngram_size": 8},
        {"embedding_bias_words": ["hello"], "embedding_bias_weights": [5.0]},
        {"min_tokens": 40},
        {"end_id": -1},
        {"top_logprobs": 2, "return_log_probs": True},
        {"stop_words": ["never written"], "exclude_stop_words_in_output": True},
    ],
    ids=lambda values: next(iter(values)),
)
def test_the_structure_holds_beside_other_inputs(client, values):
    answer = client.generate("A person:", max_tokens=60, **PERSON, **values)
    assert judge_json(SCHEMA)(answer.text) is None
    assert answer.finish_reason == "stop"


def test_a_bias_chooses_among_what_the_structure_allows(client):
    for word in ("red", "blue"):
        values = {"embedding_bias_words": [word], "embedding_bias_weights": [50.0]}
        assert client.generate("A colour:", **COLOURS, **values).text == word


def test_where_bans_leave_nothing_the_request_ends_with_an_error(client):
    only = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{3}"}
    with pytest.raises(ClientError, match=r"forbidden|banned"):
        client.generate("A number:", bad_words=list("0123456789"), **only)


def test_a_shared_prefix_is_reused_with_a_structure(client):
    text = "A long text that many requests share. " * 20
    for question in ("Who?", "Who else?"):
        answer = client.generate(text + question, max_tokens=60, return_perf_metrics=True, **PERSON)
        assert judge_json(SCHEMA)(answer.text) is None
    assert answer.outputs["kv_cache_reused_blocks"].item() >= 4


def test_a_stream_that_is_left_ends_the_structure_and_harms_nobody(client):
    endless = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z ]{3000}"}
    with client.stream("Once", max_tokens=2000, **endless) as stream:
        first = next(iter(stream)).text
    assert re.fullmatch("[a-z ]+", first)
    assert client.generate("A colour:", **COLOURS).text in ("red", "blue")
