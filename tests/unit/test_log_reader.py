"""What of Triton's log reaches the screen, on lines as Triton 2.51 writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_backend.server.log_reader import (
    LoadFailure,
    LogReader,
    for_a_person,
    load_failures,
    reason_of_a_model,
    told_to_stop,
    unloaded_models,
)

_AT = "1201 12:49:05.156118 22715"


@pytest.mark.parametrize(
    "line",
    [
        f'E{_AT} server.cc:241] "CudaDriverHelper has not been initialized."',
        f'E{_AT} ensemble_scheduler.cc:1468] "unable to create stream for ensemble: CUDA driver version is insufficient'
        ' for CUDA runtime version"',
        f'W{_AT} metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
        f'I{_AT} model_lifecycle.cc:472] "loading: ensemble:1"',
        "Error: Failed to initialize NVML",
        "a line that a model printed",
        "",
    ],
)
def test_what_needs_no_action_is_not_shown(line: str) -> None:
    assert for_a_person(line) is None


def test_an_error_is_shown_without_its_decoration() -> None:
    assert for_a_person(f'E{_AT} pb_stub.cc:721] "the engine has failed"') == "the engine has failed"


def test_the_reason_of_a_load_failure_is_the_message_of_the_exception() -> None:
    lines = [
        f"E{_AT} model_lifecycle.cc:642] \"failed to load 'tensorrt_llm' version 1: Internal: ModuleNotFoundError: No"
        " module named 'x'\\n\\nAt:\\n  /repo/tensorrt_llm/1/model.py(3): <module>\\n\"",
    ]
    assert load_failures(lines) == [LoadFailure("tensorrt_llm", "No module named 'x'")]


def test_a_model_that_failed_twice_is_named_once() -> None:
    line = f"E{_AT} model_lifecycle.cc:642] \"failed to load 'a' version 1: Internal: broken\""
    assert load_failures([line, line]) == [LoadFailure("a", "broken")]


def test_an_ensemble_that_fails_with_its_step_is_left_out() -> None:
    lines = [
        f"E{_AT} model_lifecycle.cc:642] \"failed to load 'step' version 1: Internal: broken\"",
        f"E{_AT} model_repository_manager.cc:700] \"failed to load 'ensemble': Invalid argument: ensemble 'ensemble'"
        " depends on 'step' which has no loaded version\"",
    ]
    assert load_failures(lines) == [LoadFailure("step", "broken")]


def test_an_unusable_configuration_is_a_load_failure() -> None:
    line = (
        f"E{_AT} model_repository_manager.cc:1460] \"Poll failed for model directory 'ensemble': ensemble input 'x' for"
        " ensemble ensemble' is not used\""
    )
    assert load_failures([line])[0].model == "ensemble"


def test_an_ensemble_that_does_not_fit_its_steps_is_a_load_failure() -> None:
    line = (
        f'E{_AT} model_repository_manager.cc:703] "Invalid argument: in ensemble chat, ensemble tensor text_input is'
        ' mapping to non-existing input NO_INPUT in model preprocessing"'
    )
    reason = "ensemble tensor text_input is mapping to non-existing input NO_INPUT in model preprocessing"
    assert load_failures([line]) == [LoadFailure("chat", reason)]


def test_an_ensemble_without_one_of_its_steps_is_a_load_failure_unless_the_step_is_one() -> None:
    step = f"E{_AT} model_repository_manager.cc:1460] \"Poll failed for model directory 'post': broken\""
    ensemble = (
        f'E{_AT} model_repository_manager.cc:703] "Invalid argument: ensemble chat contains models that are not'
        ' available or ambiguous: post"'
    )
    assert load_failures([ensemble])[0].model == "chat"
    assert load_failures([step, ensemble]) == [LoadFailure("post", "broken")]


def test_a_model_is_unloaded_when_triton_says_so_and_not_before() -> None:
    loaded = f"I{_AT} model_lifecycle.cc:839] \"successfully loaded 'a'\""
    assert unloaded_models([loaded, "All models are stopped, unloading models"]) == set()
    assert unloaded_models([loaded, f"I{_AT} model_lifecycle.cc:624] \"successfully unloaded 'a' version 1\""]) == {"a"}


def test_lines_are_read_once_and_only_when_they_are_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntw")
    reader = LogReader(log)
    assert reader.new_lines() == ["one"]
    assert reader.new_lines() == []
    with log.open("ab") as file:
        file.write(b"o\nthree")
    assert reader.new_lines() == ["two"]


def test_a_stop_that_the_launcher_did_not_ask_for_is_seen_with_the_reason_of_the_model_that_did() -> None:
    failed = f'E{_AT} pb.py:189] "The engine has failed (out of memory); the server stops."'
    assert not told_to_stop([failed])
    assert told_to_stop([failed, "Signal (15) received."])
    assert reason_of_a_model(["Signal (15) received.", failed]) == (
        "The engine has failed (out of memory); the server stops."
    )
    assert reason_of_a_model([f'E{_AT} pb.py:189] "another error"']) is None
