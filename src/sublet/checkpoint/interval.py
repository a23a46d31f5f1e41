"""When a save is due. Rule: `auto` pays at most one hundredth of the time for saving, and no more than a stop would
cost.

Between two saves lies sqrt(2 · time between stops · cost of a save), the interval that loses least (Young, Daly),
but at least a hundred times the cost and at least as long as the disk needs.
"""

import math
import re
import time
from dataclasses import dataclass, field
from typing import Literal

from sublet.checkpoint.errors import Refused

UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
OVERHEAD_SHARE = 100
FIRST_AUTO_MS = 10_000
DEFAULT_RECLAIMED_MS = 3_600_000


def duration_ms(text: str) -> int:
    """Milliseconds of `90s`, `10m`, `1h30m`; Refused if it is none."""
    if not re.fullmatch(r"(\d+(ms|s|m|h|d))+", text):
        raise Refused(what=f"{text!r} is no duration.", hint="Write 90s, 10m or 1h30m.")
    return sum(int(count) * UNITS_MS[unit] for count, unit in re.findall(r"(\d+)(ms|s|m|h|d)", text))


def auto_ms(blocked_ms: float, write_ms: float, reclaimed_ms: float) -> int:
    """The interval for a measured cost per save, a measured time of a write, and a mean time between stops."""
    best = math.sqrt(2 * reclaimed_ms * blocked_ms)
    return round(max(best, OVERHEAD_SHARE * blocked_ms, write_ms))


@dataclass(slots=True, kw_only=True)
class Interval:
    """Steps, time, or auto. `last_step` and `last_ms` are of the last save, or of the start."""

    kind: Literal["steps", "time", "auto"]
    steps: int = 0
    every_ms: int = 0
    reclaimed_ms: int = DEFAULT_RECLAIMED_MS
    blocked_ms: float = 0.0
    write_ms: float = 0.0
    last_step: int = 0
    last_ms: float = field(default_factory=lambda: time.monotonic() * 1000)

    def is_due(self, step: int) -> bool:
        """Is a save due after `step`?"""
        if self.kind == "steps":
            return step // self.steps > self.last_step // self.steps
        return time.monotonic() * 1000 - self.last_ms >= self.every_ms

    def saved(self, step: int, blocked_ms: float) -> None:
        """A save was made; its cost moves the automatic interval."""
        self.last_step, self.last_ms = step, time.monotonic() * 1000
        self.blocked_ms = blocked_ms if not self.blocked_ms else 0.7 * self.blocked_ms + 0.3 * blocked_ms
        if self.kind == "auto":
            self.every_ms = auto_ms(self.blocked_ms, self.write_ms, self.reclaimed_ms)


def parse_interval(every: int | str, reclaimed_every: str | None = None) -> Interval:
    """`100` steps, `"10m"`, or `"auto"`; Refused if it is none of these."""
    reclaimed_ms = duration_ms(reclaimed_every) if reclaimed_every else DEFAULT_RECLAIMED_MS
    if isinstance(every, int) and not isinstance(every, bool):
        if every < 1:
            raise Refused(what=f"every={every} makes no sense.", why="A save is due each N steps, N at least 1.")
        return Interval(kind="steps", steps=every)
    if every == "auto":
        return Interval(kind="auto", every_ms=FIRST_AUTO_MS, reclaimed_ms=reclaimed_ms)
    return Interval(kind="time", every_ms=duration_ms(str(every)))
