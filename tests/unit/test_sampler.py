from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.engine.random_stream import RandomStream
from python_backend.engine.sampler import Sampler
from python_backend.engine.sequence import Sequence
from python_backend.errors import EngineFailure
from tests.unit.sampling_helpers import distribution, make_sequence, processed

VOCAB = 1000  # not a multiple of the group size, so that padding takes part


def random_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def generate(sampler: Sampler, sequence: Sequence, steps: int, logits_seed: int = 0) -> list[int]:
    for step in range(steps):
        row = random_logits(seed=logits_seed + 31 * step)
        token = sampler.sample(row, [sequence])[0]
        assert isinstance(token, int)
        sequence.token_ids.append(token)
    return sequence.output_ids


def bitmask_of(allowed: list[int], vocab: int = VOCAB) -> np.ndarray:
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_greedy_takes_the_most_probable_token_of_each_row() -> None:
    logits = random_logits(rows=8)
    sequences = [make_sequence() for _ in range(8)]
    assert Sampler(VOCAB).sample(logits, sequences) == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1, "temperature": 0.7}, {"temperature": 1.0}, {}])
def test_what_the_request_calls_greedy_is_greedy(options: dict[str, Any]) -> None:
    logits = random_logits()
    assert Sampler(VOCAB).sample(logits, [make_sequence(**options)]) == [int(logits.argmax())]


def test_equal_logits_give_the_lowest_token_id() -> None:
    assert Sampler(VOCAB).sample(np.ones((1, VOCAB), np.float32), [make_sequence()]) == [0]


def test_the_logits_stay_as_they_are() -> None:
    logits = random_logits(rows=2)
    before = logits.copy()
    sequences = [make_sequence(temperature=0.5, repetition_penalty=2.0, top_p=0.9, bad_words=((3,),)), make_sequence()]
    Sampler(VOCAB).sample(logits, sequences)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.9}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.8, "temperature": 1.3}],
)
def test_a_seed_gives_the_same_tokens_in_any_company(options: dict[str, Any]) -> None:
    alone = generate(Sampler(VOCAB), make_sequence(seed=7, **options), steps=12)
    sampler = Sampler(VOCAB)
    mine = make_sequence(seed=7, **options)
    others = [make_sequence(seed=seed, temperature=1.5) for seed in range(5)]
    for step in range(12):
        position = step % 6
        sequences = [*others[:position], mine, *others[position:]]
        logits = random_logits(rows=6, seed=1000 + step)
        logits[position] = random_logits(seed=31 * step)[0]
        for sequence, token in zip(sequences, sampler.sample(logits, sequences), strict=True):
            assert isinstance(token, int)
            sequence.token_ids.append(token)
    assert mine.output_ids == alone


def test_a_sequence_computed_again_in_another_sampler_goes_on_with_the_same_tokens() -> None:
    options: dict[str, Any] = {
        "seed": 3, "temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "no_repeat_ngram_size": 2,
    }  # fmt: skip
    whole = generate(Sampler(VOCAB), make_sequence(**options), steps=10)
    resumed = make_sequence(output_ids=whole[:5], **options)
    for step in range(5, 10):
        token = Sampler(VOCAB).sample(random_logits(seed=31 * step), [resumed])[0]
        assert isinstance(token, int)
        resumed.token_ids.append(token)
    assert resumed.output_ids == whole


def test_sample_number_two_of_seed_five_is_sample_number_zero_of_seed_seven() -> None:
    first = generate(Sampler(VOCAB), make_sequence(seed=5, index=2, temperature=1.5), steps=8)
    second = generate(Sampler(VOCAB), make_sequence(seed=7, index=0, temperature=1.5), steps=8)
    other = generate(Sampler(VOCAB), make_sequence(seed=5, index=0, temperature=1.5), steps=8)
    assert first == second
    assert first != other


def test_without_a_seed_two_requests_differ() -> None:
    flat = np.zeros((1, VOCAB), np.float32)
    sampler = Sampler(VOCAB)
    tokens = {sampler.sample(flat, [make_sequence(temperature=0.9)])[0] for _ in range(20)}
    assert len(tokens) > 10


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "seed": 1},
        {"top_k": 10},
        {"top_p": 0.5},
        {"repetition_penalty": 1.2},
        {"return_log_probs": True},
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_fails_alone(options: dict[str, Any], bad: float) -> None:
    logits = random_logits(rows=3)
    logits[1, 700] = bad
    first, second, third = Sampler(VOCAB).sample(logits, [make_sequence(**options) for _ in range(3)])
    assert isinstance(second, EngineFailure)
    assert isinstance(first, int)
    assert isinstance(third, int)


def test_when_every_token_is_forbidden_the_request_fails() -> None:
    sequence = make_sequence(bad_words=tuple((token,) for token in range(VOCAB)))
    assert isinstance(Sampler(VOCAB).sample(random_logits(), [sequence])[0], EngineFailure)


def test_a_mask_forbids_what_it_does_not_allow() -> None:
    logits = random_logits(rows=2)
    allowed = [5, 31, 32, 999]
    masks = np.stack([bitmask_of(allowed), np.full(32, -1, dtype=np.int32)])
    tokens = Sampler(VOCAB).sample(logits, [make_sequence(), make_sequence()], masks)
    assert tokens == [max(allowed, key=lambda token: logits[0, token]), int(logits[1].argmax())]


def test_tokens_behind_the_end_of_the_mask_are_forbidden() -> None:
    logits = random_logits()
    logits[0, 990] = 99.0
    assert Sampler(VOCAB).sample(logits, [make_sequence()], np.full((1, 2), -2, np.int32)) == [
        1 + int(np.where(np.arange(1, 64) == 32, -np.inf, logits[0, 1:64]).argmax())
    ]


def test_a_finished_structure_may_end_before_min_tokens() -> None:
    sequence = make_sequence(end_ids=(9,), min_tokens=5)
    assert Sampler(VOCAB).sample(random_logits(), [sequence], bitmask_of([9])[None]) == [9]


def test_min_tokens_bans_an_end_id_that_the_mask_allows_among_others() -> None:
    logits = random_logits()
    logits[0, 9] = 50.0
    sequence = make_sequence(end_ids=(9,), min_tokens=5)
    assert Sampler(VOCAB).sample(logits, [sequence], bitmask_of([9, 10])[None]) == [10]


def test_min_tokens_bans_the_end_ids_until_they_are_reached() -> None:
    logits = random_logits()
    logits[0, [9, 11]] = 50.0, 49.0
    sampler = Sampler(VOCAB)
    tokens = [
        sampler.sample(logits, [make_sequence([20] * done, end_ids=(9, 11), min_tokens=3)])[0] for done in range(4)
    ]
    assert tokens[3] == 9
    assert not {9, 11} & set(tokens[:3])


def test_a_bad_word_of_one_token_never_comes() -> None:
    logits = random_logits()
    best, second = np.argsort(-logits[0])[:2].tolist()
    assert Sampler(VOCAB).sample(logits, [make_sequence(bad_words=((best,),))]) == [second]


def test_the_last_token_of_a_bad_word_is_banned_only_behind_the_others() -> None:
    logits = random_logits()
    best, second = np.argsort(-logits[0])[:2].tolist()
    words = ((7, 8, best),)
    sampler = Sampler(VOCAB)
    assert sampler.sample(logits, [make_sequence([7, 8], bad_words=words)]) == [second]
    assert sampler.sample(logits, [make_sequence([8, 7], bad_words=words)]) == [best]
    assert sampler.sample(logits, [make_sequence([8], prompt_ids=[7], bad_words=words)]) == [second]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_comes_twice(size: int) -> None:
    sampler = Sampler(VOCAB)
    sequence = make_sequence(no_repeat_ngram_size=size, temperature=0.5, seed=1)
    logits = np.full((1, VOCAB), -30.0, np.float32)
    logits[0, :8] = 0.0
    for _ in range(6 if size == 1 else 40):
        token = sampler.sample(logits, [sequence])[0]
        assert isinstance(token, int)
        sequence.token_ids.append(token)
    ngrams = [tuple(sequence.token_ids[i : i + size]) for i in range(len(sequence.token_ids) - size + 1)]
    assert len(ngrams) == len(set(ngrams))


def test_the_bias_is_added_and_may_be_shorter_than_the_vocabulary() -> None:
    bias = np.zeros(VOCAB - 100, np.float32)
    bias[17] = 100.0
    assert Sampler(VOCAB).sample(random_logits(), [make_sequence(embedding_bias=bias)]) == [17]


def test_penalties_count_prompt_and_output_and_follow_new_tokens() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [3, 4, 5, 6]] = 4.0, 3.9, 3.8, 3.7
    sequence = make_sequence(prompt_ids=[3], repetition_penalty=1.5)
    sampler = Sampler(VOCAB)
    for expected in (4, 5, 6):
        assert sampler.sample(logits, [sequence]) == [expected]
        sequence.token_ids.append(expected)


def test_the_frequency_penalty_grows_with_each_occurrence() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 3], logits[0, 4] = 4.0, 2.5
    sampler = Sampler(VOCAB)
    assert sampler.sample(logits, [make_sequence([3], frequency_penalty=1.0)]) == [3]
    assert sampler.sample(logits, [make_sequence([3, 3], frequency_penalty=1.0)]) == [4]
    assert sampler.sample(logits, [make_sequence([3, 3], presence_penalty=1.0)]) == [3]


def test_top_p_decays_to_its_minimum_and_comes_back_after_the_reset_token() -> None:
    options: dict[str, Any] = {"top_p": 0.8, "top_p_decay": 0.5, "top_p_min": 0.3, "top_p_reset_id": 42}
    sequence = make_sequence([10], **options)
    sampler = Sampler(VOCAB)
    sampler.open(sequence)
    decay = sequence.sampler_state.top_p_decay
    assert decay.value(sequence) == pytest.approx(0.4)
    sequence.token_ids.append(10)
    assert decay.value(sequence) == pytest.approx(0.3)
    sequence.token_ids.append(42)
    assert decay.value(sequence) == pytest.approx(0.8)


def test_log_probs_are_those_of_the_raw_model() -> None:
    logits = random_logits()
    expected = logits[0].astype(np.float64) - np.log(np.exp(logits[0].astype(np.float64)).sum())
    sequence = make_sequence(
        temperature=2.0, seed=4, return_log_probs=True, top_logprobs=5, repetition_penalty=1.7, top_k=30
    )
    sampler = Sampler(VOCAB)
    tokens = [sampler.sample(logits, [sequence])[0] for _ in range(3)]
    assert sequence.log_probs == pytest.approx([expected[token] for token in tokens], abs=1e-5)
    assert sequence.cum_log_prob == pytest.approx(sum(sequence.log_probs))
    top = sequence.top_log_probs[0]
    assert top.token_ids == np.argsort(-logits[0], kind="stable")[:5].tolist()
    assert top.log_probs == pytest.approx(expected[top.token_ids], abs=1e-5)


def test_an_end_id_counts_in_cum_log_prob_but_is_no_output() -> None:
    logits = random_logits()
    sequence = make_sequence(end_ids=(int(logits.argmax()),), return_log_probs=True, top_logprobs=2)
    Sampler(VOCAB).sample(logits, [sequence])
    assert sequence.log_probs == []
    assert sequence.top_log_probs == []
    assert sequence.cum_log_prob < 0


def test_log_probs_are_kept_only_when_asked_for() -> None:
    sequence = make_sequence(temperature=0.8)
    Sampler(VOCAB).sample(random_logits(), [sequence])
    assert sequence.log_probs == []
    assert sequence.cum_log_prob == 0


def test_no_alternatives_still_give_the_chosen_log_prob() -> None:
    sequence = make_sequence(top_logprobs=0)
    Sampler(VOCAB).sample(random_logits(), [sequence])
    assert len(sequence.log_probs) == 1
    assert len(sequence.top_log_probs[0].token_ids) == 0


sampling_options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 3, 60, 700, 5000]),
        "top_p": st.sampled_from([0.0, 0.01, 0.5, 0.95, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.4]),
        "presence_penalty": st.sampled_from([-0.5, 1.0]),
        "frequency_penalty": st.sampled_from([-0.5, 1.0]),
        "no_repeat_ngram_size": st.integers(0, 3),
        "bad_words": st.just(((2,), (1, 4), (5, 6, 7))),
        "return_log_probs": st.booleans(),
        "top_logprobs": st.sampled_from([None, 0, 3]),
        "seed": st.integers(0, 2**64 - 1),
    },
)


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.sampled_from([8, 40, 511, 512, 513, 1000]),
    options=sampling_options,
    history=st.lists(st.integers(0, 7), max_size=12),
    kind=st.sampled_from(["normal", "flat", "peaked", "ties"]),
    data=st.data(),
)
def test_the_chosen_token_is_always_a_permitted_one(
    vocab: int, options: dict[str, Any], history: list[int], kind: str, data: st.DataObject
) -> None:
    logits = random_logits(vocab=vocab, seed=len(history))
    if kind != "normal":
        logits = {"flat": logits * 1e-3, "peaked": logits * 20, "ties": np.round(logits / 3)}[kind].astype(np.float32)
    sequence = make_sequence(history, **options)
    bitmask = None
    allowed = np.ones(vocab, dtype=bool)
    if data.draw(st.booleans()):
        allowed = np.random.default_rng(len(history)).random(vocab) < 0.5
        allowed[data.draw(st.integers(0, vocab - 1))] = True
        bitmask = bitmask_of(np.flatnonzero(allowed).tolist(), vocab)[None]
    allowed[list(naive_bans(sequence))] = False
    token = Sampler(vocab).sample(logits, [sequence], bitmask)[0]
    if not allowed.any():
        assert isinstance(token, EngineFailure)
        return
    assert isinstance(token, int)
    assert allowed[token]
    banned = np.where(allowed, processed(logits[0], sequence), -np.inf)
    sampling = sequence.request.sampling
    if sampling.greedy:
        assert banned[token] == pytest.approx(banned.max(), rel=1e-5, abs=1e-5)
    elif sampling.top_k:
        assert (banned > banned[token] + 1e-5).sum() < sampling.top_k


def naive_bans(sequence: Sequence) -> set[int]:
    ids = sequence.token_ids
    banned = {word[-1] for word in sequence.request.bad_words if ids[len(ids) - len(word) + 1 :] == list(word[:-1])}
    size = sequence.request.sampling.no_repeat_ngram_size
    if size:
        tail = ids[len(ids) - size + 1 :] if len(ids) >= size - 1 else None
        banned |= {ids[i + size - 1] for i in range(len(ids) - size + 1) if ids[i : i + size - 1] == tail}
    return banned


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(st.tuples(sampling_options, st.lists(st.integers(0, 7), max_size=6)), min_size=1, max_size=6))
def test_a_batch_gives_what_its_rows_give_alone(batch: list[tuple[dict[str, Any], list[int]]]) -> None:
    logits = random_logits(rows=len(batch))
    sampler = Sampler(VOCAB)

    def sequence(row: int) -> Sequence:
        options, history = batch[row]
        return make_sequence(history, **{"seed": row} | options)

    together = [sequence(row) for row in range(len(batch))]
    alone = [sequence(row) for row in range(len(batch))]
    tokens = sampler.sample(logits, together)
    assert tokens == [sampler.sample(logits[row : row + 1], [alone[row]])[0] for row in range(len(batch))]
    assert [s.log_probs for s in together] == [s.log_probs for s in alone]


CASES: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 1.0},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": 50, "temperature": 2.0},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.999, "temperature": 2.0},
    {"top_k": 40, "top_p": 0.7},
    {"temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"top_p": 0.95, "frequency_penalty": 1.5, "temperature": 1.4},
]


@pytest.mark.parametrize("vocab", [60, 2000])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_frequencies_follow_the_exact_distribution(options: dict[str, Any], vocab: int) -> None:
    draws = 3000
    logits = random_logits(vocab=vocab, seed=5, scale=2.0)
    history = [3, 3, 3, 7, 20, int(logits.argmax())]
    options = options | {"seed": 0}  # only says that temperature 1 means sampling
    expected = distribution(logits[0], make_sequence(history, **options))
    sampler, sequence = Sampler(vocab), make_sequence(history, **options)
    tokens = []
    for seed in range(draws):
        sampler.open(sequence)
        sequence.sampler_state.random = RandomStream(seed)
        tokens.append(sampler.sample(logits, [sequence])[0])
    counts = np.bincount(np.array(tokens), minlength=vocab)
    assert not counts[expected == 0].any()
    assert chi_square_z(counts, expected * draws) < 4


def chi_square_z(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations chi-square lies over its mean; rare tokens are put together in bins of 5."""
    order = np.argsort(-expected)
    bins = np.minimum(np.cumsum(expected[order]) / 5, (expected[order] >= 5).sum() + 1e9).astype(int)
    common = expected[order] >= 5
    bins[common] = np.arange(common.sum())
    bins[~common] += len(order)
    _, bins = np.unique(bins, return_inverse=True)
    observed = np.bincount(bins, weights=counts[order])
    means = np.bincount(bins, weights=expected[order])
    observed, means = observed[means > 0], means[means > 0]
    freedom = max(len(means) - 1, 1)
    return float((((observed - means) ** 2 / means).sum() - freedom) / math.sqrt(2 * freedom))


def test_draws_of_successive_steps_are_independent_of_each_other() -> None:
    sampler = Sampler(2)
    logits = np.zeros((1, 2), np.float32)
    sequence = make_sequence(seed=1, temperature=0.5)
    for _ in range(4000):
        token = sampler.sample(logits, [sequence])[0]
        assert isinstance(token, int)
        sequence.token_ids.append(token)
    bits = np.array(sequence.output_ids) * 2.0 - 1
    for lag in (1, 2, 3):
        assert abs((bits[lag:] * bits[:-lag]).mean()) < 4 / math.sqrt(4000)
    assert abs(bits.mean()) < 4 / math.sqrt(4000)
