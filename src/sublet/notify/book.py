"""The webhooks, how far the log was read for them, and every delivery: one small database beside the store.

One rule: how far the log was read and the deliveries that follow from it are written in one transaction. So a server
that dies at any point tells everything at least once, and under the same id when it tells it again.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KEPT_DELIVERIES = 10_000  # that are over
SCHEMA = """
CREATE TABLE IF NOT EXISTS hooks (
    name TEXT PRIMARY KEY, url TEXT NOT NULL, secret TEXT NOT NULL, kinds TEXT NOT NULL, quota TEXT NOT NULL,
    since INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS read (one INTEGER PRIMARY KEY CHECK (one = 1), sequence INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS deliveries (
    number INTEGER PRIMARY KEY AUTOINCREMENT, hook TEXT NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL,
    subject TEXT NOT NULL, body TEXT NOT NULL, state TEXT NOT NULL, tries INTEGER NOT NULL DEFAULT 0,
    made_ms INTEGER NOT NULL, next_ms INTEGER NOT NULL, tried_ms INTEGER, answer TEXT NOT NULL DEFAULT '',
    UNIQUE (hook, id)
);
DROP INDEX IF EXISTS due;
CREATE INDEX IF NOT EXISTS waiting ON deliveries (hook, next_ms) WHERE state = 'waiting';
"""
_COLUMNS = "number, hook, id, kind, subject, body, state, tries, made_ms, next_ms, tried_ms, answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """`kinds`: what it is told of every job of `quota` (empty: of all); jobs may ask for more by its name.

    `secrets`: the newest first; every one of them signs. `since`: it hears of what is behind this number of the log.
    """

    name: str
    url: str
    secrets: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    quota: str = ""
    since: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """`state`: waiting, delivered or given_up. `answer`: what the last try came to. Times in ms, UTC."""

    number: int
    hook: str
    id: str
    kind: str
    subject: str
    body: str
    state: str
    tries: int
    made_ms: int
    next_ms: int
    tried_ms: int | None
    answer: str


class Book:
    """Safe for any thread. `path`: made readable by its owner alone, for the secrets."""

    def __init__(self, path: Path) -> None:
        self._guard = threading.Lock()
        path.touch(mode=0o600, exist_ok=True)
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + SCHEMA)
        if "since" not in {row[1] for row in self._look("PRAGMA table_info(hooks)")}:
            self._look("ALTER TABLE hooks ADD COLUMN since INTEGER NOT NULL DEFAULT 0")

    def close(self) -> None:
        with self._guard:
            self._connection.close()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._guard:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _look(self, query: str, values: Sequence[object] = ()) -> list[tuple[object, ...]]:
        with self._guard:
            return self._connection.execute(query, values).fetchall()

    # ---- webhooks

    def hooks(self) -> list[Hook]:
        rows = self._look("SELECT name, url, secret, kinds, quota, since FROM hooks ORDER BY name")
        return [
            Hook(
                name=str(name),
                url=str(url),
                secrets=tuple(str(secrets).split()),
                kinds=tuple(str(kinds).split()),
                quota=str(quota),
                since=int(str(since)),
            )
            for name, url, secrets, kinds, quota, since in rows
        ]

    def hook(self, name: str) -> Hook | None:
        return next((hook for hook in self.hooks() if hook.name == name), None)

    def put(self, hook: Hook) -> None:
        """New, or in the place of the one of that name."""
        with self._change() as change:
            row = (hook.name, hook.url, " ".join(hook.secrets), " ".join(hook.kinds), hook.quota, hook.since)
            columns = "name, url, secret, kinds, quota, since"
            change.execute(f"INSERT OR REPLACE INTO hooks ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)

    def remove(self, name: str) -> None:
        """What waits for it is given up."""
        with self._change() as change:
            change.execute("DELETE FROM hooks WHERE name = ?", (name,))
            gone = "UPDATE deliveries SET state = 'given_up', answer = 'the webhook was removed'"
            change.execute(f"{gone} WHERE hook = ? AND state = 'waiting'", (name,))

    # ---- deliveries

    def read_until(self) -> int | None:
        """The number of the last entry that was read; None: nothing was, ever."""
        rows = self._look("SELECT sequence FROM read")
        return int(str(rows[0][0])) if rows else None

    def add(self, sequence: int, made_ms: int, deliveries: Sequence[tuple[str, str, str, str, str]]) -> None:
        """The log was read until `sequence`. Of each delivery: hook, id, kind, subject, body."""
        with self._change() as change:
            change.execute("INSERT OR REPLACE INTO read VALUES (1, ?)", (sequence,))
            self._insert(change, made_ms, deliveries)

    def add_one(self, made_ms: int, delivery: tuple[str, str, str, str, str]) -> None:
        with self._change() as change:
            self._insert(change, made_ms, [delivery])

    def _insert(
        self, change: sqlite3.Connection, made_ms: int, deliveries: Sequence[tuple[str, str, str, str, str]]
    ) -> None:
        rows = [(*one, "waiting", made_ms, made_ms) for one in deliveries]
        change.executemany(
            "INSERT OR IGNORE INTO deliveries (hook, id, kind, subject, body, state, made_ms, next_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )

    def due(self, hook: str, now_ms: int, most: int) -> list[Delivery]:
        """In the order in which it happened, as far as nothing has to be tried again."""
        query = f"SELECT {_COLUMNS} FROM deliveries WHERE state = 'waiting' AND next_ms <= ? AND hook = ?"
        rows = self._look(f"{query} ORDER BY next_ms, number LIMIT ?", (now_ms, hook, most))
        return [Delivery(*row) for row in rows]  # type: ignore[arg-type]

    def next_ms(self) -> dict[str, int]:
        """When the next try of each webhook is due, of those for which something waits."""
        rows = self._look("SELECT hook, min(next_ms) FROM deliveries WHERE state = 'waiting' GROUP BY hook")
        return {str(hook): int(str(at_ms)) for hook, at_ms in rows}

    def tried(self, delivery: Delivery, now_ms: int, *, state: str, next_ms: int, answer: str) -> None:
        with self._change() as change:
            change.execute(
                "UPDATE deliveries SET state = ?, tries = tries + 1, tried_ms = ?, next_ms = ?, answer = ?"
                " WHERE number = ? AND state = 'waiting'",
                (state, now_ms, next_ms, answer, delivery.number),
            )
            change.execute(
                "DELETE FROM deliveries WHERE state != 'waiting'"
                " AND number <= (SELECT max(number) FROM deliveries) - ?",
                (KEPT_DELIVERIES,),
            )

    def deliveries(self, hook: str = "", *, before: int | None = None, limit: int = 100) -> list[Delivery]:
        """The newest first."""
        query = f"SELECT {_COLUMNS} FROM deliveries WHERE (? = '' OR hook = ?) AND number < ? ORDER BY number DESC"
        rows = self._look(f"{query} LIMIT ?", (hook, hook, before or 1 << 62, limit))
        return [Delivery(*row) for row in rows]  # type: ignore[arg-type]
