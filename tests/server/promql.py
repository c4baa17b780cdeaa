"""Holds PromQL expressions against a scrape: every selector in them has to find a series."""

from __future__ import annotations

import re

_SELECTOR = re.compile(r'\b((?:llm|nv)_\w+)(?:\{(\w+)="([^"]*)"\})?')
_GROUPING = re.compile(r"\bby \((\w+)\)")


def unanswered(expressions: list[str], scrape: str) -> list[str]:
    """Selectors that match no series, and groupings by a label that the series have not."""
    series = [
        (name, dict(re.findall(r'(\w+)="([^"]*)"', labels)))
        for name, labels in re.findall(r"^(\w+)\{(.*)\} \S+$", scrape, re.MULTILINE)
    ]
    found = []
    for expression in expressions:
        for name, label, value in _SELECTOR.findall(expression):
            matching = [
                labels for known, labels in series if known == name and (not label or labels.get(label) == value)
            ]
            if not matching:
                found.append(f"{name}{{{label}={value}}} of {expression}")
            grouping = _GROUPING.search(expression)
            if grouping and not all(grouping[1] in labels for labels in matching):
                found.append(f"by ({grouping[1]}) of {expression}")
    return found
