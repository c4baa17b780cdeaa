"""One real Triton with the demo model for all tests of a run, and a tiny repository for tests of the launcher."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.launched import LaunchedServer, ServerAddresses, assert_nothing_left
from tests.server.tiny_deployment import build_tiny_deployment
from tests.server.tiny_repository import write_tiny_repository
from tests.server.wire import active_requests, wait_until


@pytest.fixture(scope="session")
def server() -> Iterator[ServerAddresses]:
    """The demo deployment, built if missing, started once; at the end it must stop and leave nothing behind."""
    launched = LaunchedServer()
    try:
        addresses = launched.wait_ready(timeout_s=280)
        yield addresses
        launched.signal(signal.SIGTERM)
        assert launched.wait() == 0, launched.output
        assert_nothing_left(launched, addresses, within_s=1)
    finally:
        launched.process.kill()


@pytest.fixture(autouse=True)
def idle(request: pytest.FixtureRequest) -> None:
    """A test meets an engine that nobody else uses.

    A request that the test before left behind would share its steps, and how many sequences decode together changes
    the last bits of bf16; one that never ends is a fault of its own.
    """
    if "server" in request.fixturenames:
        addresses = request.getfixturevalue("server")
        wait_until(lambda: active_requests(addresses) == 0, timeout_s=60)


@pytest.fixture
def tiny_repository(tmp_path: Path) -> Path:
    """A repository whose `ensemble` echoes its text; text "sleep N" takes N seconds."""
    return write_tiny_repository(tmp_path / "model_repo")


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of a deployment with a model of two layers, for tests that kill their server."""
    return build_tiny_deployment(tmp_path_factory.mktemp("tiny"))
