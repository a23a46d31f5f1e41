"""The local engine with real processes: what it promises of starts, notices, stops, crashes and ends."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet.domain.effects import GiveNotice, StartGang, StopInstances, WithdrawNotice
from sublet.domain.events import CheckpointSaved, Event, InstanceBegan, InstanceEnded, NodeJoined
from sublet.domain.jobs import JobRequest, Program
from sublet.domain.leases import Lease, LeaseKind
from sublet.domain.nodes import Node
from sublet.engines.local import LocalEngine
from sublet.supervisor import processes

LIMIT_S = 30
NODES = (Node(name="n1", spec="demo", gpu=2), Node(name="n2", spec="demo", gpu=2))


class Heard:
    """An inbox that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def put(self, event: Event) -> None:
        self.events.append(event)

    def ends(self) -> list[InstanceEnded]:
        return [event for event in self.events if isinstance(event, InstanceEnded)]


class Stage:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engines: list[LocalEngine] = []
        self.open()

    def open(self, kill_after_ms: int = 30_000) -> None:
        """A new server on the same directory."""
        if self.engines:
            self.engines[-1].close()
        self.heard = Heard()
        self.engine = LocalEngine(directory=self.directory, nodes=NODES, kill_after_ms=kill_after_ms)
        self.engine.connect(self.heard)
        self.engines.append(self.engine)

    def path(self, name: str, instance: int = 0) -> Path:
        return self.directory / "job_a" / "1" / str(instance) / name

    def pid(self) -> int:
        until(lambda: self.path("keeper.json").exists())
        return int(json.loads(self.path("keeper.json").read_text())["pid"])

    def supervisor(self) -> int:
        until(lambda: self.path("lock").exists() and self.path("lock").read_text().isdigit())
        return int(self.path("lock").read_text())

    def members(self) -> list[int]:
        """All that carries the mark of an instance of this directory."""
        starts = [json.loads(path.read_text()) for path in self.directory.glob("*/*/*/start.json")]
        return [pid for start in starts for pid in processes.members(None, start["mark"], "")]

    def log(self, instance: int = 0) -> str:
        path = self.engine.log_path("job_a", 1, instance)
        return path.read_text() if path else ""

    def end(self) -> InstanceEnded:
        until(lambda: bool(self.heard.ends()))
        return self.heard.ends()[0]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path / "instances")
    yield made
    for pid in made.members():
        processes.send(pid, signal.SIGKILL)
    made.engine.close()


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit, "it did not come to hold"
        time.sleep(0.005)


def start(command: str, nodes: tuple[str, ...] = ("n1",)) -> StartGang:
    request = JobRequest(id="job_a", quota="q", name="a", sizes=(1,) * len(nodes), program=Program(command=(command,)))
    lease = Lease(kind=LeaseKind.IDLE, spec="demo", nodes=nodes, gpus=(1,) * len(nodes), granted_ms=0)
    return StartGang(job="job_a", attempt=1, lease=lease, instances=tuple(range(len(nodes))), request=request)


def notice(within_ms: int, claimant: str = "job_b") -> GiveNotice:
    deadline = time.time_ns() // 1_000_000 + within_ms
    return GiveNotice(
        job="job_a", attempt=1, instances=(0,), reason="reclaim", claimant=claimant, deadline_ms=deadline, lost_gpu_ms=0
    )


STOP = StopInstances(job="job_a", attempt=1, instances=(0,), reason="stopped")


def is_alive(pid: int) -> bool:
    return processes.start_ticks(pid) is not None


def test_nodes_are_told_and_a_program_finds_its_environment(stage: Stage) -> None:
    stage.engine.carry_out(start("env"))
    assert stage.end().exit_code == 0 and stage.end().finished
    assert [e.node.name for e in stage.heard.events if isinstance(e, NodeJoined)] == ["n1", "n2"]
    assert any(isinstance(event, InstanceBegan) for event in stage.heard.events)
    found = dict(line.partition("=")[::2] for line in stage.log().splitlines())
    assert found["SUBLET_JOB_ID"] == "job_a" and found["SUBLET_ATTEMPT"] == "1"
    assert found["SUBLET_INSTANCE"] == "0" and found["SUBLET_INSTANCES"] == "1"
    assert found["SUBLET_IN_QUOTA"] == "0" and found["SUBLET_GRACE_SECONDS"] == "30"
    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert Path(found["SUBLET_CHECKPOINT_DIR"]).is_dir()
    assert Path(found["SUBLET_NOTICE_FILE"]).parent.is_dir()
    assert not [key for key in found if key.startswith("SUBLET_KEEPER")]


def test_a_gang_shares_a_free_port_and_no_device(stage: Stage) -> None:
    stage.engine.carry_out(
        start("echo $MASTER_ADDR $MASTER_PORT $RANK $WORLD_SIZE $CUDA_VISIBLE_DEVICES", ("n1", "n1"))
    )
    until(lambda: len(stage.heard.ends()) == 2)
    first, second = stage.log(0).split(), stage.log(1).split()
    assert first[:2] == second[:2] and first[0] == "127.0.0.1" and int(first[1]) > 1024
    assert (first[2:], second[2:]) == (["0", "2", "0"], ["1", "2", "1"])


def test_an_effect_that_is_repeated_changes_nothing(stage: Stage) -> None:
    effect = start("echo once; sleep 60")
    for _ in range(3):
        stage.engine.carry_out(effect)
    pid = stage.pid()
    stage.engine.carry_out(effect)
    stage.engine.carry_out(STOP)
    stage.engine.carry_out(STOP)
    assert stage.end().exit_code == 143 and not stage.end().finished
    assert stage.log().count("once") == 1 and not is_alive(pid)
    stage.engine.acknowledge(stage.end())
    stage.engine.carry_out(effect)
    assert stage.log().count("once") == 1


def test_a_command_that_does_not_exist_fails_in_the_words_of_the_shell(stage: Stage) -> None:
    stage.engine.carry_out(start("no-such-program --now"))
    assert stage.end().exit_code == 127
    assert "no-such-program" in stage.log() and "not found" in stage.log()


def test_a_program_that_hears_its_notice_leaves_by_itself(stage: Stage) -> None:
    stage.engine.carry_out(start('until [ -e "$SUBLET_NOTICE_FILE" ]; do sleep 0.02; done; exit 85'))
    stage.pid()
    stage.engine.carry_out(notice(60_000))
    assert stage.end().exit_code == 85 and not stage.end().finished


def test_exit_0_after_a_notice_alone_does_not_mean_finished(stage: Stage) -> None:
    stage.engine.carry_out(start('until [ -e "$SUBLET_NOTICE_FILE" ]; do sleep 0.02; done; exit 0'))
    stage.pid()
    stage.engine.carry_out(notice(60_000))
    assert stage.end().exit_code == 0 and not stage.end().finished


def test_a_program_may_say_that_it_is_finished(stage: Stage) -> None:
    script = "from sublet.job import notice, checkpointed, finished\\nimport time\\n"
    script += "checkpointed(12)\\nwhile not notice.received(): time.sleep(.02)\\nfinished()"
    stage.engine.carry_out(start(f"printf '{script}' | {sys.executable} -"))
    until(lambda: any(isinstance(event, CheckpointSaved) and event.step == 12 for event in stage.heard.events))
    stage.engine.carry_out(notice(60_000))
    assert stage.end().exit_code == 0 and stage.end().finished


def test_at_the_deadline_the_leader_alone_is_told_to_end(stage: Stage) -> None:
    """The leader's SIGTERM handler runs while its worker still lives."""
    script = "sh -c 'trap \"echo worker was told\" TERM; while :; do sleep 0.05; done' & worker=$!; "
    script += "trap 'kill -0 $worker && echo leader saves; kill -9 $worker; exit 85' TERM; "
    script += "echo up; while :; do sleep 0.05; done"
    stage.engine.carry_out(start(script))
    until(lambda: "up" in stage.log())
    stage.engine.carry_out(notice(0))
    assert stage.end().exit_code == 85
    assert "leader saves" in stage.log() and "worker was told" not in stage.log()


@pytest.mark.parametrize("line", ["{p} {s}", "cd . && {p} {s} | tee {s}.log", "export A=1; {p} {s} 2>&1"])
def test_a_program_behind_a_shell_is_told_to_end_and_not_the_shell(stage: Stage, line: str, tmp_path: Path) -> None:
    """A shell passes no signal on; the program's own handler must run, and its exit code count."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\n"
        "def save(*_):\n    print('saved', flush=True)\n    sys.exit(85)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\nwhile True: time.sleep(0.05)\n"
    )
    stage.engine.carry_out(start(line.format(p=sys.executable, s=script)))
    until(lambda: "up" in stage.log())
    stage.engine.carry_out(notice(0))
    assert stage.end().exit_code in ((0,) if "tee" in line else (85,))
    assert "saved" in stage.log()


def test_a_shell_that_goes_on_with_its_next_command_is_told_to_end_too(stage: Stage) -> None:
    stage.engine.carry_out(start("echo up; while :; do sleep 0.2; done"))
    until(lambda: "up" in stage.log())
    stage.engine.carry_out(STOP)
    assert stage.end().exit_code == 143, "not killed at the last"


def test_what_is_tidied_up_behind_a_program_that_was_told_to_end_may_take_a_moment(stage: Stage) -> None:
    stage.engine.carry_out(start("echo up; sleep 300; sleep 0.5; echo tidy; exit 4"))
    until(lambda: "up" in stage.log())
    stage.engine.carry_out(STOP)
    assert stage.end().exit_code == 4 and "tidy" in stage.log()


def test_what_ignores_the_end_is_killed_with_all_its_children(stage: Stage) -> None:
    stage.open(kill_after_ms=200)
    script = "trap '' TERM; (setsid sh -c 'echo child $$; exec sleep 300') & sleep 300; sleep 300"
    stage.engine.carry_out(start(script))
    until(lambda: "child" in stage.log())
    child = int(stage.log().split()[1])
    stage.engine.carry_out(notice(0))
    assert stage.end().exit_code == 137
    assert not is_alive(child) and not stage.members()


def test_a_notice_that_is_withdrawn_leaves_the_program_alone(stage: Stage) -> None:
    stage.engine.carry_out(
        start('while [ ! -e "$SUBLET_CHECKPOINT_DIR/go" ]; do sleep 0.02; done; ls "$SUBLET_NOTICE_FILE"')
    )
    stage.pid()
    stage.engine.carry_out(notice(60_000))
    assert stage.path("notice.json").exists()
    stage.engine.carry_out(WithdrawNotice(job="job_a", attempt=1, instances=(0,)))
    assert not stage.path("notice.json").exists()
    (stage.directory / "job_a" / "checkpoints" / "go").touch()
    assert stage.end().exit_code != 0 and "No such file" in stage.log()


def test_a_victim_that_has_not_started_never_starts(stage: Stage) -> None:
    directory = stage.path("").resolve()
    directory.mkdir(parents=True)
    (directory / "stop.json").write_text(json.dumps({"reason": "stopped", "at_ms": 0}))
    stage.engine.carry_out(start("echo started"))
    assert stage.end().exit_code == 143
    assert "started" not in stage.log()


def test_the_log_of_a_program_that_reports_all_the_time_is_bounded_too(stage: Stage) -> None:
    stage.engine.keep_log_bytes = 4096, 65_536
    script = (
        "import itertools, time\\nfrom sublet.job import checkpointed\\n"
        "for step in itertools.count():\\n    print(step, 999 * chr(46)); checkpointed(step); time.sleep(.01)"
    )
    stage.engine.carry_out(start(f"printf '{script}' | {sys.executable} -"))
    until(stage.path("log.cut").exists)
    assert stage.log().startswith("0 ..."), "its first part is there"
    stage.engine.carry_out(STOP)
    stage.end()


def test_left_over_children_are_gone_before_the_end_is_told(stage: Stage) -> None:
    stage.engine.carry_out(start("setsid sleep 300 & echo $!; exit 3"))
    assert stage.end().exit_code == 3
    assert not stage.members()


def test_a_new_server_finds_what_runs_and_tells_what_ended_meanwhile_until_it_is_known(stage: Stage) -> None:
    stage.engine.carry_out(start('while [ ! -e "$SUBLET_CHECKPOINT_DIR/go" ]; do sleep 0.02; done; exit 7'))
    pid = stage.pid()
    stage.open()
    assert is_alive(pid) and not stage.heard.ends()
    stage.engine.close()
    (stage.directory / "job_a" / "checkpoints" / "go").touch()
    until(lambda: stage.path("end.json").exists())
    for _ in range(2):
        stage.open()
        assert stage.end().exit_code == 7
    stage.engine.acknowledge(stage.end())
    stage.open()
    assert not stage.heard.ends()


def test_a_new_server_leaves_the_checkpoints_alone(stage: Stage) -> None:
    stage.engine.carry_out(start("mkdir $SUBLET_CHECKPOINT_DIR/step-10; touch $SUBLET_CHECKPOINT_DIR/step-10/COMMIT"))
    assert stage.end().exit_code == 0
    stage.open()
    assert (stage.directory / "job_a" / "checkpoints" / "step-10" / "COMMIT").exists()


def test_a_supervisor_that_is_killed_is_replaced_and_the_exit_code_survives(stage: Stage) -> None:
    stage.engine.carry_out(start('while [ ! -e "$SUBLET_CHECKPOINT_DIR/go" ]; do sleep 0.02; done; exit 9'))
    pid, first = stage.pid(), stage.supervisor()
    os.kill(first, signal.SIGKILL)
    until(lambda: stage.supervisor() != first)
    assert is_alive(pid)
    (stage.directory / "job_a" / "checkpoints" / "go").touch()
    assert stage.end().exit_code == 9


def test_the_exit_code_survives_when_supervisor_and_program_end_together(stage: Stage) -> None:
    stage.engine.carry_out(start("sleep 300"))
    pid = stage.pid()
    until(lambda: processes.child_of(pid) is not None)
    leader = processes.child_of(pid)
    os.kill(stage.supervisor(), signal.SIGKILL)
    assert leader is not None
    os.kill(leader, signal.SIGKILL)
    assert stage.end().exit_code == 137


def test_keeper_and_program_killed_from_outside_are_told_as_such(stage: Stage) -> None:
    stage.engine.carry_out(start("sleep 300"))
    os.kill(stage.pid(), signal.SIGKILL)
    assert stage.end().exit_code == 137
    assert not stage.members()


def test_a_working_directory_that_is_not_there_is_a_failure_that_says_so(stage: Stage) -> None:
    effect = start("true")
    program = Program(command=("true",), workdir="/no/such/place")
    request = JobRequest(id="job_a", quota="q", sizes=(1,), program=program)
    stage.engine.carry_out(
        StartGang(job="job_a", attempt=1, lease=effect.lease, instances=effect.instances, request=request)
    )
    assert stage.end().exit_code == 126
    assert "/no/such/place" in stage.log()
