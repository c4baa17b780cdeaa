"""The engine on a tiny model: the fast paths give what the plain path gives, and nothing leaks."""

from __future__ import annotations

import time
from concurrent.futures import Future

import numpy as np
import pytest

from python_backend.errors import EngineFailure, InvalidRequest, LimitExceeded, Overloaded, Unsupported
from tests.unit.engine_driver import make_request, running_engine


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 300, rng.integers(1, 90)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def solo() -> dict[str, list[int]]:
    """What every request answers when it is alone, without any reuse or chunking."""
    with running_engine(enable_kv_cache_reuse=False) as driver:
        return {
            str(i): driver.tokens(make_request(str(i), p, **sampling(i)))[str(i)] for i, p in enumerate(prompts(32))
        }


def sampling(i: int) -> dict:
    """Every third request is sampled."""
    return {"max_tokens": 70, **({"temperature": 0.9, "top_p": 0.95, "seed": i} if i % 3 == 2 else {})}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"enable_kv_cache_reuse": False},
        {"max_num_tokens": 33},
        {"max_batch_size": 5},
        {"batching_strategy": "V1"},
        {"kv_cache_tokens": 512},
        {"kv_cache_tokens": 512, "batch_scheduler_policy": "guaranteed_no_evict"},
        {"kv_cache_tokens": 320, "max_num_tokens": 40, "max_batch_size": 7},
    ],
    ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()) or "defaults",
)
def test_a_batch_of_32_gives_every_request_the_tokens_it_has_alone(config, solo):
    with running_engine(**config) as driver:
        requests = [make_request(str(i), p, **sampling(i)) for i, p in enumerate(prompts(32))]
        assert driver.tokens(*requests) == solo
        if config.get("kv_cache_tokens") and "batch_scheduler_policy" not in config:
            assert driver.engine.stats().preemptions > 0


def test_prefix_reuse_changes_no_token_and_is_reported():
    prompt = prompts(1, seed=5)[0] * 3
    with running_engine() as driver:
        cold = driver.run(make_request("a", prompt, return_perf_metrics=True))["a"]
        warm = driver.run(make_request("a", prompt, return_perf_metrics=True))["a"]
        salted = driver.run(make_request("a", prompt, return_perf_metrics=True, lora_task_id=7))["a"]
    assert cold.tokens == warm.tokens
    assert cold.events[0].perf.reused_blocks == 0
    assert warm.events[0].perf.reused_blocks == -(-len(prompt) // 32)
    assert salted.events[0].perf.reused_blocks == 0


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_in_the_fast_precision_too_an_answer_repeats_whether_its_prompt_was_cached_or_not(options):
    with running_engine(precision="fast", max_seq_len=300) as driver:
        for prompt in prompts(6, seed=8):
            cold, warm = (driver.run(make_request("r", prompt, max_tokens=60, **options))["r"] for _ in "12")
            assert cold.tokens == warm.tokens


def test_a_prompt_seen_before_reuses_four_blocks_and_computes_one():
    """The figures of upstream's own check: a prompt of 110 tokens, 50 tokens out, blocks of 32."""
    prompt = np.random.default_rng(1).integers(3, 300, 110).tolist()
    with running_engine() as driver:
        first, second = (
            driver.run(make_request("r", prompt, max_tokens=50, return_perf_metrics=True, end_ids=()))["r"]
            for _ in "12"
        )
    ends = [answer.events[-1].perf for answer in (first, second)]
    perf = [(e.alloc_new_blocks, e.alloc_total_blocks, e.reused_blocks) for e in ends]
    assert perf == [(4, 4, 0), (1, 1, 4)]


def test_stream_and_single_answer_agree():
    prompt = prompts(1)[0]
    with running_engine() as driver:
        streamed = driver.run(make_request("s", prompt, end_ids=()))["s"]
        whole = driver.run(make_request("w", prompt, end_ids=(), streaming=False))["w"]
    assert len(streamed.events) == 16
    assert len(whole.events) == 1
    assert streamed.tokens == whole.tokens
    assert whole.reasons == {0: "length"}


def test_many_streams_get_several_tokens_at_a_time_and_lose_none(solo):
    with running_engine() as driver:
        requests = [make_request(str(i), p, **sampling(i)) for i, p in enumerate(prompts(32))]
        answers = driver.run(*requests)
    with running_engine(stream_interval=5) as driver:
        slow = driver.run(make_request("0", prompts(32)[0], **sampling(0)))["0"]
    assert {i: a.tokens[0] for i, a in answers.items()} == solo
    assert [len(e.sequences[0].token_ids) for e in slow.events] == [1, *[5] * 13, 4]
    for answer in answers.values():
        sizes = [len(e.sequences[0].token_ids) for e in answer.events]
        assert sizes[0] == 1
        assert max(sizes) == 2


def test_an_end_id_ends_without_being_part_of_the_answer(solo):
    tokens = solo["0"]
    end = tokens[5]
    with running_engine() as driver:
        answer = driver.run(make_request("r", prompts(32)[0], max_tokens=70, end_ids=(end,)))["r"]
    assert answer.tokens[0] == tokens[: tokens.index(end)]
    assert answer.reasons == {0: "stop"}
    assert answer.events[-1].sequences[0].token_ids == []


def test_samples_differ_by_seed_and_index_and_repeat_with_the_same_seed():
    with running_engine() as driver:
        options = {"temperature": 1.0, "top_p": 1.0, "num_return_sequences": 3}
        a, again, other, unseeded, unseeded_again = (
            driver.run(make_request("r", [5, 6, 7], **options, seed=seed))["r"].tokens for seed in (1, 1, 2, None, None)
        )
    assert a == again
    assert len({tuple(t) for t in a.values()}) == 3
    assert a != other
    assert unseeded != unseeded_again


def test_beams_are_at_least_as_probable_as_greedy_and_share_memory():
    with running_engine() as driver:
        greedy = driver.run(make_request("g", [5, 6, 7], return_log_probs=True, streaming=False))["g"]
        request = make_request(
            "b", [5, 6, 7], beam_width=4, num_return_sequences=4, return_log_probs=True, streaming=False
        )
        beams = driver.run(request)["b"].events[-1].sequences
    assert len(beams) == 4
    scores = [b.cum_log_prob for b in beams]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= greedy.events[-1].sequences[0].cum_log_prob - 1e-4
    for beam in beams:
        assert len(beam.log_probs) == len(beam.token_ids) == 16
        np.testing.assert_allclose(sum(beam.log_probs), beam.cum_log_prob, atol=1e-4)


def test_beams_give_the_same_answer_in_company_and_when_preempted(solo):
    def beams():
        return make_request("b", prompts(32)[3], max_tokens=70, beam_width=3, num_return_sequences=3, streaming=False)

    with running_engine() as driver:
        alone = driver.run(beams())["b"].tokens
    with running_engine(kv_cache_tokens=512) as driver:
        requests = [make_request(str(i), p, **sampling(i)) for i, p in enumerate(prompts(32))]
        answers = driver.run(*requests[:16], beams(), *requests[16:])
        assert driver.engine.stats().preemptions > 0
    assert answers["b"].tokens == alone
    assert {i: a.tokens[0] for i, a in answers.items() if i != "b"} == solo


def test_context_and_generation_logits_belong_to_the_tokens():
    prompt = prompts(1, seed=3)[0]
    with running_engine(max_num_tokens=16) as driver:
        request = make_request("r", prompt, end_ids=(), return_context_logits=True, return_generation_logits=True)
        answer = driver.run(request)["r"]
    context = answer.events[0].context_logits
    generated = np.concatenate([e.sequences[0].generation_logits for e in answer.events])
    assert context.shape == (len(prompt), 320)
    assert context[-1].argmax() == answer.tokens[0][0]
    assert generated.argmax(axis=1).tolist() == answer.tokens[0]
    np.testing.assert_array_equal(context[-1], generated[0])


def test_cancel_frees_everything_and_closes_with_what_there_is():
    with running_engine() as driver:
        driver.engine.submit(make_request("long", [5, 6, 7], max_tokens=400, end_ids=()))
        first = driver.events.get(timeout=30)
        assert driver.engine.cancel("long")
        answer = driver.collect(1)["long"]
        assert answer.reasons == {0: "cancelled"}
        assert 1 <= len(first) + len(answer.tokens[0]) < 400
        assert not driver.engine.cancel("long")


def test_a_waiting_request_can_be_cancelled():
    with running_engine(max_batch_size=1, max_beam_width=1) as driver:
        driver.engine.submit(make_request("runs", [5, 6, 7], max_tokens=200, end_ids=()))
        driver.engine.submit(make_request("waits", [5, 6, 8], max_tokens=200, end_ids=()))
        driver.engine.cancel("waits")
        answers = driver.collect(2)
    assert answers["waits"].tokens[0] == []
    assert answers["waits"].reasons == {0: "cancelled"}
    assert len(answers["runs"].tokens[0]) == 200


def test_a_deadline_ends_a_request_as_timeout():
    with running_engine() as driver:
        request = make_request("r", [5, 6, 7], max_tokens=480, end_ids=(), deadline_s=time.monotonic() + 0.05)
        assert driver.run(request)["r"].reasons == {0: "timeout"}


def test_stopping_the_engine_ends_what_runs():
    with running_engine() as driver:
        driver.engine.submit(make_request("r", [5, 6, 7], max_tokens=480, end_ids=()))
        driver.events.get(timeout=30)
        driver.engine.stop()
        assert driver.collect(1)["r"].reasons == {0: "cancelled"}
        with pytest.raises(Overloaded, match="shutting down"):
            driver.engine.submit(make_request("late", [5]))


def test_a_full_queue_refuses_at_once_with_upstreams_words():
    with running_engine(start=False, max_queue_size=2) as driver:
        driver.engine.submit(make_request("a", [5]))
        driver.engine.submit(make_request("b", [5]))
        with pytest.raises(Overloaded, match="Maximum queue size of 2 has been reached, please try again later"):
            driver.engine.submit(make_request("c", [5]))
        driver.engine.start()
        driver.collect(2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt_ids": [5] * 501}, LimitExceeded, r"Prompt length \(501\) exceeds maximum input length \(500\)"),
        ({"prompt_ids": [320]}, InvalidRequest, r"is 320; allowed: 0 to 319"),
        ({"prompt_ids": [-1]}, InvalidRequest, r"is -1; allowed: 0 to 319"),
        ({"end_ids": (400,)}, InvalidRequest, r"EndId \(400\) is not within acceptable range \[-1, 320\)"),
        ({"beam_width": 5}, LimitExceeded, r"beam_width is 5; allowed: 1 to max_beam_width \(4\)"),
        (
            {"num_return_sequences": 99},
            LimitExceeded,
            r"num_return_sequences is 99; allowed: 1 to max_batch_size \(32\)",
        ),
        ({"embedding_bias": np.zeros(321, np.float32)}, InvalidRequest, r"embedding_bias is \[321\]"),
        ({"beam_width": 2, "return_generation_logits": True}, Unsupported, "beam_width 1 only"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_numbers(options, error, message):
    with running_engine(start=False) as driver, pytest.raises(error, match=message):
        driver.engine.submit(make_request("r", options.pop("prompt_ids", [5]), **options))


def test_a_request_that_can_never_fit_is_refused_and_not_queued_for_ever():
    refused = pytest.raises(LimitExceeded, match=r"needs 7 KV cache blocks \(210 tokens")
    with running_engine(start=False, kv_cache_tokens=128) as driver, refused:
        driver.engine.submit(make_request("r", [5] * 10, max_tokens=200))


def test_too_long_an_answer_is_lowered_with_a_warning():
    with running_engine() as driver:
        request = make_request("r", [5] * 490, max_tokens=100, end_ids=())
        answer = driver.run(request)["r"]
    assert len(answer.tokens[0]) == 22
    assert "lowered to 22" in request.warnings[0]


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(monkeypatch):
    with running_engine() as driver:
        wait = driver.engine.core.runner.wait
        broken = iter([True])

        def fail_once():
            logits = wait()
            if next(broken, False):
                raise RuntimeError("out of luck")
            return logits

        monkeypatch.setattr(driver.engine.core.runner, "wait", fail_once)
        failed = driver.run(make_request("r", [5]))["r"]
        assert isinstance(failed.error, EngineFailure)
        perf = failed.events[-1].perf
        assert perf.first_scheduled_ns >= perf.arrival_ns > 0
        assert perf.first_token_ns == 0
        assert len(driver.tokens(make_request("r", [5], end_ids=()))["r"]) == 16


def test_an_engine_that_keeps_failing_says_so_to_everybody(monkeypatch):
    with running_engine() as driver:
        monkeypatch.setattr("threading.excepthook", lambda args: None)
        monkeypatch.setattr(driver.engine.core.runner, "wait", lambda: 1 / 0)
        for _ in range(3):
            assert isinstance(driver.run(make_request("r", [5]))["r"].error, EngineFailure)
        driver.engine._thread.join(10)
        with pytest.raises(EngineFailure, match="restart the server"):
            driver.engine.submit(make_request("r", [5]))


def test_nan_logits_fail_their_own_request_only(monkeypatch):
    with running_engine() as driver:
        wait = driver.engine.core.runner.wait

        def poison():
            logits = wait()
            logits[0] = np.nan
            return logits

        monkeypatch.setattr(driver.engine.core.runner, "wait", poison)
        answers = driver.run(make_request("bad", [5], end_ids=()), make_request("good", [6], max_tokens=1, end_ids=()))
    assert isinstance(answers["bad"].error, EngineFailure)


def test_a_mask_confines_the_output():
    class Even:
        def fill(self, bitmask):
            bitmask[:] = 0x55555555

        def accept(self, token_id):
            assert token_id % 2 == 0

        def forced_tokens(self):
            return []

        finished = False

    masks = Future()
    masks.set_result(Even)
    with running_engine() as driver:
        driver.engine.submit(make_request("r", [5, 6], end_ids=()), masks)
        answer = driver.collect(1)["r"]
    assert all(t % 2 == 0 for t in answer.tokens[0])
