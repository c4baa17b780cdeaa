"""Log-probs on the real server: four transports, chunks, samples, beams, guides, prompts, and bad requests."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import clients
from clients.log_probs import LogProb, mean_log_prob
from tests.server import wire
from tests.unit.client_runs import EVERY_CLIENT, KINDS, generate, stream

if TYPE_CHECKING:
    from tests.server.launched import ServerAddresses

PROMPT = "The three largest cities of Österreich 🇦🇹 are"


@dataclass(frozen=True)
class _Running:
    grpc_url: str
    http_url: str


@pytest.fixture(scope="module")
def running(server: ServerAddresses) -> _Running:
    return _Running(server.grpc, f"http://{server.http}")


def ask(running: _Running, prompt: str = PROMPT, **values: Any) -> clients.Result:
    return generate("grpc", running, prompt, **values)


def check_against_text(text: str, entries: tuple[LogProb, ...]) -> None:
    """Tokens, bytes, offsets and numbers of a whole answer that no special token stands in."""
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode("utf-8", "replace") == text
    for index, entry in enumerate(entries):
        before = b"".join(bytes(other.bytes or ()) for other in entries[:index]).decode("utf-8", "ignore")
        assert entry.text_offset == len(before)
        assert entry.logprob is not None
        assert entry.logprob <= 0
        values = [other.logprob for other in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-4
        same = [other.logprob for other in entry.top_logprobs if other.id == entry.id]
        assert same in ([], [entry.logprob])


def test_every_transport_gives_the_same_streamed_and_whole(running: _Running) -> None:
    found: dict[str, clients.Result] = {}
    for kind in KINDS:
        values: dict[str, Any] = {"max_tokens": 12, "top_logprobs": 3, "top_prompt_logprobs": 1}
        chunks, found[f"{kind} streamed"] = stream(kind, running, PROMPT, **values)
        assert sum(len(chunk.logprobs[0]) for chunk in chunks) == 12
        found[f"{kind} whole"] = generate(kind, running, PROMPT, **values)
    first = found["grpc whole"]
    check_against_text(first.text, first.logprobs)
    assert first.logprobs_distribution == "raw"
    assert len(first.logprobs) == 12
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].id == entry.id for entry in first.logprobs)
    assert any(entry.logprob < -0.1 for entry in first.logprobs), "greedy has real values"
    for name, other in found.items():
        assert [(e.id, e.text_offset, e.token) for e in other.logprobs] == [
            (e.id, e.text_offset, e.token) for e in first.logprobs
        ], name
        assert [e.logprob for e in other.logprobs] == pytest.approx([e.logprob for e in first.logprobs], abs=0.02), name
        assert len(other.prompt_logprobs) == len(first.prompt_logprobs)


def test_chunks_hold_the_entries_of_their_tokens(running: _Running) -> None:
    chunks, result = stream(
        "grpc", running, "Emoji: 🤯🤯🤯", max_tokens=12, top_logprobs=0, return_num_output_tokens=True
    )
    assert len(chunks) > 2
    for chunk in chunks:
        assert len(chunk.logprobs[0]) == chunk.num_output_tokens
    parts = [entry for entry in result.logprobs if "\\x" in entry.token]
    assert parts, "the answer has characters of several tokens"
    offsets = [entry.text_offset for entry in result.logprobs]
    assert offsets == sorted(offsets)
    assert max(offsets) <= len(result.text)


def test_cumulative_values_are_upstreams(running: _Running) -> None:
    result = ask(running, max_tokens=6, top_logprobs=1, return_log_probs=True, end_id=-1)
    values = result.outputs["output_log_probs"].reshape(-1)
    assert [entry.logprob for entry in result.logprobs] == pytest.approx(values.tolist(), abs=1e-4)
    assert float(result.outputs["cum_log_probs"].reshape(-1)[0]) == pytest.approx(float(values.sum()), abs=1e-3)


def test_processed_is_what_was_drawn_from(running: _Running) -> None:
    values: dict[str, Any] = {"max_tokens": 6, "temperature": 0.3, "top_k": 40, "seed": 5, "top_logprobs": 5}
    raw = ask(running, **values)
    processed = ask(running, logprobs_mode="processed", **values)
    assert (raw.logprobs_distribution, processed.logprobs_distribution) == ("raw", "processed")
    assert raw.text == processed.text
    for first, second in zip(raw.logprobs, processed.logprobs, strict=True):
        assert [o.id for o in first.top_logprobs] == [o.id for o in second.top_logprobs]
        gap = first.top_logprobs[0].logprob - first.top_logprobs[1].logprob
        assert second.top_logprobs[0].logprob - second.top_logprobs[1].logprob == pytest.approx(gap / 0.3, abs=0.2)


def test_samples_and_beams_have_their_own(running: _Running) -> None:
    samples = ask(running, max_tokens=5, num_return_sequences=3, temperature=1.2, seed=3, top_logprobs=1, end_id=-1)
    beams = ask(running, max_tokens=5, beam_width=3, top_logprobs=2, top_prompt_logprobs=0, end_id=-1)
    for result in (samples, beams):
        assert len(result.sequences) == 3
        assert len({sequence.text for sequence in result.sequences}) == 3
        for sequence in result.sequences:
            check_against_text(sequence.text, sequence.logprobs)
            assert len(sequence.logprobs) == 5
    assert beams.prompt_logprobs


def test_stop_words_end_the_list_where_the_text_ends(running: _Running) -> None:
    for exclude in (False, True):
        values: dict[str, Any] = {"max_tokens": 40, "stop_words": ["9"], "exclude_stop_words_in_output": exclude}
        _, result = stream("grpc", running, "1, 2, 3, 4, 5, 6,", top_logprobs=0, **values)
        assert result.text.endswith("9") is not exclude
        assert result.logprobs[-1].text_offset < len(result.text)
        assert "".join(entry.token for entry in result.logprobs).startswith(result.text)


def test_a_guide_tells_how_much_it_forbade(running: _Running) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(schema)}
    _, result = stream("grpc", running, "A person:", max_tokens=32, top_logprobs=2, **guide)
    whole = ask(running, "A person:", max_tokens=32, top_logprobs=2, **guide)
    assert json.loads(result.text)
    assert [e.id for e in result.logprobs] == [e.id for e in whole.logprobs]
    masked = [entry.masked_probability for entry in result.logprobs]
    assert all(0 <= share <= 1 for share in masked)
    assert masked[0] > 0.5, "the model did not want to write JSON"
    for entry in result.logprobs:
        assert entry.masked_probability + math.exp(entry.logprob) <= 1 + 1e-3
    assert {e.masked_probability for e in ask(running, max_tokens=2, top_logprobs=0).logprobs} == {None}


def test_a_prompt_scores_as_teacher_forcing_whatever_the_cache_holds(running: _Running) -> None:
    text = "Paris is the capital of France. " * 12
    ask(running, text, max_tokens=1)
    scored = ask(running, text, max_tokens=1, top_prompt_logprobs=1)
    again = ask(running, text, max_tokens=1, top_prompt_logprobs=1, return_context_logits=True)
    assert scored.prompt_logprobs == again.prompt_logprobs
    logits = again.outputs["context_logits"][0].astype(np.float64)
    first, *others = scored.prompt_logprobs
    assert first.logprob is None
    assert "".join(entry.token for entry in scored.prompt_logprobs) == text
    assert len(logits) == len(others) + 1
    for row, entry in zip(logits, others, strict=False):
        normalizer = row.max() + math.log(np.exp(row - row.max()).sum())
        assert entry.logprob == pytest.approx(row[entry.id] - normalizer, abs=1e-4)
        assert entry.top_logprobs[0].id == int(row.argmax())
    assert mean_log_prob(scored.prompt_logprobs) > mean_log_prob(
        ask(running, "Capital France the is of. Paris " * 12, max_tokens=1, top_prompt_logprobs=0).prompt_logprobs
    )


def test_what_postprocessing_derives_from_logits_equals_the_engines(server: ServerAddresses) -> None:
    ids = [504, 3575, 282, 4649, 314]
    inputs = wire.engine_inputs(
        ids, 8, return_generation_logits=[[True]], top_logprobs=[[5]], exclude_input_in_output=[[True]]
    )
    reply = wire.ask(server, "tensorrt_llm", inputs)[0]
    assert not reply.error, reply.error
    tensors = {
        "TOKENS_BATCH": reply["output_ids"],
        "SEQUENCE_LENGTH": reply["sequence_length"],
        "GENERATION_LOGITS": reply["generation_logits"],
        "TOP_LOGPROBS": [[5]],
    }
    derived = wire.ask(server, "postprocessing", [wire.tensor(name, value) for name, value in tensors.items()])[0]
    assert not derived.error, derived.error
    ours, theirs = (json.loads(array.reshape(-1)[0]) for array in (reply["logprobs"], derived["LOGPROBS"]))
    assert [entry["id"] for entry in ours] == [entry["id"] for entry in theirs]
    for own, made in zip(ours, theirs, strict=True):
        assert made["logprob"] == pytest.approx(own["logprob"], abs=1e-4)
        assert made["text_offset"] == own["text_offset"]
        assert [o["id"] for o in made["top_logprobs"]] == [o["id"] for o in own["top_logprobs"]]
        numbers = [[o["logprob"] for o in entry["top_logprobs"]] for entry in (made, own)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)


def test_openais_body_works_as_it_is(running: _Running) -> None:
    body = {"text_input": "Hello", "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    for model in ("ensemble", "ensemble_unary"):
        with urllib.request.urlopen(
            f"{running.http_url}/v2/models/{model}/generate", json.dumps(body).encode(), timeout=60
        ) as reply:
            answer = json.load(reply)
        content = json.loads(answer["logprobs"])
        assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
        assert answer["logprobs_distribution"] == "raw"
        assert "warnings" not in answer


def test_nothing_is_sent_unless_it_is_asked_for(running: _Running) -> None:
    with urllib.request.urlopen(
        f"{running.http_url}/v2/models/ensemble/generate", b'{"text_input": "Hello", "max_tokens": 2}', timeout=60
    ) as reply:
        assert not {"logprobs", "logprobs_distribution", "prompt_logprobs"} & json.load(reply).keys()


@EVERY_CLIENT
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_logprobs": 21}, r"top_logprobs is 21; allowed: 0 to 20"),
        ({"top_logprobs": -1}, r"top_logprobs is -1; allowed: 0 to 20"),
        ({"top_prompt_logprobs": 21}, r"top_prompt_logprobs is 21; allowed: 0 to 20"),
        ({"top_logprobs": 1, "logprobs_mode": "cooked"}, r"logprobs_mode is 'cooked'; allowed: raw and processed"),
        ({"logprobs_mode": "processed"}, r"logprobs_mode was sent without top_logprobs"),
    ],
)
def test_bad_requests_are_refused(kind: str, running: _Running, values: dict[str, Any], message: str) -> None:
    with pytest.raises(clients.RequestRefused, match=message):
        generate(kind, running, "Hi", max_tokens=4, **values)


def test_streams_with_log_probs_may_be_cancelled_again_and_again(running: _Running) -> None:
    with clients.GrpcClient(running.grpc_url) as client:
        for _ in range(20):
            with client.stream("Once upon a time", max_tokens=500, top_logprobs=20, top_prompt_logprobs=20) as chunks:
                next(iter(chunks))
        assert client.generate("Hi", max_tokens=2, top_logprobs=1).logprobs
