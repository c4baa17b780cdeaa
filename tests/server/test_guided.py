"""Constrained answers of the real server: valid or cut off, refused with the reason, and no harm to others."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, Field

from clients import ClientError, GrpcClient, HttpClient, IncompleteAnswer, generate_as
from tests.server.guided_cases import judge_json
from tests.server.guided_run import run
from tests.server.launched import ServerAddresses

SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Rome", "東京"]},
    },
    "required": ["first_name", "age", "city"],
    "additionalProperties": False,
}
PERSON = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)}


def regex(pattern: str) -> dict[str, str]:
    return {"guided_decoding_guide_type": "regex", "guided_decoding_guide": pattern}


@pytest.fixture(scope="module")
def client(server: ServerAddresses) -> Iterator[GrpcClient]:
    with GrpcClient(server.grpc) as made:
        yield made


def test_varied_structures_sampled_32_at_once_all_hold(server):
    outcome = run(server.grpc, requests=64, seed=1, max_tokens=64)
    assert outcome.wrong == []
    assert outcome.total("stop") >= 32
    assert outcome.total("stop") + outcome.total("length") == 64


def test_a_stream_is_the_whole_answer_and_every_transport_gives_it(client, server):
    whole = client.generate("A person:", max_tokens=60, **PERSON)
    assert judge_json(SCHEMA)(whole.text) is None
    with client.stream("A person:", max_tokens=60, **PERSON) as stream:
        assert "".join(chunk.text for chunk in stream) == whole.text
    with HttpClient(f"http://{server.http}") as http:
        assert http.generate("A person:", max_tokens=60, **PERSON).text == whole.text


def test_samples_are_constrained_one_by_one(client):
    answer = client.generate(
        "A person:", max_tokens=60, num_return_sequences=4, temperature=1.0, top_p=1.0, seed=3, **PERSON
    )
    assert [judge_json(SCHEMA)(sequence.text) for sequence in answer.sequences] == [None] * 4
    assert len({sequence.text for sequence in answer.sequences}) > 1


def test_max_tokens_inside_a_structure_is_told_by_finish_reason(client):
    answer = client.generate("A person:", max_tokens=5, **PERSON)
    assert answer.finish_reason == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(answer.text)


def test_a_structure_that_is_closed_in_time_is_valid_at_any_budget(client):
    close = {**PERSON, "guided_decoding_close": True}
    with pytest.raises(ClientError, match="max_tokens is 5, and the shortest answer found takes") as refused:
        client.generate("A person:", max_tokens=5, **close)
    least = int(re.search(r"takes (\d+)", str(refused.value))[1])
    for max_tokens in (least, least + 1, least + 4, 60):
        answer = client.generate("A person:", max_tokens=max_tokens, temperature=1.0, seed=max_tokens, **close)
        assert judge_json(SCHEMA)(answer.text) is None
    long = client.generate("A person:", max_tokens=least, num_return_sequences=2, temperature=1.0, seed=1, **close)
    assert [judge_json(SCHEMA)(sequence.text) for sequence in long.sequences] == [None, None]


def test_counts_and_log_probs_hold_for_forced_tokens(client):
    answer = client.generate("A person:", max_tokens=60, return_log_probs=True, return_num_output_tokens=True, **PERSON)
    values = answer.outputs["output_log_probs"].reshape(-1)
    assert answer.usage.completion_tokens == len(values) > 10
    assert (values <= 0).all()
    assert answer.outputs["cum_log_probs"].item() == pytest.approx(values.sum(), rel=1e-3)


def test_stop_words_end_a_structure_early_and_bad_words_stay_out_of_it(client):
    stopped = client.generate("A person:", max_tokens=60, stop_words=['"age"'], **PERSON)
    assert stopped.text.endswith('"age"')
    assert stopped.finish_reason == "stop"
    choice = {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["yes", "no"]'}
    answers = {client.generate("Yes or no?", bad_words=["yes"], **choice).text for _ in range(2)}
    assert answers == {"no"}


def test_the_end_of_a_structure_outranks_min_tokens(client):
    answer = client.generate("aaa", max_tokens=40, min_tokens=30, **regex("[ab]{3}"))
    assert re.fullmatch("[ab]{3}", answer.text)
    assert answer.finish_reason == "stop"


def test_an_answer_that_may_go_on_ends_where_the_model_ends_it(client):
    answer = client.generate("The answer:", max_tokens=30, temperature=1.0, top_p=1.0, seed=5, **regex("[a-z ]{0,400}"))
    assert re.fullmatch("[a-z ]*", answer.text)


@pytest.mark.parametrize(
    ("kind", "guide", "words"),
    [
        ("json_schema", '{"properties": {"a": {"not": {}}}}', "keyword not at #/properties/a/not cannot be enforced"),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", "{", "is no JSON"),
        ("json_schema", "[" * 50_000, "nested deeper"),
        ("json_schema", " " * 1_000_000, "has 1000000 bytes; at most 262144 are allowed"),
        ("json_schema", '{"$ref": "#"}', "No text can satisfy"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("ebnf_grammar", 'start ::= "a"', "No 'root' rule"),
        ("yaml", "a: 1", "allowed: json, json_schema, regex, ebnf_grammar, choice, structural_tag"),
    ],
)
def test_a_guide_that_cannot_be_kept_is_refused_before_anything_is_generated(client, kind, guide, words):
    with pytest.raises(ClientError, match=re.escape(words)):
        client.generate("Hello", guided_decoding_guide_type=kind, guided_decoding_guide=guide)


class City(BaseModel):
    name: str = Field(max_length=12)
    inhabitants: int = Field(ge=1, le=40_000_000)
    twins: list[str] = Field(max_length=2)


def test_a_pydantic_model_is_the_schema_and_the_answer_its_object(client):
    city = generate_as(client, "Rome in JSON:", City, max_tokens=200, repetition_penalty=1.2)
    assert isinstance(city, City)
    with pytest.raises(IncompleteAnswer, match="finish_reason length") as cut:
        generate_as(client, "Rome in JSON:", City, max_tokens=4)
    assert cut.value.text.startswith('{"name')


def test_without_strict_the_answer_says_what_was_not_enforced(client):
    schema = '{"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": true, "maxItems": 3}'
    options = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": schema}
    answer = client.generate("A list:", max_tokens=20, guided_decoding_strict=False, **options)
    assert answer.warnings == ("The keyword uniqueItems at #/uniqueItems is not enforced.",)
    assert isinstance(json.loads(answer.text), list)


def test_a_guide_may_begin_behind_a_marker(client):
    free = client.generate("1, 2, 3,", max_tokens=12).text
    assert "5" in free
    options = {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["yes", "no"]'}
    answer = client.generate("1, 2, 3,", max_tokens=30, guided_decoding_begin_after="5", **options)
    assert re.fullmatch(r".*5.{0,2}(yes|no)", answer.text, re.DOTALL)
    assert answer.text.startswith(free[: free.index("5") + 1])
    assert answer.finish_reason == "stop"


def test_every_beam_follows_the_structure_by_itself(client):
    answer = client.generate("A person:", max_tokens=60, beam_width=3, return_log_probs=True, **PERSON)
    assert [sequence.finish_reason for sequence in answer.sequences] == ["stop"] * 3
    assert [judge_json(SCHEMA)(sequence.text) for sequence in answer.sequences] == [None] * 3
    assert len({sequence.text for sequence in answer.sequences}) == 3
    choice = {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["yes", "no"]'}
    with client.stream("Yes or no?", max_tokens=9, beam_width=4, **choice) as stream:
        assert list(stream)
    # "yes" is one token, or two: another beam.
    assert {sequence.text for sequence in stream.result.sequences} == {"yes", "no"}
    with pytest.raises(
        ClientError, match="beam_width is 2; a request with guided_decoding_close is served with 1 only"
    ):
        client.generate("Hello", beam_width=2, guided_decoding_close=True, **PERSON)


def test_hostile_guides_do_not_hold_up_a_stream_beside_them(client):
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(6000)} | {"d6000": {}}
    many = {f"p{i}": {"type": "string"} for i in range(5000)}
    hostile = [{"$defs": chain, "$ref": "#/$defs/d0"}, {"type": "object", "properties": many}]
    errors: list[str] = []

    def attack(schema: object) -> None:
        try:
            client.generate("x", guided_decoding_guide_type="json_schema", guided_decoding_guide=json.dumps(schema))
        except ClientError as error:
            errors.append(str(error))

    attackers = [threading.Thread(target=attack, args=(schema,)) for schema in hostile]
    with client.stream("Once upon a time", max_tokens=60, end_id=-1) as stream:
        next(iter(stream))
        for attacker in attackers:
            attacker.start()
        last, gaps = time.monotonic(), []
        for _ in stream:
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
    for attacker in attackers:
        attacker.join(60)
    assert max(gaps) < 2
    assert len(errors) == 2
    assert all("too complex" in error for error in errors)
    assert judge_json(SCHEMA)(client.generate("A person:", max_tokens=60, **PERSON).text) is None
