"""What every store keeps to. One suite; a store that is added here must pass all of it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet.domain.changes import Changes, Entry, NodeRecord, Snapshot
from sublet.domain.effects import EndJob, GiveNotice, QueueJob, StartGang
from sublet.domain.events import JobStopAsked, JobSubmitted, Tick
from sublet.domain.jobs import JobRecord, JobRequest, JobState, Outcome
from sublet.domain.leases import Lease, LeaseKind
from sublet.domain.nodes import Node, NodeState
from sublet.domain.quotas import Quota
from sublet.domain.rules import Rules
from sublet.ports import Store
from sublet.store.memory import MemoryStore
from sublet.store.sql import open_postgresql, open_sqlite
from tests.postgresql import Postgres, running

FACTORIES: dict[str, Callable[[Path], Store]] = {"memory": lambda _: MemoryStore(), "sqlite": open_sqlite}


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running() as server:
        yield server


@pytest.fixture(params=[*sorted(FACTORIES), "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        leading = open_postgresql(server.create(f"t{abs(hash(request.node.name))}"))
        assert leading.lead is not None and leading.lead.take()
        opened: Store = leading
    else:
        opened = FACTORIES[request.param](tmp_path)
    yield opened
    opened.close()


def request_of(job: str, **more: object) -> JobRequest:
    return JobRequest(id=job, quota="q", **more)  # type: ignore[arg-type]


def record_of(job: str, state: JobState = JobState.WAITING, submitted_ms: int = 1) -> JobRecord:
    return JobRecord(request=request_of(job), state=state, submitted_ms=submitted_ms)


def submitted(sequence: int, job: str) -> Entry:
    queued = QueueJob(job=job, quota="q", idle="never")
    return Entry(sequence=sequence, event=JobSubmitted(at_ms=sequence, request=request_of(job)), effects=(queued,))


def test_a_new_store_is_empty(store: Store) -> None:
    assert store.load() == Snapshot()
    assert store.entries() == [] and store.jobs() == [] and store.job("job_a") is None


def test_what_was_committed_is_loaded(store: Store) -> None:
    node = NodeRecord(node=Node(name="n1", spec="s", gpu=8), state=NodeState.DRAINING)
    quota = Quota(name="q", nominal={"s": 8}, owner="mei")
    rules = Rules(grace_ms=1)
    changes = Changes(
        jobs={"job_a": record_of("job_a")}, nodes={"n1": node}, quotas={"q": quota}, rules=rules, core='{"k":1}'
    )
    store.commit([submitted(1, "job_a")], changes, 42)
    assert store.load() == Snapshot(
        sequence=1, at_ms=42, rules=rules, nodes=(node,), quotas=(quota,), jobs=(record_of("job_a"),), core='{"k":1}'
    )


def test_a_turn_replaces_what_it_changed_and_keeps_the_rest(store: Store) -> None:
    quotas = {name: Quota(name=name) for name in ("p", "q")}
    store.commit([], Changes(quotas=dict(quotas), rules=Rules(grace_ms=7), core="one"), 1)
    store.commit([], Changes(quotas={"q": Quota(name="q", owner="lin")}), 2)
    after = store.load()
    assert after.quotas == (quotas["p"], Quota(name="q", owner="lin"))
    assert (after.rules.grace_ms, after.core, after.at_ms) == (7, "one", 2)


def test_none_removes(store: Store) -> None:
    present = Changes(nodes={"n1": NodeRecord(node=Node(name="n1", spec="s", gpu=1))}, quotas={"q": Quota(name="q")})
    store.commit([], present, 1)
    store.commit([], Changes(nodes={"n1": None, "never-there": None}, quotas={"q": None}), 2)
    assert store.load() == Snapshot(at_ms=2)


def test_an_ended_job_leaves_the_snapshot_and_stays_in_the_history(store: Store) -> None:
    store.commit([], Changes(jobs={"job_a": record_of("job_a"), "job_b": record_of("job_b")}), 1)
    ended = record_of("job_a", JobState.FAILED)
    store.commit([], Changes(jobs={"job_a": ended}), 2)
    assert store.load().jobs == (record_of("job_b"),)
    assert store.job("job_a") == ended


def test_jobs_come_newest_first_in_pages(store: Store) -> None:
    records = [record_of(f"job_{name}", submitted_ms=at) for name, at in (("d", 1), ("b", 5), ("c", 5), ("a", 9))]
    store.commit([], Changes(jobs={record.request.id: record for record in records}), 1)
    expected = ["job_a", "job_c", "job_b", "job_d"]
    assert [record.request.id for record in store.jobs()] == expected
    assert [record.request.id for record in store.jobs(limit=2)] == expected[:2]
    assert [record.request.id for record in store.jobs(limit=2, before="job_c")] == expected[2:]
    assert store.jobs(before="job_d") == [] and store.jobs(before="job_zz") == []


def test_jobs_are_found_by_state(store: Store) -> None:
    records = [record_of(f"job_{state}", state) for state in JobState]
    store.commit([], Changes(jobs={record.request.id: record for record in records}), 1)
    found = store.jobs(states=[JobState.FAILED, JobState.RUNNING])
    assert [record.state for record in found] == [JobState.RUNNING, JobState.FAILED]


def test_jobs_are_found_by_name_or_the_beginning_of_their_id(store: Store) -> None:
    named = {job: record_of(job) for job in ("job_abc", "job_abd", "job_b")}
    named["job_b"] = JobRecord(request=request_of("job_b", name="abc"), state=JobState.FAILED, submitted_ms=3)
    store.commit([], Changes(jobs=named), 1)
    assert [record.request.id for record in store.find_jobs("job_ab")] == ["job_abd", "job_abc"]
    assert [record.request.id for record in store.find_jobs("job_ab", limit=1)] == ["job_abd"]
    assert [record.request.id for record in store.find_jobs("abc")] == ["job_b"]
    assert store.find_jobs("job_%") == [] and store.find_jobs("job_a_") == [] and store.find_jobs("") == []


def test_the_log_comes_in_order_and_in_pages(store: Store) -> None:
    store.commit([submitted(1, "job_a"), submitted(2, "job_b")], Changes(), 2)
    store.commit([submitted(3, "job_c")], Changes(), 3)
    assert [entry.sequence for entry in store.entries()] == [1, 2, 3]
    assert store.entries(after=1, limit=1) == [submitted(2, "job_b")]
    assert store.entries(after=3) == []


def test_the_log_of_a_job_holds_all_that_speaks_of_it(store: Store) -> None:
    lease = Lease(kind=LeaseKind.GUARANTEED, spec="s", nodes=("n1",), gpus=(1,), granted_ms=2)
    start = StartGang(job="job_a", attempt=1, lease=lease, instances=(0,), request=request_of("job_a"))
    notice = GiveNotice(
        job="job_b", attempt=1, instances=(0,), reason="reclaim", claimant="job_a", deadline_ms=9, lost_gpu_ms=0
    )
    end = EndJob(job="job_a", outcome=Outcome.STOPPED, failures=0, preemptions=0)
    log = [
        submitted(1, "job_a"),
        submitted(2, "job_b"),
        Entry(sequence=3, event=Tick(at_ms=3), effects=(start,)),
        Entry(sequence=4, event=Tick(at_ms=4), effects=(notice,)),
        Entry(sequence=5, event=Tick(at_ms=5), effects=()),
        Entry(sequence=6, event=JobStopAsked(at_ms=6, job="job_a"), effects=(end,)),
    ]
    store.commit(log, Changes(), 6)
    assert [entry.sequence for entry in store.entries(job="job_a")] == [1, 3, 4, 6]
    assert store.entries(job="job_a", after=3, limit=1) == [log[3]]
    assert [entry.sequence for entry in store.entries(job="job_b")] == [2, 4]
