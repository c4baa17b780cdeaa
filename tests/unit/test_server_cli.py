"""Exit codes of the launcher that come before there is a Triton."""

from __future__ import annotations

import pytest

from python_backend.server import cli
from python_backend.server.launcher import Launcher


def interrupted(self: Launcher) -> int:
    raise KeyboardInterrupt


def test_ctrl_c_before_triton_is_started_is_130(monkeypatch, capsys):
    monkeypatch.setattr(Launcher, "run", interrupted)
    assert cli.main([]) == 130
    assert capsys.readouterr().err == "interrupted before the server was started\n"


@pytest.mark.parametrize("arguments", [["--http-port", "70000"], ["--spec", "a", "--model-repository", "b"], ["serve"]])
def test_wrong_usage_is_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: " in capsys.readouterr().err
