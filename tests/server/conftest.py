"""One real Triton with the demo model for all tests of a run, and a tiny repository for tests of the launcher."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.launched import LaunchedServer, ServerAddresses, assert_nothing_left
from tests.server.tiny_deployment import build_tiny_deployment
from tests.server.tiny_repository import write_tiny_repository


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


@pytest.fixture
def tiny_repository(tmp_path: Path) -> Path:
    """A repository whose `ensemble` echoes its text; text "sleep N" takes N seconds."""
    return write_tiny_repository(tmp_path / "model_repo")


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of a deployment with a model of two layers, for tests that kill their server."""
    return build_tiny_deployment(tmp_path_factory.mktemp("tiny"))
