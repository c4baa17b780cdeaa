from __future__ import annotations

from typing import Any

from python_backend.engine.sequence import Sequence
from python_backend.engine.stopping import StopDecision, decide
from tests.unit.sampling_helpers import make_sequence

LIMIT = 1000


class StopsAfter:
    """A text stop that finds its text with the n-th token."""

    def __init__(self, count: int, text_cut: int = 2) -> None:
        self.pushed: list[int] = []
        self._count, self._text_cut = count, text_cut

    def push(self, token_id: int) -> int | None:
        self.pushed.append(token_id)
        return self._text_cut if len(self.pushed) == self._count else None

    def held_tokens(self) -> int:
        return 0


def run(sequence: Sequence, tokens: list[int], max_seq_len: int = LIMIT) -> StopDecision:
    decision = StopDecision(append=True)
    for token in tokens:
        assert decision.finish_reason is None, "went on after the end"
        decision = decide(sequence, token, max_seq_len)
        if decision.append:
            sequence.token_ids.append(token)
    return decision


def finished_with(tokens: list[int], max_seq_len: int = LIMIT, **options: Any) -> tuple[str | None, list[int]]:
    sequence = make_sequence(**options)
    decision = run(sequence, tokens, max_seq_len)
    return decision.finish_reason, sequence.output_ids


def test_an_end_id_stops_and_is_no_part_of_the_output() -> None:
    assert finished_with([5, 6, 9], end_ids=(8, 9)) == ("stop", [5, 6])


def test_without_end_ids_no_token_stops() -> None:
    assert finished_with([5, 9, 0]) == (None, [5, 9, 0])


def test_a_stop_word_stops_and_stays_in_the_output() -> None:
    assert finished_with([5, 6, 7], stop_words=((6, 7), (4,))) == ("stop", [5, 6, 7])


def test_a_stop_word_does_not_reach_back_into_the_prompt() -> None:
    assert finished_with([7], prompt_ids=[1, 6], stop_words=((6, 7),)) == (None, [7])


def test_a_part_of_a_stop_word_does_not_stop() -> None:
    assert finished_with([6, 5, 7], stop_words=((6, 7),)) == (None, [6, 5, 7])


def test_an_empty_stop_word_never_stops() -> None:
    assert finished_with([6], stop_words=((),)) == (None, [6])


def test_max_tokens_ends_with_length() -> None:
    assert finished_with([5, 6], max_tokens=2) == ("length", [5, 6])


def test_the_longest_sequence_ends_with_length() -> None:
    assert finished_with([5, 6], prompt_ids=[1, 2, 3], max_seq_len=5) == ("length", [5, 6])


def test_a_stop_word_that_ends_at_the_limit_counts_as_stop() -> None:
    assert finished_with([5, 6], max_tokens=2, stop_words=((5, 6),)) == ("stop", [5, 6])


def test_min_tokens_holds_stop_words_back() -> None:
    assert finished_with([6, 6, 6], min_tokens=3, stop_words=((6,),)) == ("stop", [6, 6, 6])


def test_an_end_id_that_was_chosen_ends_even_before_min_tokens() -> None:
    assert finished_with([5, 9], min_tokens=5, end_ids=(9,)) == ("stop", [5])


def test_a_text_stop_cuts_the_text() -> None:
    sequence = make_sequence()
    sequence.text_stop = StopsAfter(2, text_cut=3)
    assert run(sequence, [5, 6]) == StopDecision(append=True, finish_reason="stop", text_cut=3)


def test_a_text_stop_sees_every_token_once_but_no_end_id() -> None:
    sequence = make_sequence(end_ids=(9,), min_tokens=3)
    text_stop = StopsAfter(2)
    sequence.text_stop = text_stop
    assert run(sequence, [5, 6, 7, 9]).finish_reason == "stop"
    assert text_stop.pushed == [5, 6, 7]


def test_the_cut_is_known_when_text_and_token_ids_match_together() -> None:
    sequence = make_sequence(stop_words=((6,),), max_tokens=2)
    sequence.text_stop = StopsAfter(2, text_cut=4)
    assert run(sequence, [5, 6]) == StopDecision(append=True, finish_reason="stop", text_cut=4)
