"""report.html: one file without the network, the answer first, every chart well-formed, two runs side by side."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loadtests import files, slo, verdict
from loadtests.ledger import Ledger
from loadtests.options import parse
from loadtests.outcome import Outcome, as_dict
from loadtests.records import Record
from loadtests.report.page import page
from loadtests.report.svg import Axis, nice
from loadtests.results import of_stage
from loadtests.scrape import Sample, summarize
from loadtests.scrape import parse as parse_metrics
from loadtests.search import Crossing, Found
from loadtests.server import Server
from loadtests.stages import Stage

BEGUN = 1_700_000_000.0
MACHINE = {
    "cpu": "A <fast> processor",
    "cores": 2,
    "instructions": ["avx2"],
    "python": "3.11.7",
    "packages": {"numpy": "1.26.4"},
    "commit": "abc1234",
    "load_average": 1.0,
}


def outcome(slower: float = 1.0, workload: str = "chat") -> Outcome:
    ledger = Ledger()
    samples, stages = [], []
    for number, users in enumerate((1, 4, 16)):
        begin = BEGUN + 40 * number
        stages.append(Stage(users, "users", begin, begin + 5, begin + 35, begin + 38))
        for place in range(30):
            ttft, tpot = slower * 0.05 * users, slower * 0.005 * users
            chunks = tuple(ttft + tpot * token for token in range(20))
            ledger.records.append(
                Record(
                    index=place,
                    workload="mixed/long" if workload == "mixed" and place % 3 == 0 else workload,
                    transport="grpc-stream",
                    intended_at=begin + 5 + place,
                    sent_s=0.001,
                    end_s=chunks[-1],
                    chunk_s=chunks,
                    chunk_tokens=(1,) * 20,
                    prompt_tokens=50,
                    output_tokens=20,
                    max_tokens=20,
                    error="QueueFull" if users == 16 and place < 3 else None,
                    message="<the queue> is full" if users == 16 and place < 3 else "",
                )
            )
        samples += [
            Sample(
                begin + second,
                {
                    "running": users,
                    "waiting": 0.0,
                    "max_running": 32,
                    "kv_used": 3 * users,
                    "kv_max": 1024,
                    "prompt_tokens": 50.0 * (40 * number + second),
                    "cached_tokens": 20.0 * (40 * number + second),
                    "steps": 30.0 * (40 * number + second),
                },
            )
            for second in range(40)
        ]
    chat = slo.load("chat")
    results = [of_stage(stage, ledger, samples, chat) for stage in stages]
    return Outcome(
        options=parse(["--workload", workload]),
        server=Server("http://127.0.0.1:1", "127.0.0.1:2", None),
        about="Talk & text.",
        begun_at=BEGUN,
        results=results,
        verdict=verdict.of_ladder(results, 4, chat),
        records=ledger.records,
        samples=samples,
        machine=MACHINE,
        salt="s",
        command=["--slo", "chat"],
    )


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return dict(json.loads(json.dumps(as_dict(outcome()))))


def svgs(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)]


def test_the_answer_comes_first_and_in_words(report: dict[str, Any]) -> None:
    html = page(report, None)
    text = re.sub(r"<[^>]+>", " ", html[html.index("<body>") :])
    answer = "It holds 4 users within the SLO chat (the limit is near"
    assert answer in text
    assert text.index(answer) < text.index("TTFT p95")
    assert "At 16 users the first thing to give is errors 10 %" in text
    assert "Required: 4 users. Met." in text


def test_the_page_needs_nothing_else(report: dict[str, Any]) -> None:
    html = page(report, None)
    assert not re.findall(r"<(?:script|link|img|iframe)\b|@import|url\(|src=", html)
    assert len(html) < 400_000


def test_every_chart_is_well_formed_and_within_its_frame(report: dict[str, Any]) -> None:
    drawn = svgs(page(report, None))
    assert len(drawn) >= 12
    for svg in drawn:
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        points = [pair.split(",") for line in svg.iter("polyline") for pair in line.attrib["points"].split()]
        dots = [(dot.attrib["cx"], dot.attrib["cy"]) for dot in svg.iter("circle")]
        assert points or dots
        assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in [*points, *dots])


def test_what_the_server_said_is_text_and_not_markup(report: dict[str, Any]) -> None:
    html = page(report, None)
    assert "&lt;the queue&gt; is full" in html
    assert "A &lt;fast&gt; processor" in html
    assert "QueueFull" in html


def test_the_server_is_on_the_clock_of_the_requests(report: dict[str, Any]) -> None:
    assert report["samples"]["t"][0] == 0.0
    assert report["timeline"][0][0] == 5.0
    assert report["tokens"][5] > 0
    assert report["stages"][1]["server"]["prefix_hit_ratio"] == pytest.approx(0.4)
    assert report["stages"][1]["server"]["steps_per_s"] == pytest.approx(30.0)


def test_two_runs_are_compared_load_by_load(report: dict[str, Any]) -> None:
    slower = dict(json.loads(json.dumps(as_dict(outcome(slower=1.5)))))
    html = page(slower, report)
    assert "Beside the other run" in html
    assert html.count("+50 %") == 9, "three latencies at three loads"
    assert 'class="line other"' in html
    assert "Beside the other run" not in page(slower, None)


@pytest.mark.parametrize("kept", ["no request", "one request", "failures only"])
def test_a_run_that_went_badly_has_a_page_too(kept: str) -> None:
    done = outcome()
    ledger = Ledger()
    if kept != "no request":
        error = "QueueFull" if kept == "failures only" else None
        ledger.records = [replace(done.records[0], error=error)]
    results = [of_stage(result.stage, ledger, [], slo.load("chat")) for result in done.results]
    judged = verdict.of_ladder(results, 4, slo.load("chat"))
    bad = replace(done, results=results, verdict=judged, records=ledger.records, samples=[])
    text = json.dumps(as_dict(bad), allow_nan=False)
    html = page(json.loads(text), json.loads(text))
    assert "Required: 4 users. Missed" in html
    assert all(svg.attrib["viewBox"] for svg in svgs(html))


def test_a_search_is_drawn_and_is_plain_json() -> None:
    done = replace(
        outcome(),
        search=Found(Crossing(6.0, 0.02, 1.0), 4.0, 16.0, [(1.0, 0.3), (4.0, 0.9), (16.0, 2.0), (64.0, math.inf)]),
    )
    text = json.dumps(as_dict(done), allow_nan=False)
    assert "share of the tightest limit that was used" in page(json.loads(text), None)


def test_groups_are_shown_when_there_are_several() -> None:
    found = as_dict(outcome(workload="mixed"))
    assert set(found["stages"][0]["groups"]) == {"mixed", "mixed/long"}
    assert "By workload and adapter" in page(found, None)


def test_the_files_can_be_read_again_and_the_page_made_anew(tmp_path: Path) -> None:
    done = outcome()
    object.__setattr__(done.options, "out", tmp_path)
    directory = files.write(done)
    assert {path.name for path in directory.iterdir()} == set(files.NAMES)
    assert len((directory / "requests.csv").read_text().splitlines()) == 91
    assert len((directory / "stages.csv").read_text().splitlines()) == 4
    first = (directory / "report.html").read_text()
    assert files.render(directory, None) == directory / "report.html"
    assert (directory / "report.html").read_text() == first


def test_axes_have_round_ticks_within_them() -> None:
    assert Axis(0, 1.08).ticks() == pytest.approx([0, 0.5, 1.0])
    assert Axis(0.03, 2.5, log=True).ticks() == pytest.approx([0.05, 0.1, 0.2, 0.5, 1, 2])
    assert len(Axis(0.31, 0.33, log=True).ticks()) >= 3, "a short logarithmic axis has ticks as well"
    assert [nice(value) for value in (0.0011, 0.3, 7, 10)] == pytest.approx([0.002, 0.5, 10, 10])


METRICS = """# HELP nv_trt_llm_request_metrics x
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1
llm_requests_refused_total{code="UNAVAILABLE",model="tensorrt_llm",version="1"} 2
llm_requests_refused_total{code="INVALID_ARG",model="tensorrt_llm",version="1"} 5
other_metric 7
llm_prompt_tokens_total{model="a \\"quoted\\" name",version="1"} 1.5e3
"""


def test_prometheus_text_is_read_and_labels_are_added_up() -> None:
    assert parse_metrics(METRICS) == {"running": 3, "waiting": 1, "refused": 7, "prompt_tokens": 1500}


def test_figures_the_server_does_not_export_are_absent() -> None:
    assert summarize([], 0, 1) == {}
    found = summarize([Sample(0.5, {"running": 2.0}), Sample(0.9, {"running": 4.0})], 0, 1)
    assert found == {"running_mean": 3.0, "running_max": 4.0}
