"""The durable store: the log and the present, in one SQL database. SQLite by default.

One rule: what `commit` returned from is on the disk whole, and what it did not return from is not there at all.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError

from sublet.domain import codec
from sublet.domain.changes import Changes, Entry, NodeRecord, Snapshot
from sublet.domain.errors import Unavailable
from sublet.domain.jobs import JobRecord
from sublet.domain.quotas import Quota
from sublet.domain.rules import Rules
from sublet.store import lock, schema, statements
from sublet.store.lead import KEY, Lead

FILE = "sublet.db"
BUSY_MS = 5_000
CONNECT_WITHIN_S = 5
# A server that was cut off is noticed by the database in about 10 s, so that its lock does not outlive it for hours.
ALIVE = {"keepalives": 1, "keepalives_idle": 3, "keepalives_interval": 2, "keepalives_count": 3,
         "options": "-c tcp_keepalives_idle=3 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3"}  # fmt: skip
_READ = {"sublet_read": True}


class SqlStore:
    """`Store` on an engine that this store alone writes to; safe for reads from any thread."""

    def __init__(
        self, engine: Engine, where: str, lock_descriptor: int | None = None, lead: Lead | None = None
    ) -> None:
        self._engine = engine
        self._reader = engine.execution_options(**_READ)
        self._where = where
        self._lock = lock_descriptor
        self.lead = lead
        self._begin = engine.begin if lead is None else lead.begin

    def load(self) -> Snapshot:
        with _explained(self._where), self._reader.begin() as connection:
            states = {row.key: row.value for row in connection.execute(statements.all_states())}
            rules = states.get("rules")
            return Snapshot(
                sequence=connection.execute(statements.last_sequence()).scalar_one(),
                at_ms=int(states.get("at_ms", "0")),
                rules=codec.from_json(rules) if rules else Rules(),
                nodes=_values(connection, statements.all_records(statements.nodes)),
                quotas=_values(connection, statements.all_records(statements.quotas)),
                jobs=_values(connection, statements.live_jobs()),
                core=states.get("core", ""),
            )

    def commit(self, entries: Sequence[Entry], changes: Changes, at_ms: int) -> None:
        with _explained(self._where), self._begin() as connection:
            _append_entries(connection, entries)
            self._replace(connection, statements.jobs, [_job_row(record) for record in changes.jobs.values()])
            self._replace_or_remove(connection, statements.nodes, changes.nodes)
            self._replace_or_remove(connection, statements.quotas, changes.quotas)
            self._replace(connection, statements.state, _state_rows(changes, at_ms))

    def entries(self, *, after: int = 0, limit: int = 1000, job: str | None = None) -> list[Entry]:
        with _explained(self._where), self._reader.begin() as connection:
            rows = connection.execute(statements.log(after, limit, job)).all()
        return [
            Entry(sequence=row.sequence, event=codec.from_json(row.event), effects=codec.from_json(row.effects))
            for row in rows
        ]

    def jobs(self, *, states: Sequence[str] = (), limit: int = 1000, before: str | None = None) -> list[JobRecord]:
        with _explained(self._where), self._reader.begin() as connection:
            return list(_values(connection, statements.newest_jobs(states, limit, before)))

    def job(self, job_id: str) -> JobRecord | None:
        with _explained(self._where), self._reader.begin() as connection:
            found: tuple[JobRecord, ...] = _values(connection, statements.one_job(job_id))
        return found[0] if found else None

    def find_jobs(self, text: str, *, limit: int = 2) -> list[JobRecord]:
        if not text:
            return []
        with _explained(self._where), self._reader.begin() as connection:
            return list(_values(connection, statements.named_jobs(text, limit)))

    def may_write(self) -> bool:
        """Whether this server leads, or may lead from now on. It does not wait for another one to end."""
        with _explained(self._where):
            return self.lead is None or self.lead.take()

    def last_sequence(self) -> int:
        """The number of the newest entry."""
        with _explained(self._where), self._reader.begin() as connection:
            return int(connection.execute(statements.last_sequence()).scalar_one())

    def leader(self) -> str:
        """Where the server that leads said it can be reached; empty when none ever did."""
        with _explained(self._where), self._reader.begin() as connection:
            states = {row.key: row.value for row in connection.execute(statements.all_states())}
        return str(states.get("leader", ""))

    def say_leader(self, url: str) -> None:
        with _explained(self._where), self._begin() as connection:
            self._replace(connection, statements.state, [{"key": "leader", "value": url}])

    def close(self) -> None:
        if self.lead is not None:
            self.lead.close()
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _replace(self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            connection.execute(statements.replace(table, self._engine.dialect.name), rows)

    def _replace_or_remove(
        self,
        connection: Connection,
        table: Table,
        changed: Mapping[str, NodeRecord | None] | Mapping[str, Quota | None],
    ) -> None:
        kept = [{"name": name, "record": codec.to_json(item)} for name, item in changed.items() if item is not None]
        gone = [{"gone": name} for name, item in changed.items() if item is None]
        self._replace(connection, table, kept)
        if gone:
            connection.execute(statements.remove(table), gone)


def open_sqlite(directory: Path) -> SqlStore:
    """The store in this directory, made when there is none.

    Unavailable when another server has it or it cannot be written, Refused when a newer program has written it.
    """
    with ExitStack() as undo:
        descriptor = lock.take(directory)
        undo.callback(os.close, descriptor)
        engine = sqlite_engine(directory / FILE)
        undo.callback(engine.dispose)
        with _explained(str(directory)):
            schema.migrate(engine)
        undo.pop_all()
    return SqlStore(engine, str(directory), descriptor)


def open_postgresql(url: str) -> SqlStore:
    """The store in this database, its tables made when there are none. It reads; it writes once its `lead` is taken.

    `url`: postgresql://user@host/name. Unavailable when the server cannot be reached, Refused when the database was
    written by a newer program.
    """
    parsed = make_url(url).set(drivername="postgresql+psycopg")
    engine = create_engine(parsed, pool_pre_ping=True, connect_args={"connect_timeout": CONNECT_WITHIN_S, **ALIVE})
    where = parsed.render_as_string(hide_password=True)
    with ExitStack() as undo:
        undo.callback(engine.dispose)
        with _explained(where), engine.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": KEY + 1})  # one that migrates
            schema.migrate_on(connection)
        undo.pop_all()
    return SqlStore(engine, where, lead=Lead(engine))


def sqlite_engine(path: Path) -> Engine:
    """Every commit is on the disk before it returns; a reader never waits for the writer."""
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_MS / 1000})
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver begins no transaction of its own
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_MS}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    reads = connection.get_execution_options().get("sublet_read")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _append_entries(connection: Connection, entries: Sequence[Entry]) -> None:
    if not entries:
        return
    connection.execute(statements.append(statements.entries), [_entry_row(entry) for entry in entries])
    spoken_of = [{"job": job, "sequence": entry.sequence} for entry in entries for job in _mentioned(entry)]
    if spoken_of:
        connection.execute(statements.append(statements.mentions), spoken_of)


def _entry_row(entry: Entry) -> dict[str, Any]:
    return {
        "sequence": entry.sequence,
        "at_ms": entry.event.at_ms,
        "type": type(entry.event).__name__,
        "event": codec.to_json(entry.event),
        "effects": codec.to_json(entry.effects),
    }


def _mentioned(entry: Entry) -> list[str]:
    request = getattr(entry.event, "request", None)
    named = {request.id} if request else set()
    for item in (entry.event, *entry.effects):
        named |= {getattr(item, key, "") for key in ("job", "claimant")}
    return sorted(named - {""})


def _job_row(record: JobRecord) -> dict[str, Any]:
    request = record.request
    return {
        "id": request.id,
        "name": request.name,
        "user_name": request.user,
        "quota": request.quota,
        "state": record.state.value,
        "submitted_ms": record.submitted_ms,
        "record": codec.to_json(record),
    }


def _state_rows(changes: Changes, at_ms: int) -> list[dict[str, str]]:
    values = {
        "at_ms": str(at_ms),
        "rules": None if changes.rules is None else codec.to_json(changes.rules),
        "core": changes.core,
    }
    return [{"key": key, "value": value} for key, value in values.items() if value is not None]


def _values(connection: Connection, statement: Any) -> tuple[Any, ...]:
    return tuple(codec.from_json(text) for text in connection.execute(statement).scalars())


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turns what the database says of the world into Unavailable; mistakes of ours pass through as they are."""
    try:
        yield
    except DBAPIError as error:
        said = str(error.orig)
        hint = _hint(said)
        if hint is None:
            raise
        raise Unavailable(
            what=f"The database in {where} cannot be used.",
            why=f"It says: {said}.",
            hint=hint,
            code="store_unavailable",
        ) from error


_HINTS = (
    ("full", "Nothing was changed; free space on that disk and start again."),
    ("readonly", "Nothing was changed; make the files writable for this user and start again."),
    ("read-only", "Nothing was changed; make the files writable for this user and start again."),
    ("unable to open", "Check that the directory exists and that this user may write there."),
    ("disk I/O", "Nothing was changed; check the disk (space, quota, health) and start again."),
    ("locked", "Another program has the file open; end it and try again."),
    ("malformed", "The file is damaged; put a backup in its place."),
    ("not a database", "The file is none of ours; move it away or choose another --data directory."),
    ("connection", "Check that the database server runs and can be reached."),
)


def _hint(said: str) -> str | None:
    return next((hint for mark, hint in _HINTS if mark in said), None)
