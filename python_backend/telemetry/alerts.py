"""The alert rules of a deployment, for Prometheus. Knows nothing of files; limits are those of the SLO for chats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from python_backend.telemetry import gauges, health, refusals, requests
from python_backend.telemetry.queries import quantile, rate, share, value

TIME_TO_FIRST_TOKEN_S = 1.0
TIME_PER_OUTPUT_TOKEN_S = 0.05
ERROR_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule: it fires when the expression has a value for so long."""

    name: str
    expression: str
    for_: str
    severity: str
    summary: str
    action: str


_ACTIVE = value(gauges.REQUESTS, "active")
_STEPS = value(gauges.GENERAL, "iteration_counter")
_ALL_ENDED, _ERRORS = rate(requests.FINISHED), rate(requests.FINISHED, "error")
_LOOK_AT_THE_LAUNCHER = (
    "Look at the exit code and the last line of the launcher; a supervisor should have started it again."
)

ALERTS = (
    Alert(
        "LLMNoServer",
        f"absent({value(health.HEALTHY)})",
        "2m",
        "critical",
        "No server exports its health.",
        _LOOK_AT_THE_LAUNCHER,
    ),
    # Whatever the job is called: a target that has had our gauge. One that is no target any more is not missed.
    Alert(
        "LLMServerDown",
        f"up == 0 and on (instance, job) count_over_time({value(health.HEALTHY)}[1d])",
        "2m",
        "critical",
        "The server {{ $labels.instance }} does not answer Prometheus.",
        _LOOK_AT_THE_LAUNCHER,
    ),
    Alert(
        "LLMModelUnhealthy",
        f"{value(health.HEALTHY)} == 0",
        "1m",
        "critical",
        "The model {{ $labels.part }} of {{ $labels.instance }} does not serve.",
        "Ask the model health for the reason; see docs/operations.md.",
    ),
    Alert(
        "LLMEngineStands",
        f"{_ACTIVE} > 0 and on (instance, job) changes({_STEPS}[2m]) == 0",
        "1m",
        "critical",
        "The engine of {{ $labels.instance }} has {{ $value }} requests and makes no step.",
        "Take a stack dump (py-spy dump) of the process of tensorrt_llm, then restart the server.",
    ),
    Alert(
        "LLMRequestsRefused",
        f"{rate(refusals.REFUSED, 'UNAVAILABLE')} > 0",
        "5m",
        "warning",
        "Requests are turned away for want of room, or by a server that stops ({{ $value | humanize }} per second, "
        "those left out that Triton's own queue rejected).",
        "Add a server, or lower what one client may send; the message of the refusals says what was full.",
    ),
    Alert(
        "LLMErrors",
        f"{share(_ERRORS, _ALL_ENDED)} > {ERROR_SHARE:g}",
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests end with an error of the engine.",
        "Look for `The engine failed in a step` in the server's log.",
    ),
    Alert(
        "LLMTimeToFirstTokenHigh",
        f"{quantile(0.95, requests.TIME_TO_FIRST_TOKEN)} > {TIME_TO_FIRST_TOKEN_S:g}",
        "10m",
        "warning",
        "The 95th percentile of the time to the first token is {{ $value | humanizeDuration }}.",
        "Compare with the queue time: if that is most of it, the server is too small; else prompts are too long.",
    ),
    Alert(
        "LLMTimePerOutputTokenHigh",
        f"{quantile(0.95, requests.TIME_PER_OUTPUT_TOKEN)} > {TIME_PER_OUTPUT_TOKEN_S:g}",
        "10m",
        "warning",
        "The 95th percentile of the time between tokens is {{ $value | humanizeDuration }}.",
        "Lower max_batch_size or max_num_tokens in the spec, or add a server.",
    ),
    Alert(
        "LLMKVCacheFull",
        f"{value(gauges.KV_CACHE, 'fraction')} > 0.95 and on (instance, job) {value(gauges.REQUESTS, 'waiting')} > 0",
        "5m",
        "warning",
        "The KV cache of {{ $labels.instance }} is full and requests wait.",
        "Raise kv_cache_tokens in the spec, or let fewer requests in.",
    ),
    Alert(
        "LLMPreemptions",
        f"{rate(gauges.PREEMPTIONS)} > 0.1",
        "10m",
        "warning",
        "{{ $value | humanize }} sequences per second are computed twice for lack of KV blocks.",
        "Raise kv_cache_tokens, or set batch_scheduler_policy: guaranteed_no_evict.",
    ),
)


def rules() -> dict[str, Any]:
    """The content of a rule file."""
    return {
        "groups": [
            {
                "name": "llm",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expression,
                        "for": alert.for_,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "action": alert.action},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }
