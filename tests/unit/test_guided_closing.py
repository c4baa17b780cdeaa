"""Budget-aware closing: what was let in is complete by max_tokens, whatever is chosen on the way."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from python_backend.errors import EngineFailure, InvalidRequest, Unsupported
from python_backend.guided.after_marker import AfterMarker
from python_backend.guided.backends import make_backend
from python_backend.guided.closing import Closer, ClosingMask
from python_backend.guided.completion import SearchLimits, TokenOrder, shortest_completion
from python_backend.guided.guide import check_guide
from python_backend.guided.limits import GuideLimits
from python_backend.request import GenerationRequest, Guide, SamplingParams
from python_backend.text.tokenizer import Tokenizer
from python_backend.triton.closing import ClosingService
from tests.server.guided_cases import cases
from tests.unit.engine_driver import make_request, running_engine
from tests.unit.guided_helpers import END_ID, LIBRARIES, VOCAB_SIZE, allowed, compiled, tokenizer
from tests.unit.tiny_models import tiny_tokenizer

ENDS = (END_ID,)
PATIENT = SearchLimits(seconds=20)
QUICK = SearchLimits(seconds=20, first=True)


def closer() -> Closer:
    return Closer(TokenOrder([tokenizer().decode([i]) for i in range(VOCAB_SIZE)]), VOCAB_SIZE)


CLOSER = closer()


@pytest.fixture(params=LIBRARIES)
def library(request):
    return request.param


def schema(**entries):
    return json.dumps(entries)


def closing(mask, completion, max_tokens, lead_in=()):
    return ClosingMask(mask, CLOSER, completion=completion, max_tokens=max_tokens, end_ids=ENDS, lead_in=lead_in)


def start(kind, guide, max_tokens, **options):
    """A closing mask, or None where no way to the end was found."""
    matcher = compiled(kind, guide, **options).start(ENDS)
    completion = CLOSER.completion(matcher, max_tokens, ENDS, limits=QUICK)
    return None if completion is None else closing(matcher, completion, max_tokens)


def write(mask, max_tokens, rng, *, forcing=True):
    """The answer of a model that chooses at random, as the engine takes it down, and how often it was overruled."""
    tokens: list[int] = []
    overruled = 0
    while len(tokens) < max_tokens and not mask.finished:
        chosen = rng.choice(sorted(allowed(mask)))
        settled = mask.settle(chosen)
        overruled += settled != chosen
        if settled == END_ID:
            break
        mask.accept(settled)
        tokens.append(settled)
        for token_id in mask.forced_tokens() if forcing and not mask.finished else []:
            mask.accept(token_id)
            tokens.append(token_id)
    assert len(tokens) <= max_tokens
    return tokenizer().decode(tokens, skip_special_tokens=False), overruled


@pytest.mark.parametrize("seed", range(6))
def test_every_answer_that_was_let_in_is_valid_at_its_budget(library, seed):
    rng = random.Random(seed)
    done = 0
    for case in cases(seed, 16):
        for max_tokens in (rng.randint(2, 12), rng.randint(12, 60), 150):
            mask = start(case.kind, case.guide, max_tokens, whitespace=case.whitespace, library=library)
            if mask is None:
                continue
            text, _ = write(mask, max_tokens, rng, forcing=rng.random() < 0.7)
            assert case.judge(text) is None, (case.guide, max_tokens, text)
            done += 1
    assert done >= 24


def shortest_by_trying_all(matcher, longest):
    """Length of the shortest completion, by breadth-first search over every token."""
    level = [matcher]
    for length in range(longest + 1):
        if any(state.is_accepting for state in level):
            return length
        level = [twin for state in level for twin in _children(state)]
    return None


def _children(state):
    for token_id in allowed(state) - {END_ID}:
        twin = state.fork()
        twin.accept(token_id)
        yield twin


@pytest.mark.parametrize(
    ("kind", "guide"),
    [
        ("regex", "a*b"),
        ("regex", "[a-z]{2,3}!"),
        ("regex", "(foo|x)[0-9]"),
        ("choice", '["hello", "no"]'),
        ("json_schema", schema(type="integer")),
        ("json_schema", schema(type="boolean")),
        ("json_schema", schema(type="array", items={"type": "integer"}, maxItems=2)),
        ("ebnf_grammar", 'root ::= "(" root ")" | "x"'),
    ],
)
def test_the_shortest_completion_is_found_where_all_can_be_tried(library, kind, guide):
    matcher = compiled(kind, guide, library=library).start(ENDS)
    found = shortest_completion(matcher, 20, CLOSER.order, vocab_size=VOCAB_SIZE, end_ids=ENDS, limits=PATIENT)
    assert len(found) == shortest_by_trying_all(matcher, 4)


def test_a_budget_with_room_leaves_every_choice_to_the_model(library):
    mask = start("regex", "[a-z]{0,20}", 21, library=library)
    text, overruled = write(mask, 21, random.Random(1))
    assert overruled == 0
    assert text.islower() or text == ""


def test_the_model_may_use_the_whole_budget(library):
    text, overruled = write(start("regex", '"[a-z]*"', 9, library=library), 9, random.Random(2))
    assert text[0] == text[-1] == '"'
    assert overruled == 1
    assert len(text) >= 9


def test_an_end_is_forced_where_every_other_token_leads_too_far(library):
    mask = start("regex", "(abcdefghijklmnopq)*", 3, library=library)
    assert mask.settle(min(allowed(mask) - {END_ID})) == END_ID


def test_what_cannot_be_complete_in_time_has_no_completion(library):
    matcher = compiled("json_schema", schema(type="string", minLength=80), library=library).start(ENDS)
    assert CLOSER.completion(matcher, 10, ENDS, limits=PATIENT) is None


def test_forced_tokens_that_would_take_too_many_are_not_offered():
    class Wordy:
        """Forces a long way of writing what one token writes as well."""

        def __init__(self, place=0):
            self.place = place

        def fill(self, bitmask):
            bitmask.fill(-1)

        def fork(self):
            return Wordy(self.place)

        def accept(self, token_id):
            self.place += 5 if token_id == 9 else 1

        def forced_tokens(self):
            return [7] * (5 - self.place)

        @property
        def is_accepting(self):
            return self.place >= 5

        finished = is_accepting

    mask = closing(Wordy(), [9], 3)
    assert mask.forced_tokens() == []
    assert mask.settle(9) == 9
    assert closing(Wordy(), [9], 5).forced_tokens() == [7] * 5


def test_a_token_that_was_not_settled_is_not_taken(library):
    mask = start("regex", "[a-z]{0,20}", 10, library=library)
    with pytest.raises(EngineFailure, match="was not settled"):
        mask.accept(40)


def test_behind_a_marker_the_marker_is_written_in_time(library):
    marker = "</think>"
    lead_in = tokenizer().encode(marker, add_special_tokens=False)
    matcher = compiled("choice", '["yes", "no"]', library=library).start(ENDS)
    decode = tokenizer().decode
    guided = AfterMarker(matcher, marker, ENDS, lambda ids: decode(ids, skip_special_tokens=False))
    limit = len(lead_in) + 12
    completion = CLOSER.completion(guided, limit, ENDS, lead_in)
    assert CLOSER.completion(guided, len(lead_in), ENDS, lead_in) is None
    text, overruled = write(closing(guided, completion, limit, lead_in), limit, random.Random(3))
    assert overruled >= len(lead_in)
    assert text.rpartition(marker)[2] in ("yes", "no")


def test_a_twin_and_its_origin_go_their_own_ways(library):
    matcher = compiled("regex", "[ab]{2}", library=library).start(ENDS)
    twin = matcher.fork()
    a = tokenizer().encode("a", add_special_tokens=False)[0]
    twin.accept(a)
    twin.accept(a)
    assert twin.finished
    assert not matcher.finished
    bitmask = np.zeros(VOCAB_SIZE // 32, np.int32)
    matcher.fill(bitmask)
    assert bitmask.any()


SAMPLING = ("max_tokens", "no_repeat_ngram_size", "beam_width", "num_return_sequences")


def request(guide, **options):
    sampling = {name: options.pop(name) for name in SAMPLING if name in options}
    options.setdefault("end_ids", ENDS)
    return GenerationRequest("r", [5], SamplingParams(**{"max_tokens": 40, **sampling}), guide=guide, **options)


NAME = schema(type="object", properties={"name": {"type": "string"}}, required=["name"], additionalProperties=False)
CLOSED = Guide("json_schema", NAME, close=True)


@pytest.fixture
def service():
    made = ClosingService(tokenizer(), VOCAB_SIZE)
    yield made
    made.stop()


def prepared(service, sent, begin):
    """What makes the masks, once the way to the end has been found."""
    masks: Future = Future()
    service.prepare(sent, begin, masks)
    return masks.result(timeout=60)


def test_a_request_that_cannot_be_complete_in_time_is_refused_with_what_it_takes(library, service):
    guide = compiled("json_schema", NAME, library=library)
    least = len(CLOSER.completion(guide.start(ENDS), 99, ENDS))
    with pytest.raises(InvalidRequest, match=f"max_tokens is {least - 1}, and the shortest answer found takes {least}"):
        prepared(service, request(CLOSED, max_tokens=least - 1), lambda: guide.start(ENDS))
    assert prepared(service, request(CLOSED, max_tokens=least), lambda: guide.start(ENDS))().forced_tokens()


def test_whoever_makes_the_masks_searches_for_nothing_though_the_guide_was_forgotten(service, monkeypatch):
    searching = []
    search = Closer.completion

    def watched(self, *arguments, **options):
        searching.append(threading.current_thread().name)
        return search(self, *arguments, **options)

    monkeypatch.setattr(Closer, "completion", watched)
    monkeypatch.setattr("python_backend.triton.closing._MAX_KNOWN", 2)
    makers = []
    for word in ("yes", "no", "maybe", "never", "yes"):
        text = json.dumps([word, f"{word}, indeed"])
        guide = compiled("choice", text)
        sent = request(Guide("choice", text, close=True))
        makers.append(prepared(service, sent, lambda guide=guide: guide.start(ENDS)))
    assert len(searching) == 5  # "yes" twice: it had been forgotten
    for make in makers:
        for mask in (make(), make()):
            assert allowed(mask)
    assert len(searching) == 5
    assert all(name.startswith("guide-closing") for name in searching)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bad_words": ((7,),)}, "bad_words"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"embedding_bias": np.array([0, -np.inf], np.float32)}, "an embedding_bias of -inf"),
        ({"end_ids": ()}, "end_id -1"),
    ],
)
def test_what_may_forbid_the_closing_tokens_is_refused_by_name(options, words):
    with pytest.raises(Unsupported, match=f"together with {words}"):
        ClosingService(tokenizer(), VOCAB_SIZE).check(request(CLOSED, **options))
    ClosingService(tokenizer(), VOCAB_SIZE).check(request(CLOSED))


def test_closing_is_not_served_with_beams():
    sent = request(CLOSED, beam_width=2, num_return_sequences=2)
    with pytest.raises(Unsupported, match="beam_width is 2; a request with guided_decoding_close"):
        ClosingService(tokenizer(), VOCAB_SIZE).check(sent)


@pytest.fixture(scope="module", params=LIBRARIES)
def tiny(request):
    """The compiled schema and the service for the vocabulary of the engine's tiny models."""
    fast = tiny_tokenizer(320)
    backend = make_backend(request.param, GuideLimits())
    backend.load_tokenizer(fast.to_str(), 320, ENDS)
    tokens = Tokenizer(fast)
    guide = backend.compile(backend.grammar(check_guide(Guide("json_schema", NAME))))
    service = ClosingService(tokens, 320)
    yield guide, service, tokens
    service.stop()


@pytest.mark.parametrize("options", [{}, {"return_log_probs": True, "num_return_sequences": 3}])
@pytest.mark.parametrize("max_tokens", [12, 13, 20, 60])
def test_the_engine_ends_every_sample_with_a_complete_structure(tiny, max_tokens, options):
    guide, service, tokens = tiny
    masks: Future = Future()
    sent = make_request("r", [5], end_ids=ENDS, max_tokens=max_tokens, temperature=1.0, top_p=1.0, seed=3, **options)
    sent.guide = CLOSED
    service.prepare(sent, lambda: guide.start(ENDS), masks)
    with running_engine() as driver:
        driver.engine.submit(sent, masks)
        answer = driver.collect(1)["r"]
    assert answer.error is None
    for ids in answer.tokens.values():
        assert len(ids) <= max_tokens
        assert isinstance(json.loads(tokens.decode(ids))["name"], str)
    if max_tokens <= 13:  # a random model does not end a string by itself so soon
        assert set(answer.reasons.values()) == {"length"}
    if "return_log_probs" in options:
        last = {event.sequences[0].index: event.sequences[0] for event in answer.events}
        assert all(len(last[index].log_probs) == len(ids) for index, ids in answer.tokens.items())


def test_a_mask_that_cannot_be_made_ends_its_own_request_only():
    def refuse():
        raise InvalidRequest("the reason")

    masks: Future = Future()
    masks.set_result(refuse)
    with running_engine() as driver:
        driver.engine.submit(make_request("bad", [5], end_ids=ENDS), masks)
        assert str(driver.collect(1)["bad"].error) == "the reason"
        assert len(driver.run(make_request("good", [5], end_ids=()))["good"].tokens[0]) == 16
