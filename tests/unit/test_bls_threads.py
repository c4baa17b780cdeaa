"""The threads of Triton's Python backend: asked for by the launcher, read by models from the server's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_backend import bls_threads


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tritonserver", "--model-repository=/x"], 28),
        (["tritonserver", bls_threads.option(8)], 28),
        (["tritonserver", bls_threads.option(32)], 48),
        (["tritonserver", "--backend-config", "python,thread-pool-size=100", "--id=1"], 96),
        (["tritonserver", bls_threads.option(32), "--backend-config=python,thread-pool-size=2"], 1),
        (["tritonserver", "--backend-config=tensorrtllm,thread-pool-size=7"], 28),
    ],
)
def test_models_may_ask_as_much_as_the_server_has_threads_but_for_some(
    tmp_path: Path, words: list[str], expected: int
) -> None:
    command = tmp_path / "cmdline"
    command.write_bytes("\0".join([*words, ""]).encode())
    assert bls_threads.for_long_answers(command) == expected


def test_without_a_command_line_it_is_what_triton_has_by_default(tmp_path: Path) -> None:
    assert bls_threads.for_long_answers(tmp_path / "none") == 28
    assert bls_threads.for_long_answers() == 28, "the parent of this process is no Triton"
