"""The tables and every statement that the SQL store speaks, by name.

One rule: what differs between dialects stands here and nowhere else. Texts hold domain values as the codec spells them;
the other columns exist only to be searched.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Delete,
    Index,
    MetaData,
    Select,
    String,
    Table,
    Text,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import Insert

from sublet.domain.jobs import JobState

HEAD = "0001"  # the newest migration; a test holds it against the files
LIVE = tuple(state.value for state in JobState if not state.is_final)

metadata = MetaData()

entries = Table(
    "entries",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("type", String(40), nullable=False),
    Column("event", Text, nullable=False),
    Column("effects", Text, nullable=False),
)
mentions = Table(  # which jobs an entry speaks of: its event or one of its effects
    "mentions",
    metadata,
    Column("job", String(80), primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
)
jobs = Table(
    "jobs",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("user_name", String(200), nullable=False),
    Column("quota", String(400), nullable=False),
    Column("state", String(20), nullable=False),
    Column("submitted_ms", BigInteger, nullable=False),
    Column("record", Text, nullable=False),
    Index("jobs_newest", "submitted_ms", "id"),
    Index("jobs_by_state", "state", "submitted_ms", "id"),
    Index("jobs_by_name", "name"),
)
nodes = Table(
    "nodes",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("record", Text, nullable=False),
)
quotas = Table(
    "quotas",
    metadata,
    Column("name", String(400), primary_key=True),
    Column("record", Text, nullable=False),
)
state = Table(
    "state",
    metadata,
    Column("key", String(40), primary_key=True),
    Column("value", Text, nullable=False),
)


def append(table: Table) -> Insert:
    return insert(table)


def replace(table: Table, dialect: str) -> Insert:
    """Insert the row, or overwrite the one of the same key."""
    keys = [column.name for column in table.primary_key]
    others = [column.name for column in table.columns if column.name not in keys]
    if dialect == "postgresql":
        new = postgresql.insert(table)
        return new.on_conflict_do_update(index_elements=keys, set_={name: new.excluded[name] for name in others})
    row = sqlite.insert(table)
    return row.on_conflict_do_update(index_elements=keys, set_={name: row.excluded[name] for name in others})


def remove(table: Table) -> Delete:
    """By name; for the tables whose key is one."""
    return delete(table).where(table.c.name == bindparam("gone"))


def last_sequence() -> Select[Any]:
    return select(func.coalesce(func.max(entries.c.sequence), 0))


def all_states() -> Select[Any]:
    return select(state.c.key, state.c.value)


def all_records(table: Table) -> Select[Any]:
    return select(table.c.record).order_by(table.c.name)


def live_jobs() -> Select[Any]:
    return select(jobs.c.record).where(jobs.c.state.in_(LIVE)).order_by(jobs.c.submitted_ms, jobs.c.id)


def one_job(job_id: str) -> Select[Any]:
    return select(jobs.c.record).where(jobs.c.id == job_id)


def newest_jobs(states: Sequence[str], limit: int, before: str | None) -> Select[Any]:
    """`before`: only those after this job in the order newest first; nothing when there is no such job."""
    found = select(jobs.c.record).order_by(jobs.c.submitted_ms.desc(), jobs.c.id.desc()).limit(limit)
    if states:
        found = found.where(jobs.c.state.in_(states))
    if before is not None:
        since = select(jobs.c.submitted_ms).where(jobs.c.id == before).scalar_subquery()
        found = found.where(tuple_(jobs.c.submitted_ms, jobs.c.id) < tuple_(since, before))
    return found


def named_jobs(text: str, limit: int) -> Select[Any]:
    """By name, or by how the id begins."""
    begins = jobs.c.id.between(text, text + "\U0010ffff")  # an index range; LIKE would read _ and % as wildcards
    newest = select(jobs.c.record).order_by(jobs.c.submitted_ms.desc(), jobs.c.id.desc())
    return newest.where(or_(jobs.c.name == text, begins)).limit(limit)


def log(after: int, limit: int, job: str | None) -> Select[Any]:
    found = select(entries.c.sequence, entries.c.event, entries.c.effects)
    if job is not None:
        found = found.join(mentions, mentions.c.sequence == entries.c.sequence).where(mentions.c.job == job)
    return found.where(entries.c.sequence > after).order_by(entries.c.sequence).limit(limit)
