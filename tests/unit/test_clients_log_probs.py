"""The table of log-probabilities that a terminal shows."""

from __future__ import annotations

import math

import pytest

from clients.log_probs import LogProb, LogProbs, mean_log_prob, parse_content, table


def entry(token: str, probability: float, *others: LogProb, **values) -> LogProb:
    return LogProb(token, math.log(probability), tuple(token.encode()), others, **values)


def test_a_row_names_the_token_its_probability_and_the_alternatives_once() -> None:
    taken, other = entry(" Paris", 0.766, id=1), entry(" the", 0.0001, id=2)
    (line, summary) = table([entry(" Paris", 0.766, taken, other, id=1)])
    assert line == "' Paris'   76.6 %  ███████▋    ' the'   <0.1 %"
    assert summary == "1 tokens, log-prob -0.267 on average, perplexity 1.31"


def test_columns_line_up_whatever_the_tokens_are() -> None:
    rows = [entry("a", 0.5, entry("long one", 0.2, id=7), id=1), entry("世界", 0.25, entry("b", 0.1, id=8), id=2)]
    first, second, _ = table(rows)
    assert first.index("50.0 %") == second.index("25.0 %") + 2  # two characters of two columns each
    assert len(first) == len(second) + 2


def test_what_a_guide_forbade_has_a_column_of_its_own() -> None:
    first, second, _ = table([entry("{", 0.01, masked_probability=0.99), entry("a", 0.5, masked_probability=0.0)])
    assert "guide forbade  99.0 %" in first
    assert "guide forbade   0.0 %" in second


def test_the_first_token_of_a_prompt_has_no_number() -> None:
    entries = [LogProb("The", None), entry(" end", 0.5)]
    first, _, summary = table(entries)
    assert first.endswith("–")
    assert summary.endswith("perplexity 2.00")
    assert mean_log_prob(entries) == pytest.approx(math.log(0.5))
    assert mean_log_prob(entries[:1]) is None


def test_no_tokens_make_no_table() -> None:
    assert list(table([])) == []


def test_lists_of_several_responses_are_one_and_are_read_when_looked_at() -> None:
    one = '[{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]'
    found = LogProbs([one, "[]", one])
    assert len(found) == 2
    assert found == (LogProb("a", -0.5, (97,)),) * 2
    assert found[-1] == found[0]
    assert [entry.token for entry in found[:1]] == ["a"]
    assert not LogProbs()
    assert LogProbs(["rubbish"]).texts == ("rubbish",)


def test_content_of_any_server_of_openais_shape_is_read() -> None:
    (found,) = parse_content('[{"token": "a", "logprob": -0.5, "bytes": null, "top_logprobs": []}]')
    assert found == LogProb("a", -0.5)
    assert found.probability == pytest.approx(math.exp(-0.5))
