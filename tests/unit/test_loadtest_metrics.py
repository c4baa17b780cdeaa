"""The metrics of the load tests: AIPerf's formulas on recorded streams, and what a naive count would get wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtests import metrics
from loadtests.records import Record
from loadtests.samples import ecdf, percentile, summary

STREAMS = json.loads((Path(__file__).parents[1] / "data" / "loadtest" / "stream_timings.json").read_text())
"""Eight streams of the demo server: start and responses in ns of one clock, and the server's tokens per response."""


def record(stream: dict[str, Any]) -> Record:
    start = stream["start_ns"]
    chunks = tuple((at - start) / 1e9 for at in stream["responses_ns"])
    return Record(
        index=0,
        workload="chat",
        transport="grpc-stream",
        intended_at=start / 1e9,
        sent_s=0.0,
        end_s=chunks[-1],
        chunk_s=chunks,
        chunk_tokens=tuple(stream["tokens"]),
        prompt_tokens=stream["prompt_tokens"],
        output_tokens=sum(stream["tokens"]),
    )


RECORDS = [record(stream) for stream in STREAMS]


def aiperf(stream: dict[str, Any]) -> dict[str, Any]:
    """AIPerf's record metrics, in its own unit (ns) and by its own documented formulas.

    Source: github.com/ai-dynamo/aiperf, docs/metrics_reference.md and the "Formula:" lines of
    src/aiperf/metrics/types/{ttft,ttst,request_latency,inter_token_latency,inter_chunk_latency}_metric.py
    (inter_token_latency_metric.py at 58dd5de: the divisor is the output length less the tokens of the first response
    when the server reports them, and less one otherwise).
    """
    start, at, tokens = stream["start_ns"], stream["responses_ns"], sum(stream["tokens"])
    ttft, latency = at[0] - start, at[-1] - start
    many = tokens >= 2
    first = stream["tokens"][0]
    rest = tokens - first if first > 0 and tokens - first >= 1 else tokens - 1
    return {
        "ttft": ttft,
        "ttst": at[1] - at[0] if len(at) > 1 else None,
        "latency": latency,
        "itl": (latency - ttft) / (tokens - 1) if many else None,
        "tpot": (latency - ttft) / rest if many else None,
        "icl": [at[i] - at[i - 1] for i in range(1, len(at))],
    }


@pytest.mark.parametrize("number", range(len(STREAMS)))
def test_a_recorded_stream_gives_aiperfs_figures(number: int) -> None:
    expected, found = aiperf(STREAMS[number]), RECORDS[number]
    for metric in metrics.RECORD_METRICS:
        if metric.tag in expected:
            value = expected[metric.tag]
            assert metric.of(found) == (None if value is None else pytest.approx(value / 1e9, rel=1e-9)), metric.tag
    assert metrics.InterChunkLatency.of(found) == pytest.approx([gap / 1e9 for gap in expected["icl"]])


def test_a_recorded_run_gives_aiperfs_figures() -> None:
    """Derived metrics: token and request throughput over (last response - first request), goodput of good requests."""
    duration = max(s["responses_ns"][-1] for s in STREAMS) - min(s["start_ns"] for s in STREAMS)
    output = sum(sum(stream["tokens"]) for stream in STREAMS)
    prompts = sum(stream["prompt_tokens"] for stream in STREAMS)
    seconds = metrics.BenchmarkDuration.of(RECORDS)
    assert seconds == pytest.approx(duration / 1e9)
    assert metrics.OutputTokenThroughput.of(RECORDS, seconds) == pytest.approx(output / duration * 1e9)
    assert metrics.TotalTokenThroughput.of(RECORDS, seconds) == pytest.approx((output + prompts) / duration * 1e9)
    assert metrics.RequestThroughput.of(RECORDS, seconds) == pytest.approx(len(STREAMS) / duration * 1e9)
    limit = sorted(aiperf(stream)["ttft"] for stream in STREAMS)[3]
    good = metrics.Goodput.of(RECORDS, seconds, lambda r: (metrics.TimeToFirstToken.of(r) or 0) <= limit / 1e9 + 1e-9)
    assert good == pytest.approx(4 / duration * 1e9)


def test_a_failed_request_counts_against_the_good_fraction_and_for_no_latency() -> None:
    failed = replace(RECORDS[0], error="ServerFailure")
    assert metrics.GoodFraction.of([*RECORDS[1:4], failed], lambda _: True) == 0.75
    assert metrics.ErrorRate.of([*RECORDS[1:4], failed]) == 0.25
    assert [metric.of(failed) for metric in metrics.RECORD_METRICS if metric.tag in ("ttft", "latency", "itl")] == [
        None
    ] * 3
    assert metrics.OutputTokenThroughput.of([failed], 1.0) == 0


def test_tokens_that_come_bundled_do_not_look_faster() -> None:
    """8 tokens per response, 10 ms per token: the time per token is 10 ms, also with a first response of 8."""
    chunks = tuple(0.2 + 0.08 * number for number in range(16))
    bundled = replace(RECORDS[0], chunk_s=chunks, chunk_tokens=(8,) * 16, output_tokens=128, end_s=chunks[-1])
    assert metrics.TimePerOutputToken.of(bundled) == pytest.approx(0.010, rel=1e-6)
    assert metrics.InterTokenLatency.of(bundled) == pytest.approx(0.010, rel=0.06)
    assert np.mean(metrics.InterChunkLatency.of(bundled)) == pytest.approx(0.080)


def test_a_whole_answer_has_a_latency_and_no_first_token() -> None:
    whole = replace(RECORDS[3], streamed=False, chunk_s=(), chunk_tokens=(), end_s=1.5)
    assert metrics.RequestLatency.of(whole) == 1.5
    assert metrics.TimeToFirstToken.of(whole) is None
    assert metrics.TimePerOutputToken.of(whole) is None


def test_latency_counts_from_the_moment_a_request_was_meant_to_start() -> None:
    late = replace(RECORDS[3], sent_s=2.0, chunk_s=(2.1, 2.2), chunk_tokens=(1, 1), output_tokens=2, end_s=2.2)
    assert metrics.TimeToFirstToken.of(late) == 2.1
    assert metrics.ScheduleLag.of(late) == 2.0


def test_tokens_of_a_window_are_those_that_came_in_it() -> None:
    one = replace(
        RECORDS[0],
        intended_at=100.0,
        chunk_s=(0.5, 1.0, 1.5, 2.0),
        chunk_tokens=(1, 2, 2, 2),
        output_tokens=7,
        end_s=2.0,
    )
    whole = replace(one, streamed=False, chunk_s=(), chunk_tokens=(), end_s=1.2)
    assert metrics.received_tokens([one], 101.0, 102.0) == 4
    assert metrics.received_tokens([one], 0.0, 100.4) == 0
    assert metrics.received_tokens([whole], 101.0, 102.0) == 7
    assert metrics.received_tokens([whole], 100.0, 101.0) == 0


@pytest.mark.parametrize("share", [0, 1, 50, 90, 95, 99, 99.9, 100])
def test_percentiles_are_numpys_and_not_rounded(share: float) -> None:
    values = list(np.random.default_rng(1).exponential(0.1234567, 37))
    assert percentile(values, share) == pytest.approx(np.percentile(values, share), rel=1e-12)
    assert percentile([0.25], share) == 0.25


def test_no_percentile_is_above_the_maximum() -> None:
    values = [0.0101, 0.0102, 0.01049]
    found = summary(values)
    assert found["p99"] <= found["max"] == 0.01049
    assert found["count"] == 3
    assert summary([]) == {"count": 0}


def test_a_distribution_ends_with_the_largest_value_and_all_requests() -> None:
    points = ecdf([float(value) for value in range(1000)])
    assert points[0] == (0.0, 0.001)
    assert points[-1] == (999.0, 1.0)
    assert len(points) <= 60
    assert all(math.isclose(share, (value + 1) / 1000) for value, share in points)


def test_a_record_survives_the_way_from_a_worker() -> None:
    travelled = json.loads(json.dumps(RECORDS[4].as_dict()))
    assert Record.of(travelled) == RECORDS[4]
