"""Dashboard and alerts against a scrape of the running server: every query finds its series."""

from __future__ import annotations

from python_backend.telemetry.alerts import ALERTS
from python_backend.telemetry.dashboard import expressions
from tests.server.promql import unanswered
from tests.server.wire import metrics_text

EXPRESSIONS = [*expressions(), *(alert.expression for alert in ALERTS)]


def test_every_query_finds_its_series(server):
    # Adapters have series where the spec has a section lora; test_lora.py looks there.
    assert unanswered([text for text in EXPRESSIONS if "llm_lora_" not in text], metrics_text(server)) == []


def test_the_search_for_series_can_fail(server):
    scrape = metrics_text(server)
    assert unanswered(["rate(llm_nothing_total[5m])"], scrape)
    assert unanswered(['llm_requests_total{finish_reason="bored"}'], scrape)
    assert unanswered(["sum by (colour) (llm_requests_total)"], scrape)
