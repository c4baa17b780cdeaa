"""An SVG picture of what a card's memory goes to. Knows nothing of how the figures were made."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

_COLOURS = {
    "weights": "#3b6ea8",
    "activations": "#7a9ec9",
    "runtime": "#9a9a9a",
    "adapters": "#8a63a8",
    "kv_cache": "#4c9a63",
    "unused": "#e4e4e4",
}
_LABELLED = 0.2  # share of the card from which a use has its name in the bar
_WIDTH, _BAR, _LEFT, _ROW = 640, 36, 20, 22


def memory_picture(report: dict[str, Any]) -> str:
    """One bar for a card, cut by use, with a legend; a text that any browser shows."""
    memory, hardware = report["memory_per_card"], report["hardware"]
    capacity = memory["capacity_bytes"]
    uses = {use: max(0, memory[f"{use}_bytes"]) for use in _COLOURS}
    scale = (_WIDTH - 2 * _LEFT) / max(capacity, sum(uses.values()))
    of = f"one {hardware['card']}" if hardware["cards"] == 1 else f"each of {hardware['cards']} x {hardware['card']}"
    title = f"{report['name']}: memory of {of}, {capacity / 1e9:.0f} GB"
    if not memory["fits"]:
        title += " (does not fit)"
    parts = [f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>']
    x = float(_LEFT)
    for use, size in uses.items():
        parts.append(f'<rect x="{x:.1f}" y="36" width="{size * scale:.1f}" height="{_BAR}" fill="{_COLOURS[use]}"/>')
        if size > _LABELLED * capacity and use != "unused":
            label = f"{use.replace('_', ' ')} {100 * size / capacity:.0f} %"
            middle = f'x="{x + size * scale / 2:.1f}" y="{36 + _BAR / 2 + 5:.0f}" text-anchor="middle" fill="white"'
            parts.append(f"<text {middle}>{escape(label)}</text>")
        x += size * scale
    end = _LEFT + capacity * scale
    parts.append(f'<line x1="{end:.1f}" y1="30" x2="{end:.1f}" y2="{42 + _BAR}" stroke="#c33" stroke-width="2"/>')
    y = 36 + _BAR + 28
    for use, size in uses.items():
        label = f"{use.replace('_', ' ')}: {size / 1e9:.2f} GB ({100 * size / capacity:.1f} %)"
        if use == "kv_cache":
            label += f", {memory['max_tokens_in_kv_cache']:,} tokens"
        parts.append(f'<rect x="{_LEFT}" y="{y - 12}" width="14" height="14" fill="{_COLOURS[use]}"/>')
        parts.append(f'<text x="{_LEFT + 22}" y="{y}">{escape(label)}</text>')
        y += _ROW
    size_of = f'width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size_of} font-family="sans-serif" font-size="13">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])
