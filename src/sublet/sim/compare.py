"""Two replays of one stream side by side. The one rule kept: the difference is told in the metric's own unit and as a
share of the left one, and nobody is named the winner.
"""

from collections.abc import Mapping, Sequence

from sublet.sim.report import NAMES, figure


def compare(left: Mapping[str, float], right: Mapping[str, float]) -> list[dict[str, object]]:
    """One row a metric: its key, both values, right minus left, and that as a share of the left (None when it is 0)."""
    return [
        {
            "metric": key,
            "left": left[key],
            "right": right[key],
            "difference": round(right[key] - left[key], 6),
            "share": round((right[key] - left[key]) / left[key], 6) if left[key] else None,
        }
        for key in NAMES
    ]


def table(names: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """The comparison as text in columns."""
    lines = [["", *names, "change"]]
    for row in rows:
        key, left, right = str(row["metric"]), number(row["left"]), number(row["right"])
        lines.append([NAMES[key], figure(key, left), figure(key, right), changed(row["share"])])
    widths = [max(len(cells[column]) for cells in lines) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(cells, widths, strict=True)) for cells in lines)
    )


def number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def changed(share: object) -> str:
    if share is None:
        return "-"
    value = 100 * number(share)
    return "same" if abs(value) < 0.05 else f"{value:+.1f} %"
