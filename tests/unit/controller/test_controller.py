"""The controller when all goes well, and when the store, the engine or the core does not do its part.

The core and the store are the real ones; what fails is put around them.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep

import pytest

from sublet.controller import loop
from sublet.controller.inbox import Inbox
from sublet.controller.loop import Controller
from sublet.core.core import Core
from sublet.domain.changes import Changes, Entry, Snapshot
from sublet.domain.effects import Effect, EndJob, GiveNotice, QueueJob, StartGang, StopInstances
from sublet.domain.errors import Broken, Unavailable
from sublet.domain.events import (
    Event,
    InstanceBegan,
    InstanceEnded,
    JobStopAsked,
    JobSubmitted,
    NodeJoined,
    QuotaSet,
    Tick,
)
from sublet.domain.jobs import JobRequest
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota
from sublet.ports import Inbox as InboxPort
from sublet.sim.clock import SimulatedClock
from sublet.store.memory import MemoryStore

PATIENCE_S = 20.0


class FailingStore(MemoryStore):
    """`before`: so many commits fail and change nothing. `after`: so many count, and are said to have failed."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.after = self.loads = 0

    def load(self) -> Snapshot:
        if self.loads:
            self.loads -= 1
            raise Unavailable(what="The store cannot be read.")
        return super().load()

    def commit(self, entries: Sequence[Entry], changes: Changes, at_ms: int) -> None:
        if self.before:
            self.before -= 1
            raise Unavailable(what="The disk is full.")
        super().commit(entries, changes, at_ms)
        if self.after:
            self.after -= 1
            raise Unavailable(what="The connection broke.")


class Machines:
    """An engine that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Effect] = []
        self.acknowledged: list[Event] = []
        self.failures = 0

    def connect(self, inbox: InboxPort) -> None:
        self.inbox = inbox

    def carry_out(self, effect: Effect) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable(what="The machine does not answer.")
        self.told.append(effect)

    def acknowledge(self, event: Event) -> None:
        self.acknowledged.append(event)

    def close(self) -> None:
        """Nothing is held."""

    def starts(self) -> list[tuple[str, int]]:
        return [(one.job, one.attempt) for one in self.told if isinstance(one, StartGang)]


class Server:
    """A cluster of one node of four GPUs and a quota that is promised all of them."""

    def __init__(self) -> None:
        self.store, self.engine, self.clock = FailingStore(), Machines(), SimulatedClock()
        self.controller = self.started()
        self.controller.put(NodeJoined(at_ms=0, node=Node(name="n1", spec="gpu", gpu=4)))
        self.controller.put(QuotaSet(at_ms=0, quota=Quota(name="q", nominal={"gpu": 4})))
        self.controller.turn()

    def started(self, between: Callable[[str], None] = lambda step: None) -> Controller:
        controller = Controller(self.store, self.engine, self.clock, between=between)
        controller.recover()
        return controller

    def submit(self, job: str, gpus: int = 1) -> JobSubmitted:
        event = JobSubmitted(at_ms=0, request=JobRequest(id=job, quota="q", sizes=(gpus,)))
        self.controller.put(event)
        return event

    def logged(self, kind: type) -> list[Event]:
        return [entry.event for entry in self.store.entries() if isinstance(entry.event, kind)]


@pytest.fixture
def server() -> Server:
    return Server()


@contextmanager
def running(controller: Controller) -> Iterator[None]:
    thread = threading.Thread(target=controller.run)
    thread.start()
    try:
        yield
    finally:
        controller.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def until(holds: Callable[[], object]) -> None:
    give_up = monotonic() + PATIENCE_S
    while not holds():
        assert monotonic() < give_up, "it did not happen in time"
        sleep(0.005)


# ---- the turn


def test_a_turn_takes_all_that_is_there_and_ends_with_one_tick(server: Server) -> None:
    server.submit("a")
    server.submit("b")
    entries = server.controller.turn()
    assert [type(entry.event) for entry in entries] == [JobSubmitted, JobSubmitted, Tick]
    assert server.engine.starts() == [("a", 1), ("b", 1)]
    assert server.controller.turn() == []


def test_numbers_go_on_and_time_never_runs_backwards(server: Server) -> None:
    server.clock.move_to(9_000)
    server.submit("a")
    server.controller.turn()
    server.clock = SimulatedClock(1_000)  # the machine's clock was set back meanwhile
    server.controller = server.started()
    server.submit("b")
    server.controller.turn()
    log = server.store.entries()
    assert [entry.sequence for entry in log] == list(range(1, len(log) + 1))
    assert log[-1].event.at_ms == 9_000


def test_a_deadline_needs_no_event(server: Server) -> None:
    server.controller.put(QuotaSet(at_ms=0, quota=Quota(name="owner", nominal={"gpu": 2})))
    server.submit("a", gpus=4)
    server.controller.turn()
    server.controller.put(JobStopAsked(at_ms=0, job="a"))
    server.controller.turn()
    deadline = server.controller.read(lambda core: core.next_deadline())
    assert deadline is not None and server.controller.turn() == []
    server.clock.move_to(deadline)
    assert [type(entry.event) for entry in server.controller.turn()] == [Tick]


def test_nothing_leaves_before_it_is_durable(server: Server) -> None:
    seen: list[tuple[int, int]] = []  # entries in the store, effects and acknowledgements that left
    between = lambda _: seen.append((len(server.store.entries()), len(server.engine.told)))  # noqa: E731
    server.controller = server.started(between)
    written, told = len(server.store.entries()), len(server.engine.told)
    server.submit("a")
    server.controller.turn()
    left_early = [one for one in seen if one[0] == written and one[1] > told]
    assert seen and not left_early
    assert isinstance(server.engine.acknowledged[-2], JobSubmitted)


def test_events_of_many_threads_all_arrive_in_their_order(server: Server) -> None:
    def work(name: str) -> None:
        for number in range(50):
            server.submit(f"{name}{number:02d}")

    with running(server.controller):
        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: len(server.logged(JobSubmitted)) == 200)
    for name in "abcd":
        mine = [e.request.id for e in server.logged(JobSubmitted) if e.request.id.startswith(name)]  # type: ignore[attr-defined]
        assert mine == [f"{name}{number:02d}" for number in range(50)]


def test_an_inbox_that_was_woken_before_it_waits_does_not_wait() -> None:
    inbox = Inbox()
    inbox.wake()
    waiter = threading.Thread(target=inbox.wait, args=(None,))
    waiter.start()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


# ---- the store fails


def test_a_commit_that_fails_changes_nothing_and_loses_nothing(server: Server) -> None:
    server.store.before = 1
    event = server.submit("a")
    with pytest.raises(Unavailable, match="full"):
        server.controller.turn()
    assert server.engine.starts() == [] and event not in server.logged(JobSubmitted)
    server.submit("b")
    server.controller.turn()
    assert server.engine.starts() == [("a", 1), ("b", 1)]
    log = server.store.entries()
    assert [entry.sequence for entry in log] == list(range(1, len(log) + 1))


def test_a_commit_that_counted_although_it_failed_is_not_decided_twice(server: Server) -> None:
    server.store.after = 1
    server.submit("a")
    with pytest.raises(Unavailable, match="connection"):
        server.controller.turn()
    assert server.engine.starts() == []
    server.controller.turn()
    assert server.engine.starts() == [("a", 1)]
    assert len(server.logged(JobSubmitted)) == 1
    assert isinstance(server.engine.acknowledged[-2], JobSubmitted)


def test_a_job_that_ends_in_a_turn_of_doubtful_outcome_is_not_run_again(server: Server) -> None:
    server.store.after = 1
    server.submit("a", gpus=9)  # waits for ever
    server.controller.put(JobStopAsked(at_ms=0, job="a"))
    with pytest.raises(Unavailable):
        server.controller.turn()
    server.controller.turn()
    assert sum(isinstance(e, EndJob) for e in server.engine.told) == 1
    assert sum(isinstance(e, QueueJob) for e in server.engine.told) == 1


def test_while_the_books_are_ahead_of_the_store_nobody_sees_them(server: Server) -> None:
    server.store.before = 1
    server.submit("a")
    with pytest.raises(Unavailable):
        server.controller.turn()
    with pytest.raises(Unavailable, match="cannot answer now"):
        server.controller.read(lambda core: core.job("a"))
    server.controller.turn()
    assert server.controller.read(lambda core: core.job("a")) is not None


def test_a_store_that_cannot_be_read_either_is_asked_again(server: Server) -> None:
    server.store.before, server.store.loads = 1, 2
    server.submit("a")
    for _ in range(3):
        with pytest.raises(Unavailable):
            server.controller.turn()
    server.controller.turn()
    assert server.engine.starts() == [("a", 1)]


def test_the_running_controller_tells_that_it_is_not_ready_and_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(server.controller._stopping, "wait", lambda pause: pauses.append(pause) or False)
    ready: list[bool] = []
    monkeypatch.setattr(loop.log, "error", lambda *told: ready.append(server.controller.is_ready))
    server.store.before = 7
    server.submit("a")
    with running(server.controller):
        until(lambda: server.engine.starts() == [("a", 1)])
        until(lambda: server.controller.is_ready)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert ready == [False] * 7


# ---- the engine fails


def test_what_the_engine_could_not_do_is_tried_again_and_acknowledged_only_then(server: Server) -> None:
    server.engine.failures = 2
    event = server.submit("a")
    for _ in range(2):
        with pytest.raises(Unavailable, match="machine"):
            server.controller.turn()
    assert event not in server.engine.acknowledged
    server.submit("b")
    server.controller.turn()
    assert server.engine.starts() == [("a", 1), ("b", 1)]
    assert event in server.engine.acknowledged


# ---- the core fails


def trips_over(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[Core, Event], bool]) -> None:
    real = Core.handle

    def handle(self: Core, event: Event) -> tuple[Effect, ...]:
        if is_bad(self, event):
            raise ZeroDivisionError("a mistake in the core")
        return real(self, event)

    monkeypatch.setattr(Core, "handle", handle)


def test_an_event_that_the_core_cannot_digest_is_dropped_and_told(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trips_over(monkeypatch, lambda _, event: isinstance(event, JobStopAsked))
    server.submit("a")
    server.controller.put(JobStopAsked(at_ms=0, job="a"))
    server.submit("b")
    server.controller.turn()
    assert server.engine.starts() == [("a", 1), ("b", 1)] and not server.logged(JobStopAsked)
    assert "JobStopAsked" in caplog.text and "a mistake in the core" in caplog.text


def test_the_event_that_spoils_the_instant_is_found_among_many(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The events are all digested; what one of them left behind trips the Tick."""
    trips_over(monkeypatch, lambda core, event: isinstance(event, Tick) and core.job("j13") is not None)
    for number in range(40):
        server.submit(f"j{number:02d}")
    server.controller.turn()
    assert len(server.logged(JobSubmitted)) == 39
    assert "j13" in caplog.text and "j12" not in caplog.text
    assert server.controller.read(lambda core: core.job("j13")) is None


def test_two_events_that_trip_it_are_both_dropped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    trips_over(monkeypatch, lambda core, e: isinstance(e, Tick) and bool(core.job("j3") or core.job("j5")))
    for number in range(8):
        server.submit(f"j{number}")
    server.controller.turn()
    kept = [e.request.id for e in server.logged(JobSubmitted)]  # type: ignore[attr-defined]
    assert kept == ["j0", "j1", "j2", "j4", "j6", "j7"]


def test_when_no_event_is_to_blame_none_is_dropped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    is_broken = True
    trips_over(monkeypatch, lambda _, event: is_broken and isinstance(event, Tick))
    server.submit("a")
    with pytest.raises(Broken, match=r"ZeroDivisionError.*report this"):
        server.controller.turn()
    is_broken = False
    server.controller.turn()
    assert server.engine.starts() == [("a", 1)]


def test_a_store_that_fails_while_the_culprit_is_sought_loses_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips_over(monkeypatch, lambda _, event: isinstance(event, JobStopAsked))
    server.submit("a")
    server.controller.put(JobStopAsked(at_ms=0, job="a"))
    server.submit("b")
    server.store.loads = 1
    with pytest.raises(Unavailable):
        server.controller.turn()
    server.controller.turn()
    assert server.engine.starts() == [("a", 1), ("b", 1)]


# ---- the server dies


def test_after_a_crash_before_the_effects_left_they_leave(server: Server) -> None:
    class Crash(Exception):
        pass

    def crash(step: str) -> None:
        if step == "commit":
            raise Crash

    server.controller = server.started(crash)
    server.submit("a")
    with pytest.raises(Crash):
        server.controller.turn()
    assert server.engine.starts() == []
    server.controller = server.started()
    assert server.engine.starts() == [("a", 1)] and server.controller.is_ready


def test_a_new_server_tells_again_all_that_stands_and_decides_nothing_anew(server: Server) -> None:
    server.controller.put(QuotaSet(at_ms=0, quota=Quota(name="owner", nominal={"gpu": 4})))
    server.controller.put(QuotaSet(at_ms=0, quota=Quota(name="q", nominal={})))
    server.controller.put(JobSubmitted(at_ms=0, request=JobRequest(id="b", quota="q", sizes=(4,), idle="only")))  # type: ignore[arg-type]
    server.controller.turn()
    server.controller.put(InstanceBegan(at_ms=0, job="b", attempt=1, instance=0))
    server.controller.put(JobSubmitted(at_ms=0, request=JobRequest(id="o", quota="owner", sizes=(4,))))
    server.controller.turn()
    before = {type(one) for one in server.engine.told}
    assert {StartGang, GiveNotice} <= before
    first, server.engine = server.engine, Machines()
    server.controller = server.started()
    notices = [one for one in server.engine.told if isinstance(one, GiveNotice)]
    assert server.engine.starts() == [("b", 1)]
    assert notices == [one for one in first.told if isinstance(one, GiveNotice)]
    assert not any(isinstance(one, StopInstances) for one in server.engine.told)
    assert server.controller.turn() == []


def test_a_new_server_tells_again_who_must_end(server: Server) -> None:
    server.submit("a")
    server.controller.turn()
    server.controller.put(JobStopAsked(at_ms=0, job="a"))
    server.controller.turn()
    server.engine = Machines()
    server.controller = server.started()
    assert [type(one) for one in server.engine.told] == [StartGang, StopInstances]


def test_an_end_that_is_told_twice_ends_one_instance(server: Server) -> None:
    server.submit("a")
    server.controller.turn()
    ended = InstanceEnded(at_ms=0, job="a", attempt=1, instance=0, exit_code=0, finished=True)
    server.controller.put(ended)
    server.controller.turn()
    server.controller.put(ended)
    server.controller.turn()
    assert sum(isinstance(one, EndJob) for one in server.engine.told) == 1
