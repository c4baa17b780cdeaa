from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.engine.beam import Hypothesis
from python_backend.engine.beam_search import BeamSearch
from python_backend.errors import EngineFailure
from tests.unit.sampling_helpers import make_sequence

REFERENCES = Path(__file__).parents[1] / "data" / "beam_search.json"
END = 0


class TableModel:
    """A language model whose logits depend on the last two tokens only, so that a path can be scored by hand.

    The same as in tests/tools/make_beam_references.py.
    """

    def __init__(self, vocab: int, seed: int) -> None:
        side = min(vocab, 40)
        self.table = (np.random.default_rng(seed).standard_normal((side, side, vocab)) * 2).astype(np.float32)
        self.vocab = vocab

    def logits(self, token_ids: list[int]) -> np.ndarray:
        side = len(self.table)
        return self.table[token_ids[-2] % side, token_ids[-1] % side]

    def log_probs(self, token_ids: list[int]) -> np.ndarray:
        row = self.logits(token_ids).astype(np.float64)
        return row - np.log(np.exp(row).sum())


def search(model: TableModel, max_seq_len: int = 1000, **options: Any) -> list[Hypothesis]:
    """Run a search; block tables are imitated by token lists that are forked by the parents it names."""
    options = {"prompt_ids": [1, 2], "end_ids": (END,)} | options
    request = make_sequence(**options).request
    beam_search = BeamSearch(request, model.vocab, max_seq_len)
    tables = [list(request.prompt_ids)]
    done = False
    while not done:
        step = beam_search.advance(np.stack([model.logits(table) for table in tables]))
        tables = [[*tables[parent], token] for parent, token in zip(step.parents, step.tokens, strict=True)]
        assert tables == [beam.token_ids for beam in beam_search.beams]
        done = step.done
    return beam_search.hypotheses()


def all_answers(
    model: TableModel, max_tokens: int, length_penalty: float
) -> list[tuple[float, tuple[int, ...], float]]:
    """Every answer of at most max_tokens tokens as (score, output without the end id, cum_log_prob), best first."""
    vocab = model.vocab
    answers = []
    for length in range(1, max_tokens + 1):
        for path in itertools.product(range(vocab), repeat=length):
            if END in path[:-1] or (path[-1] != END and length < max_tokens):
                continue
            ids, total = [1, 2], 0.0
            for token in path:
                total += float(model.log_probs(ids)[token])
                ids.append(token)
            output = path[:-1] if path[-1] == END else path
            answers.append((total / length**length_penalty, output, total))
    return sorted(answers, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_answers(seed: int, length_penalty: float) -> None:
    model = TableModel(vocab=4, seed=seed)
    found = search(model, beam_width=64, max_tokens=4, length_penalty=length_penalty, early_stopping=False)
    expected = all_answers(model, 4, length_penalty)
    assert [tuple(hypothesis.output_ids) for hypothesis in found[:10]] == [output for _, output, _ in expected[:10]]
    assert [hypothesis.score for hypothesis in found[:10]] == pytest.approx(
        [score for score, _, _ in expected[:10]], abs=1e-5
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"stop_words": ((3, 1),)}, {"min_tokens": 3}, {"repetition_penalty": 1.3}, {"early_stopping": False}],
)
def test_log_probs_belong_to_the_tokens_of_their_hypothesis(options: dict[str, Any]) -> None:
    model = TableModel(vocab=6, seed=2)
    for hypothesis in search(model, beam_width=4, max_tokens=6, **options):
        ids, expected = [1, 2], []
        for token in hypothesis.output_ids:
            expected.append(float(model.log_probs(ids)[token]))
            ids.append(token)
        assert hypothesis.log_probs == pytest.approx(expected, abs=1e-5)
        is_ended = hypothesis.finish_reason == "stop" and hypothesis.output_ids[-2:] != [3, 1]
        end = float(model.log_probs(ids)[END]) if is_ended else 0.0
        assert hypothesis.cum_log_prob == pytest.approx(sum(expected) + end, abs=1e-5)


def test_one_beam_is_greedy_search() -> None:
    model = TableModel(vocab=8, seed=5)
    ids = [1, 2]
    for _ in range(10):
        token = int(model.logits(ids).argmax())
        if token == END:
            break
        ids.append(token)
    assert search(model, beam_width=1, max_tokens=10)[0].output_ids == ids[2:]


def test_hypotheses_come_best_first_and_differ() -> None:
    found = search(TableModel(vocab=12, seed=1), beam_width=6, max_tokens=8)
    assert len(found) == 6
    assert [hypothesis.score for hypothesis in found] == sorted((h.score for h in found), reverse=True)
    assert len({tuple(hypothesis.output_ids) for hypothesis in found}) == 6


def test_equal_scores_are_broken_by_beam_then_token() -> None:
    beam_search = BeamSearch(make_sequence(beam_width=3, max_tokens=5).request, 10, 100)
    flat = np.zeros((1, 10), np.float32)
    assert beam_search.advance(flat).tokens == [0, 1, 2]
    step = beam_search.advance(np.repeat(flat, 3, axis=0))
    assert (step.parents, step.tokens) == ([0, 0, 0], [0, 1, 2])


def test_a_stop_word_completes_a_hypothesis_and_stays_in_it() -> None:
    model = TableModel(vocab=6, seed=3)
    found = search(model, beam_width=4, max_tokens=12, end_ids=(), stop_words=((4,), (2, 3)))
    stopped = [hypothesis for hypothesis in found if hypothesis.finish_reason == "stop"]
    assert stopped
    for hypothesis in stopped:
        assert hypothesis.output_ids[-1:] == [4] or hypothesis.output_ids[-2:] == [2, 3]
        assert 4 not in hypothesis.output_ids[:-1]


def test_a_stop_text_completes_a_hypothesis_with_its_cut() -> None:
    request = make_sequence(beam_width=2, max_tokens=5).request
    beam_search = BeamSearch(request, 6, 100, find_text_stop=lambda ids: 3 if ids[-1] == 5 else None)
    logits = np.array([[0, 0, 0, 0, 1, 2]], np.float32)
    step = beam_search.advance(logits)
    assert 5 not in step.tokens
    assert beam_search.hypotheses()[0].output_ids == [5]
    assert beam_search.hypotheses()[0].text_cut == 3


def test_min_tokens_holds_end_ids_and_stop_words_back() -> None:
    found = search(
        TableModel(vocab=5, seed=0), beam_width=3, max_tokens=9, min_tokens=4, stop_words=((3,),), early_stopping=True
    )
    assert all(len(hypothesis.output_ids) >= 4 for hypothesis in found)


def test_the_longest_sequence_ends_the_search() -> None:
    found = search(TableModel(vocab=5, seed=0), beam_width=2, max_tokens=50, end_ids=(), max_seq_len=7)
    assert [(len(h.output_ids), h.finish_reason) for h in found] == [(5, "length")] * 2


def test_early_stopping_needs_no_more_steps_than_the_patient_search() -> None:
    for seed in range(5):
        model = TableModel(vocab=6, seed=seed)
        early = search(model, beam_width=3, max_tokens=12, early_stopping=True, length_penalty=1.0)
        patient = search(model, beam_width=3, max_tokens=12, early_stopping=False, length_penalty=1.0)
        assert patient[0].score >= early[0].score - 1e-9


def test_the_diversity_rate_favours_later_beams_in_the_ranking_only() -> None:
    request = make_sequence(beam_width=2, max_tokens=3, beam_search_diversity_rate=100.0).request
    beam_search = BeamSearch(request, 6, 100)
    logits = np.array([[0, 1, 2, 3, 4, 5]], np.float32)
    beam_search.advance(logits)
    assert beam_search.advance(np.repeat(logits, 2, axis=0)).parents == [1, 1]
    for hypothesis in beam_search.hypotheses():
        assert hypothesis.cum_log_prob == pytest.approx(sum(hypothesis.log_probs))
        assert hypothesis.cum_log_prob < 0


def test_bans_and_penalties_follow_each_beam() -> None:
    found = search(TableModel(vocab=5, seed=4), beam_width=4, max_tokens=8, end_ids=(), no_repeat_ngram_size=2)
    for hypothesis in found:
        ids = [1, 2, *hypothesis.output_ids]
        pairs = list(itertools.pairwise(ids))
        assert len(pairs) == len(set(pairs))


def test_penalties_count_the_tokens_of_their_own_beam() -> None:
    model = TableModel(vocab=6, seed=7)
    penalty = 1.5
    for hypothesis in search(model, beam_width=3, max_tokens=7, end_ids=(), frequency_penalty=penalty):
        ids, expected = [1, 2], 0.0
        for token in hypothesis.output_ids:
            row = model.logits(ids).astype(np.float64) - penalty * np.bincount(ids, minlength=6)
            expected += float(row[token] - np.log(np.exp(row).sum()))
            ids.append(token)
        assert hypothesis.score == pytest.approx(expected / 7, abs=1e-5)


def test_alternatives_are_given_for_each_token() -> None:
    model = TableModel(vocab=7, seed=4)
    for hypothesis in search(model, beam_width=3, max_tokens=5, top_logprobs=2):
        ids = [1, 2]
        assert len(hypothesis.top_log_probs) == len(hypothesis.output_ids)
        for token, top in zip(hypothesis.output_ids, hypothesis.top_log_probs, strict=True):
            expected = np.argsort(-model.log_probs(ids))[:2]
            assert top.token_ids == expected.tolist()
            assert top.log_prob == pytest.approx(model.log_probs(ids)[token], abs=1e-5)
            ids.append(token)


def test_logits_that_are_not_finite_end_the_request() -> None:
    beam_search = BeamSearch(make_sequence(beam_width=2, max_tokens=5).request, 6, 100)
    with pytest.raises(EngineFailure, match="NaN"):
        beam_search.advance(np.full((1, 6), np.nan, np.float32))


def test_when_every_token_is_forbidden_the_request_fails() -> None:
    request = make_sequence(beam_width=2, max_tokens=5, bad_words=tuple((token,) for token in range(6))).request
    with pytest.raises(EngineFailure, match="forbidden"):
        BeamSearch(request, 6, 100).advance(np.zeros((1, 6), np.float32))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    length_penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.booleans(),
    end_ids=st.sampled_from([(), (0,), (0, 3)]),
    stop_words=st.sampled_from([(), ((4,),), ((1, 2),)]),
)
def test_a_search_agrees_with_the_plain_definition(
    *,
    seed: int,
    width: int,
    length_penalty: float,
    early_stopping: bool,
    end_ids: tuple[int, ...],
    stop_words: tuple[tuple[int, ...], ...],
) -> None:
    model = TableModel(vocab=7, seed=seed)
    options: dict[str, Any] = {
        "beam_width": width, "max_tokens": 6, "length_penalty": length_penalty, "early_stopping": early_stopping,
        "end_ids": end_ids, "stop_words": stop_words,
    }  # fmt: skip
    found = search(model, **options)
    expected = naive_search(model, **{name.replace("beam_width", "width"): value for name, value in options.items()})
    assert [h.score for h in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert [h.output_ids for h in found] == [output for _, output in expected]


@pytest.mark.parametrize(
    "case", json.loads(REFERENCES.read_text()), ids=lambda case: f"{case['beam_width']}-{case['seed']}"
)
def test_a_search_finds_what_transformers_finds(case: dict[str, Any]) -> None:
    found = search(
        TableModel(case["vocab"], case["seed"]),
        beam_width=case["beam_width"],
        max_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        end_ids=tuple(case["end_ids"]),
    )
    assert [h.output_ids for h in found] == case["output_ids"]
    assert [h.score for h in found] == pytest.approx(case["scores"], abs=1e-3)


def naive_search(
    model: TableModel,
    *,
    width: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool,
    end_ids: tuple[int, ...],
    stop_words: tuple[tuple[int, ...], ...],
) -> list[tuple[float, list[int]]]:
    """Beam search over the whole sorted candidate list; returns (score, output) best first."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    complete: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        options = [
            (cum + log_prob, [*output, token])
            for cum, output in beams
            for token, log_prob in enumerate(model.log_probs([1, 2, *output]).tolist())
        ]
        options.sort(key=lambda option: -option[0])
        beams = []
        for rank, (cum, output) in enumerate(options):
            ends = output[-1] in end_ids
            stops = any(tuple(output[len(output) - len(word) :]) == word for word in stop_words)
            if not ends and not stops:
                beams.append((cum, output))
            elif rank < width:
                complete.append((cum / length**length_penalty, output[:-1] if ends else output))
            if len(beams) == width:
                break
        complete = sorted(complete, key=lambda answer: -answer[0])[:width]
        if not beams:
            return complete
        if len(complete) == width and (early_stopping or complete[-1][0] >= options[0][0] / length**length_penalty):
            return complete
    growing = [(cum / max_tokens**length_penalty, output) for cum, output in beams]
    return sorted([*complete, *growing], key=lambda answer: -answer[0])[:width]
