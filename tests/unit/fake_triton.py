"""What the models that answer later need beside fake_pb_utils: requests with senders, and metric families."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tests.unit import fake_pb_utils

FINAL = 1


class TritonModelException(Exception):
    """As Triton names it."""


class Sender:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.responses: list[Any] = []
        self.cancelled = False
        self.final = threading.Event()

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self.final.is_set(), "a response after the final one"
        if response is not None:
            self.responses.append(response)
        if flags & FINAL:
            self.final.set()

    def is_cancelled(self) -> bool:
        assert not self.final.is_set(), "a question after the final response takes Triton down"
        return self.cancelled

    def wait(self) -> list[Any]:
        """All responses, once the final one was sent."""
        assert self.final.wait(5), "no final response within 5 s"
        return self.responses

    @property
    def error(self) -> Any:
        """The error of the only response."""
        (response,) = self.wait()
        return response.error


@dataclass
class Request:
    """A Triton request as `execute` gets it."""

    tensors: dict[str, np.ndarray]
    id: str = ""
    outputs: tuple[str, ...] = ()
    params: str = ""
    timeout_us: int = 0
    sender: Sender = field(default_factory=Sender)

    def inputs(self) -> list[Any]:
        return [fake_pb_utils.Tensor(name, array) for name, array in self.tensors.items()]

    def request_id(self) -> str:
        return self.id

    def requested_output_names(self) -> set[str]:
        return set(self.outputs)

    def parameters(self) -> str:
        return self.params

    def timeout(self) -> int:
        return self.timeout_us

    def get_response_sender(self) -> Sender:
        return self.sender


class MetricFamily:
    """Counts what its series are told."""

    GAUGE, COUNTER, HISTOGRAM = range(3)
    values: ClassVar[dict[tuple[str, tuple[str, ...]], float]] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name = name

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Any:
        key = (self.name, tuple(sorted(labels.values())))

        class Metric:
            def increment(self, value: float) -> None:
                MetricFamily.values[key] = MetricFamily.values.get(key, 0) + value

            def set(self, value: float) -> None:
                MetricFamily.values[key] = value

            def observe(self, value: float) -> None:
                self.increment(1)

        return Metric()


def install() -> None:
    """fake_pb_utils with the above."""
    fake_pb_utils.install()
    for name, value in {
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": FINAL,
        "TritonModelException": TritonModelException,
        "MetricFamily": MetricFamily,
    }.items():
        if not hasattr(fake_pb_utils, name):
            setattr(fake_pb_utils, name, value)
