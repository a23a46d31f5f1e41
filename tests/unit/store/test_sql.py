"""The SQL store against the disk and against other writers: durable or not there, and one clear sentence."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError

from sublet.domain.changes import Changes, Entry
from sublet.domain.errors import Refused, Unavailable
from sublet.domain.events import Tick
from sublet.domain.quotas import Quota
from sublet.store import schema, statements
from sublet.store.sql import FILE, SqlStore, open_sqlite, sqlite_engine

A_QUOTA = Changes(quotas={"q": Quota(name="q", nominal={"s": 8})})


def test_what_was_committed_is_there_after_opening_again(tmp_path: Path) -> None:
    first = open_sqlite(tmp_path)
    first.commit([], A_QUOTA, 1)
    first.close()
    again = open_sqlite(tmp_path)
    assert again.load().quotas == (A_QUOTA.quotas["q"],)
    again.close()


def test_a_sequence_is_written_once_and_a_failed_turn_leaves_nothing(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path)
    first, second = (Entry(sequence=number, event=Tick(at_ms=number), effects=()) for number in (1, 2))
    store.commit([first], A_QUOTA, 1)
    before = store.load()
    with pytest.raises(IntegrityError):
        store.commit([second, first], Changes(quotas={"q": None}, core="new"), 5)
    assert (store.load(), store.entries()) == (before, [first])
    store.close()


def test_every_commit_reaches_the_disk(tmp_path: Path) -> None:
    with sqlite_engine(tmp_path / FILE).connect() as connection:
        pragmas = {name: connection.execute(text(f"PRAGMA {name}")).scalar() for name in PRAGMAS}
    assert pragmas == PRAGMAS


PRAGMAS = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


def test_the_migrations_make_the_tables_that_the_statements_name(tmp_path: Path) -> None:
    open_sqlite(tmp_path).close()
    with sqlite_engine(tmp_path / FILE).connect() as connection:
        assert schema.revision(connection) == statements.HEAD
        assert compare_metadata(MigrationContext.configure(connection), statements.metadata) == []


def test_head_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(schema.SCRIPTS))
    assert ScriptDirectory.from_config(config).get_heads() == [statements.HEAD]


def test_a_migration_that_breaks_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sqlite3.connect(tmp_path / FILE) as raw:
        raw.execute("CREATE TABLE state (key TEXT)")  # the last table that the first migration makes
    raw.close()
    with pytest.raises(DBAPIError, match="already exists"):
        open_sqlite(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as raw:
        tables = [name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    raw.close()
    assert tables == ["state"]


def test_a_database_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    open_sqlite(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.close()
    with pytest.raises(Refused, match="schema 9999"):
        open_sqlite(tmp_path)


def test_the_second_writer_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    first = open_sqlite(tmp_path)
    with pytest.raises(Unavailable, match=rf"Another server works on .*process {os.getpid()}"):
        open_sqlite(tmp_path)
    first.close()
    open_sqlite(tmp_path).close()


def test_the_lock_goes_with_a_killed_process(tmp_path: Path) -> None:
    program = "import sys,pathlib,os,signal;from sublet.store.sql import open_sqlite;"
    program += "open_sqlite(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == -9
    open_sqlite(tmp_path).close()


def test_a_full_disk_is_told_and_changes_nothing(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path)
    store.commit([], A_QUOTA, 1)
    limit_pages(store, 30)
    big = Changes(quotas={"q": None, **{f"q{n}": Quota(name=f"q{n}", owner="x" * 4000) for n in range(100)}})
    with pytest.raises(Unavailable, match="full") as raised:
        store.commit([], big, 2)
    assert "free space" in raised.value.hint
    assert store.load().quotas == (A_QUOTA.quotas["q"],)
    store.commit([], Changes(quotas={"small": Quota(name="small")}), 3)
    assert [quota.name for quota in store.load().quotas] == ["q", "small"]
    store.close()


def limit_pages(store: SqlStore, pages: int) -> None:
    with store._engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")


def test_a_read_only_database_is_told(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path)
    with store._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only=ON")
    with pytest.raises(Unavailable, match="readonly"):
        store.commit([], A_QUOTA, 1)
    store.close()


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"cannot be written\. .*Not a directory\. .*--data"):
        open_sqlite(tmp_path / "file" / "data")


def test_a_file_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"these are my notes, not a database\n" * 40)
    with pytest.raises(Unavailable, match="not a database"):
        open_sqlite(tmp_path)
    assert (tmp_path / FILE).read_bytes().startswith(b"these are my notes")


def test_postgresql_has_its_own_upsert() -> None:
    from sqlalchemy.dialects import postgresql

    sql = str(statements.replace(statements.quotas, "postgresql").compile(dialect=postgresql.dialect()))
    assert "ON CONFLICT (name) DO UPDATE SET record = excluded.record" in sql
