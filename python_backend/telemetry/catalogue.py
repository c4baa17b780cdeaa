"""Every metric family of this repository by name: what dashboards, alerts, pages and tests are held against.

Knows nothing of Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from python_backend.telemetry import adapters, gauges, guides, health, refusals, requests

if TYPE_CHECKING:
    from python_backend.telemetry.families import FamilySpec

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """A family and how its series behave."""

    spec: FamilySpec
    kind: Kind


_BY_KIND: tuple[tuple[Kind, tuple[FamilySpec, ...]], ...] = (
    ("gauge", (*gauges.GAUGES, *adapters.GAUGES, *health.GAUGES)),
    ("counter", (*gauges.COUNTERS, *requests.COUNTERS, *refusals.COUNTERS, *guides.COUNTERS, *adapters.COUNTERS)),
    ("histogram", (*requests.HISTOGRAMS, *guides.HISTOGRAMS, *adapters.HISTOGRAMS)),
)
FAMILIES = {
    family.spec.name: family
    for family in chain.from_iterable((Family(spec, kind) for spec in specs) for kind, specs in _BY_KIND)
}
