"""/metrics: the families of the classic backend with their labels, and figures that agree with what was sent."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from python_backend.telemetry import gauges, refusals, requests
from tests.server.wire import (
    Stream,
    active_requests,
    ask,
    engine_inputs,
    metric,
    metrics_text,
    text_inputs,
    tokens,
    used_blocks,
    wait_until,
)

TRUE = [[True]]
INFLIGHT_FAMILIES = [spec for spec in gauges.GAUGES if spec is not gauges.V1]
COUNTERS = [*gauges.COUNTERS, *requests.COUNTERS, *refusals.COUNTERS]


@pytest.mark.parametrize("spec", [*INFLIGHT_FAMILIES, *COUNTERS], ids=lambda spec: spec.name)
def test_every_series_is_there_from_the_start(server, spec):
    for value in spec.values or ("",):
        assert metric(server, spec.name, **({spec.label: value} if value else {})) >= 0


@pytest.mark.parametrize("spec", requests.HISTOGRAMS, ids=lambda spec: spec.name)
def test_every_histogram_has_its_buckets(server, spec):
    label = {spec.label: spec.values[0]} if spec.label else {}
    counts = [metric(server, f"{spec.name}_bucket", le=f"{bound:g}", **label) for bound in spec.buckets]
    assert counts == sorted(counts)
    assert counts[-1] <= metric(server, f"{spec.name}_count", **label)


def test_the_length_buckets_are_written_as_upstreams_tests_look_for_them(server):
    text = metrics_text(server)
    for bound in ("10", "50", "100", "500", "1000", "+Inf"):
        line = (
            'nv_llm_input_token_len_bucket{model="tensorrt_llm",response_metric_type="total_input_tokens",'
            f'version="1",le="{bound}"}} '
        )
        assert line in text


def counts(server):
    input_len = {"response_metric_type": "total_input_tokens"}
    output_len = {"response_metric_type": "total_output_tokens"}
    return {
        "inputs": metric(server, "nv_llm_input_token_len_sum", **input_len),
        "inputs at most 10": metric(server, "nv_llm_input_token_len_bucket", le="10", **input_len),
        "inputs at most 50": metric(server, "nv_llm_input_token_len_bucket", le="50", **input_len),
        "outputs": metric(server, "nv_llm_output_token_len_sum", **output_len),
        "requests": metric(server, "nv_llm_output_token_len_count", **output_len),
        "ended by length": metric(server, "llm_requests_total", finish_reason="length"),
        "first tokens": metric(server, "llm_time_to_first_token_seconds_count"),
        "queued": metric(server, "llm_request_queue_time_seconds_count"),
        "token times": metric(server, "llm_time_per_output_token_seconds_count"),
        "latencies": metric(server, "llm_request_latency_seconds_count"),
        "latency": metric(server, "llm_request_latency_seconds_sum"),
    }


def test_requests_are_counted_once_with_their_lengths_and_times(server):
    before = counts(server)
    started = time.monotonic()
    ask(server, "tensorrt_llm", engine_inputs([504, 3575, 282], 7, streaming=TRUE))
    ask(server, "tensorrt_llm", engine_inputs(list(range(600, 620)), 4, exclude_input_in_output=[[False]]))
    seconds = time.monotonic() - started
    wait_until(lambda: counts(server)["latencies"] - before["latencies"] == 2)
    after = counts(server)
    grown = {name: after[name] - before[name] for name in after}
    latency = grown.pop("latency")
    assert grown == {
        "inputs": 23,
        "inputs at most 10": 1,
        "inputs at most 50": 2,
        "outputs": 11,
        "requests": 2,
        "ended by length": 2,
        "first tokens": 2,
        "queued": 2,
        "token times": 2,
        "latencies": 2,
    }
    assert 0 < latency < seconds + 0.5


def test_latency_and_time_to_first_token_are_those_that_clients_measure(server):
    names = ("llm_request_latency_seconds", "llm_time_to_first_token_seconds")
    before = [metric(server, f"{name}_sum") for name in names]
    ended = metric(server, f"{names[0]}_count")
    with ThreadPoolExecutor(5) as pool:
        measured = list(pool.map(lambda _: timed(server, 60), range(5)))
    wait_until(lambda: metric(server, f"{names[0]}_count") - ended == 5)
    for name, old, seconds in zip(names, before, map(sum, zip(*measured, strict=True)), strict=True):
        found = metric(server, f"{name}_sum") - old
        assert seconds - 5 * 0.1 < found < seconds


def timed(server, num_tokens):
    """Seconds from sending a request to its end, and to its first token."""
    stream = Stream(server)
    started = time.monotonic()
    stream.send("tensorrt_llm", engine_inputs([504, 3575], num_tokens, streaming=TRUE, end_id=[[-1]]))
    assert not stream.next().error
    first_s = time.monotonic() - started
    stream.rest()
    seconds = time.monotonic() - started
    stream.close()
    return seconds, first_s


def test_token_counters_follow_the_prefix_cache(server):
    prompt = list(range(3000, 3100))
    names = ("llm_prompt_tokens_total", "llm_cached_prompt_tokens_total", "llm_generated_tokens_total")
    before = [metric(server, name) for name in names]
    for _ in range(2):
        ask(server, "tensorrt_llm", engine_inputs(prompt, 3))
    wait_until(lambda: metric(server, names[2]) - before[2] == 6)
    prompt_tokens, cached, _ = (metric(server, name) - old for name, old in zip(names, before, strict=True))
    assert prompt_tokens == 200
    assert 64 <= cached < 100
    assert metric(server, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="reused") > 0


def test_gauges_show_a_request_while_it_runs_and_nothing_afterwards(server):
    stream = Stream(server)
    stream.send("tensorrt_llm", engine_inputs([504], 3000, streaming=TRUE), request_id="gauged")
    stream.next()
    wait_until(lambda: metric(server, "nv_trt_llm_request_metrics", request_type="scheduled") == 1)
    wait_until(lambda: used_blocks(server) > 0)
    steps = metric(server, "nv_trt_llm_general_metrics", general_type="iteration_counter")
    wait_until(lambda: metric(server, "nv_trt_llm_general_metrics", general_type="iteration_counter") > steps)
    stream.close(cancel=True)
    wait_until(lambda: active_requests(server) == 0)
    wait_until(lambda: used_blocks(server) == 0)
    blocks = {
        kind: metric(server, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind) for kind in ("max", "free")
    }
    assert blocks["free"] == blocks["max"]


MODELS_THAT_REFUSE = ("preprocessing", "tensorrt_llm", "ensemble_unary")


def refused(server):
    return {
        model: metric(server, "llm_requests_refused_total", model=model, code="INVALID_ARG")
        for model in MODELS_THAT_REFUSE
    }


@pytest.mark.parametrize(
    ("asked", "inputs", "refuses"),
    [
        ("tensorrt_llm", engine_inputs([504], -1), "tensorrt_llm"),
        ("ensemble", text_inputs("Hello", 5, temperature=[[-1.0]]), "tensorrt_llm"),
        ("ensemble", text_inputs("Hello", 5, messages=[["[]"]]), "preprocessing"),
        ("ensemble_unary", text_inputs("Hello", 5, messages=[["[]"]]), "preprocessing"),
        ("ensemble_unary", text_inputs("Hello", 5, stream=TRUE), "ensemble_unary"),
    ],
    ids=["engine", "engine behind the ensemble", "preprocessing", "preprocessing behind unary", "unary"],
)
def test_a_refusal_is_counted_once_in_the_model_that_refuses(server, asked, inputs, refuses):
    before = refused(server)
    (reply,) = ask(server, asked, inputs)
    assert reply.error
    assert refused(server) == {model: count + (model == refuses) for model, count in before.items()}


def test_triton_counts_an_error_of_the_ensemble_twice_and_none_of_a_python_model(server):
    def failed(model, *reasons):
        return sum(metric(server, "nv_inference_request_failure", model=model, reason=reason) for reason in reasons)

    reasons = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    before, engine_before = failed("ensemble", "OTHER"), failed("tensorrt_llm", *reasons)
    ask(server, "ensemble", text_inputs("Hello", 5, temperature=[[-1.0]]))
    wait_until(lambda: failed("ensemble", "OTHER") == before + 2)
    assert failed("tensorrt_llm", *reasons) == engine_before


def test_the_timestamp_is_now_in_microseconds(server):
    stamp = metric(server, "nv_trt_llm_general_metrics", general_type="timestamp")
    assert stamp / 1e6 == pytest.approx(time.time(), abs=5)


def test_families_have_help_and_type(server):
    text = metrics_text(server)
    ask(server, "tensorrt_llm", engine_inputs([504], 1))
    for spec in [*INFLIGHT_FAMILIES, *COUNTERS, *requests.HISTOGRAMS]:
        assert re.search(rf"^# HELP {spec.name} \S", text, re.MULTILINE)
        assert re.search(rf"^# TYPE {spec.name} (gauge|counter|histogram)$", text, re.MULTILINE)


def test_metrics_do_not_stop_a_stream(server):
    stream = Stream(server)
    stream.send("tensorrt_llm", engine_inputs([504], 60, streaming=TRUE, end_id=[[-1]]))
    for _ in range(20):
        metrics_text(server)
    assert len(tokens(stream.rest())) == 60
    stream.close()
