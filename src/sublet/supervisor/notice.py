"""When the program has to go: from the notice and the stop that the engine has left in the instance's directory.

Rule: the leader is told at the deadline, and everything that is left is killed a fixed time later.
"""

from dataclasses import dataclass
from typing import Any

GANG_KILL_MS = 10_000  # a gang that lost a member holds capacity for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Times in UTC milliseconds; None: never. `is_noticed`: a notice stands."""

    terminate_ms: int | None = None
    kill_ms: int | None = None
    is_noticed: bool = False
    is_hang: bool = False

    @property
    def is_told_to_go(self) -> bool:
        return self.terminate_ms is not None


def orders(notice: dict[str, Any] | None, stop: dict[str, Any] | None, kill_after_ms: int) -> Orders:
    times = []
    if notice is not None:
        times.append((notice["deadline_ms"], notice["deadline_ms"] + kill_after_ms))
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
    )
