"""Small charts as SVG text: axes, lines, dots, limits. Colours are classes, so that the page decides on light and dark.

Knows nothing of what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

Point = tuple[float, float]
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 40


class Axis:
    """Maps values to pixels; linear or logarithmic."""

    def __init__(self, low: float, high: float, *, log: bool = False) -> None:
        self.low, self.log = low, log
        self.high = high if high > low else low + 1
        if log:
            self.low = max(low, 1e-9)

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            value, low, high = (math.log(max(number, 1e-9)) for number in (value, self.low, self.high))
            return (value - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values within the axis."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first < 4 else (1,)
            found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            within = [value for value in found if self.low <= value <= self.high]
            if len(within) > 1:
                return within  # otherwise the axis is so short that linear ticks do
        step = nice((self.high - self.low) / count)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * 0.999)


def top(values: Sequence[float], at_least: float = 0.0) -> float:
    """A high end for an axis that holds all values with some air above."""
    highest = max([*values, at_least], default=1.0)
    return highest * 1.08 if highest > 0 else 1.0


class Plot:
    """One chart. Draw in the order of the layers: bands, lines, dots; then text()."""

    def __init__(self, x: Axis, y: Axis, *, width: int = 440, height: int = 230, title: str = "") -> None:
        self._x, self._y = x, y
        self._width, self._height, self._title = width, height, title
        self._parts: list[str] = []
        self._legend: list[tuple[str, str]] = []

    def px(self, value: float) -> float:
        """Pixels from the left."""
        return round(_LEFT + self._x.share(value) * (self._width - _LEFT - _RIGHT), 1)

    def py(self, value: float) -> float:
        """Pixels from the top; values outside are drawn at the edge."""
        share = min(1.0, max(0.0, self._y.share(value)))
        return round(self._height - _BOTTOM - share * (self._height - _TOP - _BOTTOM), 1)

    def axes(
        self,
        x_ticks: Sequence[tuple[float, str]],
        y_label: Callable[[float], str],
        x_name: str = "",
        y_ticks: int = 5,
    ) -> None:
        """Grid, ticks and names."""
        bottom, right = self._height - _BOTTOM, self._width - _RIGHT
        for value in self._y.ticks(y_ticks):
            y = self.py(value)
            self._parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
            label = escape(y_label(value))
            self._parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5}" text-anchor="end">{label}</text>')
        self._parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        for value, label in x_ticks:
            x = self.px(value)
            self._parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
            self._parts.append(
                f'<text class="tick" x="{x}" y="{bottom + 15}" text-anchor="middle">{escape(label)}</text>'
            )
        if x_name:
            middle = (_LEFT + right) / 2
            self._parts.append(
                f'<text class="name" x="{middle}" y="{self._height - 6}" text-anchor="middle">{escape(x_name)}</text>'
            )

    def band(self, begin: float, end: float, label: str = "", odd: bool = False) -> None:
        """A stage in the background of a time line."""
        x0, x1 = self.px(begin), self.px(end)
        height = self._height - _TOP - _BOTTOM
        style, width = ("band odd" if odd else "band"), f"{max(0, x1 - x0):.1f}"
        self._parts.append(f'<rect class="{style}" x="{x0}" y="{_TOP}" width="{width}" height="{height}"/>')
        if label:
            self._parts.append(f'<text class="tick" x="{x0 + 3}" y="{_TOP + 10}">{escape(label)}</text>')

    def line(
        self, points: Sequence[Point], style: str, name: str = "", *, dots: bool = False, tip: str = "{y}"
    ) -> None:
        """A line through points; with dots, each says its value when pointed at."""
        if name:
            self._legend.append((style, name))
        if not points:
            return
        path = " ".join(f"{self.px(x)},{self.py(y)}" for x, y in points)
        self._parts.append(f'<polyline class="line {style}" points="{path}"/>')
        if dots:
            for x, y in points:
                shown = escape(tip.format(x=f"{x:g}", y=f"{y:.4g}"))
                circle = f'<circle class="dot {style}" cx="{self.px(x)}" cy="{self.py(y)}" r="3.5">'
                self._parts.append(f"{circle}<title>{shown}</title></circle>")

    def steps(self, points: Sequence[Point], style: str, name: str = "") -> None:
        """A line that holds its value until the next point."""
        held: list[Point] = []
        for point in points:
            if held:
                held.append((point[0], held[-1][1]))
            held.append(point)
        self.line(held, style, name)

    def scatter(self, points: Sequence[Point], style: str, name: str = "", radius: float = 1.8) -> None:
        """Dots without a line."""
        if name:
            self._legend.append((style, name))
        self._parts += [
            f'<circle class="point {style}" cx="{self.px(x)}" cy="{self.py(y)}" r="{radius}"/>' for x, y in points
        ]

    def limit(self, value: float, label: str) -> None:
        """A limit across the chart, when it is within the axis."""
        if not 0 <= self._y.share(value) <= 1:
            return
        y, right = self.py(value), self._width - _RIGHT
        self._parts.append(f'<line class="limit" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        self._parts.append(f'<text class="limit-text" x="{right}" y="{y - 4}" text-anchor="end">{escape(label)}</text>')

    def upright(self, value: float, label: str) -> None:
        """A limit from bottom to top."""
        if not 0 <= self._x.share(value) <= 1:
            return
        x = self.px(value)
        self._parts.append(
            f'<line class="limit" x1="{x}" x2="{x}" y1="{_TOP}" y2="{self._height - _BOTTOM}"/>'
            f'<text class="limit-text" x="{x + 4}" y="{_TOP + 9}">{escape(label)}</text>'
        )

    def figure(self, caption: str) -> str:
        """The chart with its title, legend and caption as HTML."""
        legend = "".join(
            f'<span class="key"><i class="{style}"></i>{escape(name)}</span>' for style, name in self._legend
        )
        drawn = "".join(self._parts)
        return (
            f'<figure><figcaption><b>{escape(self._title)}</b> {escape(caption)}<div class="legend">{legend}</div>'
            f'</figcaption><svg viewBox="0 0 {self._width} {self._height}" role="img" '
            f'aria-label="{escape(self._title)}">{drawn}</svg></figure>'
        )
