"""The store, as everybody but the controller sees it: with word of what has just become durable.

One rule: word goes out after the commit and never before it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from sublet.domain.changes import Changes, Entry, NodeRecord, Snapshot
from sublet.domain.errors import Unavailable
from sublet.domain.events import Event
from sublet.domain.jobs import JobRecord
from sublet.domain.quotas import Quota
from sublet.domain.rules import Rules
from sublet.ports import Store

Kept = TypeVar("Kept")


class Expected:
    """Waits for the entry of one event."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._came = threading.Event()
        self._entry: Entry | None = None
        self._trouble: Unavailable | None = None

    def look(self, entry: Entry) -> None:
        came = type(entry.event) is type(self._event) and replace(self._event, at_ms=entry.event.at_ms) == entry.event
        if came and self._entry is None:
            self._entry = entry
            self._came.set()

    def fail(self, trouble: Unavailable) -> None:
        self._trouble = trouble
        self._came.set()

    def wait(self, within_ms: int) -> Entry:
        """The entry, once it is durable; Unavailable when the store is, or when it takes too long."""
        self._came.wait(within_ms / 1000)
        if self._entry is not None:
            return self._entry
        trouble = self._trouble
        raise Unavailable(
            what=trouble.what if trouble else "The server has not written it down yet.",
            why=trouble.why if trouble else f"It waited {within_ms // 1000} s for its controller.",
            hint="The server goes on trying: look with sublet ls before you ask again.",
            code=trouble.code if trouble else "busy",
        )


class Feed:
    """A `Store` that passes everything on, tells listeners of each commit, and remembers what is small.

    `quotas`, `nodes`, `rules`: as of the last commit, by name; replaced and never changed, so that any thread may look.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._guard = threading.Lock()
        self._expected: list[Expected] = []
        self._listeners: list[Callable[[], None]] = []
        self.last_sequence = 0
        self.quotas: Mapping[str, Quota] = {}
        self.nodes: Mapping[str, NodeRecord] = {}
        self.rules = Rules()

    @contextmanager
    def expecting(self, event: Event) -> Iterator[Expected]:
        """To be entered before the event is put, so that its entry cannot be missed."""
        expected = Expected(event)
        with self._guard:
            self._expected.append(expected)
        try:
            yield expected
        finally:
            with self._guard:
                self._expected.remove(expected)

    @contextmanager
    def listening(self, told: Callable[[], None]) -> Iterator[None]:
        """`told` is called after each commit, from the controller's thread; it must return at once."""
        with self._guard:
            self._listeners.append(told)
        try:
            yield
        finally:
            with self._guard:
                self._listeners.remove(told)

    def load(self) -> Snapshot:
        snapshot = self._store.load()
        self.last_sequence = snapshot.sequence
        self.rules = snapshot.rules
        self.quotas = {quota.name: quota for quota in snapshot.quotas}
        self.nodes = {record.node.name: record for record in snapshot.nodes}
        return snapshot

    def commit(self, entries: Sequence[Entry], changes: Changes, at_ms: int) -> None:
        try:
            self._store.commit(entries, changes, at_ms)
        except Unavailable as trouble:
            for one in self._all_expected():
                one.fail(trouble)
            raise
        self.quotas = _changed(self.quotas, changes.quotas)
        self.nodes = _changed(self.nodes, changes.nodes)
        self.rules = changes.rules or self.rules
        if not entries:
            return
        self.last_sequence = entries[-1].sequence
        for one in self._all_expected():
            for entry in entries:
                one.look(entry)
        with self._guard:
            listeners = list(self._listeners)
        for told in listeners:
            told()

    def _all_expected(self) -> list[Expected]:
        with self._guard:
            return list(self._expected)

    def entries(self, *, after: int = 0, limit: int = 1000, job: str | None = None) -> list[Entry]:
        return self._store.entries(after=after, limit=limit, job=job)

    def jobs(self, *, states: Sequence[str] = (), limit: int = 1000, before: str | None = None) -> list[JobRecord]:
        return self._store.jobs(states=states, limit=limit, before=before)

    def job(self, job_id: str) -> JobRecord | None:
        return self._store.job(job_id)

    def find_jobs(self, text: str, *, limit: int = 2) -> list[JobRecord]:
        return self._store.find_jobs(text, limit=limit)

    def close(self) -> None:
        self._store.close()


def _changed(present: Mapping[str, Kept], changes: Mapping[str, Kept | None]) -> Mapping[str, Kept]:
    if not changes:
        return present
    merged = {**present, **changes}
    return {name: item for name, item in merged.items() if item is not None}
