"""When the program has to go: from the notice and the stop that the engine has left in the instance's directory.

Rule: the leader is told at the deadline, and everything that is left is killed a fixed time later. The deadline comes
early when the program has said that a stop costs nothing any more: it would be stopped anyway, and somebody waits.
"""

from __future__ import annotations

from sublet.supervisor import files

TYPE_CHECKING = False  # as in `typing`, which is not loaded: see watch.py
if TYPE_CHECKING:
    from typing import Any

GANG_KILL_MS = 10_000  # a gang that lost a member holds capacity for nothing
LEAVES_BY_ITSELF_MS = 2_000  # a program that has saved may have a code to leave with


class Orders:
    """Times in UTC milliseconds; None: never. `is_noticed`: a notice stands."""

    __slots__ = ("is_hang", "is_noticed", "is_safe", "kill_ms", "terminate_ms")

    def __init__(
        self,
        *,
        terminate_ms: int | None = None,
        kill_ms: int | None = None,
        is_noticed: bool = False,
        is_hang: bool = False,
        is_safe: bool = False,
    ) -> None:
        self.terminate_ms, self.kill_ms = terminate_ms, kill_ms
        self.is_noticed, self.is_hang, self.is_safe = is_noticed, is_hang, is_safe

    @property
    def is_told_to_go(self) -> bool:
        return self.terminate_ms is not None


def safe_ms(directory: str, given_ms: int) -> int | None:
    """Since when a stop costs nothing, by the word of the program on the notice that was given then; None while it has
    not said so, or not clearly."""
    try:
        said = files.read(directory, files.SAFE)
        is_so = said is not None and said["safe"] is True and said["at_ms"] >= given_ms
        return int(said["at_ms"]) if is_so else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def orders(
    notice: dict[str, Any] | None, stop: dict[str, Any] | None, kill_after_ms: int, safe_ms: int | None = None
) -> Orders:
    """`safe_ms`: since when a stop costs nothing."""
    times = []
    if notice is not None:
        deadline_ms = notice["deadline_ms"]
        if safe_ms is not None:
            deadline_ms = min(deadline_ms, safe_ms + LEAVES_BY_ITSELF_MS)
        times.append((deadline_ms, deadline_ms + kill_after_ms))
    if stop is not None:
        patience = kill_after_ms if stop["reason"] not in ("gang", "hang") else min(kill_after_ms, GANG_KILL_MS)
        times.append((stop["at_ms"], stop["at_ms"] + patience))
    if not times:
        return Orders()
    return Orders(
        terminate_ms=min(terminate for terminate, _ in times),
        kill_ms=min(kill for _, kill in times),
        is_noticed=notice is not None,
        is_hang=stop is not None and stop["reason"] == "hang",
        is_safe=safe_ms is not None,
    )
