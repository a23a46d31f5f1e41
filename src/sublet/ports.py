"""What we need of the world. Four protocols; nothing here knows how they are met."""

from collections.abc import Sequence
from typing import Protocol

from sublet.domain.changes import Changes, Entry, Snapshot
from sublet.domain.effects import Effect
from sublet.domain.events import Event
from sublet.domain.jobs import JobRecord


class Clock(Protocol):
    def now_ms(self) -> int:
        """UTC in whole milliseconds since 1970 (a simulated clock: since the scenario's start)."""
        ...


class Inbox(Protocol):
    """Where events come in, from any thread. The controller stamps them so that time never runs backwards."""

    def put(self, event: Event) -> None: ...


class Store(Protocol):
    """Durable when `commit` returns. One writer. `Unavailable` when the disk is full, read-only or held by another."""

    def load(self) -> Snapshot: ...

    def commit(self, entries: Sequence[Entry], changes: Changes, at_ms: int) -> None:
        """All entries and changes in one transaction, or nothing of it."""
        ...

    def entries(self, *, after: int = 0, limit: int = 1000, job: str | None = None) -> list[Entry]:
        """The log from `after` (exclusive) on, oldest first; of one job when named."""
        ...

    def jobs(self, *, states: Sequence[str] = (), limit: int = 1000, before: str | None = None) -> list[JobRecord]:
        """Newest first by (submitted_ms, id); `before`: only those after this job id in that order."""
        ...

    def job(self, job_id: str) -> JobRecord | None: ...

    def find_jobs(self, text: str, *, limit: int = 2) -> list[JobRecord]:
        """Those whose name is `text` or whose id begins with it, newest first; none for an empty text."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """Starts and stops instances on real machines; has no policy. What happens comes back through the inbox.

    Idempotent: an effect that is repeated changes nothing. An attempt that was released is never started again.
    `InstanceEnded` is delivered again and again until it is acknowledged; so is all that was said of a node.
    """

    def connect(self, inbox: Inbox) -> None:
        """Find again what runs from before, then report nodes, what runs and what ended meanwhile."""
        ...

    def carry_out(self, effect: Effect) -> None:
        """Start, notice, withdraw, stop, upgrade, downgrade; other effects are ignored. Must not block for long."""
        ...

    def acknowledge(self, event: Event) -> None:
        """The event is durable: it need not be told again."""
        ...

    def close(self) -> None:
        """Let go; what runs goes on running."""
        ...
