"""Log-probabilities that the engine gives: of answers and prompts, raw and processed, with masks, samples and beams."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.engine.batch_scorer import BatchScorer
from python_backend.engine.log_probs import forbidden_share, log_probs_at
from python_backend.engine.prompt_reader import MAX_ROWS
from tests.unit.engine_driver import Answer, Driver, make_request, running_engine
from tests.unit.sampling_helpers import make_sequence, processed
from tests.unit.scripted_mask import future_mask

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
END = 0


def soft(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities, float64."""
    values = np.asarray(logits, np.float64)
    return (
        values
        - values.max(-1, keepdims=True)
        - np.log(np.exp(values - values.max(-1, keepdims=True)).sum(-1))[..., None]
    )


def ask(driver: Driver, prompt: list[int] = PROMPT, masks: object = None, **options: object) -> Answer:
    request = make_request("a", prompt, streaming=options.pop("streaming", False), **options)
    if masks is None:
        driver.engine.submit(request)
    else:
        driver.engine.submit(request, masks)
    return driver.collect(1)["a"]


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([1, 5, 511, 1000, 8191, 8192, 9000, 12_288]),
    n=st.sampled_from([0, 1, 5, 20, 200]),
    scale=st.sampled_from([0.0, 1e-3, 3.0, 80.0]),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_are_scored_together_as_defined(vocab: int, n: int, scale: float, ties: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rng.integers(1, 5), vocab)) * scale).astype(np.float32)
    if ties:
        logits = np.round(logits)
    for row, score in zip(logits, BatchScorer(vocab).score(list(logits), n), strict=True):
        found = log_probs_at(row, score, int(rng.integers(vocab)), n)
        expected = soft(row)
        assert score.maximum == row.max()
        assert score.token_ids[0] == row.argmax()
        assert found.token_ids == np.argsort(-row, kind="stable")[: min(n, vocab)].tolist()
        assert found.log_probs == pytest.approx(expected[found.token_ids].tolist(), abs=2e-5)
        assert found.log_probs == sorted(found.log_probs, reverse=True)
        assert np.exp(found.log_probs).sum() <= 1 + 1e-4


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_sound_says_so_and_harms_no_other(bad: float) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 9000)).astype(np.float32)
    logits[1, 4321] = bad
    first, second, third = BatchScorer(9000).score(list(logits), 5)
    assert not np.isfinite(second.maximum)
    for row, score in ((logits[0], first), (logits[2], third)):
        assert score.token_ids == np.argsort(-row)[:5].tolist()
        assert score.log_probs == pytest.approx(soft(row)[score.token_ids].tolist(), abs=1e-5)


@pytest.mark.parametrize(("vocab", "n"), [(9000, 5), (9000, 2), (200, 20), (200, 3)])
def test_what_a_mask_left_nothing_of_is_not_among_the_most_probable(vocab: int, n: int) -> None:
    row = np.full(vocab, -np.inf, np.float32)
    row[[5, 70]] = [1.0, 2.0]
    (score,) = BatchScorer(vocab).score([row], n)
    assert score.token_ids == [70, 5]
    assert np.exp(score.log_probs).sum() == pytest.approx(1)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999, 1.0])
def test_the_forbidden_share_is_the_probability_of_what_a_mask_forbids(share: float) -> None:
    vocab = 9001
    rng = np.random.default_rng(1)
    row = (rng.standard_normal(vocab) * 3).astype(np.float32)
    allowed = rng.random(vocab) < share
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[:vocab] = allowed
    (score,) = BatchScorer(vocab).score([row], 1)
    bitmask = np.packbits(bits, bitorder="little").view(np.int32)
    expected = float(np.exp(soft(row)[~allowed]).sum())
    assert forbidden_share(row, score.normalizer, bitmask) == pytest.approx(expected, abs=1e-6, rel=1e-4)
    assert forbidden_share(row, score.normalizer, None) == 0


def test_processed_values_are_of_the_distribution_that_is_drawn_from() -> None:
    options = {"temperature": 0.5, "repetition_penalty": 1.3, "seed": 7, "top_k": 4, "max_tokens": 6}
    with running_engine() as driver:
        answer = ask(driver, top_logprobs=3, logprobs_mode="processed", return_generation_logits=True, **options)
        raw = ask(driver, top_logprobs=3, **options)
    (news,) = answer.events[-1].sequences
    sequence = make_sequence(prompt_ids=PROMPT, temperature=0.5, repetition_penalty=1.3)
    for token_id, logits, entry in zip(news.token_ids, news.generation_logits, news.top_log_probs, strict=True):
        expected = soft(processed(logits, sequence))
        assert entry.log_prob == pytest.approx(expected[token_id], abs=1e-4)
        assert entry.token_ids == np.argsort(-expected, kind="stable")[:3].tolist()
        assert entry.log_probs == pytest.approx(expected[entry.token_ids], abs=1e-4)
        sequence.token_ids.append(token_id)
    assert raw.tokens[0] == answer.tokens[0]
    (other,) = raw.events[-1].sequences
    assert other.log_probs == pytest.approx(news.log_probs)  # upstream's stay raw
    assert [entry.log_prob for entry in other.top_log_probs] == pytest.approx(other.log_probs)
    assert [entry.log_prob for entry in news.top_log_probs] != pytest.approx(news.log_probs, abs=0.01)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_forced_tokens_have_the_values_and_the_masked_share_that_steps_give(mode: str) -> None:
    script = [[5], [6], [7], [8, 9], [10], [11]]
    options = {"top_logprobs": 2, "logprobs_mode": mode, "temperature": 0.7, "top_k": 5, "seed": 3, "end_ids": (END,)}
    with running_engine() as driver:
        fast, slow = (ask(driver, masks=future_mask(script, END, forcing=on), **options) for on in (True, False))
    entries = [answer.events[-1].sequences[0].top_log_probs for answer in (fast, slow)]
    assert fast.tokens[0] == slow.tokens[0]
    assert len(entries[0]) == len(script)
    for first, second, allowed in zip(*entries, script, strict=True):
        assert first.log_prob == pytest.approx(second.log_prob, abs=1e-4)
        assert first.masked == pytest.approx(second.masked, abs=1e-5)
        if mode == "raw":
            assert first.token_ids == second.token_ids
            if len(allowed) == 1:
                assert first.masked == pytest.approx(1 - np.exp(first.log_prob), abs=1e-4)
        else:
            assert sorted(first.token_ids) == allowed
            assert np.exp(first.log_probs).sum() == pytest.approx(1, abs=1e-5)


def test_without_a_mask_nothing_is_said_of_one() -> None:
    with running_engine() as driver:
        answer = ask(driver, top_logprobs=1)
    assert {entry.masked for entry in answer.events[-1].sequences[0].top_log_probs} == {None}


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_every_sample_and_every_beam_has_its_own(mode: str) -> None:
    options = {"top_logprobs": 2, "logprobs_mode": mode, "max_tokens": 5}
    with running_engine() as driver:
        samples = ask(driver, num_return_sequences=3, temperature=1.5, top_k=50, seed=1, streaming=True, **options)
        beams = ask(driver, beam_width=3, num_return_sequences=3, repetition_penalty=1.4, **options)
    for index in range(3):
        entries = [e for event in samples.events for s in event.sequences if s.index == index for e in s.top_log_probs]
        assert len(entries) == len(samples.tokens[index]) == 5
    for beam in beams.events[-1].sequences:
        assert len(beam.top_log_probs) == len(beam.token_ids) == 5
        if mode == "raw":
            assert [entry.log_prob for entry in beam.top_log_probs] == pytest.approx(beam.log_probs)
        else:
            assert [entry.log_prob for entry in beam.top_log_probs] != pytest.approx(beam.log_probs, abs=1e-3)


def test_a_prompt_scores_as_teacher_forcing_does() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 200, 3 * MAX_ROWS + 7).tolist()
    with running_engine(max_num_tokens=256) as driver:
        ask(driver, prompt, max_tokens=1)  # now the prompt is in the cache, and must be computed all the same
        answer = ask(driver, prompt, max_tokens=2, top_prompt_logprobs=2)
        expected = soft(ask(driver, prompt, max_tokens=1, return_context_logits=True).events[-1].context_logits)
        steps = driver.engine.stats().iteration
        ask(driver, prompt, max_tokens=2)
        assert driver.engine.stats().cached_prompt_tokens > 0
    found = answer.events[-1].prompt_log_probs
    assert len(found) == len(prompt) - 1
    assert expected.shape[0] == len(prompt)
    for place, entry in enumerate(found):
        assert entry.log_prob == pytest.approx(expected[place, prompt[place + 1]], abs=1e-4)
        assert entry.token_ids == np.argsort(-expected[place], kind="stable")[:2].tolist()
    assert steps >= 8  # chunks of MAX_ROWS, not one step


def test_a_prompt_is_told_once_with_samples_and_with_beams() -> None:
    with running_engine() as driver:
        samples = ask(
            driver, num_return_sequences=3, temperature=1.0, seed=2, top_prompt_logprobs=0, max_tokens=3, streaming=True
        )
        beams = ask(driver, beam_width=2, top_prompt_logprobs=1, max_tokens=3, streaming=True)
        alone = ask(driver, [5], top_prompt_logprobs=1, max_tokens=1)
    for answer in (samples, beams):
        told = [event.prompt_log_probs for event in answer.events if event.prompt_log_probs is not None]
        assert [len(found) for found in told] == [len(PROMPT) - 1]
    assert alone.events[-1].prompt_log_probs == []


def test_a_preempted_prompt_is_read_once() -> None:
    prompts = [np.random.default_rng(i).integers(1, 200, 90).tolist() for i in range(4)]
    options = {"max_tokens": 40, "top_prompt_logprobs": 1, "return_context_logits": True, "streaming": False}
    with running_engine(kv_cache_tokens=256, enable_kv_cache_reuse=False) as driver:
        answers = driver.run(*(make_request(str(i), prompt, **options) for i, prompt in enumerate(prompts)))
        assert driver.engine.stats().preemptions > 0
    for answer in answers.values():
        (event,) = answer.events
        assert len(event.prompt_log_probs) == 89
        assert event.context_logits.shape[0] == 90


def test_long_prompts_that_are_read_do_not_hold_up_the_queue() -> None:
    prompts = [np.random.default_rng(i).integers(1, 200, 400).tolist() for i in range(3)]
    with running_engine() as driver:
        readers = [make_request(f"r{i}", p, max_tokens=2, top_prompt_logprobs=0) for i, p in enumerate(prompts)]
        order = driver.run(*readers, make_request("short", PROMPT, max_tokens=2))
    assert next(iter(order)) == "short"
