"""Pictures as SVG text: stacked areas, bars, spreads and a heat map. The one rule kept: a picture is told in words, too
(its title and its description), and takes its colours from the page's style sheet.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """`style` is the CSS class that colours it."""

    label: str
    style: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A row of a distribution: values in rising order, as many as there are marks."""

    label: str
    values: Sequence[float]


def picture(title: str, height: float, body: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *body, "</svg>"])


def text(x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> str:
    mark = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{mark}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, style: str, tip: str = "") -> str:
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{style}">{inner}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def nice_steps(high: float, count: int = 5) -> list[float]:
    """Round values from 0 to at least `high`."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / count
    base = 10 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= raw)
    return [step * index for index in range(math.ceil(high / step) + 1)]


def y_axis(steps: Sequence[float], y: Callable[[float], float]) -> list[str]:
    parts = []
    for step in steps:
        parts.append(line(LEFT, y(step), WIDTH - RIGHT, y(step), "grid"))
        parts.append(text(LEFT - 6, y(step) + 4, f"{step:,.10g}", anchor="end", style="tick"))
    return parts


def day_axis(days: float, height: float, x: Callable[[float], float]) -> list[str]:
    """`x` takes days."""
    steps = nice_steps(days, 7)
    return [text(x(day), height - 10, f"day {day:g}", anchor="middle", style="tick") for day in steps if day <= days]


def stacked_areas(title: str, series: Sequence[Series], days: float, height: float = 260) -> str:
    """Values over time, one on the other, each held until the next; all series are equally long."""
    count = len(series[0].values)
    high = max((sum(values) for values in zip(*(each.values for each in series), strict=True)), default=0)
    steps = nice_steps(high)
    plot_h, plot_w = height - TOP - BOTTOM, WIDTH - LEFT - RIGHT

    def y(value: float) -> float:
        return TOP + plot_h * (1 - value / steps[-1])

    below = [0.0] * count
    parts = []
    for each in series:
        above = [low + value for low, value in zip(below, each.values, strict=True)]
        edge = stepped(above, plot_w, y) + stepped(below, plot_w, y)[::-1]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in edge)
        parts.append(f'<polygon points="{points}" class="{each.style}"><title>{escape(each.label)}</title></polygon>')
        below = above
    axes = y_axis(steps, y) + day_axis(days, height, lambda day: LEFT + plot_w * day / max(days, 1e-9))
    return picture(title, height, parts + axes)


def stepped(values: Sequence[float], width: float, y: Callable[[float], float]) -> list[tuple[float, float]]:
    count = max(1, len(values))
    points = []
    for index, value in enumerate(values):
        points += [(LEFT + width * index / count, y(value)), (LEFT + width * (index + 1) / count, y(value))]
    return points


def bars(title: str, series: Series, days: float, height: float = 150) -> str:
    """One bar a slot of time."""
    steps = nice_steps(max(series.values, default=0), 3)
    plot_h, plot_w = height - TOP - BOTTOM, WIDTH - LEFT - RIGHT
    slot = plot_w / max(1, len(series.values))

    def y(value: float) -> float:
        return TOP + plot_h * (1 - value / steps[-1])

    parts = y_axis(steps, y)
    for index, value in enumerate(series.values):
        if value:
            left, tip = LEFT + slot * index, f"{series.label}: {value:,.6g}"
            parts.append(rect(left + slot * 0.1, y(value), slot * 0.8, TOP + plot_h - y(value), series.style, tip))
    return picture(title, height, parts + day_axis(days, height, lambda day: LEFT + plot_w * day / max(days, 1e-9)))


def spreads(title: str, rows: Sequence[Spread], marks: Sequence[str], ticks: Sequence[tuple[float, str]]) -> str:
    """One row a distribution on a logarithmic axis that starts at zero: a bar to each mark, the later the paler."""
    row_h, left = 24, 130
    height = TOP + row_h * len(rows) + BOTTOM
    high = max([ticks[1][0], *(row.values[-1] for row in rows)])

    def x(value: float) -> float:
        return left + (WIDTH - left - RIGHT) * math.log1p(value) / math.log1p(high)

    parts = []
    for value, words in ticks:
        if value <= high:
            parts.append(line(x(value), TOP, x(value), height - BOTTOM, "grid"))
            parts.append(text(x(value), height - 10, words, anchor="middle", style="tick"))
    for index, row in enumerate(rows):
        top = TOP + row_h * index + 4
        parts.append(text(left - 8, top + 12, row.label, anchor="end", style="tick"))
        for mark in reversed(range(len(marks))):
            tip = f"{row.label}, {marks[mark]}: {row.values[mark]:,.0f} s"
            parts.append(rect(left, top, max(0.0, x(row.values[mark]) - left), row_h - 8, f"mark{mark}", tip))
    return picture(title, height, parts)


def heat_map(title: str, names: Sequence[str], values: Sequence[Sequence[float]], unit: str) -> str:
    """`values[row][column]`: from the row's name to the column's; the shade grows with the square root."""
    left, top = 130, 74
    cell = min(56.0, (WIDTH - left - RIGHT) / max(1, len(names)))
    row_h = 24
    high = max((value for row in values for value in row), default=0) or 1
    parts = []
    for index, name in enumerate(names):
        x = left + cell * (index + 0.5)
        parts.append(f'<text transform="translate({x:.1f},{top - 8}) rotate(-40)" class="tick">{escape(name)}</text>')
        parts.append(text(left - 8, top + row_h * index + 16, name, anchor="end", style="tick"))
    for row, line_values in enumerate(values):
        for column, value in enumerate(line_values):
            x, y = left + cell * column, top + row_h * row
            tip = f"{names[row]} to {names[column]}: {value:,.0f} {unit}"
            shade = math.sqrt(value / high)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{cell - 2:.1f}" height="{row_h - 2}" class="heat" '
                f'fill-opacity="{0.04 + 0.96 * shade:.2f}"><title>{escape(tip)}</title></rect>'
            )
            if value >= 0.5 and cell > 34:
                words = compact(value)
                parts.append(
                    text(x + cell / 2 - 1, y + 15, words, anchor="middle", style="dark" if shade > 0.6 else "tick")
                )
    return picture(title, top + row_h * len(names) + 8, parts)


def compact(value: float) -> str:
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.0f}"
