"""What every engine keeps to. One suite; an engine that is added here must pass all of it.

The simulated one runs on a clock that is moved; the local one runs real processes in real time.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from sublet.domain.effects import GiveNotice, StartGang, StopInstances, WithdrawNotice
from sublet.domain.events import Event, InstanceBegan, InstanceEnded
from sublet.domain.jobs import JobRequest, Program
from sublet.domain.leases import Lease, LeaseKind
from sublet.domain.nodes import Node
from sublet.engines.local import LocalEngine
from sublet.engines.simulated import Behaviour, SimulatedEngine
from sublet.ports import Engine
from sublet.sim.clock import SimulatedClock
from sublet.supervisor import processes

LIMIT_S = 30
PROGRAMS = {  # job: what its program does, for both kinds of machine
    "job_done": ("exit 0", Behaviour(work_ms=1_000)),
    "job_fails": ("exit 7", Behaviour()),
    "job_stays": ("exec sleep 600", Behaviour(leaves_after_ms=None)),
    "job_heeds": (
        'while [ ! -e "$SUBLET_NOTICE_FILE" ]; do sleep 0.05; done; exit 85',
        Behaviour(leaves_after_ms=100, leaves_with=85),
    ),
}


class Heard:
    """An inbox that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def put(self, event: Event) -> None:
        self.events.append(event)

    def ends(self) -> list[tuple[str, int, int, int | None, bool]]:
        ended = [event for event in self.events if isinstance(event, InstanceEnded)]
        return [(one.job, one.attempt, one.instance, one.exit_code, one.finished) for one in ended]

    def begun(self) -> set[tuple[str, int, int]]:
        return {(e.job, e.attempt, e.instance) for e in self.events if isinstance(e, InstanceBegan)}


class Machines(Protocol):
    engine: Engine
    heard: Heard

    def until(self, holds: Callable[[], object]) -> None: ...
    def restart(self) -> None: ...
    def now_ms(self) -> int: ...

    def count(self) -> int: ...
    def stayers(self) -> int: ...
    def close(self) -> None: ...


class Simulated:
    def __init__(self, _: Path) -> None:
        self.clock, self.heard = SimulatedClock(), Heard()
        self.engine = SimulatedEngine(self.clock, {job: behaviour for job, (_, behaviour) in PROGRAMS.items()})
        self.engine.connect(self.heard)

    def until(self, holds: Callable[[], object]) -> None:
        self.engine.advance()
        while not holds():
            at_ms = self.engine.next_ms()
            assert at_ms is not None and at_ms < 3_600_000, "it does not come to hold"
            self.clock.move_to(at_ms)
            self.engine.advance()
            if self.clock.now_ms() >= 1_000 and "job_fails" in {job for job, *_ in self.engine.running()}:
                self.engine.finish("job_fails", 7, None)

    def restart(self) -> None:
        """Another server connects to the same machines."""
        self.heard = Heard()
        self.engine.connect(self.heard)

    def now_ms(self) -> int:
        return self.clock.now_ms()

    def count(self) -> int:
        return len(list(self.engine.running()))

    stayers = count

    def close(self) -> None:
        self.engine.close()


STAYS = b"sleep\x00600\x00"


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


class Local:
    def __init__(self, directory: Path) -> None:
        self.directory = directory / "instances"
        self.engine: LocalEngine | None = None
        self.restart()

    def restart(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.heard = Heard()
        nodes = (Node(name="n1", spec="demo", gpu=2), Node(name="n2", spec="demo", gpu=2))
        self.engine = LocalEngine(directory=self.directory, nodes=nodes)
        self.engine.connect(self.heard)

    def until(self, holds: Callable[[], object]) -> None:
        limit = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < limit, "it did not come to hold"
            time.sleep(0.01)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def pids(self) -> list[int]:
        starts = [json.loads(path.read_text()) for path in self.directory.glob("*/*/*/start.json")]
        return [pid for start in starts for pid in processes.members(None, start["mark"], "")]

    def count(self) -> int:
        return len(self.pids())

    def stayers(self) -> int:
        """Programs of `job_stays`, without the shells around them."""
        return sum(_command(pid) == STAYS for pid in self.pids())

    def close(self) -> None:
        """Nothing of it may be left for the next test to find."""
        for pid in self.pids():
            processes.send(pid, signal.SIGKILL)
        self.until(lambda: not self.pids())
        assert self.engine is not None
        self.engine.close()


@pytest.fixture(params=[Simulated, Local], ids=["simulated", "local"])
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machines]:
    made: Machines = request.param(tmp_path)
    yield made
    made.close()


def start(job: str, attempt: int = 1, instances: int = 1) -> StartGang:
    gpus, nodes = (1,) * instances, ("n1", "n2")[:instances]
    request = JobRequest(id=job, quota="q", name=job, sizes=gpus, program=Program(command=(PROGRAMS[job][0],)))
    lease = Lease(kind=LeaseKind.IDLE, spec="demo", nodes=nodes, gpus=gpus, granted_ms=0)
    return StartGang(job=job, attempt=attempt, lease=lease, instances=tuple(range(instances)), request=request)


def stop(job: str, attempt: int = 1, instances: tuple[int, ...] = (0,)) -> StopInstances:
    return StopInstances(job=job, attempt=attempt, instances=instances, reason="stopped")


def notice(machines: Machines, job: str, within_ms: int) -> GiveNotice:
    deadline_ms = machines.now_ms() + within_ms
    return GiveNotice(
        job=job, attempt=1, instances=(0,), reason="reclaim", claimant="o", deadline_ms=deadline_ms, lost_gpu_ms=0
    )


def test_a_gang_begins_and_ends_instance_by_instance(machines: Machines) -> None:
    machines.engine.carry_out(start("job_done", instances=2))
    machines.until(lambda: len(set(machines.heard.ends())) == 2)
    assert machines.heard.begun() == {("job_done", 1, 0), ("job_done", 1, 1)}
    assert set(machines.heard.ends()) == {("job_done", 1, 0, 0, True), ("job_done", 1, 1, 0, True)}


def test_a_failure_is_told_with_its_exit_code_and_is_not_finished(machines: Machines) -> None:
    machines.engine.carry_out(start("job_fails"))
    machines.until(machines.heard.ends)
    assert machines.heard.ends()[0] == ("job_fails", 1, 0, 7, False)


def test_a_start_that_is_repeated_starts_nothing(machines: Machines) -> None:
    machines.engine.carry_out(start("job_stays"))
    machines.until(lambda: machines.stayers() == 1)
    machines.engine.carry_out(start("job_stays"))
    machines.restart()
    machines.engine.carry_out(start("job_stays"))
    machines.engine.carry_out(start("job_done"))  # what came before it has been done by its end
    machines.until(machines.heard.ends)
    machines.until(lambda: machines.stayers() == 1)
    assert {job for job, *_ in machines.heard.ends()} == {"job_done"}


def test_an_end_is_told_until_it_is_acknowledged_and_then_no_more(machines: Machines) -> None:
    machines.engine.carry_out(start("job_done"))
    machines.until(machines.heard.ends)
    machines.until(lambda: len(machines.heard.ends()) >= 2)
    machines.restart()
    machines.until(machines.heard.ends)
    ended = next(event for event in machines.heard.events if isinstance(event, InstanceEnded))
    machines.engine.acknowledge(ended)
    machines.restart()
    machines.engine.carry_out(start("job_fails"))
    machines.until(machines.heard.ends)
    assert {job for job, *_ in machines.heard.ends()} == {"job_fails"}


def test_an_attempt_that_is_over_is_not_started_again(machines: Machines) -> None:
    machines.engine.carry_out(start("job_done"))
    machines.until(machines.heard.ends)
    for event in machines.heard.events:
        machines.engine.acknowledge(event)
    machines.restart()
    machines.engine.carry_out(start("job_done"))
    machines.engine.carry_out(start("job_done", attempt=2))
    machines.until(machines.heard.ends)
    assert {attempt for _, attempt, *_ in machines.heard.ends()} == {2}
    assert ("job_done", 1, 0) not in machines.heard.begun()


def test_what_is_told_to_stop_is_gone_when_its_end_is_told(machines: Machines) -> None:
    machines.engine.carry_out(start("job_stays"))
    machines.until(machines.heard.begun)
    machines.engine.carry_out(stop("job_stays"))
    machines.engine.carry_out(stop("job_stays"))
    machines.until(machines.heard.ends)
    assert machines.count() == 0
    job, attempt, instance, exit_code, finished = machines.heard.ends()[0]
    assert (job, attempt, instance, finished) == ("job_stays", 1, 0, False) and exit_code != 0


def test_a_withdrawal_does_not_take_back_a_stop(machines: Machines) -> None:
    machines.engine.carry_out(start("job_stays"))
    machines.until(machines.heard.begun)
    machines.engine.carry_out(stop("job_stays"))
    machines.engine.carry_out(WithdrawNotice(job="job_stays", attempt=1, instances=(0,)))
    machines.until(machines.heard.ends)
    assert machines.count() == 0


def test_a_program_that_heeds_its_notice_leaves_by_itself(machines: Machines) -> None:
    machines.engine.carry_out(start("job_heeds"))
    machines.until(machines.heard.begun)
    machines.engine.carry_out(notice(machines, "job_heeds", 60_000))
    machines.until(machines.heard.ends)
    assert machines.heard.ends()[0] == ("job_heeds", 1, 0, 85, False)


def test_a_program_that_pays_no_heed_is_ended_after_its_deadline(machines: Machines) -> None:
    machines.engine.carry_out(start("job_stays"))
    machines.until(machines.heard.begun)
    told = notice(machines, "job_stays", 1_500)
    machines.engine.carry_out(told)
    machines.until(machines.heard.ends)
    assert machines.now_ms() >= told.deadline_ms and machines.count() == 0


def test_a_notice_that_is_withdrawn_leaves_the_program_running(machines: Machines) -> None:
    machines.engine.carry_out(start("job_stays"))
    machines.until(machines.heard.begun)
    machines.engine.carry_out(notice(machines, "job_stays", 1_500))
    machines.engine.carry_out(WithdrawNotice(job="job_stays", attempt=1, instances=(0,)))
    after_ms = machines.now_ms() + 3_000
    machines.engine.carry_out(start("job_done"))
    machines.until(lambda: machines.heard.ends() and (machines.now_ms() > after_ms or isinstance(machines, Simulated)))
    assert {job for job, *_ in machines.heard.ends()} == {"job_done"} and machines.count() >= 1


def test_commands_about_what_is_not_there_change_nothing(machines: Machines) -> None:
    machines.engine.carry_out(stop("job_stays", attempt=4))
    machines.engine.carry_out(notice(machines, "job_stays", 10))
    machines.engine.carry_out(WithdrawNotice(job="job_stays", attempt=1, instances=(0,)))
    machines.engine.carry_out(start("job_done"))
    machines.until(machines.heard.ends)
    assert {job for job, *_ in machines.heard.ends()} == {"job_done"}
