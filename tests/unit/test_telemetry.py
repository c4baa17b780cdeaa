"""Metric families: names and labels of the classic backend, values from snapshots and ended requests."""

from __future__ import annotations

import time
from typing import Any

import pytest

from python_backend.engine.output import EngineStats
from python_backend.errors import Overloaded
from python_backend.telemetry import gauges, refusals, requests
from python_backend.telemetry.gauges import EngineMetrics
from python_backend.telemetry.poller import Poller
from python_backend.telemetry.refusals import Refusals
from python_backend.telemetry.requests import RequestMetrics, RequestRecord

LABELS = {"model": "tensorrt_llm", "version": "1"}


class FakeMetric:
    def __init__(self, buckets: list[float] | None) -> None:
        self.buckets = buckets
        self.value = 0.0
        self.sets = 0
        self.observed: list[float] = []

    def set(self, value: float) -> None:
        self.value, self.sets = value, self.sets + 1

    def increment(self, value: float) -> None:
        self.value += value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class FakeFactory:
    """Keeps every series under its name and its own label's value."""

    GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.series: dict[tuple[str, str], FakeMetric] = {}
        self.labels: dict[str, set[str]] = {}

    def __call__(self, *, name: str, description: str, kind: str) -> Any:
        assert description
        self.kinds[name] = kind
        factory = self

        class Family:
            def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> FakeMetric:
                assert {"model", "version"} <= set(labels)
                own = [value for key, value in labels.items() if key not in LABELS]
                factory.labels.setdefault(name, set()).update(labels.keys() - LABELS.keys())
                metric = FakeMetric(buckets)
                factory.series[name, own[0] if own else ""] = metric
                return metric

        return Family()


@pytest.fixture
def factory() -> FakeFactory:
    return FakeFactory()


def test_the_classic_gauges_have_the_contracts_labels_and_values(factory):
    EngineMetrics(factory, LABELS)
    expected = {
        "nv_trt_llm_request_metrics": ("request_type", {"active", "max", "scheduled", "context", "waiting"}),
        "nv_trt_llm_runtime_memory_metrics": ("memory_type", {"cpu", "gpu", "pinned"}),
        "nv_trt_llm_kv_cache_block_metrics": (
            "kv_cache_block_type",
            {"max", "free", "used", "tokens_per", "reused", "fraction"},
        ),
        "nv_trt_llm_inflight_batcher_metrics": (
            "inflight_batcher_specific_metric",
            {"total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"},
        ),
        "nv_trt_llm_general_metrics": ("general_type", {"timestamp", "iteration_counter"}),
    }
    for name, (label, values) in expected.items():
        assert factory.kinds[name] == "gauge"
        assert factory.labels[name] == {label}
        assert {value for family, value in factory.series if family == name} == values
    assert "nv_trt_llm_v1_metrics" not in factory.kinds


def test_static_batching_has_its_own_family_instead(factory):
    metrics = EngineMetrics(factory, LABELS, static_batching=True)
    metrics.update(EngineStats(max_requests=8, scheduled_requests=3, generation_requests=2, context_tokens=5))
    assert "nv_trt_llm_inflight_batcher_metrics" not in factory.kinds
    assert factory.labels["nv_trt_llm_v1_metrics"] == {"v1_specific_metric"}
    values = {value: m.value for (name, value), m in factory.series.items() if name == "nv_trt_llm_v1_metrics"}
    assert values == {"total_context_tokens": 5, "total_generation_tokens": 2, "empty_generation_slots": 5}


def test_gauges_follow_the_snapshot(factory):
    metrics = EngineMetrics(factory, LABELS)
    metrics.update(
        EngineStats(active_requests=5, scheduled_requests=3, max_requests=8, kv_blocks_max=10, kv_blocks_used=4)
    )
    series = factory.series
    assert series["nv_trt_llm_request_metrics", "active"].value == 5
    assert series["nv_trt_llm_request_metrics", "waiting"].value == 2
    assert series["nv_trt_llm_kv_cache_block_metrics", "fraction"].value == pytest.approx(0.4)
    assert series["nv_trt_llm_runtime_memory_metrics", "cpu"].value > 1e6
    microseconds = series["nv_trt_llm_general_metrics", "timestamp"].value
    assert microseconds / 1e6 == pytest.approx(time.time(), abs=60)


def test_a_gauge_that_has_not_changed_is_not_set_again(factory):
    metrics = EngineMetrics(factory, LABELS)
    for used in (4, 4, 5):
        metrics.update(EngineStats(kv_blocks_used=used))
    assert factory.series["nv_trt_llm_kv_cache_block_metrics", "used"].sets == 2


def test_token_counters_grow_by_what_is_new(factory):
    metrics = EngineMetrics(factory, LABELS)
    for total in (10, 10, 25):
        metrics.update(EngineStats(prompt_tokens=total, generated_tokens=2 * total, preemptions=total // 10))
    assert factory.series["llm_prompt_tokens_total", ""].value == 25
    assert factory.series["llm_generated_tokens_total", ""].value == 50
    assert factory.series["llm_preemptions_total", ""].value == 2
    assert factory.kinds["llm_preemptions_total"] == "counter"


def record(**changes: Any) -> RequestRecord:
    values = {
        "input_tokens": 7,
        "output_tokens": 11,
        "finish_reason": "length",
        "arrival_ns": 1_000_000_000,
        "first_scheduled_ns": 1_500_000_000,
        "first_token_ns": 2_000_000_000,
        "last_token_ns": 4_000_000_000,
        "end_ns": 4_500_000_000,
    }
    return RequestRecord(**{**values, **changes})


def observed(factory: FakeFactory, name: str) -> list[float]:
    return next(metric.observed for (family, _), metric in factory.series.items() if family == name)


def test_an_ended_request_is_observed_once_in_every_histogram(factory):
    metrics = RequestMetrics(factory, LABELS)
    metrics.ended(record())
    assert observed(factory, "nv_llm_input_token_len") == [7]
    assert observed(factory, "nv_llm_output_token_len") == [11]
    assert observed(factory, "llm_request_queue_time_seconds") == [0.5]
    assert observed(factory, "llm_time_to_first_token_seconds") == [1.0]
    assert observed(factory, "llm_time_per_output_token_seconds") == [pytest.approx(0.2)]
    assert observed(factory, "llm_request_latency_seconds") == [3.5]
    assert factory.series["llm_requests_total", "length"].value == 1
    assert factory.series["llm_requests_total", "stop"].value == 0


def test_the_length_histograms_have_the_contracts_label_and_whole_buckets(factory):
    RequestMetrics(factory, LABELS)
    for name, value in (
        ("nv_llm_input_token_len", "total_input_tokens"),
        ("nv_llm_output_token_len", "total_output_tokens"),
    ):
        assert factory.labels[name] == {"response_metric_type"}
        assert factory.series[name, value].buckets == [10, 50, 100, 500, 1000]


def test_a_request_that_ended_in_the_queue_has_no_token_times(factory):
    metrics = RequestMetrics(factory, LABELS)
    metrics.ended(
        record(output_tokens=0, finish_reason="timeout", first_scheduled_ns=0, first_token_ns=0, last_token_ns=0)
    )
    assert observed(factory, "llm_time_to_first_token_seconds") == []
    assert observed(factory, "llm_time_per_output_token_seconds") == []
    assert observed(factory, "llm_request_queue_time_seconds") == []
    assert factory.series["llm_requests_total", "timeout"].value == 1


def test_the_time_per_token_is_that_of_one_sequence(factory):
    RequestMetrics(factory, LABELS).ended(record(output_tokens=22, sequences=2))
    assert observed(factory, "llm_time_per_output_token_seconds") == [pytest.approx(0.2)]


def test_refusals_are_counted_by_code(factory):
    counter = Refusals(factory, LABELS)
    for error in (Overloaded("full"), KeyError("surprise"), KeyError("another")):
        counter.count(error)
    found = {code: factory.series["llm_requests_refused_total", code].value for code in refusals.CODES}
    assert found == {"UNAVAILABLE": 1, "INTERNAL": 2, "INVALID_ARG": 0, "UNSUPPORTED": 0, "NOT_FOUND": 0}


def test_family_names_are_unique():
    specs = [*gauges.GAUGES, *gauges.COUNTERS, *requests.HISTOGRAMS, *requests.COUNTERS, *refusals.COUNTERS]
    assert len({spec.name for spec in specs}) == len(specs)


def test_a_poller_goes_on_after_a_failure_and_calls_once_more_at_the_end():
    calls: list[int] = []

    def action() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("first")

    poller = Poller("test", 0.005, action)
    poller.start()
    deadline = time.monotonic() + 5
    while len(calls) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    before = len(calls)
    poller.stop()
    assert before >= 3
    assert len(calls) > before


def test_a_poller_that_waits_for_something_is_eager_until_it_is_there():
    calls: list[float] = []
    poller = Poller("test", 3600, lambda: calls.append(time.monotonic()), until=lambda: len(calls) >= 3, eager_s=0.005)
    poller.start()
    deadline = time.monotonic() + 5
    while len(calls) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.1)  # twenty more if it were still eager
    assert len(calls) == 3
    poller.stop()
