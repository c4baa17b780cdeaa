"""Beams with a mask: each keeps to its own, and the search is the plain definition over what the masks allow."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.engine.beam import Hypothesis
from python_backend.engine.beam_search import BeamSearch
from python_backend.engine.masks import MaskFiller
from python_backend.errors import EngineFailure
from python_backend.guided.backends import make_backend
from python_backend.guided.guide import check_guide
from python_backend.guided.limits import GuideLimits
from python_backend.request import Guide
from python_backend.text.tokenizer import Tokenizer
from tests.unit.engine_driver import make_request, running_engine
from tests.unit.guided_helpers import LIBRARIES
from tests.unit.sampling_helpers import make_sequence
from tests.unit.scripted_mask import future_mask
from tests.unit.test_beam_search import TableModel
from tests.unit.tiny_models import tiny_tokenizer

VOCAB = 7
END = 0


@dataclass(frozen=True)
class Automaton:
    """From each state the tokens that may follow, with the states behind them, and where an answer may end."""

    moves: tuple[dict[int, int], ...]
    accepting: frozenset[int]

    def allowed(self, state: int) -> set[int]:
        return {*self.moves[state], *({END} if state in self.accepting else ())}


@dataclass
class AutomatonMask:
    """As the engine's masks are; a token that it does not allow is an error, as with a real one."""

    automaton: Automaton
    state: int = 0
    taken: list[int] = field(default_factory=list)

    def fill(self, bitmask: np.ndarray) -> None:
        bitmask[:] = sum(1 << token for token in self.automaton.allowed(self.state))

    def accept(self, token_id: int) -> None:
        if token_id not in self.automaton.moves[self.state]:
            raise EngineFailure(f"token {token_id} is not allowed")
        self.state = self.automaton.moves[self.state][token_id]
        self.taken.append(token_id)

    def fork(self) -> AutomatonMask:
        return AutomatonMask(self.automaton, self.state, list(self.taken))

    def forced_tokens(self) -> list[int]:
        return []

    @property
    def finished(self) -> bool:
        return self.state in self.automaton.accepting and not self.automaton.moves[self.state]


@st.composite
def automata(draw: st.DrawFn) -> Automaton:
    """Every state has a way on or accepts, as the states of a compiled grammar do."""
    size = draw(st.integers(1, 5))
    moves = [
        draw(st.dictionaries(st.integers(1, VOCAB - 1), st.integers(0, size - 1), max_size=4)) for _ in range(size)
    ]
    moves[0] = moves[0] or {1: 0}
    accepting = draw(st.frozensets(st.integers(0, size - 1)))
    return Automaton(tuple(moves), accepting | {state for state, move in enumerate(moves) if not move})


def search(model: TableModel, automaton: Automaton, **options: object) -> list[Hypothesis]:
    request = make_sequence(**{"prompt_ids": [1, 2], "end_ids": (END,)} | options).request
    beam_search = BeamSearch(request, VOCAB, 1000)
    beam_search.constrain(AutomatonMask(automaton), MaskFiller(VOCAB).fill_one)
    done = False
    while not done:
        done = beam_search.advance(np.stack([model.logits(beam.token_ids) for beam in beam_search.beams])).done
        for beam in beam_search.beams:
            assert beam.mask.taken == beam.token_ids[2:]
    return beam_search.hypotheses()


def masked_log_probs(model: TableModel, output: list[int], allowed: set[int]) -> dict[int, float]:
    row = model.log_probs([1, 2, *output])
    total = np.log(np.exp(row[sorted(allowed)]).sum())
    return {token: float(row[token] - total) for token in sorted(allowed)}


def plain_search(
    model: TableModel, automaton: Automaton, *, width: int, max_tokens: int, length_penalty: float, early_stopping: bool
) -> list[tuple[float, list[int], str]]:
    """Beam search over every allowed token of every beam: (score, output, finish_reason) best first."""
    beams: list[tuple[float, list[int], int]] = [(0.0, [], 0)]
    complete: list[tuple[float, list[int], str]] = []
    for length in range(1, max_tokens + 1):
        options = [
            (cum + log_prob, [*output, token], automaton.moves[state].get(token, -1))
            for cum, output, state in beams
            for token, log_prob in masked_log_probs(model, output, automaton.allowed(state)).items()
        ]
        options.sort(key=lambda option: -option[0])
        beams = []
        for rank, (cum, output, state) in enumerate(options):
            if output[-1] != END and not (state in automaton.accepting and not automaton.moves[state]):
                beams.append((cum, output, state))
            elif rank < width:
                complete.append((cum / length**length_penalty, output[:-1] if output[-1] == END else output, "stop"))
            if len(beams) == width:
                break
        complete = sorted(complete, key=lambda answer: -answer[0])[:width]
        if not beams:
            return complete
        if len(complete) == width and (early_stopping or complete[-1][0] >= options[0][0] / length**length_penalty):
            return complete
    growing = [(cum / max_tokens**length_penalty, output, "length") for cum, output, _ in beams]
    return [*complete, *sorted(growing, key=lambda answer: -answer[0])][:width]


@settings(max_examples=150, deadline=None)
@given(
    automaton=automata(),
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
    early_stopping=st.booleans(),
)
def test_a_masked_search_agrees_with_the_plain_definition(automaton, seed, width, length_penalty, early_stopping):
    model = TableModel(VOCAB, seed)
    rest = {"max_tokens": 5, "length_penalty": length_penalty, "early_stopping": early_stopping}
    found = search(model, automaton, beam_width=width, **rest)
    expected = plain_search(model, automaton, width=width, **rest)
    assert [(h.output_ids, h.finish_reason) for h in found] == [(output, reason) for _, output, reason in expected]
    assert [h.score for h in found] == pytest.approx([score for score, _, _ in expected], abs=1e-4)


def answers(automaton: Automaton, longest: int) -> list[list[int]]:
    """Every output that the automaton accepts, by trying all of them."""
    found = []
    for length in range(longest + 1):
        for output in itertools.product(range(1, VOCAB), repeat=length):
            state: int | None = 0
            for token in output:
                state = None if state is None else automaton.moves[state].get(token)
            if state in automaton.accepting:
                found.append(list(output))
    return found


@settings(max_examples=40, deadline=None)
@given(automaton=automata(), seed=st.integers(0, 10_000))
def test_beams_as_many_as_there_are_answers_find_every_one(automaton, seed):
    found = search(TableModel(VOCAB, seed), automaton, beam_width=100, max_tokens=3, early_stopping=False)
    complete = [h.output_ids for h in found if h.finish_reason == "stop"]
    possible = answers(automaton, 3)
    # An end takes a step, except where nothing can follow.
    expected = [output for output in possible if len(output) < 3 or is_finished(automaton, output)]
    assert sorted(complete) == sorted(expected)


def is_finished(automaton: Automaton, output: list[int]) -> bool:
    mask = AutomatonMask(automaton)
    for token in output:
        mask.accept(token)
    return mask.finished


def test_many_tokens_that_end_their_beam_do_not_hide_the_one_that_goes_on():
    ends = dict.fromkeys(range(1, 6), 1)
    automaton = Automaton(({**ends, 6: 0}, {}), frozenset({1}))
    model = TableModel(VOCAB, 0)
    model.table[:] = [0, 6, 5, 4, 3, 2, -3]
    found = search(model, automaton, beam_width=2, max_tokens=2, end_ids=(), early_stopping=False, length_penalty=9.0)
    assert found[0].output_ids == [6, 1]  # longer answers are preferred, and 6 is the last of six candidates


def test_log_probs_are_those_of_the_model_and_tell_what_was_forbidden():
    model = TableModel(VOCAB, 3)
    automaton = Automaton(({1: 1, 2: 1}, {3: 2, 4: 2}, {}), frozenset({2}))
    for hypothesis in search(model, automaton, beam_width=4, max_tokens=5, top_logprobs=1):
        ids, state = [1, 2], 0
        assert hypothesis.cum_log_prob == pytest.approx(sum(hypothesis.log_probs))
        for token, value, shown in zip(
            hypothesis.output_ids, hypothesis.log_probs, hypothesis.top_log_probs, strict=True
        ):
            row = model.log_probs(ids)
            assert value == shown.log_prob == pytest.approx(row[token], abs=1e-5)
            assert shown.masked == pytest.approx(1 - np.exp(row[sorted(automaton.moves[state])]).sum(), abs=1e-5)
            ids.append(token)
            state = automaton.moves[state][token]


def test_bans_that_leave_a_beam_nothing_end_it_and_the_others_go_on():
    automaton = Automaton(({1: 1, 2: 2}, {3: 3}, {4: 3}, {}), frozenset({3}))
    found = search(TableModel(VOCAB, 1), automaton, beam_width=2, max_tokens=5, bad_words=((3,),))
    assert [(h.output_ids, h.finish_reason) for h in found] == [([2, 4], "stop")]
    with pytest.raises(EngineFailure, match="Every token is forbidden"):
        search(TableModel(VOCAB, 1), automaton, beam_width=2, max_tokens=5, bad_words=((3,), (4,)))


NAME = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 2}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module", params=LIBRARIES)
def compile_guide(request):
    fast = tiny_tokenizer(320)
    backend = make_backend(request.param, GuideLimits())
    backend.load_tokenizer(fast.to_str(), 320, (2,))
    return lambda kind, text: backend.compile(backend.grammar(check_guide(Guide(kind, text))))


def beams_of(guide: object, **options: object):
    masks: Future = Future()
    masks.set_result(lambda: guide.start((2,)))
    sent = make_request("r", [5], end_ids=(2,), num_return_sequences=options["beam_width"], **options)
    with running_engine() as driver:
        driver.engine.submit(sent, masks)
        answer = driver.collect(1)["r"]
    return answer, [Tokenizer(tiny_tokenizer(320)).decode(ids) for ids in answer.tokens.values()]


def test_the_engine_gives_beams_that_satisfy_a_guide_and_differ(compile_guide):
    answer, texts = beams_of(compile_guide("json_schema", NAME), beam_width=3, max_tokens=60)
    assert answer.error is None
    assert set(answer.reasons.values()) == {"stop"}
    assert len(set(texts)) == 3
    for text in texts:
        assert set(json.loads(text)) == {"name", "ok"}
        assert len(json.loads(text)["name"]) <= 2


def test_a_structure_with_fewer_answers_than_beams_gives_them_all(compile_guide):
    answer, texts = beams_of(compile_guide("choice", '["yes", "no"]'), beam_width=4, max_tokens=20)
    assert answer.error is None
    assert sorted(texts) == ["no", "yes"]


def test_max_tokens_inside_the_structure_is_told(compile_guide):
    answer, _ = beams_of(compile_guide("json_schema", NAME), beam_width=2, max_tokens=4)
    assert set(answer.reasons.values()) == {"length"}


def test_a_mask_that_cannot_be_forked_ends_its_request():
    sent = make_request("r", [5], end_ids=(2,), beam_width=2, num_return_sequences=2)
    with running_engine() as driver:
        driver.engine.submit(sent, future_mask([[7], [8, 9]], 2))
        assert "ScriptedMask cannot" in str(driver.collect(1)["r"].error)
