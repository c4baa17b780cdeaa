"""monitoring/: up to date, accepted by promtool where it is installed, and without a query that nobody answers."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from python_backend.telemetry import __main__ as command
from python_backend.telemetry.alerts import ALERTS
from python_backend.telemetry.catalogue import FAMILIES
from python_backend.telemetry.dashboard import dashboard, expressions

EXPRESSIONS = [*expressions(), *(alert.expression for alert in ALERTS)]


@pytest.mark.parametrize("name", command.files())
def test_the_file_is_up_to_date(name):
    kept = (command.FOLDER / name).read_text(encoding="utf-8")
    assert kept == command.files()[name], "run python -m python_backend.telemetry"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_takes_the_rules(tmp_path):
    done = subprocess.run(
        ["promtool", "check", "rules", command.FOLDER / "alerts.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Dashboards have no checker of their own: each query as a rule.
    rules = "\n".join(f"  - record: query_{at}\n    expr: {text!r}" for at, text in enumerate(EXPRESSIONS))
    (tmp_path / "queries.yaml").write_text(f"groups:\n- name: queries\n  rules:\n{rules}\n")
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "queries.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _series(name, instance, values, job="llm"):
    return {"series": f'{name}{{job="{job}", instance="{instance}"}}', "values": values}


def _firing(name, at, *instances):
    """What promtool is to find: the alert, at that time, for these servers and no others."""
    alert = next(alert for alert in ALERTS if alert.name == name)
    expected = [
        {
            "exp_labels": {"severity": alert.severity, "job": "llm", "instance": instance},
            "exp_annotations": {
                "summary": alert.summary.replace("{{ $labels.instance }}", instance),
                "action": alert.action,
            },
        }
        for instance in instances
    ]
    return {"alertname": name, "eval_time": at, "exp_alerts": expected}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_one_of_two_servers_that_is_down_is_named_and_what_is_no_server_is_not(tmp_path):
    series = [
        _series("up", "one:8002", "1x60"),
        _series("llm_model_healthy", "one:8002", "1x60"),
        _series("up", "two:8002", "1x10 0x50"),
        _series("llm_model_healthy", "two:8002", "1x10 stale"),
        _series("up", "three:9187", "0x60", job="database"),
    ]
    checks = [
        _firing("LLMServerDown", "11m"),
        _firing("LLMServerDown", "20m", "two:8002"),
        _firing("LLMNoServer", "20m"),
    ]
    tests = {
        "rule_files": [str(command.FOLDER / "alerts.yaml")],
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": checks}],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_family_is_on_the_dashboard_unless_it_is_of_another_batching():
    shown = " ".join(expressions())
    missing = {name for name in FAMILIES if not re.search(rf"\b{name}(_bucket)?\b", shown)}
    assert missing == {"nv_trt_llm_v1_metrics"}


def test_panels_do_not_overlap_and_stay_inside():
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert all(0 <= x < 24 for x, _ in cells)
        taken |= cells


def test_every_alert_says_what_is_wrong_and_what_to_do():
    for alert in ALERTS:
        assert alert.summary.endswith(".")
        assert alert.action.endswith(".")
        assert re.fullmatch(r"\d+[ms]", alert.for_)
