"""Counts requests that were turned away before they ran, in each model that may do so. Knows nothing of Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_backend.errors import StackError
from python_backend.telemetry.families import FamilySpec, Series

if TYPE_CHECKING:
    from collections.abc import Mapping

    from python_backend.telemetry.families import MetricFactory

CODES = ("INVALID_ARG", "UNSUPPORTED", "NOT_FOUND", "UNAVAILABLE", "INTERNAL")
REFUSED = FamilySpec("llm_requests_refused_total", "Requests refused before they ran, by code", "code", CODES)
COUNTERS = (REFUSED,)


class Refusals:
    """The series of one model. A request is counted where it is refused, and nowhere else."""

    def __init__(self, factory: MetricFactory, labels: Mapping[str, str]) -> None:
        self._refused = Series(factory, factory.COUNTER, REFUSED, labels)

    def count(self, error: BaseException) -> None:
        """One request more that got this error."""
        self._refused[error.code if isinstance(error, StackError) else StackError.code].increment(1)
