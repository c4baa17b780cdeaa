"""PromQL expressions written from declared families, so that none can name a series that nobody exports.

Knows nothing of dashboards or alerts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_backend.telemetry.catalogue import FAMILIES

if TYPE_CHECKING:
    from python_backend.telemetry.catalogue import Kind
    from python_backend.telemetry.families import FamilySpec


def value(spec: FamilySpec, label_value: str = "") -> str:
    """The value now of a gauge; one series when the value of its label is given."""
    return _selector(spec, "gauge", label_value)


def rate(spec: FamilySpec, label_value: str = "", by: str = "", window: str = "5m") -> str:
    """Per second, of a counter, over all servers; one for each value of the label `by`."""
    assert by in ("", spec.label), f"{spec.name} has no label {by}"
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({_selector(spec, 'counter', label_value)}[{window}]))"


def quantile(q: float, spec: FamilySpec, window: str = "5m") -> str:
    """A quantile of a histogram, over all servers."""
    assert FAMILIES[spec.name].kind == "histogram"
    return f"histogram_quantile({q:g}, sum by (le) (rate({spec.name}_bucket[{window}])))"


def share(part: str, whole: str) -> str:
    """One rate in relation to another; nothing while there is none."""
    return f"{part} / ({whole} > 0)"


def _selector(spec: FamilySpec, kind: Kind, label_value: str) -> str:
    assert FAMILIES[spec.name].kind == kind, f"{spec.name} is no {kind}"
    if not label_value:
        return spec.name
    assert label_value in spec.values, f"{spec.name} has no value {label_value}"
    return f'{spec.name}{{{spec.label}="{label_value}"}}'
