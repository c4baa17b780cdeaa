"""The tritonserver process, its stubs, and the watcher that ends them when the launcher is killed."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from python_backend import bls_threads, cpu_share
from python_backend.server.addresses import Addresses
from python_backend.server.drain import has_engine, wait_until_idle
from python_backend.server.stubs import Stub, stubs_of
from python_backend.server.traces import trace_options
from python_backend.server.watcher import end_group, living, remove_empty
from python_backend.server.workspace import Workspace, own_triton_folder, triton_folders

_PR_SET_PDEATHSIG = 1
_MAX_BATCH_SIZE = re.compile(r"^max_batch_size *: *(\d+)", re.MULTILINE)
_CANCEL_TRIES = 4
_CANCEL_S = 5.0  # a step takes a second at most
_SHM_BYTES = 4 * 2**20  # per model instance at the start, and per growth


class TritonProcess:
    """One running tritonserver, leader of its own session; its stubs are in the same process group."""

    def __init__(
        self, workspace: Workspace, repository: Path, addresses: Addresses, log_file: Path, exit_timeout_s: int
    ):
        self._workspace = workspace
        self._addresses = addresses
        self._watcher = _start_watcher()
        self._tell(f"folder {workspace.folder}")
        self._tell(f"shm {workspace.shm_prefix}")
        command = _command(workspace, repository, addresses, exit_timeout_s)
        self._triton_folders = triton_folders()
        with log_file.open("ab") as log:
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
                preexec_fn=_in_child(ctypes.CDLL(None), os.getpid()),  # noqa: PLW1509  no other thread yet
            )
        self._tell(f"group {self._server.pid}")
        self._stubs: tuple[Stub, ...] = ()
        self._own_folder: Path | None = None

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._server.poll()

    def watch_models(self) -> None:
        """From now on `ended_models` says which have ended; all must be loaded."""
        self._own_folder = own_triton_folder(self._triton_folders)
        if self._own_folder is not None:
            self._tell(f"triton_folder {self._own_folder}")
        self._stubs = stubs_of(self._server.pid)

    def living_models(self) -> set[str]:
        """Models all of whose processes live, of those that `watch_models` has seen."""
        return {stub.model for stub in self._stubs} - self.ended_models()

    def ended_models(self) -> set[str]:
        """Models one of whose processes has ended since `watch_models`."""
        return {stub.model for stub in self._stubs if not stub.lives()}

    def terminate(self, patience_s: float, give_up: Callable[[], bool]) -> bool:
        """Lets what runs finish, refuses what comes, and asks Triton to stop.

        The stubs get SIGTERM first: they do not die of it, and the engine's model takes it as the sign to refuse new
        requests. A second one, after patience_s, tells it to end what still runs with what it has. Triton itself gets
        it last: once it is stopping, it starts no further step of an ensemble, whose request then never ends.

        Args:
            patience_s: how long running requests may take.
            give_up: asked again and again; True ends the waiting.

        Returns:
            True when the engine has ended all that it had, so that Triton has nothing to wait for.
        """
        self._tell_stubs()
        idle = wait_until_idle(self._addresses, patience_s, give_up)
        for _ in range(0 if idle else _CANCEL_TRIES):  # a signal that meets a pending one is lost
            self._tell_stubs()
            idle = wait_until_idle(self._addresses, _CANCEL_S / _CANCEL_TRIES, give_up)
            if idle:
                break
        idle = idle and has_engine(self._addresses)
        _send(self._server.pid, signal.SIGTERM)
        return idle

    def kill(self) -> None:
        """Ends server and stubs at once."""
        self._signal(signal.SIGKILL)

    def clean_up(self) -> None:
        """Kills what is left of the group and removes its files; afterwards nothing of this server exists."""
        self.kill()
        self._server.wait()
        end_group(self._server.pid)  # the stubs are not our children: they must be gone before their files are removed
        self._workspace.remove()
        if (folder := self._own_folder or own_triton_folder(self._triton_folders)) is not None:
            remove_empty(str(folder))
        self._tell("done")
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait()

    def _tell_stubs(self) -> None:
        for pid in living(self._server.pid):
            if pid != self._server.pid:
                _send(pid, signal.SIGTERM)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._server.pid, number)
        except ProcessLookupError:
            return  # everybody has ended

    def _tell(self, line: str) -> None:
        assert self._watcher.stdin is not None
        try:
            self._watcher.stdin.write(f"{line}\n".encode())
            self._watcher.stdin.flush()
        except BrokenPipeError:
            return  # somebody killed the watcher; this process still cleans up


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended


def _command(workspace: Workspace, repository: Path, addresses: Addresses, exit_timeout_s: int) -> list[str]:
    command = [str(workspace.tritonserver), f"--model-repository={repository}"]
    for name in ("http", "grpc", "metrics"):
        command += [f"--{name}-address={addresses.host}", f"--{name}-port={getattr(addresses, name)}"]
    command += [
        f"--backend-directory={workspace.backends}",
        f"--backend-config=python,shm-region-prefix-name={workspace.shm_prefix}",
        f"--backend-config=python,shm-default-byte-size={_SHM_BYTES}",
        f"--backend-config=python,shm-growth-byte-size={_SHM_BYTES}",
        bls_threads.option(_largest_batch(repository)),
        f"--exit-timeout-secs={exit_timeout_s}",
        "--disable-auto-complete-config",  # the repository is complete; else every stub would be started twice
        "--log-verbose=0",
        *trace_options(),
    ]
    return command


def _largest_batch(repository: Path) -> int:
    configs = (path.read_text(encoding="utf-8", errors="replace") for path in repository.glob("*/config.pbtxt"))
    return max((int(size) for config in configs for size in _MAX_BATCH_SIZE.findall(config)), default=0)


def _environment() -> dict[str, str]:
    """The stub takes the python3 that is first on PATH, and its libpython from where that Python lives."""
    environment = dict(os.environ)
    environment["PATH"] = f"{sys.prefix}/bin{os.pathsep}{environment.get('PATH', os.defpath)}"
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    folders = (sysconfig.get_config_var("LIBDIR") or "", f"{sys.base_prefix}/lib")
    found = [folder for folder in folders if Path(folder, name).exists()][:1]
    others = environment.get("LD_LIBRARY_PATH")
    if found:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*found, *([others] if others else [])])
    return environment


def _in_child(libc: ctypes.CDLL, launcher_pid: int) -> Callable[[], None]:
    """What the child runs before exec: default signals, death together with the launcher, the engine comes first."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher_pid:  # the launcher died before prctl
            os._exit(1)
        cpu_share.give_way()

    return prepare


def _start_watcher() -> subprocess.Popen[bytes]:
    """By file name and from its folder, so that a kill by the launcher's command line does not hit it too."""
    file = Path(__file__).with_name("watcher.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", file.name],
        cwd=file.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
