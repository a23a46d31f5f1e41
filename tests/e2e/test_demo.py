"""The demo, as a newcomer runs it, with a shorter training; and what is left when it is interrupted: nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.server import until

COMMAND = [sys.executable, "-m", "sublet", "demo", "--steps", "60", "--owner-steps", "5"]


def left(place: Path) -> list[str]:
    """Processes that the demo started, or that those started: they all inherit where temporary files go."""
    mark, found = f"TMPDIR={place}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(one.startswith(mark) for one in (process / "environ").read_bytes().split(b"\0")):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # gone meanwhile
            continue
    return found


@contextmanager
def demo(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Started as a terminal would: in a process group of its own."""
    with subprocess.Popen(
        COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(place), "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def reads_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    assert any(words in line for line in process.stdout), f"it never said: {words}"


@pytest.mark.timeout(280)
def test_the_demo_holds_what_it_claims(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "SUBLET_SERVER": "http://127.0.0.1:9", "SUBLET_USER": "eve"}
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILS" not in done.stdout and done.stdout.count("\nholds ") == 8
    assert "All of it holds." in done.stdout
    for words in ("Not in Quota", "NOTICE: leaves within 30s", "Resource Preempted", "attempt 2 is granted"):
        assert words in done.stdout
    assert ": 0 steps lost" in done.stdout and "from her submit to her start" in done.stdout
    assert left(tmp_path) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path) as process:
        reads_until(process, "ben trains on what team-a does not use")
        until(lambda: any("--out" in command and "/ben" in command for command in left(tmp_path)), "ben's training")
        os.killpg(process.pid, number)
        assert process.wait(60) == 130
    assert left(tmp_path) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.timeout(200)
def test_a_demo_whose_server_dies_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        reads_until(process, "ben trains on what team-a does not use")
        until(lambda: any("--out" in command and "/ben" in command for command in left(tmp_path)), "ben's training")
        (note,) = tmp_path.glob("sublet-demo-*/data/server.json")
        (server,) = [pid for pid in pids() if f"--data {note.parent}" in command_of(pid)]
        os.kill(server, signal.SIGKILL)
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(60) == 75
    assert "Unavailable: The server at http://127.0.0.1:" in said and f"Its logs are in {tmp_path}/sublet-demo-" in said
    assert left(tmp_path) == []


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
