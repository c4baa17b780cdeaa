"""The answer in words, the same in the terminal and on the page.

Knows only the plain values of report.json.
"""

from __future__ import annotations

from typing import Any


def milliseconds(seconds: float | None) -> str:
    """With a unit and three digits that mean something; a dash for what was not measured."""
    if seconds is None:
        return "–"
    if seconds == 0:
        return "0"
    if seconds >= 0.9995:
        return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms"


def load(value: float, kind: str) -> str:
    """A load as people say it."""
    plural = "s" if value != 1 else ""
    return f"{value:g} user{plural}" if kind == "users" else f"{value:.3g} request{plural}/s"


def limit(check: dict[str, Any]) -> str:
    """TTFT p95 1.24 s, 24 % over 1.00 s."""
    if check["measured"] is None:
        return f"{check['label']} could not be measured (limit {quantity(check, 'limit')})"
    text = f"{check['label']} {quantity(check, 'measured')}"
    if check["use"] is None:
        return f"{text}, limit {quantity(check, 'limit')}"
    side = "under" if check["metric"] == "good_fraction" else "over"
    return f"{text}, {100 * (check['use'] - 1):.0f} % {side} {quantity(check, 'limit')}"


def quantity(check: dict[str, Any], key: str) -> str:
    """The measured value or the limit of a check, with its unit."""
    if check["metric"] in ("error_rate", "good_fraction"):
        return f"{100 * check[key]:.3g} %"
    return milliseconds(check[key])


def limits(slo: dict[str, Any]) -> str:
    """An SLO in a line."""
    parts = [
        f"{tag.upper() if len(tag) < 6 else tag} {name} ≤ {milliseconds(value)}"
        for tag, found in slo["limits_s"].items()
        for name, value in found.items()
    ]
    if slo.get("good_fraction") is not None:
        parts.append(f"good requests ≥ {100 * slo['good_fraction']:.3g} %")
    return ", ".join([*parts, f"errors ≤ {100 * slo['error_rate']:.3g} %"])


def answer(verdict: dict[str, Any], slo: dict[str, Any], kind: str) -> str:
    """How much holds and what gives first, in one or two sentences."""
    name, holds, misses, first = slo["name"], verdict["holds"], verdict["misses"], verdict["first"]
    if holds is None and misses is None:
        return f"Nothing was measured, so nothing can be said about the SLO {name}."
    if holds is None:
        return f"It does not hold the SLO {name} at {load(misses, kind)}: {limit(first)}."
    if verdict.get("margin") is not None:
        figure = f"{load(verdict['estimate'], kind)} ± {100 * verdict['margin']:.1f} %"
        give = f" At {load(misses, kind)} the first thing to give is {limit(first)}." if first else ""
        return f"The highest rate within the SLO {name} is {figure}. It holds {load(holds, kind)}.{give}"
    held = f"It holds {load(holds, kind)} within the SLO {name}"
    if misses is None:
        return f"{held}, the highest load tried."
    about = f" (the limit is near {verdict['estimate']:.3g})" if verdict["estimate"] else ""
    return f"{held}{about}. At {load(misses, kind)} the first thing to give is {limit(first)}."


def missed(verdict: dict[str, Any], kind: str) -> list[str]:
    """What was missed at the load that had to hold."""
    if verdict["required"] is None:
        return []
    where = load(verdict["required"], kind)
    if not verdict["missed"]:
        return [f"Required: {where}. Met."]
    return [f"Required: {where}. Missed: {'; '.join(limit(check) for check in verdict['missed'])}."]
