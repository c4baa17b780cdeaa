"""What is observed once, at the end of each request: lengths, times and how it ended.

Knows nothing of Triton. An observation costs about 0.06 ms, so nothing here is called for a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from python_backend.request import FinishReason
from python_backend.telemetry.families import FamilySpec, Series

if TYPE_CHECKING:
    from collections.abc import Mapping

    from python_backend.telemetry.families import MetricFactory

_LENGTH_BUCKETS = (10, 50, 100, 500, 1000)
_FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TOKEN_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)

INPUT_LEN = FamilySpec(
    "nv_llm_input_token_len",
    "Number of tokens of the prompt",
    "response_metric_type",
    ("total_input_tokens",),
    _LENGTH_BUCKETS,
)
OUTPUT_LEN = FamilySpec(
    "nv_llm_output_token_len",
    "Number of generated tokens of a request",
    "response_metric_type",
    ("total_output_tokens",),
    _LENGTH_BUCKETS,
)
TIME_TO_FIRST_TOKEN = FamilySpec(
    "llm_time_to_first_token_seconds", "From arrival to the first token", buckets=_FIRST_TOKEN_BUCKETS
)
TIME_PER_OUTPUT_TOKEN = FamilySpec(
    "llm_time_per_output_token_seconds", "Mean time between two tokens of a request", buckets=_TOKEN_BUCKETS
)
QUEUE_TIME = FamilySpec(
    "llm_request_queue_time_seconds", "From arrival to the first step", buckets=_FIRST_TOKEN_BUCKETS
)
LATENCY = FamilySpec("llm_request_latency_seconds", "From arrival to the last response", buckets=_REQUEST_BUCKETS)
HISTOGRAMS = (INPUT_LEN, OUTPUT_LEN, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, QUEUE_TIME, LATENCY)

FINISHED = FamilySpec("llm_requests_total", "Requests that have ended, by how", "finish_reason", get_args(FinishReason))
COUNTERS = (FINISHED,)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that has ended. Times are time.monotonic_ns(), 0 for what did not happen."""

    input_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    end_ns: int
    sequences: int = 1  # samples or beams that share the tokens


class RequestMetrics:
    """Counters and histograms of requests."""

    def __init__(self, factory: MetricFactory, labels: Mapping[str, str]) -> None:
        self._histograms = {spec.name: Series(factory, factory.HISTOGRAM, spec, labels) for spec in HISTOGRAMS}
        self._finished = Series(factory, factory.COUNTER, FINISHED, labels)

    def ended(self, record: RequestRecord) -> None:
        """Observe a request that ran."""
        self._finished[record.finish_reason].increment(1)
        self._observe(INPUT_LEN, record.input_tokens)
        self._observe(OUTPUT_LEN, record.output_tokens)
        self._observe(LATENCY, (record.end_ns - record.arrival_ns) / 1e9)
        if record.first_scheduled_ns:
            self._observe(QUEUE_TIME, (record.first_scheduled_ns - record.arrival_ns) / 1e9)
        if record.first_token_ns:
            self._observe(TIME_TO_FIRST_TOKEN, (record.first_token_ns - record.arrival_ns) / 1e9)
        later_tokens = record.output_tokens / record.sequences - 1
        if record.last_token_ns > record.first_token_ns and later_tokens > 0:
            self._observe(TIME_PER_OUTPUT_TOKEN, (record.last_token_ns - record.first_token_ns) / 1e9 / later_tokens)

    def _observe(self, spec: FamilySpec, value: float) -> None:
        self._histograms[spec.name][spec.values[0] if spec.values else ""].observe(value)
