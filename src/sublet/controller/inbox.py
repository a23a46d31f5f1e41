"""Where events wait for the next turn, from any thread. Rule: what was put in is taken once, in order."""

from collections.abc import Iterable
from threading import Condition

from sublet.domain.events import Event


class Inbox:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._changed = Condition()

    def put(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify()

    def put_back(self, events: Iterable[Event]) -> None:
        """In front of all others: they were taken, and their turn did not count."""
        with self._changed:
            self._events[:0] = events

    def take(self) -> list[Event]:
        with self._changed:
            taken, self._events = self._events, []
            return taken

    def wait(self, timeout_s: float | None) -> None:
        """Until something is there, `wake` is called, or the time is over."""
        with self._changed:
            if not self._events:
                self._changed.wait(timeout_s)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
