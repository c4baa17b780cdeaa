"""Workloads and traces: the same seed gives the same requests, lengths are the server's, shared prefixes are known."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtests import arrivals, traces
from loadtests.errors import UsageFault
from loadtests.texts import Library
from loadtests.workloads import WORKLOADS, Item, Setting, Workload, make
from loadtests.workloads.extraction import structure_problem


def words(texts: Sequence[str]) -> list[int]:
    """A tokenizer of words."""
    return [len(text.split()) for text in texts]


SETTING = Setting(library=Library.load(words), adapters=("pirate", "json"))


def workload(name: str, tmp_path: Path | None = None, **changes: Any) -> Workload:
    if name == "replay":
        assert tmp_path is not None
        trace = tmp_path / "trace.jsonl"
        rows = [{"at_s": number / 4, "prompt_tokens": 30 + number, "output_tokens": 9} for number in range(20)]
        traces.write(trace, rows)
        changes = {"trace": trace, **changes}
    return make(name, replace(SETTING, **changes))


def prompt(item: Item) -> str:
    """Everything of the prompt as one text."""
    if "messages" in item.fields:
        return "\n".join(message["content"] for message in item.fields["messages"])
    return str(item.fields["text_input"])


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_index_is_the_same_request_every_time_and_in_any_order(name: str, tmp_path: Path) -> None:
    first, second = workload(name, tmp_path), workload(name, tmp_path)
    items = [first.item(index) for index in range(40)]
    assert [second.item(index) for index in reversed(range(40))] == items[::-1]
    assert len({prompt(item) for item in items}) > 15
    assert [workload(name, tmp_path, seed=2).item(index) for index in range(40)] != items


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_salt_changes_the_words_and_not_the_lengths(name: str, tmp_path: Path) -> None:
    plain, salted = workload(name, tmp_path), workload(name, tmp_path, salt="x")
    for index in range(20):
        one, other = plain.item(index), salted.item(index)
        assert prompt(one) != prompt(other)
        assert (one.max_tokens, one.adapter, one.workload) == (other.max_tokens, other.adapter, other.workload)
        # Lengths are kept in tokens; how many words that makes depends on the words.
        assert len(prompt(one).split()) == pytest.approx(len(prompt(other).split()), rel=0.15, abs=8)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_request_fits_the_model(name: str, tmp_path: Path) -> None:
    made = workload(name, tmp_path)
    for index in range(100):
        item = made.item(index)
        assert 1 <= item.max_tokens <= 256
        assert len(prompt(item).split()) < 2100
        assert item.shared_tokens <= len(prompt(item).split())


@pytest.mark.parametrize("tokens", [1, 7, 64, 500, 1500])
def test_a_prompt_has_the_length_asked_for(tokens: int) -> None:
    text, length = workload("chat").prose(tokens, "a key")
    assert length == tokens
    assert abs(len(text.split()) - tokens) <= 1


def test_a_turn_of_a_conversation_begins_with_the_one_before() -> None:
    chat = workload("chat")
    for conversation in range(8):
        turns = [chat.item(conversation + 8 * turn).fields["messages"] for turn in range(3)]
        for before, after in pairwise(turns):
            assert after[: len(before)] == before
            assert len(after) == len(before) + 2
        assert chat.item(conversation).shared_tokens == 0
    assert chat.item(24).fields["messages"][1:] != chat.item(0).fields["messages"][1:], (
        "new conversations after three turns"
    )


def test_the_shared_prefix_of_a_document_is_known() -> None:
    rag = workload("rag")
    items = [rag.item(index) for index in range(120)]
    documents = [prompt(item).split("\n\nQuestion:")[0] for item in items]
    assert 6 <= len(set(documents)) <= 12
    for number, item in enumerate(items):
        assert bool(item.shared_tokens) == (documents[number] in documents[:number])
    shared = sum(item.shared_tokens for item in items)
    assert 0.7 < shared / sum(len(prompt(item).split()) for item in items) < 0.95
    counts = Counter(documents).most_common()
    assert counts[0][1] > 2 * counts[-1][1], "popular documents are asked for more often"


def test_adapters_follow_zipf_and_include_the_base_model() -> None:
    made = workload("adapters")
    found = Counter(made.item(index).adapter for index in range(600))
    assert set(found) == {None, "pirate", "json"}
    assert found[None] / found["pirate"] == pytest.approx(2.0, rel=0.25)
    assert found[None] / found["json"] == pytest.approx(3.0, rel=0.3)


def test_a_server_without_adapters_is_told_how_to_get_some() -> None:
    with pytest.raises(UsageFault, match=r"smollm2-135m-lora\.yaml"):
        workload("adapters", adapters=())


def test_one_prompt_in_ten_is_long_and_is_kept_apart() -> None:
    mixed = workload("mixed")
    items = [mixed.item(index) for index in range(400)]
    long = [item for item in items if item.workload == "mixed/long"]
    assert 0.06 < len(long) / len(items) < 0.14
    assert min(len(prompt(item).split()) for item in long) >= 1490


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"place": "a", "visitors": 3}', None),
        ('{"place": "a"}', "lacks 'visitors'"),
        ('{"place": "a", ', "no JSON"),
        ("[1]", "no JSON object"),
    ],
)
def test_an_answer_that_breaks_its_structure_is_found(text: str, problem: str | None) -> None:
    found = structure_problem(text, {"required": ["place", "visitors"]})
    assert found is None if problem is None else problem in str(found)


MOONCAKE = [
    {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 30535, "input_length": 1400, "output_length": 26, "hash_ids": [46, 47, 2353]},
]


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("m.jsonl", "".join(json.dumps(row) + "\n" for row in MOONCAKE), [(0.0, 1100, 52), (3.053, 1400, 26)]),
        (
            "azure.csv",
            f"{AZURE}\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
            [(0.0, 374, 44), (4.314579, 396, 109)],
        ),
        (
            "azure24.csv",
            f"{AZURE}\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2,7\n",
            [(0.0, 2162, 5), (0.99007, 2, 7)],
        ),
        (
            "burst.csv",
            f"{BURST}\n5,ChatGPT,472,18,490,Conversation log\n"
            "45,ChatGPT,1087,0,1087,Conversation log\n118,GPT-4,417,276,693,API log\n",
            [(0.0, 472, 18), (113.0, 417, 276)],
        ),
        ("own.jsonl", '{"at_s": 2, "prompt_tokens": 5, "output_tokens": 6}\n\n', [(0.0, 5, 6)]),
    ],
)
def test_public_traces_are_read(tmp_path: Path, name: str, content: str, expected: list[Any]) -> None:
    (tmp_path / name).write_text(content)
    rows = traces.load(tmp_path / name)
    found = [(pytest.approx(row.at_s, abs=1e-5), row.prompt_tokens, row.output_tokens) for row in rows]
    assert expected == found


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", '{"at_s": 1, "prompt_tokens": 5, "output_tokens": 6}\n{"when": 2}\n', "line 2: 'at_s' is missing"),
        ("a.csv", "When,How\n1,2\n", "has the columns How, When; known are Azure's"),
        ("b.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        ("c.jsonl", "", "holds no requests"),
    ],
)
def test_a_trace_that_cannot_be_read_names_the_place(tmp_path: Path, name: str, content: str, problem: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageFault, match=problem):
        traces.load(tmp_path / name)


def test_equal_hash_ids_become_equal_text(tmp_path: Path) -> None:
    trace = tmp_path / "m.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    replay = workload("replay", tmp_path, trace=trace)
    one, other = (prompt(replay.item(index)) for index in range(2))
    shared = len(one.split()) - next(
        n for n, pair in enumerate(zip(one.split(), other.split(), strict=False)) if pair[0] != pair[1]
    )
    assert len(one.split()) - shared >= 1020, "two blocks of 512 tokens"
    assert replay.item(0).shared_tokens == 0
    assert replay.item(1).shared_tokens == 1024
    assert replay.item(1).max_tokens == 26


def test_a_trace_can_be_scaled_to_a_small_model(tmp_path: Path) -> None:
    trace = tmp_path / "m.jsonl"
    trace.write_text("".join(json.dumps({**row, "input_length": 20000}) + "\n" for row in MOONCAKE))
    scaled = workload("replay", tmp_path, trace=trace, trace_scale=0.05).item(0)
    assert len(prompt(scaled).split()) == pytest.approx(1000, abs=5)
    clipped = workload("replay", tmp_path, trace=trace).item(0)
    assert len(prompt(clipped).split()) + clipped.max_tokens <= 4096


def test_poisson_arrivals_have_their_rate_and_no_memory() -> None:
    times = list(islice(arrivals.Poisson(5.0, seed=3).times(), 4000))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.08), "an exponential distribution"


def test_the_same_seed_is_the_same_pattern_at_every_rate() -> None:
    for pattern in (arrivals.Poisson, lambda rate: arrivals.Counted(rate, 8)):
        slow, fast = (list(islice(pattern(rate).times(), 50)) for rate in (1.0, 4.0))
        assert slow == pytest.approx([4 * time for time in fast])


def test_counted_arrivals_have_their_number_in_every_group_and_are_scattered_within() -> None:
    times = list(islice(arrivals.Counted(2.0, 8, seed=1).times(), 8 * 500))
    assert times == sorted(times)
    assert [int(time / 4.0) for time in times] == [number // 8 for number in range(8 * 500)]
    within = [time / 4.0 % 1 for time in times]
    assert sum(within) / len(within) == pytest.approx(0.5, abs=0.02)
    assert sum(time < 0.25 for time in within) / len(within) == pytest.approx(0.25, abs=0.03)


def test_bursts_arrive_together_and_keep_the_rate() -> None:
    times = list(islice(arrivals.Bursts(2.0, 8, seed=1).times(), 8 * 400))
    assert all(len(set(times[start : start + 8])) == 1 for start in range(0, len(times), 8))
    assert len(times) / times[-1] == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize(
    "made",
    [
        arrivals.Poisson(2.5, 7),
        arrivals.Counted(2.5, 8, 7),
        arrivals.Even(3.0),
        arrivals.Bursts(1.0, 4, 2),
        arrivals.Recorded((0.0, 1.5), 2.0),
    ],
)
def test_arrivals_survive_the_way_to_a_worker(made: arrivals.Arrivals) -> None:
    again = arrivals.of(json.loads(json.dumps(made.as_dict())))
    assert again == made
    assert list(islice(again.times(), 2)) == list(islice(made.times(), 2))
