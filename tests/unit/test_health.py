"""What counts as healthy: an engine judged from its snapshots, and models judged from what they answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from python_backend.engine.output import EngineStats
from python_backend.telemetry.health import PARTS, EngineHealth
from tests.unit import fake_triton

if TYPE_CHECKING:
    from collections.abc import Callable

fake_triton.install()

from python_backend.triton import health  # noqa: E402

BUSY = EngineStats(active_requests=3, waiting_requests=2, iteration=5, prompt_tokens=100)


@pytest.fixture
def engine() -> EngineHealth:
    return EngineHealth(patience_s=30)


def test_an_idle_engine_is_well_for_ever(engine):
    for now in (0, 100, 10_000):
        engine.update(EngineStats(iteration=5), 0, None, now)
        assert engine.reason() is None


def test_an_engine_that_steps_is_well(engine):
    for now in range(0, 100, 10):
        engine.update(replace(BUSY, iteration=now), 3, None, now)
        assert engine.reason() is None


def test_an_engine_that_hangs_is_ill_after_its_patience_and_well_once_it_steps(engine):
    for now, ill in ((0, False), (29, False), (31, True)):
        engine.update(BUSY, 1, None, now)
        assert bool(engine.reason()) is ill
    assert engine.reason() == "the engine has work and has made no step for 31 s."
    engine.update(replace(BUSY, iteration=6), 1, None, 32)
    assert engine.reason() is None


def test_the_time_of_idleness_before_a_request_does_not_count(engine):
    engine.update(BUSY, 0, None, 0)
    engine.update(BUSY, 0, None, 1000)
    engine.update(BUSY, 1, None, 1001)
    assert engine.reason() is None


def test_blocks_that_stay_taken_make_it_ill_and_an_admission_makes_it_well(engine):
    short = replace(BUSY, short_of_blocks=True)
    for now in (0, 10, 20, 30):
        engine.update(replace(short, iteration=now), 3, None, now)
    assert engine.reason() == "no KV cache block has become free for 2 waiting requests in 30 s."
    engine.update(replace(short, iteration=31, prompt_tokens=150), 3, None, 31)
    assert engine.reason() is None


def test_a_dead_engine_and_a_server_that_stops_are_ill_at_once(engine):
    engine.update(BUSY, 1, RuntimeError("out of memory"), 1)
    assert engine.reason() == "the engine has failed (out of memory); restart the server."
    engine.close()
    assert engine.reason() == "the server is shutting down."


class Models:
    """What each part would answer, and what the prober told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.trouble: dict[str, str] = {}
        self.while_open: dict[str, Callable[[], None]] = {}  # called before the part answers
        self.healthy: dict[str, bool] = {}
        self.dead: list[str] = []
        self.prober = health.Prober(self.answer, self.healthy.__setitem__, self.dead.append, lambda: self.now)

    def answer(self, part: str) -> str | None:
        self.while_open.get(part, lambda: None)()
        return self.trouble.get(part)

    def round(self) -> None:
        for part in PARTS:
            self.prober.ask(part)


@pytest.fixture
def models() -> Models:
    return Models()


def test_nothing_is_known_before_every_part_has_answered(models):
    for part in PARTS:
        assert models.prober.reason() == "the first round of questions is under way."
        models.prober.ask(part)
    assert models.prober.reason() is None
    assert models.healthy == dict.fromkeys(PARTS, True)


@pytest.mark.parametrize("part", PARTS)
def test_trouble_is_named_with_its_model_and_goes_away(models, part):
    models.trouble[part] = "no file tokenizer.json"
    models.round()
    assert models.prober.reason() == f"{part}: no file tokenizer.json"
    assert models.healthy[part] is False
    models.trouble.clear()
    models.round()
    assert models.prober.reason() is None


def test_a_model_whose_process_has_ended_is_reported_once_and_not_at_its_first_silence(models):
    models.trouble["tensorrt_llm"] = "Stub process 'tensorrt_llm_0_0' is not healthy."
    models.round()
    assert models.dead == []
    for _ in range(3):
        models.round()
    assert models.dead == ["tensorrt_llm"]


@pytest.mark.parametrize("part", PARTS)
def test_a_model_that_does_not_answer_is_named_and_shown_while_the_question_is_open(models, part):
    models.round()
    seen = []

    def hang() -> None:
        for models.now in (5.0, 11.0):
            models.prober.look()
            seen.append((models.prober.reason(), dict(models.healthy)))

    models.while_open[part] = hang
    models.round()
    well = dict.fromkeys(PARTS, True)
    assert seen == [(None, well), (f"{part} has not answered for 11 s.", well | {part: False})]
    models.prober.look()
    assert models.prober.reason() is None
    assert models.healthy == well


def test_the_other_models_are_asked_while_one_hangs(models):
    models.round()
    models.while_open["preprocessing"] = lambda: models.prober.ask("tensorrt_llm")
    models.trouble["tensorrt_llm"] = "the engine has failed"
    models.prober.ask("preprocessing")
    assert models.healthy == {part: part != "tensorrt_llm" for part in PARTS}


def test_a_question_that_cannot_be_sent_counts_as_not_answered_from_the_first_time_on(models):
    models.round()

    def fail() -> None:
        raise RuntimeError("no shared memory")

    models.while_open["postprocessing"] = fail
    for models.now in (0.0, 6.0, 11.0):
        with pytest.raises(RuntimeError):
            models.prober.ask("postprocessing")
    models.prober.look()
    assert models.prober.reason() == "postprocessing has not answered for 11 s."
    assert models.healthy["postprocessing"] is False
