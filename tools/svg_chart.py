"""Small charts as SVG text, the same bytes on every machine, so that a test can tell a stale one.

A plotting library would bring its fonts' metrics and its release into every file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 168, 40, 52
#: Colours that people with colour-blindness can tell apart (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes:
        title: with the unit.
        ticks: values that get a line and a number; the first and the last are the ends of the axis.
        log: equal ratios are equally long.
    """

    title: str
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies: 0 at the first tick, 1 at the last."""
        first, last, here = ((math.log(v) if self.log else v) for v in (self.ticks[0], self.ticks[-1], value))
        return (here - first) / (last - first)


@dataclass(frozen=True)
class Series:
    """One line, or points without one.

    Attributes:
        name: for the legend.
        points: (x, smallest y, y, largest y); the two others equal y where there is no range.
        line: whether the points are joined, and the range drawn as a band.
    """

    name: str
    points: tuple[tuple[float, float, float, float], ...]
    line: bool = True


def nice_log_ticks(values: Iterable[float]) -> tuple[float, ...]:
    """Ticks at 1, 2 and 5 times powers of ten that enclose all values, each above 0."""
    found = list(values)
    exponents = range(math.floor(math.log10(min(found))), math.ceil(math.log10(max(found))) + 1)
    steps = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    first = max(step for step in steps if step <= min(found))
    last = min(step for step in steps if step >= max(found))
    return tuple(step for step in steps if first <= step <= last)


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series], *, mark: float | None = None) -> str:
    """Draw series over two axes.

    Args:
        mark: value of y with a stronger line, such as 1 for a ratio.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="{_FONT}" font-size="13" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14" font-weight="600">{escape(title)}</text>',
        *_axes(x, y, mark),
    ]
    for number, one in enumerate(series):
        parts += _drawn(one, _COLOURS[number % len(_COLOURS)], x, y)
        parts += _legend(one.name, _COLOURS[number % len(_COLOURS)], number)
    return "\n".join([*parts, "</svg>", ""])


def _axes(x: Axis, y: Axis, mark: float | None) -> Iterator[str]:
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
    for tick in x.ticks:
        at = _x(x, tick)
        yield f'<path d="M{at} {top}V{bottom}" stroke="#e6e6e6"/>'
        yield f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>'
    for tick in y.ticks:
        at = _y(y, tick)
        yield f'<path d="M{left} {at}H{right}" stroke="{"#777" if tick == mark else "#e6e6e6"}"/>'
        yield f'<text x="{left - 8}" y="{at + 4.5:.1f}" text-anchor="end">{tick:g}</text>'
    yield f'<text x="{(left + right) / 2:g}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x.title)}</text>'
    middle = (top + bottom) / 2
    yield f'<text transform="translate(16 {middle:g}) rotate(-90)" text-anchor="middle">{escape(y.title)}</text>'


def _drawn(one: Series, colour: str, x: Axis, y: Axis) -> Iterator[str]:
    if one.line:
        high = [f"{_x(x, px)} {_y(y, top)}" for px, _, _, top in one.points]
        low = [f"{_x(x, px)} {_y(y, bottom)}" for px, bottom, _, _ in reversed(one.points)]
        yield f'<path d="M{"L".join([*high, *low])}Z" fill="{colour}" fill-opacity="0.14"/>'
        middle = [f"{_x(x, px)} {_y(y, value)}" for px, _, value, _ in one.points]
        yield f'<path d="M{"L".join(middle)}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for px, _, value, _ in one.points:
        yield f'<circle cx="{_x(x, px)}" cy="{_y(y, value)}" r="3.5" fill="{colour}"/>'


def _legend(name: str, colour: str, number: int) -> Iterator[str]:
    left, at = WIDTH - _RIGHT + 16, _TOP + 12 + 22 * number
    yield f'<circle cx="{left}" cy="{at}" r="4.5" fill="{colour}"/>'
    yield f'<text x="{left + 12}" y="{at + 4.5:g}">{escape(name)}</text>'


def _x(axis: Axis, value: float) -> float:
    return round(_LEFT + axis.place(value) * (WIDTH - _RIGHT - _LEFT), 1)


def _y(axis: Axis, value: float) -> float:
    return round(HEIGHT - _BOTTOM - axis.place(value) * (HEIGHT - _BOTTOM - _TOP), 1)
