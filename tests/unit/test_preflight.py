"""The checks before a start: each fault is one sentence that names the value and the next step."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from python_backend.errors import BuildError, EnvironmentFault
from python_backend.server import preflight
from python_backend.server.addresses import Addresses
from python_backend.server.workspace import sweep
from tests.server.tiny_repository import write_tiny_repository

_HUGE = 2**60


@pytest.fixture
def tiny_repository(tmp_path: Path) -> Path:
    return write_tiny_repository(tmp_path / "model_repo")


def test_this_machine_passes() -> None:
    preflight.check_machine()
    preflight.check_shared_memory()
    preflight.check_disk(Path.cwd())


def test_a_cpu_without_avx2_is_refused(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse sse2 avx\n")
    with pytest.raises(EnvironmentFault, match="no AVX2"):
        preflight.check_machine(cpuinfo)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"aarch64.*x86_64"):
        preflight.check_machine(machine="aarch64")


@pytest.mark.parametrize("version", ["2.2.6", ""], ids=["numpy 2", "no numpy"])
def test_a_numpy_that_kills_the_stub_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(preflight, "numpy_version", lambda: version)
    with pytest.raises(EnvironmentFault, match="make setup"):
        preflight.check_machine()


@pytest.mark.parametrize("series", [(3, 9), (3, 14)], ids=str)
def test_a_python_without_a_stub_is_refused(monkeypatch: pytest.MonkeyPatch, series: tuple[int, int]) -> None:
    monkeypatch.setattr(preflight.sys, "version_info", (*series, 0))
    with pytest.raises(EnvironmentFault, match=r"3\.10 to 3\.13"):
        preflight.check_machine()


def test_too_little_shared_memory_is_refused_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"MiB free, \d+ MiB are needed.*--shm-size"):
        preflight.check_shared_memory(tmp_path, needed_bytes=_HUGE)


def test_a_missing_shared_memory_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        preflight.check_shared_memory(tmp_path / "none")


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="free some"):
        preflight.check_disk(tmp_path, needed_bytes=_HUGE)


def test_a_repository_without_the_model_lists_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "echo").mkdir()
    (tmp_path / "echo" / "config.pbtxt").touch()
    with pytest.raises(BuildError, match=r"no model named ensemble \(found: echo\)"):
        preflight.check_repository(tmp_path, "ensemble")


@pytest.mark.parametrize(
    ("left", "named"), [("1/model.txt", "model.py is missing"), ("model.py", "no version directory")]
)
def test_a_python_model_without_its_file_is_named_before_triton_waits_for_it(
    tiny_repository: Path, left: str, named: str
) -> None:
    preflight.check_repository(tiny_repository, "ensemble")
    echo = tiny_repository / "echo"
    (echo / "1" / "model.py").rename(echo / left)
    if left == "model.py":
        (echo / "1").rmdir()
    with pytest.raises(BuildError, match=f"{echo}.*{named}.*make build-engines"):
        preflight.check_repository(tiny_repository, "ensemble")


def test_a_taken_port_is_named_with_the_variable_that_moves_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=rf"metrics port {port} .*METRICS_PORT={port + 10}"):
            Addresses("127.0.0.1", 0, 0, port).settled()


def test_the_same_port_twice_is_refused() -> None:
    free = Addresses("127.0.0.1", 0, 0, 0).settled()
    with pytest.raises(EnvironmentFault, match=f"grpc port {free.http} "):
        Addresses("127.0.0.1", free.http, free.http, free.metrics).settled()


def test_port_0_becomes_three_different_free_ports() -> None:
    settled = Addresses("127.0.0.1", 0, 0, 0).settled()
    assert len({settled.http, settled.grpc, settled.metrics, 0}) == 4


def test_sweep_removes_the_files_of_a_dead_launcher_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("python_backend.server.workspace._SHM", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    namespace = os.stat("/proc/self/ns/pid").st_ino
    dead = tmp_path / f"triton-llm-{namespace}.99999999-x"  # above the largest process id of Linux
    alive = tmp_path / f"triton-llm-{namespace}.{os.getpid()}-x"
    of_a_container = tmp_path / f"triton-llm-{namespace + 1}.99999999-x"
    foreign = tmp_path / "triton_python_backend_shm_region_1"
    for file in (dead, alive, of_a_container, foreign):
        file.touch()
    (tmp_path / f"triton-llm-{namespace}.99999999-folder" / "backends").mkdir(parents=True)
    sweep()
    assert sorted(tmp_path.iterdir()) == sorted([alive, of_a_container, foreign])
