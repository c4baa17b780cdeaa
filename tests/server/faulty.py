"""What tests of faults share: a server of the tiny deployment, its processes, and its health."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from python_backend.server import triton_process
from python_backend.server.addresses import Addresses
from python_backend.server.stubs import stubs_of
from python_backend.server.watcher import end_group
from python_backend.server.workspace import Workspace
from tests.server.launched import LaunchedServer, ServerAddresses, is_open
from tests.server.wire import Stream, post, text_inputs, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAULTS = """
import os, time
from python_backend.engine.engine_core import EngineCore
_step, _begin = EngineCore.step, EngineCore._begin

def step(self):
    if os.path.exists({flag!r} + "dead"):
        raise SystemExit("killed by a test")
    while os.path.exists({flag!r} + "hangs"):
        time.sleep(0.02)
    _step(self)

def begin(self, batch):
    if os.path.exists({flag!r} + "fails"):
        raise RuntimeError("failed by a test")
    if os.path.exists({flag!r} + "fails-once"):
        os.unlink({flag!r} + "fails-once")
        raise RuntimeError("failed by a test")
    _begin(self, batch)

EngineCore.step, EngineCore._begin = step, begin
"""
_HANGS = """
import os, time
_execute = TritonPythonModel.execute

def execute(self, requests):
    while os.path.exists({flag!r}):
        time.sleep(0.02)
    return _execute(self, requests)

TritonPythonModel.execute = execute
"""
_IMPATIENT = """
from python_backend.triton import health
health.ANSWER_S = {seconds}
health.LOADING_PERIOD_S = 0.001
"""


@contextmanager
def running(repository: Path, *arguments: str) -> Iterator[tuple[LaunchedServer, ServerAddresses]]:
    """A server that is killed at the end, in case that the test has not ended it."""
    launched = LaunchedServer("--model-repository", str(repository), *arguments)
    try:
        yield launched, launched.wait_ready()
    finally:
        if launched.process.poll() is None:
            launched.signal(signal.SIGTERM)
            launched.wait()


@contextmanager
def bare_triton(
    repository: Path, exit_timeout_s: int = 10
) -> Iterator[tuple[subprocess.Popen[bytes], ServerAddresses]]:
    """tritonserver alone, as a container may start it: no launcher looks after it. It has been healthy once."""
    workspace = Workspace.create()
    free = Addresses("127.0.0.1", 0, 0, 0).settled()
    command = triton_process._command(workspace, repository, free, exit_timeout_s)
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=triton_process._environment(), start_new_session=True, **quiet)
    server = ServerAddresses(*(f"{free.host}:{port}" for port in (free.http, free.grpc, free.metrics)))
    try:
        wait_until(lambda: _ended(process) or (is_open(server.metrics) and health(server)[0] == 200), timeout_s=60)
        assert not _ended(process), process.returncode
        yield process, server
    finally:
        end_group(process.pid)
        process.wait()
        workspace.remove()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def copy_with(repository: Path, place: Path, **parameters: object) -> Path:
    """The repository with other parameters of tensorrt_llm."""
    shutil.copytree(repository, place)
    path = place / "tensorrt_llm" / "config.pbtxt"
    config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    for name, value in parameters.items():
        config.parameters[name].string_value = str(value)
    path.write_text(text_format.MessageToString(config))
    return place


def with_switches(repository: Path, flag: str) -> Path:
    """Its engine dies when the file `flag`dead is there; while `flag`hangs is, it hangs; while `flag`fails is, each of
    its steps fails, and with `flag`fails-once the next one.
    """
    return _append(repository, "tensorrt_llm", _FAULTS.format(flag=flag))


def that_hangs(repository: Path, model: str, flag: str) -> Path:
    """One of its models does not answer while the file `flag` is there."""
    return _append(repository, model, _HANGS.format(flag=flag))


def impatient(repository: Path, seconds: float) -> Path:
    """Its `health` takes a model that has not answered for so long as one that hangs, and begins at once."""
    return _append(repository, "health", _IMPATIENT.format(seconds=seconds))


def _append(repository: Path, model: str, code: str) -> Path:
    shim = repository / model / "1" / "model.py"
    shim.write_text(shim.read_text() + code)
    return repository


def tritonserver_pid(launched: LaunchedServer) -> int:
    """The one whose command line has the launcher's folder."""
    mark = f".{launched.launcher_pid}-".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes()
        except OSError:
            continue
        if mark in arguments and b"bin/tritonserver\0" in arguments:
            return int(path.parent.name)
    raise AssertionError("no tritonserver")


def stub_pid(launched: LaunchedServer, model: str) -> int:
    return next(stub.pid for stub in stubs_of(tritonserver_pid(launched)) if stub.model == model)


def kill_stub(launched: LaunchedServer, model: str) -> None:
    os.kill(stub_pid(launched, model), signal.SIGKILL)


def server_pids(launched: LaunchedServer) -> dict[str, int]:
    """tritonserver and the process of each model, by name."""
    triton = tritonserver_pid(launched)
    return {"tritonserver": triton} | {stub.model: stub.pid for stub in stubs_of(triton)}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def health(server: ServerAddresses) -> tuple[int, str]:
    """HTTP status of the model `health`, and its reason when it is not 200."""
    status, answer = post(server, "health/infer", {"inputs": []})
    return status, answer.get("error", "")


def long_stream(server: ServerAddresses, max_tokens: int, request_id: str = "") -> Stream:
    """A stream through the ensemble that has begun and ends by its length."""
    stream = Stream(server)
    inputs = text_inputs("Once upon a time", max_tokens, stream=[[True]], end_id=[[-1]])
    stream.send("ensemble", inputs, request_id=request_id)
    first = stream.next()
    assert not first.error, first.error
    return stream


class Beside:
    """Calls `action` again and again on a thread until it is left; an error of it is the test's."""

    def __init__(self, action: object) -> None:
        self._action = action
        self._over = threading.Event()
        self.errors: list[BaseException] = []
        self.calls = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._action()  # type: ignore[operator]
                self.calls += 1
            except BaseException as error:
                self.errors.append(error)
                return
