"""What a newcomer does by hand, with a real server, real processes and the real command line."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Done, Server, end, environment, serving, start, sublet, until

HELLO = "name: hello\nquota: team-a\ngpu: 1\ncommand: echo hello from $SUBLET_JOB_ID\n"
SLEEPER = "name: sleeper\nquota: {quota}\nidle: {idle}\ngpu: {gpu}\ncommand: exec sleep 600\n"
SLEEPER += "fault_tolerance: {{grace: 1s}}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("folder")) as running:
        yield running


def is_clean(done: Done, code: int) -> bool:
    """One clear sentence or two, and no traceback."""
    return done.code == code and done.out == "" and "Traceback" not in done.err and len(done.err.splitlines()) <= 2


def test_submit_logs_and_the_end(server: Server) -> None:
    job = server.submit(HELLO)
    assert server.run("logs", "-f", job).out == f"hello from {job}\n"
    view = server.reaches(job, "succeeded")
    assert (view["note"], view["restarts"], view["preemptions"]) == ("exit code 0", 0, 0)
    told = server.run("events", "--job", job).out
    positions = [told.index(word) for word in ("queued", "granted", "began", "ended", "succeeded")]
    assert positions == sorted(positions)


def test_lend_take_back_and_stop(server: Server) -> None:
    """A borrower takes all, the owner takes hers back, and the borrower waits with his first submit time."""
    borrowers = [server.submit(SLEEPER.format(quota="team-b", idle="only", gpu=2)) for _ in range(2)]
    for job in borrowers:
        server.reaches(job, "running")
    rows = {line.split()[0]: line for line in server.run("ls").out.splitlines()}
    assert all("Not in Quota" in rows[job] for job in borrowers)
    assert {view["nodes"] for view in server.jobs() if view["state"] == "running"} == {None}
    owner = server.submit(SLEEPER.format(quota="team-a", idle="never", gpu=2))
    assert server.reaches(owner, "running")["idle_resources"] == "in_quota"
    (victim,) = (view for view in server.jobs() if view["id"] in borrowers and view["preemptions"])
    assert (victim["state"], victim["restarts"]) == ("waiting", 0)
    (attempt,) = server.job(victim["id"])["attempts"]
    assert (attempt["outcome"], attempt["claimant"]) == ("preempted", owner)
    why = server.run("why", victim["id"])
    assert why.code == 0 and "0 of 4 demo GPU idle, needs 2" in why.out
    table = server.run("quota", "ls").out.splitlines()
    assert [line.split()[1:5] for line in table[1:3]] == [["2", "2", "0", "0"], ["2", "0", "2", "0"]]
    assert server.run("stop", owner, *borrowers).code == 0
    for job in (owner, *borrowers):
        server.reaches(job, "stopped")


def test_events_go_on(server: Server) -> None:
    command = [sys.executable, "-m", "sublet", "events", "-f", "-o", "jsonl"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(server.data)) as follower:
        assert follower.stdout is not None
        job = server.submit(HELLO)
        told = (json.loads(line) for line in follower.stdout)
        kinds = []
        for view in told:
            if view["job"] == job:
                kinds.append(view["type"])
            if kinds[-1:] == ["succeeded"]:
                break
        follower.terminate()
    assert kinds[:3] == ["queued", "granted", "began"]


def test_a_command_that_does_not_exist(server: Server) -> None:
    job = server.submit("quota: team-a\ngpu: 1\ncommand: no-such-program --fast\n")
    view = server.reaches(job, "failed")
    assert "exit code 127" in view["note"]
    assert "no-such-program: not found" in server.run("logs", job).out


def test_drain_and_resume(server: Server) -> None:
    assert server.run("node", "drain", "n1").out == "n1 is draining\n"
    assert server.run("node", "ls").out.splitlines()[1].split()[2] == "Draining"
    assert server.run("node", "resume", "n1").out == "n1 is up\n"


BAD = [
    (
        "gpu: 1\nquota: team-a\ncommand: x\ngpus: 2\n",
        "gpus is not a known key. The nearest known key is gpu.   (job.yaml:4)\nWrite gpu instead.\n",
    ),
    ("gpu: 0\nquota: team-a\ncommand: x\n", "gpu is 0. It must be 1 to 1,024.   (job.yaml:1)\n"),
    ("gpu: -2\nquota: team-a\ncommand: x\n", "gpu is -2. It must be 1 to 1,024.   (job.yaml:1)\n"),
    (f"gpu: {10**20}\nquota: team-a\ncommand: x\n", f"gpu is {10**20}. It must be 1 to 1,024.   (job.yaml:1)\n"),
    (
        "quota: team-a\nresources:\n  gpu: 3\ncommand: x\n",
        "resources.gpu is 3, but no node of spec demo has more than 2.   (job.yaml:3)\n"
        "Choose another spec: sublet node ls.\n",
    ),
    ("gpu: 1\nquota: team-x\ncommand: x\n", "There is no quota team-x.   (job.yaml:2)\nDid you mean "),
    (
        "gpu: 1\nquota: team-a\ncommand: ''\n",
        "command is empty. There is nothing to run.   (job.yaml:3)\nWrite command: python train.py\n",
    ),
    ("gpu: [1\n", "The file is no YAML mapping. The parser says: "),
]


@pytest.mark.parametrize(("text", "said"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_and_nothing_is_stored(server: Server, text: str, said: str) -> None:
    before = server.run("ls", "--all-states", "-o", "name").out
    (server.folder / "job.yaml").write_text(text)
    done = server.run("submit", "job.yaml")
    assert is_clean(done, 2), done
    assert done.err.startswith(f"Refused: {said}")
    assert server.run("ls", "--all-states", "-o", "name").out == before


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = sublet("up", "--port", port, "--data", str(tmp_path / "d"), data=tmp_path)
    assert is_clean(done, 75), done
    assert done.err.startswith(f"Unavailable: The server cannot listen on 127.0.0.1:{port}. The system says: Address")


def test_a_second_server_on_the_same_directory(server: Server) -> None:
    done = sublet("up", "--port", "0", "--data", str(server.data), data=server.data)
    assert is_clean(done, 75), done
    assert done.err.startswith(f"Unavailable: Another server works on {server.data} (process {server.process.pid}).")
    assert server.run("ls").code == 0


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = sublet("up", "--port", "0", "--data", str(tmp_path / "file" / "data"), data=tmp_path)
    assert is_clean(done, 75), done
    assert done.err.startswith(f"Unavailable: The data directory {tmp_path}/file/data cannot be written. The system")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "Refused: The port is 99999. It must be 0 to 65,535.\n"),
        (["--config", "missing.yaml"], "Refused: missing.yaml cannot be read."),
        (
            ["--config", "bad.yaml"],
            "Refused: nodez is not a known key. The nearest known key is nodes.   (bad",
        ),
        (["--config", "tree.yaml"], "Refused: No node is of spec demi. Did you mean demo?\n"),
    ],
)
def test_a_wrong_start_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "bad.yaml").write_text("nodez: []\n")
    (tmp_path / "tree.yaml").write_text("nodes: [{name: n1, spec: demo, gpu: 1}]\nquotas: {a: {nominal: {demi: 1}}}\n")
    done = sublet("up", "--data", str(tmp_path / "d"), *arguments, data=tmp_path, cwd=tmp_path)
    assert is_clean(done, 2), done
    assert done.err.replace("\nDid you", " Did you").startswith(said)


def test_a_server_without_nodes_is_refused(tmp_path: Path) -> None:
    done = sublet("server", "--port", "0", "--data", str(tmp_path), data=tmp_path)
    assert is_clean(done, 2), done
    assert done.err.startswith("Refused: There are no nodes. Neither a file nor the directory names any.\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_jobs_go_on_without_the_server(tmp_path: Path, number: signal.Signals, code: int) -> None:
    gate = tmp_path / "gate"
    server = start(tmp_path / "data", tmp_path)
    job = server.submit(
        f"quota: team-a\ngpu: 1\ncommand: echo before; while [ ! -e {gate} ]; do sleep 0.05; done; echo after; exit 3\n"
        "fault_tolerance: {policy: never}\n"
    )
    server.reaches(job, "running")
    assert end(server, number) == code
    if number is not signal.SIGKILL:
        assert not (server.data / "server.json").exists()
        assert is_clean(server.run("ls"), 75)
    gate.touch()
    with serving(tmp_path / "data", tmp_path) as again:
        view = again.reaches(job, "failed")
        assert (view["attempt"], view["note"]) == (1, "fault tolerance is off · exit code 3")
        assert again.run("logs", job).out == "before\nafter\n"
        ends = [line for line in again.run("events", "--job", job).out.splitlines() if "ended with exit code 3" in line]
        assert len(ends) == 1


def test_a_config_file_and_its_change(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "tenant: lab\nrules: {grace: 5s}\nnodes:\n- {name: a, spec: x, gpu: 4}\n- {name: b, spec: x, gpu: 4}\n"
        "quotas:\n  p: {nominal: {x: 8}, owner: mei}\n  p/c: {nominal: {x: 4}}\n"
    )
    with serving(tmp_path / "data", tmp_path, "--config", str(config)) as server:
        assert [line.split()[:2] for line in server.run("quota", "ls").out.splitlines()[1:]] == [
            ["p", "8"],
            ["p/c", "4"],
            ["sum", "8"],
        ]
        assert "grace           5s" in server.run("show", server.submit(HELLO.replace("team-a", "p/c"))).out
    config.write_text("tenant: lab\nnodes: [{name: a, spec: x, gpu: 4}]\nquotas: {p: {nominal: {x: 6}}}\n")
    with serving(tmp_path / "data", tmp_path, "--config", str(config)) as server:
        until(lambda: server.run("node", "ls", "-o", "name").out == "a\n", "the removal of b")
        until(lambda: server.run("quota", "ls").out.splitlines()[1].split()[1] == "6", "the change of p")
    with serving(tmp_path / "data", tmp_path) as server:
        assert server.run("node", "ls", "-o", "name").out == "a\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB; only root may make one."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("no file system of its own can be made here")
    try:
        yield place
    finally:
        until(lambda: subprocess.run(["umount", str(place)], capture_output=True).returncode == 0, "the unmount", 20)


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return filler


def test_a_full_disk_at_the_start(small_disk: Path) -> None:
    fill(small_disk)
    done = sublet("up", "--port", "0", "--data", str(small_disk / "d"), data=small_disk)
    assert is_clean(done, 75), done
    assert "No space left on device" in done.err or "disk" in done.err


def test_a_disk_that_fills_and_is_freed(small_disk: Path, tmp_path: Path) -> None:
    """Whoever asks is told; what was asked is done once there is room, and nothing is harmed."""
    with serving(small_disk / "d", tmp_path) as server:
        kept = server.submit(HELLO)
        server.reaches(kept, "succeeded")
        filler = fill(small_disk)
        (tmp_path / "job.yaml").write_text(HELLO + f"env: {{A: {'x' * 60_000}}}\n")
        done = server.run("submit", "job.yaml")
        assert is_clean(done, 75), done
        assert "disk is full" in done.err and "look with sublet ls before you ask again" in done.err
        assert [view["id"] for view in server.jobs()] == [kept]
        filler.unlink()
        until(lambda: len(server.jobs()) == 2, "the job that was asked for")
        server.reaches(server.jobs()[0]["id"], "succeeded")
        assert server.job(kept)["state"] == "succeeded"


def test_the_name_of_the_user_is_the_one_logged_in(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sublet", "submit", "--quota", "team-a", "--gpu", "1", "-o", "json", "--", "true"],
        capture_output=True,
        env=environment(server.data) | {"SUBLET_USER": "", "LOGNAME": "jürgen", "USER": "jürgen"},
        cwd=os.sep,
        check=True,
    )
    assert json.loads(done.stdout)["user"] == "jürgen"
