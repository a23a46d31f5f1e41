"""Where events wait for the next turn, from any thread. Rule: what was put in is taken once, in order."""

from threading import Condition

from sublet.domain.events import Event


class Inbox:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._is_woken = False
        self._changed = Condition()

    def put(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify()

    def take(self) -> list[Event]:
        with self._changed:
            taken, self._events = self._events, []
            return taken

    def __len__(self) -> int:
        with self._changed:
            return len(self._events)

    def wait(self, timeout_s: float | None) -> None:
        """Until something is there, `wake` was called since the last wait, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._is_woken, timeout_s)
            self._is_woken = False

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()
