"""What becomes of programs that fail, hang or are held up: real processes, real signals, a real server."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.supervisor import processes
from tests.e2e.server import Server, end, serving, start, until

PROGRAMS = Path(__file__).parent / "programs"
CLUSTER = """
nodes:
  - {name: n1, spec: demo, gpu: 4}
  - {name: n2, spec: demo, gpu: 4}
quotas:
  q: {nominal: {demo: 8}}
  other: {nominal: {demo: 0}}
verdicts:
  - {match: "the licence server is gone", is: infrastructure}
"""
PRINTER = ["python", "-c", "import time; print('begins as')\nfor i in range(9**9): print(i); time.sleep(.1)"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("here")
    (folder / "cluster.yaml").write_text(CLUSTER)
    with serving(folder / "data", folder, "--config", "cluster.yaml") as one:
        yield one


def submit(server: Server, command: str | list[str], **keys: Any) -> str:
    return server.submit(json.dumps({"quota": "q", "gpu": 1, "command": command, **keys}))


def gang(server: Server, arguments: str, instances: int, **keys: Any) -> str:
    return submit(server, f"python {PROGRAMS / 'gang.py'} {arguments}", instances=instances, **keys)


def detail(server: Server, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.run("show", job, "-o", "json").out)
    return found


def log(server: Server, job: str, instance: int = 0, *more: str) -> str:
    return server.run("logs", job, "--instance", str(instance), *more).out


def told(server: Server, job: str, kind: str) -> list[str]:
    items = json.loads(server.run("events", "--job", job, "-o", "json").out)["items"]
    return [item["text"] for item in items if item["type"] == kind]


def directory(server: Server, job: str, attempt: int, instance: int) -> Path:
    return server.data / "instances" / job / str(attempt) / str(instance)


def pids(server: Server, job: str, instance: int, attempt: int = 1) -> list[int]:
    """The program's own processes, its keeper not among them."""
    place = directory(server, job, attempt, instance)
    files = [place / "keeper.json", place / "start.json"]
    until(lambda: all(file.exists() for file in files), "the program")
    keeper, begun = (json.loads(file.read_text()) for file in files)
    return [pid for pid in processes.members(keeper["pid"], begun["mark"], begun["cgroup"]) if pid != keeper["pid"]]


def trainer(server: Server, job: str, instance: int) -> int:
    """The process that trains: it says its pid."""
    said = until(lambda: re.search(r"begins behind step \d+ as (\d+)", log(server, job, instance)), "its first line")
    return int(said[1])


def steps_of(server: Server, job: str) -> int:
    return int(detail(server, job)["checkpoint_step"] or 0)


# ---- gangs


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gang_that_loses_a_rank_starts_again_whole_and_goes_on_where_it_was(server: Server, ranks: int) -> None:
    job = gang(server, "120", ranks)
    victim = trainer(server, job, ranks - 1)
    until(lambda: steps_of(server, job) >= 20, "step 20")
    os.kill(victim, signal.SIGKILL)
    done = server.reaches(job, "succeeded", "failed")
    assert (done["state"], done["preemptions"]) == ("succeeded", 0)
    restart, *more = detail(server, job)["restarts"]
    assert not more, (more, *(log(server, job, instance) for instance in range(ranks)))
    assert (restart["level"], restart["instance"], restart["cause"]) == ("job", ranks - 1, "infrastructure")
    assert restart["evidence"] == "exit code 137: killed by SIGKILL from outside" and restart["seconds"] is not None
    logs = [log(server, job, instance) for instance in range(ranks)]
    begun = [int(step) for step in re.findall(r"begins behind step (\d+)", "".join(logs))]
    assert begun.count(0) == ranks and len(begun) == 2 * ranks, "both attempts began whole"
    resumed = {step for step in begun if step}
    assert len(resumed) == 1 and resumed.pop() >= 20, "all of the second attempt from one checkpoint"
    expected = 0.0
    for step in range(1, 121):
        expected = expected * 0.5 + float(sum(step * (rank + 1) for rank in range(ranks)))
    for rank, text in enumerate(logs):
        assert f"rank {rank} ends with {expected!r}" in text
    ports = {json.loads((directory(server, job, 2, i) / "start.json").read_text())["port"] for i in range(ranks)}
    assert len(ports) == 1, "one rendezvous for all"
    first_end = max(
        json.loads((directory(server, job, 1, i) / "end.json").read_text())["ended_ms"] for i in range(ranks)
    )
    begin = min((directory(server, job, 2, i) / "keeper.json").stat().st_mtime_ns // 1_000_000 for i in range(ranks))
    assert begin >= first_end, "nobody starts before all have ended"


def test_of_an_asynchronous_job_only_the_failed_instance_starts_again(server: Server) -> None:
    flag = server.folder / "go"
    command = f'echo "$SUBLET_INSTANCE begins as $$"; until [ -e {flag} ]; do sleep 0.05; done'
    job = submit(server, command, instances=3, fault_tolerance={"mode": "async"})
    before = [until(lambda i=i: pids(server, job, i), "its processes") for i in range(3)]
    os.kill(before[1][0], signal.SIGKILL)
    until(lambda: log(server, job, 1).count("begins as") == 2, "its second begin")
    assert [pids(server, job, i)[0] for i in (0, 2)] == [before[0][0], before[2][0]], "the others never heard of it"
    flag.touch()
    assert server.reaches(job, "succeeded", "failed")["state"] == "succeeded"
    (restart,) = detail(server, job)["restarts"]
    assert (restart["level"], restart["instance"], restart["attempt"]) == ("instance", 1, 1)
    assert [log(server, job, i).count("begins as") for i in range(3)] == [1, 2, 1]


@pytest.mark.parametrize(("launcher", "ranks"), [("none", 2), ("torchrun", 4)])
def test_all_ranks_leave_behind_the_same_step_when_the_owner_comes(server: Server, launcher: str, ranks: int) -> None:
    command = f"{'python ' if launcher == 'none' else ''}{PROGRAMS / 'gang.py'} 100000"
    keys = {"idle": "only", "gpu": ranks // 2, "instances": 2, "launcher": launcher, "command": command}
    job = server.submit(json.dumps({"quota": "other", **keys}))
    until(lambda: steps_of(server, job) >= 5, "step 5")
    owner = submit(server, "true", gpu=4, instances=2)
    assert server.reaches(owner, "succeeded", "failed")["state"] == "succeeded"
    text = "".join(log(server, job, instance, "--attempt", "1") for instance in range(2))
    left = re.findall(r"rank (\d) leaves behind step (\d+)", text)
    assert sorted(rank for rank, _ in left) == [str(rank) for rank in range(ranks)]
    assert len({step for _, step in left}) == 1
    view = server.job(job)
    assert (view["preemptions"], view["restarts"]) == (1, 0), "a preemption spends no budget"
    server.run("stop", job)


def test_the_grace_ends_early_when_the_checkpoint_library_says_that_all_is_saved(server: Server) -> None:
    keys = {"idle": "only", "gpu": 4, "fault_tolerance": {"grace": "60s"}}
    job = server.submit(json.dumps({"quota": "other", "command": f"python {PROGRAMS / 'saver.py'}", **keys}))
    until(lambda: "step 3" in log(server, job), "its steps")
    owner = submit(server, "true", gpu=4, instances=2)
    server.reaches(owner, "succeeded")
    names = ("notice.json", "notice.json.safe", "end.json")
    notice, safe, ended = (json.loads((directory(server, job, 1, 0) / name).read_text()) for name in names)
    assert notice["given_ms"] <= safe["at_ms"] <= ended["ended_ms"] < notice["deadline_ms"] - 10_000
    assert safe["fresh"] and ended["verdict"] == ""
    assert f"step {safe['step']}\n" in log(server, job, 0, "--attempt", "1"), "it is a step that was made"
    view = server.job(job)
    assert (view["preemptions"], view["restarts"]) == (1, 0)
    resumed = until(lambda: re.search(r"begins behind step ([1-9]\d*), weight (\S+)", log(server, job)), "attempt 2")
    assert float(resumed[2]) == int(resumed[1]), "what was saved is what the step had made"
    server.run("stop", job)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
def test_mpi_runs_one_rank_a_gpu_each_in_its_own_instance(server: Server) -> None:
    command = (
        'echo "rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE in $SUBLET_INSTANCE sees $CUDA_VISIBLE_DEVICES"'
    )
    job = submit(server, command, instances=2, gpu=2, launcher="mpi")
    assert server.reaches(job, "succeeded", "failed")["state"] == "succeeded", log(server, job)
    said = sorted(re.findall(r"rank (\d) of 4 in (\d) sees ([0-9,]+)", log(server, job)))
    assert [(rank, instance) for rank, instance, _ in said] == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
    failing = submit(server, "exit $OMPI_COMM_WORLD_RANK", instances=2, launcher="mpi",
                     fault_tolerance={"policy": "never"})  # fmt: skip
    assert server.reaches(failing, "succeeded", "failed")["state"] == "failed"


def test_variables_as_pai_sets_them(server: Server) -> None:
    job = submit(server, "env | sort", instances=2, gpu=2, compat="dlc")
    server.reaches(job, "succeeded")
    found = [dict(line.split("=", 1) for line in log(server, job, i).splitlines() if "=" in line) for i in range(2)]
    assert [(one["RANK"], one["WORLD_SIZE"], one["NPROC_PER_NODE"]) for one in found] == [
        ("0", "2", "2"),
        ("1", "2", "2"),
    ]
    ports = {one["MASTER_PORT"] for one in found}
    with socket.socket() as probe:
        is_free = probe.connect_ex(("127.0.0.1", 23456)) != 0
    assert len(ports) == 1 and (ports == {"23456"} or not is_free)


# ---- hangs


def test_a_collective_that_one_rank_does_not_come_to_is_a_hang_and_that_rank_is_named(server: Server) -> None:
    hang = {"action": "restart", "after": "4s"}
    job = gang(server, "60 absent 20", 2, fault_tolerance={"hang": hang})
    done = server.reaches(job, "succeeded", "failed")
    assert done["state"] == "succeeded"
    (restart,) = detail(server, job)["restarts"]
    assert (restart["cause"], restart["instance"], restart["phase"]) == ("hang", 1, "step")
    assert re.search(r"no output and no step for .* in phase step; .*somewhere_else", restart["evidence"])
    assert "gang.py:" in restart["evidence"], "with its line"
    assert any("somewhere_else" in text for text in told(server, job, "diagnosed"))
    assert "--- sublet: no output and no step" in log(server, job, 0), "the merged stacks stand in the log"


def test_a_stopped_process_is_reported_and_nothing_is_done_and_it_is_over_when_it_goes_on(server: Server) -> None:
    job = submit(server, PRINTER, fault_tolerance={"hang": {"after": "2s"}})
    until(lambda: "3" in log(server, job), "its output")
    (program,) = pids(server, job, 0)
    os.kill(program, signal.SIGSTOP)
    try:
        said = until(lambda: (why := server.run("why", job).out) and "no output" in why and why, "the hang in why")
        assert server.job(job)["state"] == "running" and "hang" in said
    finally:
        os.kill(program, signal.SIGCONT)
    until(lambda: "no output" not in server.run("why", job).out, "the end of the hang")
    assert pids(server, job, 0) == [program]
    server.run("stop", job)


def test_of_an_asynchronous_job_the_instance_that_hangs_starts_again_alone(server: Server) -> None:
    tolerance = {"mode": "async", "hang": {"action": "restart", "after": "2s"}}
    job = submit(server, PRINTER, instances=3, fault_tolerance=tolerance)
    before = [until(lambda i=i: pids(server, job, i), "its processes")[0] for i in range(3)]
    until(lambda: "\n3\n" in log(server, job, 1), "its output")
    os.kill(before[1], signal.SIGSTOP)
    until(lambda: log(server, job, 1).count("begins as") == 2, "its second begin")
    assert [pids(server, job, i)[0] for i in (0, 2)] == [before[0], before[2]]
    (restart,) = detail(server, job)["restarts"]
    assert (restart["level"], restart["instance"], restart["cause"]) == ("instance", 1, "hang")
    server.run("stop", job)


def test_an_instance_that_does_not_end_when_the_others_are_done(server: Server) -> None:
    tolerance = {"exit_hang": "8s", "hang": {"action": "restart"}}
    job = gang(server, "10 stay 10", 2, fault_tolerance=tolerance)
    assert server.reaches(job, "succeeded", "failed")["state"] == "succeeded"
    (restart,) = detail(server, job)["restarts"]
    assert (restart["cause"], restart["phase"]) == ("hang", "exit") and "is done since" in restart["evidence"]


def test_the_rank_that_holds_the_others_up_is_named(server: Server) -> None:
    job = gang(server, "100000 slow 1", 3)
    said = until(lambda: (why := server.run("why", job).out) and "ms for a step" in why and why, "the slow one in why")
    assert "instance 1" in said
    assert any("instance 1" in text for text in told(server, job, "diagnosed"))
    server.run("stop", job)


# ---- verdicts and policies


def has_memory_limits() -> bool:
    group = processes.make_cgroup("sublet-test-memory")
    limited = processes.limit_memory(group, "sublet-test-memory", 1 << 26)
    for one in {group, limited} - {""}:
        processes.remove_cgroup(one)
    return bool(limited)


@pytest.mark.skipif(not has_memory_limits(), reason="no cgroup with a memory limit can be made here")
def test_out_of_memory_is_seen_for_what_it_is(server: Server) -> None:
    keys = {"quota": "q", "resources": {"gpu": 1, "memory": "64Mi"}, "fault_tolerance": {"max_restarts": 0}}
    job = server.submit(json.dumps(keys | {"command": ["python", "-c", "x = bytearray(1 << 30); print(len(x))"]}))
    done = server.reaches(job, "failed", "succeeded")
    assert done["state"] == "failed"
    assert "the instance's memory limit was reached" in detail(server, job)["attempts"][0]["evidence"]


CASES: list[tuple[str, dict[str, Any], int, str]] = [
    ("python -c 'import no_such_module'", {}, 1, "a restart would not help: ModuleNotFoundError"),
    ("python -c 'import no_such_module'", {"policy": "exit-code"}, 1, "a restart would not help: ModuleNotFoundError"),
    ("python -c 'import no_such_module'", {"policy": "on-failure", "max_restarts": 1}, 2, "failed 2 times since"),
    ("no-such-command", {}, 1, "a restart would not help"),
    ("echo RuntimeError: odd; exit 3", {"policy": "exit-code"}, 1, "exit code 3 is not retried under the policy"),
    ("echo RuntimeError: odd; exit 3", {}, 2, "failed 2 times in the same way without a new checkpoint"),
    ("echo RuntimeError: odd $RANDOM; kill -SEGV $$", {"policy": "exit-code", "max_restarts": 1}, 2, "failed 2 times"),
    ("echo the licence server is gone; exit 1", {"max_restarts": 1}, 2, "failed 2 times since its last new checkpoint"),
    ("exit 7", {"policy": "never"}, 1, "fault tolerance is off"),
    ("exit 9", {"verdicts": [{"exit_code": 9, "is": "user_error"}]}, 1, "a restart would not help: exit code 9"),
    ("exit 1", {"aimaster": "--max-num-of-job-restart=1 --fault-tolerant-policy OnFailure"}, 2, "failed 2 times since"),
]


def test_each_policy_does_what_it_says(server: Server) -> None:
    """All at once, for they wait for pauses most of the time."""
    jobs = [
        submit(server, command, fault_tolerance={"backoff": {"first": "100ms"}, **tolerance})
        for command, tolerance, _, _ in CASES
    ]
    for job, (command, _, attempts, why) in zip(jobs, CASES, strict=True):
        server.reaches(job, "failed", "succeeded")
        said = server.run("why", job).out
        assert why in said and len(detail(server, job)["attempts"]) == attempts, (command, said)


def test_asking_for_another_start_is_no_failure_and_time_is_limited(server: Server) -> None:
    again = submit(server, 'test "$SUBLET_ATTEMPT" -gt 5 || exit 75', fault_tolerance={"max_restarts": 0})
    long = submit(server, "sleep 600", max_time="1s")
    done = server.reaches(again, "succeeded", "failed")
    assert (done["state"], done["restarts"], len(done["attempts"])) == ("succeeded", 0, 6)
    assert server.reaches(long, "failed", "succeeded")["state"] == "failed"
    assert "max_time" in server.run("why", long).out


def test_a_signal_that_comes_with_the_notice_and_a_code_of_its_own(server: Server) -> None:
    command = "trap 'echo saved; exit 17' USR1; trap 'exit 0' TERM; while :; do sleep 0.05; done"
    text = json.dumps({"quota": "other", "idle": "only", "gpu": 4, "instances": 2, "command": command,
                       "checkpoint": {"exit_code": 17},
                       "fault_tolerance": {"notice": {"signal": "SIGUSR1"}}})  # fmt: skip
    job = server.submit(text)
    server.reaches(job, "running")
    until(lambda: all(pids(server, job, i) for i in range(2)), "its processes")
    owner = submit(server, "true", gpu=4, instances=2)
    server.reaches(owner, "succeeded")
    assert "saved" in log(server, job, 0) and "saved" in log(server, job, 1)
    view = server.job(job)
    assert view["attempts"][0]["outcome"] == "preempted" and view["restarts"] == 0
    server.run("stop", job)


# ---- nobody watches


def test_training_goes_on_without_server_and_supervisor_and_all_of_it_is_told_once(tmp_path: Path) -> None:
    data, go = tmp_path / "data", tmp_path / "go"
    script = (
        "import os, time; from sublet.job import checkpointed, progress\n"
        f"for step in range(1, 9):\n    while step > 2 and not os.path.exists({str(go)!r}): time.sleep(.02)\n"
        "    progress(step, 9); checkpointed(step)\nos.kill(os.getpid(), 11)"
    )
    one = start(data, tmp_path)
    tolerance = {"policy": "never"}
    job = one.submit(
        json.dumps({"quota": "team-a", "gpu": 1, "command": ["python", "-c", script], "fault_tolerance": tolerance})
    )
    until(lambda: steps_of(one, job) == 2, "step 2")
    place = directory(one, job, 1, 0)
    end(one, signal.SIGKILL)
    processes.send(int((place / "lock").read_text()), signal.SIGKILL)
    (trainer,) = pids(one, job, 0)
    go.touch()
    until((place / "exit").exists, "its exit code")
    assert processes.start_ticks(trainer) is None and not (place / "end.json").exists(), "nobody was there to see it"
    with serving(data, tmp_path) as again:
        done = again.reaches(job, "failed", "succeeded")
        assert (done["state"], len(done["attempts"]), steps_of(again, job)) == ("failed", 1, 8)
        assert "SIGSEGV" in detail(again, job)["attempts"][0]["evidence"]
        assert len(told(again, job, "ended")) == 1


# ---- logs


def test_logs_of_five_attempts_after_a_restart_of_the_server(tmp_path: Path) -> None:
    data = tmp_path / "data"
    one = start(data, tmp_path)
    command = 'echo "needle $SUBLET_ATTEMPT"; echo hay; test "$SUBLET_ATTEMPT" -ge 5 || exit 75'
    job = one.submit(json.dumps({"quota": "team-a", "gpu": 1, "command": command}))
    one.reaches(job, "succeeded")
    end(one, signal.SIGKILL)
    with serving(data, tmp_path) as again:
        text = log(again, job)
        assert re.findall(r"needle (\d)", text) == ["1", "2", "3", "4", "5"]
        assert len(re.findall(r"(?m)^--- attempt \d", text)) == 5, "a line before each"
        found = log(again, job, 0, "--grep", "needle")
        assert found.count("needle") == 5 and "hay" not in found and "--- attempt 3" in found
        assert log(again, job, 0, "--attempt", "3") == "needle 3\nhay\n"
        silent = again.submit('{"quota": "team-a", "gpu": 1, "command": "true"}')
        again.reaches(silent, "succeeded")
        assert "It ended without any output." in again.run("logs", silent).err


def test_what_user_code_imports_needs_nothing_but_python() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import sublet.job, sublet.supervisor.watch; print('fine')"
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys._base_executable, "-I", "-S", "-c", code, str(source)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "fine\n", done.stderr
