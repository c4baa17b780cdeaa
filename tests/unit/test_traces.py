"""Options of Triton's own traces, from OpenTelemetry's environment variables."""

from __future__ import annotations

import pytest

from python_backend.errors import EnvironmentFault
from python_backend.server.traces import trace_options

ENDPOINT, RATIO = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER_ARG"


@pytest.fixture(autouse=True)
def endpoint(monkeypatch):
    for name in (RATIO, "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ENDPOINT, "http://collector:4318/")


def rate():
    (option,) = [text for text in trace_options() if "rate=" in text]
    return option


def test_there_are_none_without_an_endpoint(monkeypatch):
    monkeypatch.setenv(ENDPOINT, "")
    monkeypatch.setenv(RATIO, "rubbish")
    assert trace_options() == []


def test_spans_go_to_the_endpoint_under_the_name_of_the_service(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    options = trace_options()
    assert "--trace-config=opentelemetry,url=http://collector:4318/v1/traces" in options
    assert "--trace-config=opentelemetry,resource=service.name=chat" in options
    assert rate() == "--trace-config=rate=1"


@pytest.mark.parametrize(
    ("ratio", "one_in"),
    [("", 1), ("1", 1), ("0.7", 1), ("0.6", 2), ("0.5", 2), ("0.3", 3), ("0.1", 10)],
)
def test_the_share_is_rounded_to_one_request_in_so_many(monkeypatch, ratio, one_in):
    monkeypatch.setenv(RATIO, ratio)
    assert rate() == f"--trace-config=rate={one_in}"


@pytest.mark.parametrize("ratio", ["0", "-0.5", "1.5", "nan", "inf", "half", "50%"])
def test_what_is_no_share_is_refused_with_what_is_allowed(monkeypatch, ratio):
    monkeypatch.setenv(RATIO, ratio)
    with pytest.raises(EnvironmentFault, match=f"{RATIO} is '{ratio}'; allowed: over 0, up to 1"):
        trace_options()
