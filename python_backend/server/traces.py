"""Triton's own traces for OpenTelemetry, asked for by the standard environment variables. Knows nothing of spans."""

from __future__ import annotations

import http.client
import json
import os

from python_backend.errors import EnvironmentFault
from python_backend.server.addresses import Addresses

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_RATIO = "OTEL_TRACES_SAMPLER_ARG"


def trace_options() -> list[str]:
    """Options of tritonserver; none unless an endpoint is named.

    Raises:
        EnvironmentFault: the share of requests to trace is no number from 0 to 1.
    """
    endpoint = os.environ.get(_ENDPOINT)
    if not endpoint:
        return []
    return [
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url={endpoint.rstrip('/')}/v1/traces",
        f"--trace-config=opentelemetry,resource=service.name={os.environ.get('OTEL_SERVICE_NAME', 'triton-llm-stack')}",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=rate={_rate()}",
    ]


def leave_out(model: str, addresses: Addresses) -> None:
    """Have calls to a model not traced: those of probes would bury all others."""
    if not os.environ.get(_ENDPOINT):
        return
    connection = http.client.HTTPConnection(addresses.host, addresses.http, timeout=5)
    try:
        connection.request("POST", f"/v2/models/{model}/trace/setting", json.dumps({"trace_level": ["OFF"]}))
        connection.getresponse().read()
    except OSError:
        return  # they stay in
    finally:
        connection.close()


def _rate() -> int:
    """Triton traces one request of so many."""
    text = os.environ.get(_RATIO) or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1
    if not 0 < ratio <= 1:
        raise EnvironmentFault(f"{_RATIO} is {text!r}; allowed: over 0, up to 1 (the share of requests to trace).")
    return max(1, round(1 / ratio))
