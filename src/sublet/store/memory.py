"""The reference store: keeps everything in memory, as the others do on disk. Shipped, for simulations and tests."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TypeVar

from sublet.domain.changes import Changes, Entry, NodeRecord, Snapshot
from sublet.domain.jobs import JobRecord
from sublet.domain.quotas import Quota
from sublet.domain.rules import Rules

Kept = TypeVar("Kept")


class MemoryStore:
    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: list[Entry] = []
        self._jobs: dict[str, JobRecord] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._quotas: dict[str, Quota] = {}
        self._rules, self._core, self._at_ms = Rules(), "", 0

    def load(self) -> Snapshot:
        with self._lock:
            live = [record for record in self._jobs.values() if not record.state.is_final]
            return Snapshot(
                sequence=self._entries[-1].sequence if self._entries else 0,
                at_ms=self._at_ms,
                rules=self._rules,
                nodes=tuple(self._nodes[name] for name in sorted(self._nodes)),
                quotas=tuple(self._quotas[name] for name in sorted(self._quotas)),
                jobs=tuple(sorted(live, key=_age)),
                core=self._core,
            )

    def commit(self, entries: Sequence[Entry], changes: Changes, at_ms: int) -> None:
        with self._lock:
            self._entries += entries
            self._jobs |= changes.jobs
            _change(self._nodes, changes.nodes)
            _change(self._quotas, changes.quotas)
            self._rules = changes.rules or self._rules
            self._core = self._core if changes.core is None else changes.core
            self._at_ms = at_ms

    def entries(self, *, after: int = 0, limit: int = 1000, job: str | None = None) -> list[Entry]:
        with self._lock:
            found = [e for e in self._entries if e.sequence > after and (job is None or _is_about(e, job))]
            return found[:limit]

    def jobs(self, *, states: Sequence[str] = (), limit: int = 1000, before: str | None = None) -> list[JobRecord]:
        with self._lock:
            found = [record for record in self._jobs.values() if not states or record.state in states]
            if before is not None:
                bound = self._jobs.get(before)
                found = [record for record in found if bound is not None and _age(record) < _age(bound)]
            return sorted(found, key=_age, reverse=True)[:limit]

    def job(self, job_id: str) -> JobRecord | None:
        with self._lock:
            return self._jobs.get(job_id)

    def find_jobs(self, text: str, *, limit: int = 2) -> list[JobRecord]:
        """Jobs of this name or with ids that begin so, newest first."""
        with self._lock:
            found = [
                r for r in self._jobs.values() if text and (r.request.id.startswith(text) or r.request.name == text)
            ]
            return sorted(found, key=_age, reverse=True)[:limit]

    def close(self) -> None:
        """Nothing is held."""


def _age(record: JobRecord) -> tuple[int, str]:
    return record.submitted_ms, record.request.id


def _change(kept: dict[str, Kept], changed: Mapping[str, Kept | None]) -> None:
    for name, value in changed.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = value


def _is_about(entry: Entry, job: str) -> bool:
    request = getattr(entry.event, "request", None)
    if request is not None and request.id == job:
        return True
    return any(
        job in (getattr(item, "job", ""), getattr(item, "claimant", "")) for item in (entry.event, *entry.effects)
    )
