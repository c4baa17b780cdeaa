"""Constrained sequences in the engine: forced tokens, waiting for masks, and failures that stay with their request."""

from __future__ import annotations

import time
from concurrent.futures import Future

import numpy as np
import pytest

from python_backend.errors import EngineFailure, InvalidRequest
from tests.unit.engine_driver import make_request, running_engine
from tests.unit.scripted_mask import ScriptedMask, future_mask

END = 2
ANY = list(range(3, 300))
SCRIPT = [[7], [8], [9], ANY, [10], [11], ANY, [12], ANY, ANY, *[[t] for t in range(20, 45)]]


def answer_of(driver, script=SCRIPT, *, forcing=True, **options):
    options.setdefault("max_tokens", 64)
    request = make_request("r", [5], end_ids=(END,), **options)  # one token: no step for the prompt alone
    driver.engine.submit(request, future_mask(script, END, forcing=forcing))
    return driver.collect(1)["r"]


def log_probs(answer):
    return [value for event in answer.events[-1:] for value in event.sequences[0].log_probs]


def test_forced_tokens_are_the_ones_that_sampling_gives_and_take_fewer_steps():
    with running_engine() as driver:
        fast = answer_of(driver)
        steps_fast = driver.engine.stats().iteration
        slow = answer_of(driver, forcing=False)
        steps_slow = driver.engine.stats().iteration - steps_fast
    assert fast.tokens[0] == slow.tokens[0]
    assert len(fast.tokens[0]) == len(SCRIPT)
    assert fast.reasons[0] == slow.reasons[0] == "stop"
    assert (steps_fast, steps_slow) == (5, len(SCRIPT))  # the first step gives the first token, whatever is forced


def test_log_probs_of_forced_tokens_are_those_of_sampling():
    options = {"return_log_probs": True, "top_logprobs": 2}
    with running_engine() as driver:
        fast, slow = answer_of(driver, **options), answer_of(driver, forcing=False, **options)
    assert len(log_probs(fast)) == len(SCRIPT)
    np.testing.assert_allclose(log_probs(fast), log_probs(slow), atol=1e-4)
    assert fast.events[-1].sequences[0].cum_log_prob == pytest.approx(sum(log_probs(slow)), abs=1e-3)
    tops = [[int(t.token_ids[0]) for e in a.events for t in e.sequences[0].top_log_probs] for a in (fast, slow)]
    assert tops[0] == tops[1]
    assert len(tops[0]) == len(SCRIPT)


def test_generation_logits_have_a_row_for_every_forced_token():
    with running_engine() as driver:
        answer = answer_of(driver, return_generation_logits=True, streaming=False)
    assert len(answer.events[-1].sequences[0].generation_logits) == len(SCRIPT)


def test_streamed_events_never_show_a_token_without_its_log_prob():
    with running_engine() as driver:
        answer = answer_of(driver, return_log_probs=True)
    shown = 0
    for event in answer.events:
        shown += len(event.sequences[0].token_ids)
        assert len(event.sequences[0].log_probs) == shown


@pytest.mark.parametrize("options", [{}, {"return_log_probs": True}])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 20])
def test_max_tokens_cuts_a_forced_run_where_it_is_reached(max_tokens, options):
    with running_engine() as driver:
        answer = answer_of(driver, max_tokens=max_tokens, **options)
    assert len(answer.tokens[0]) == max_tokens
    assert answer.reasons[0] == "length"
    assert not options or len(log_probs(answer)) == max_tokens


def test_a_structure_that_is_complete_at_max_tokens_has_not_run_out():
    with running_engine() as driver:
        assert answer_of(driver, max_tokens=len(SCRIPT)).reasons[0] == "stop"


def test_a_stop_word_inside_a_forced_run_ends_it():
    with running_engine() as driver:
        answer = answer_of(driver, stop_words=((21, 22),))
    assert answer.reasons[0] == "stop"
    assert answer.tokens[0][-2:] == [21, 22]


def test_an_end_id_is_never_forced():
    with running_engine() as driver:
        answer = answer_of(driver, [[7], [8], [END], [9]])
    assert answer.tokens[0] == [7, 8]
    assert answer.reasons[0] == "stop"


@pytest.mark.parametrize("options", [{"bad_words": ((250,),)}, {"no_repeat_ngram_size": 3}])
def test_requests_that_ban_tokens_choose_each_of_them(options):
    with running_engine() as driver:
        answer_of(driver, SCRIPT[:4], **options)
        assert driver.engine.stats().iteration == 4


def test_a_forced_run_longer_than_a_step_is_computed_in_parts():
    script = [[t] for t in range(3, 103)]
    with running_engine(max_num_tokens=32) as driver:
        answer = answer_of(driver, script, max_tokens=200, return_log_probs=True)
    assert answer.tokens[0] == [t for (t,) in script]
    assert len(log_probs(answer)) == 100


def test_constrained_sequences_survive_preemption_with_every_log_prob():
    script = [ANY if i % 5 == 0 else [3 + i] for i in range(100)]
    with running_engine(kv_cache_tokens=256, max_batch_size=8) as driver:
        for i in range(4):
            request = make_request(
                f"r{i}", [5 + i] * 40, end_ids=(END,), max_tokens=120, streaming=False, return_log_probs=True
            )
            driver.engine.submit(request, future_mask(script, END))
        answers = driver.collect(4)
        assert driver.engine.stats().preemptions > 0
    assert all(len(a.tokens[0]) == len(log_probs(a)) == 100 for a in answers.values())


def test_every_sample_has_a_mask_of_its_own():
    with running_engine() as driver:
        answer = answer_of(driver, num_return_sequences=3, temperature=1.0, top_p=0.9, seed=1)
    assert [len(answer.tokens[i]) for i in range(3)] == [len(SCRIPT)] * 3
    assert len({tuple(tokens) for tokens in answer.tokens.values()}) > 1


def test_a_request_whose_mask_is_being_made_lets_others_pass():
    masks: Future = Future()
    with running_engine() as driver:
        driver.engine.submit(make_request("waits", [5], end_ids=(END,)), masks)
        assert len(driver.run(make_request("passes", [5], end_ids=()))["passes"].tokens[0]) == 16
        masks.set_result(lambda: ScriptedMask(SCRIPT[:3], END))
        assert driver.collect(1)["waits"].tokens[0] == [7, 8, 9]


def test_a_refused_guide_ends_its_request_with_the_reason():
    masks: Future = Future()
    with running_engine() as driver:
        driver.engine.submit(make_request("r", [5]), masks)
        masks.set_exception(InvalidRequest("the reason"))
        assert str(driver.collect(1)["r"].error) == "the reason"
        with pytest.raises(InvalidRequest, match="the reason"):
            driver.engine.submit(make_request("r", [5]), masks)


def test_cancelling_and_deadlines_work_while_a_mask_is_being_made():
    with running_engine() as driver:
        driver.engine.submit(make_request("gone", [5]), Future())
        assert driver.engine.cancel("gone")
        assert driver.collect(1)["gone"].reasons[0] == "cancelled"
        driver.engine.submit(make_request("late", [5], deadline_s=time.monotonic() + 0.1), Future())
        assert driver.collect(1, timeout_s=10)["late"].reasons[0] == "timeout"
        driver.engine.submit(make_request("stopped", [5]), Future())
        driver.engine.stop()
        assert driver.collect(1)["stopped"].reasons[0] == "cancelled"


def test_a_mask_that_fails_ends_its_own_request_only():
    class Broken(ScriptedMask):
        def fill(self, bitmask):
            if self.place == 2:
                raise EngineFailure("too complex here")
            super().fill(bitmask)

    masks: Future = Future()
    masks.set_result(lambda: Broken([ANY] * 9, END))
    with running_engine() as driver:
        driver.engine.submit(make_request("bad", [5], end_ids=(END,)), masks)
        driver.engine.submit(make_request("good", [5], end_ids=()))
        answers = driver.collect(2)
    assert str(answers["bad"].error) == "too complex here"
    assert len(answers["good"].tokens[0]) == 16
