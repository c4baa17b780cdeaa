"""A deployment whose spec chooses XGrammar, on a real server: what its answers keep, what it refuses, how it fails."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from clients import ClientError, GrpcClient
from python_backend.guided import xgrammar_library
from tests.server.faulty import running
from tests.server.guided_cases import judge_json
from tests.server.launched import LaunchedServer
from tests.server.tiny_deployment import build_tiny_deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not xgrammar_library.is_installed(), reason="make setup EXTRA=xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Rome", "東京"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
TAG = {
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "integer", "minimum": 0, "maximum": 99}, "end": "</f>"},
        {"begin": "<f=say>", "schema": {"enum": ["a", "b"]}, "end": "</f>"},
    ],
    "triggers": ["<f="],
    "separator": ";",
    "stop_after_first": True,
}
_ABSENT = "import sys\nsys.modules['xgrammar'] = None\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    guided = {"backend": "xgrammar", "warm_up": [{"type": "json_schema", "guide": json.dumps(SCHEMA)}]}
    return build_tiny_deployment(tmp_path_factory.mktemp("xgrammar"), guided)


@pytest.fixture(scope="module")
def client(repository: Path) -> Iterator[GrpcClient]:
    with running(repository) as (_, server), GrpcClient(server.grpc) as made:
        yield made


def fullmatch(pattern: str) -> Callable[[str], str | None]:
    return lambda text: None if re.fullmatch(pattern, text) else f"not {pattern}"


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize(
    ("kind", "guide", "judge"),
    [
        ("json_schema", json.dumps(SCHEMA), judge_json(SCHEMA)),
        ("regex", "(ab|é){2,5}[0-9]", fullmatch("(ab|é){2,5}[0-9]")),
        ("choice", '["yes", "no", "ja, 是"]', fullmatch("yes|no|ja, 是")),
        ("ebnf_grammar", 'root ::= "(" root ")" | [xy]', fullmatch(r"(\(*)[xy](\)*)")),
        ("structural_tag", json.dumps(TAG), fullmatch('<f=add>[0-9]{1,2}</f>|<f=say>"[ab]"</f>')),
    ],
)
def test_every_kind_of_answer_sampled_from_a_random_model_holds(client, kind, guide, judge, close):
    for seed in range(3):
        answer = client.generate(
            "Hello", max_tokens=120, temperature=1.0, top_p=1.0, seed=seed,
            guided_decoding_guide_type=kind, guided_decoding_guide=guide, guided_decoding_close=close,
        )  # fmt: skip
        assert answer.finish_reason == "stop", answer.text
        assert judge(answer.text) is None, answer.text
        assert kind != "ebnf_grammar" or answer.text.count("(") == answer.text.count(")")


def test_every_beam_holds(client):
    answer = client.generate(
        "Hello", max_tokens=120, beam_width=3, num_return_sequences=3,
        guided_decoding_guide_type="json_schema", guided_decoding_guide=json.dumps(SCHEMA),
    )  # fmt: skip
    assert [judge_json(SCHEMA)(sequence.text) for sequence in answer.sequences] == [None] * 3
    assert len({sequence.text for sequence in answer.sequences}) == 3


@pytest.mark.parametrize(
    ("kind", "guide", "words"),
    [
        ("json_schema", '{"properties": {"a": {"not": {}}}}', "keyword not at #/properties/a/not cannot be enforced"),
        ("json_schema", '{"items": {"multipleOf": 0.1}}', "keyword multipleOf at #/items/multipleOf, for numbers with"),
        (
            "json_schema",
            '{"properties": {"b": {"format": "ipv6"}}}',
            "The format 'ipv6' at #/properties/b/format cannot",
        ),
        ("regex", "(?=a)b", "The regular expression cannot be enforced: it has (?=, which begins a look-around"),
    ],
)
def test_what_it_cannot_enforce_is_refused_by_keyword_and_path(client, kind, guide, words):
    with pytest.raises(ClientError, match=re.escape(words)):
        client.generate("Hello", guided_decoding_guide_type=kind, guided_decoding_guide=guide)


def test_without_the_package_the_server_does_not_start_and_one_line_says_why(repository):
    shim = repository / "tensorrt_llm" / "1" / "model.py"
    source = shim.read_text()
    shim.write_text(source.replace("from python_backend", f"{_ABSENT}from python_backend", 1))
    try:
        launched = LaunchedServer("--model-repository", str(repository))
        assert launched.wait(120) != 0
    finally:
        shim.write_text(source)
    said = [line for line in launched.lines if "guided.backend is xgrammar, which is not installed" in line]
    assert len(said) == 1, launched.output
    assert "make setup EXTRA=xgrammar" in said[0]
