"""SLO files, what a check says, and the answer that is made of the stages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests import search, slo, verdict
from loadtests.errors import UsageFault
from loadtests.ledger import Ledger
from loadtests.records import Record
from loadtests.report.words import answer, missed
from loadtests.results import StageResult, of_stage
from loadtests.scrape import Sample
from loadtests.stages import Stage


def stream(at: float, ttft: float, tpot: float, tokens: int = 21, error: str | None = None) -> Record:
    chunks = tuple(ttft + number * tpot for number in range(tokens))
    return Record(
        index=0,
        workload="chat",
        transport="grpc-stream",
        intended_at=at,
        sent_s=0.0,
        end_s=chunks[-1],
        chunk_s=chunks,
        chunk_tokens=(1,) * tokens,
        prompt_tokens=10,
        output_tokens=tokens,
        max_tokens=tokens,
        error=error,
        message="it broke" if error else "",
    )


def stage(users: int, ttft: float, tpot: float, *, failed: int = 0, samples: list[Sample] | None = None) -> StageResult:
    """A stage of 40 requests that are all alike, the first ones failed."""
    begin = 1000.0 * users
    ledger = Ledger()
    ledger.records = [
        stream(begin + number, ttft, tpot, error="ServerFailure" if number < failed else None) for number in range(40)
    ]
    made = Stage(users, "users", begin - 5, begin, begin + 40, begin + 60)
    return of_stage(made, ledger, samples or [], slo.load("chat"))


def test_the_shipped_slos_are_those_of_the_documentation() -> None:
    assert slo.load("chat").limits_s == {"ttft": {"p95": 1.0}, "tpot": {"p95": 0.050}}
    assert slo.load("code").limits_s == {"ttft": {"p95": 0.2}, "tpot": {"p95": 0.030}}
    assert slo.load("chat").error_rate == slo.load("code").error_rate == 0.001


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: x\nlimits_s: {speed: {p95: 1}}", "no metric 'speed' to limit; there are ttft"),
        ("name: x\nlimits_s: {ttft: {p42: 1}}", "limits_s.ttft.p42"),
        ("name: x\nlimits_s: {ttft: {p95: 1}}\nerorr_rate: 0", "erorr_rate is no key of it, did you mean error_rate?"),
        ("name: x\nlimits_s: {ttft: {p95: 1}}\nfoo: 0", "foo is no key of it, there are name, workload, users"),
        ("users: x\nlimits_s: {ttft: {p95: 1}}", "name: Field required; users: Input should be a valid integer"),
        ("name: [", "is no SLO file"),
        ("just text", "is no SLO file"),
    ],
)
def test_a_wrong_slo_file_says_what_is_wrong(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(UsageFault, match=expected):
        slo.load(str(path))


def test_an_unknown_slo_names_the_shipped_ones() -> None:
    with pytest.raises(UsageFault, match="chat, code, or the path"):
        slo.load("nothing")


def test_a_limit_is_met_up_to_its_value_and_missed_above_it() -> None:
    met = {check.label: check for check in stage(1, 1.0, 0.04).checks}
    assert all(check.met for check in met.values())
    over = {check.label: check for check in stage(1, 1.0, 0.06).checks}
    assert [label for label, check in over.items() if not check.met] == ["TPOT p95"]
    assert over["TPOT p95"].use == pytest.approx(1.2)


def test_one_failure_in_forty_misses_one_in_a_thousand() -> None:
    found = stage(1, 0.1, 0.01, failed=1)
    assert not found.met
    assert found.errors == {"ServerFailure": 1}
    assert found.messages == {"ServerFailure": ["it broke"]}
    assert found.rates["error_rate"] == 0.025
    assert found.metrics["ttft"]["count"] == 39, "failed requests have no latency"


def test_no_requests_at_all_meet_no_slo() -> None:
    empty = of_stage(Stage(1, "users", 0, 5, 10, 12), Ledger(), [], slo.load("chat"))
    assert not empty.met
    assert "could not be measured" in answer(
        verdict.of_ladder([empty], 1, slo.load("chat")).as_dict(), slo.load("chat").model_dump(), "users"
    )


def test_what_started_in_the_window_and_never_ended_has_failed() -> None:
    ledger = Ledger()
    ledger.records = [stream(10.0 + number, 0.1, 0.01) for number in range(9)]
    found = of_stage(Stage(1, "users", 5, 10, 20, 80, abandoned=(15.5,)), ledger, [], slo.load("chat"))
    assert found.errors == {"Unfinished": 1}
    assert found.rates["error_rate"] == 0.1


def test_the_warm_up_does_not_count() -> None:
    ledger = Ledger()
    ledger.records = [stream(7.0, 30.0, 1.0), *(stream(10.0 + number, 0.1, 0.01) for number in range(9))]
    found = of_stage(Stage(1, "users", 5, 10, 20, 80), ledger, [], slo.load("chat"))
    assert found.met
    assert found.metrics["ttft"]["max"] == 0.1


def test_goodput_wants_every_limit_of_one_request() -> None:
    ledger = Ledger()
    records = [stream(10.0, 0.1, 0.01), stream(11.0, 1.5, 0.01), stream(12.0, 0.1, 0.07), stream(13.0, 0.1, 0.05)]
    ledger.records = records
    found = of_stage(Stage(1, "users", 5, 10, 20, 80), ledger, [], slo.load("chat"))
    assert found.rates["good_fraction"] == 0.5
    assert found.rates["goodput_per_s"] == 0.2


def test_goodput_holds_a_request_against_the_highest_statistic_of_each_metric() -> None:
    found = slo.Slo(name="x", limits_s={"ttft": {"p99": 2.0, "p50": 0.3}, "tpot": {"mean": 0.05}})
    assert found.thresholds == {"ttft": 2.0, "tpot": 0.05}
    assert found.is_good(stream(10.0, 1.9, 0.01))
    assert not found.is_good(stream(10.0, 2.1, 0.01))


def test_a_busy_process_is_a_caution_and_four_calm_ones_are_not() -> None:
    calm, busy = (
        replace(stage(1, 0.1, 0.02), tool={"cores": cores, "busiest": most, "lag_s": 0.0})
        for cores, most in ((0.8, 0.2), (0.8, 0.8))
    )
    assert not any("bottleneck" in line for line in verdict.cautions([calm]))
    assert any("used 0.8 cores, of which it can use one" in line for line in verdict.cautions([busy]))


def test_the_answer_names_what_holds_what_gives_first_and_by_how_much() -> None:
    found = [stage(1, 0.1, 0.02), stage(4, 0.2, 0.03), stage(8, 0.6, 0.06), stage(16, 3.0, 0.09)]
    judged = verdict.of_ladder(found, 4, slo.load("chat"))
    assert (judged.passed, judged.holds, judged.misses) == (True, 4, 8)
    assert judged.estimate == pytest.approx(4 * 2 ** (0.4 / 0.6))
    text = answer(judged.as_dict(), slo.load("chat").model_dump(), "users")
    assert text == (
        "It holds 4 users within the SLO chat (the limit is near 6.35). "
        "At 8 users the first thing to give is TPOT p95 60 ms, 20 % over 50 ms."
    )
    assert missed(judged.as_dict(), "users") == ["Required: 4 users. Met."]


def test_the_required_load_decides_and_says_by_how_much_it_was_missed() -> None:
    found = [stage(1, 0.1, 0.02), stage(8, 1.5, 0.02)]
    judged = verdict.of_ladder(found, 8, slo.load("chat"))
    assert not judged.passed
    assert missed(judged.as_dict(), "users") == ["Required: 8 users. Missed: TTFT p95 1.5 s, 50 % over 1 s."]
    assert verdict.of_ladder(found, 1, slo.load("chat")).passed


def test_a_missed_rate_says_everything_that_was_missed() -> None:
    judged = verdict.of_ladder([stage(1, 0.1, 0.02), stage(2, 1.5, 0.06)], 2.0, slo.load("chat"))
    assert not judged.passed
    assert missed(judged.as_dict(), "rate") == [
        "Required: 2 requests/s. Missed: TTFT p95 1.5 s, 50 % over 1 s; TPOT p95 60 ms, 20 % over 50 ms."
    ]


def test_a_load_that_had_to_hold_and_was_not_reached_is_no_pass() -> None:
    judged = verdict.of_ladder([stage(1, 0.1, 0.01)], 4, slo.load("chat"))
    assert not judged.passed
    assert missed(judged.as_dict(), "users") == []


def test_a_stage_that_holds_above_one_that_does_not_is_not_what_holds() -> None:
    judged = verdict.of_ladder([stage(1, 0.1, 0.06), stage(2, 0.1, 0.02)], 2, slo.load("chat"))
    assert judged.holds is None
    assert judged.misses == 1


def test_a_search_answers_with_the_limit_its_error_and_what_gives_first() -> None:
    """Rates, here: TPOT reaches 50 ms at 2.5."""
    tried = [stage(rate, 0.1, 0.02 * rate) for rate in (1, 2, 3, 4)]
    found = search.Found(search.Crossing(2.5, 0.021, 1.0), 2.0, 3.0, [(1.0, 0.4), (2.0, 0.8), (3.0, 1.2), (4.0, 1.6)])
    judged = verdict.of_search(tried, found, slo.load("chat"))
    assert judged.passed
    assert answer(judged.as_dict(), slo.load("chat").model_dump(), "rate") == (
        "The highest rate within the SLO chat is 2.5 requests/s ± 2.1 %. It holds 2 requests/s. "
        "At 3 requests/s the first thing to give is TPOT p95 60 ms, 20 % over 50 ms."
    )
    assert not any("disagree" in line for line in judged.cautions)


@pytest.mark.parametrize("margin", [0.2, float("inf")])
def test_a_search_whose_trials_disagree_says_so(margin: float) -> None:
    found = search.Found(search.Crossing(2.5, margin, 1.0), 2.0, 3.0)
    judged = verdict.of_search([stage(2, 0.1, 0.04), stage(3, 0.1, 0.06)], found, slo.load("chat"))
    assert any("trials disagree" in line for line in judged.cautions)
    json.dumps(judged.as_dict(), allow_nan=False)
    assert "It holds 2 requests/s" in answer(judged.as_dict(), slo.load("chat").model_dump(), "rate")


@pytest.mark.parametrize(
    ("alone", "told"), [((), []), ((0.02, 0.021, 0.023), []), ((0.02, 0.021, 0.03), ["20 to 30 ms"])]
)
def test_a_search_says_how_fast_the_machine_was(alone: tuple[float, ...], told: list[str]) -> None:
    found = search.Found(search.Crossing(2.5, 0.02, 1.0), 2.0, 3.0)
    judged = verdict.of_search([stage(2, 0.1, 0.04), stage(3, 0.1, 0.06)], found, slo.load("chat"), alone)
    assert ("A request by itself takes 21 ms per token." in judged.reasons) == bool(alone)
    unsteady = [line for line in judged.cautions if "not always equally fast" in line]
    assert len(unsteady) == len(told)
    assert all(text in line for text, line in zip(told, unsteady, strict=True))


def test_a_search_that_found_no_rate_has_failed() -> None:
    found = search.Found(None, None, 1.0, [(1.0, 1.2)])
    judged = verdict.of_search([stage(1, 0.1, 0.06)], found, slo.load("chat"))
    assert not judged.passed
    assert "It does not hold the SLO chat at 1 request/s" in answer(
        judged.as_dict(), slo.load("chat").model_dump(), "rate"
    )


def test_the_servers_figures_give_the_reason() -> None:
    busy = {"running": 32.0, "waiting": 5.0, "max_running": 32.0, "kv_used": 990.0, "kv_max": 1000.0}
    samples = [
        Sample(
            32000.0 + t, {**busy, "steps": 10.0 * t, "preemptions": 0.0, "queue_sum": 2.0 * t, "queue_count": 1.0 * t}
        )
        for t in range(41)
    ]
    found = "\n".join(verdict.reasons(stage(32, 2.0, 0.1, samples=samples)))
    assert "The batch is full: 32 of 32 sequences run and 5 requests wait." in found
    assert "KV blocks run out: up to 990 of 1000" in found
    assert "A step takes 100 ms" in found
    assert "wait 2000 ms on average" in found


def test_a_tool_that_was_held_up_says_so() -> None:
    slow = replace(stage(1, 0.1, 0.01), tool={"cores": 1.0, "lag_s": 0.5})
    assert any("held up for up to 500 ms" in line for line in verdict.cautions([slow]))


def test_answers_of_another_length_than_asked_are_mentioned() -> None:
    short = replace(stage(1, 0.1, 0.01), lengths={"asked_mean": 20.0, "got_mean": 10.0, "as_asked": 0.5})
    assert any("Only 50 % of the answers" in line for line in verdict.cautions([short]))


def test_answers_that_end_by_themselves_have_no_length_to_miss() -> None:
    short = replace(stage(1, 0.1, 0.01), lengths={"as_asked": 0.0})
    ended = replace(short, records=[replace(record, workload="extraction") for record in short.records])
    assert not any("of the answers" in line for line in verdict.cautions([ended]))
