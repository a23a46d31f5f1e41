"""The books of a server that stands by: as the leader last stored them, read again when they have changed.

One rule: a server that does not lead changes nothing and says who does.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from sublet.core.core import Core
from sublet.domain.errors import Unavailable
from sublet.domain.events import Event
from sublet.ports import Clock
from sublet.service.feed import Feed

Answer = TypeVar("Answer")
FRESH_MS = 1_000  # so long the books are not read again


class StandbyBooks:
    """`Books` over a store that another server writes. `newest`: the number of its newest entry."""

    def __init__(self, feed: Feed, clock: Clock, newest: Callable[[], int], leader: Callable[[], str]) -> None:
        self._feed, self._clock, self._newest, self._leader = feed, clock, newest, leader
        self._guard = threading.Lock()
        self._core, self._sequence, self._read_ms = Core(), -1, 0

    def read(self, look: Callable[[Core], Answer]) -> Answer:
        with self._guard:
            self._refresh()
            return look(self._core)

    def put(self, event: Event) -> None:
        url = self._leader()
        raise Unavailable(
            what="This server stands by.",
            why="Another one leads, and only that one changes anything.",
            hint=f"Ask {url}." if url else "Try again when one leads.",
            code="standby",
        )

    def _refresh(self) -> None:
        now_ms = self._clock.now_ms()
        if abs(now_ms - self._read_ms) < FRESH_MS:
            return
        newest = self._newest()
        if newest != self._sequence:
            snapshot = self._feed.load()
            self._core, self._sequence = Core.restore(snapshot), snapshot.sequence
        self._read_ms = now_ms
