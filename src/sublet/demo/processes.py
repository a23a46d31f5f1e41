"""The demo's own processes: a server, a training beside it. Rule: whatever ends the demo, nothing goes on running.

Each stands in a session of its own, so that Ctrl-C reaches the demo alone, which then ends them in order, by their pid.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sublet.client.http import API, Client
from sublet.domain.errors import Unavailable
from sublet.supervisor import files

END_S = 15  # what an ending process may take
START_S = 60
POLL_S = 0.1
FINAL = ("succeeded", "failed", "stopped")


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the length of the block; what it prints goes to the log, and its temporary files beside that."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SUBLET_")}
    with log.open("wb") as out:
        started = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env={**kept, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)},
            start_new_session=True,
        )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(END_S)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


@contextmanager
def server(data: Path) -> Iterator[Client]:
    """A real `sublet up` on a new directory. At the end its jobs are stopped, then the server."""
    data.mkdir()
    command = [sys.executable, "-m", "sublet", "up", "--data", str(data), "--port", "0"]
    with process(command, data.parent / "server.log") as started:
        client = Client(url=_url(started, data), user="demo")
        try:
            yield client
        finally:
            _stop_jobs(client, data / "instances")


def _url(started: subprocess.Popen[bytes], data: Path) -> str:
    """As soon as the server has written where it listens."""
    note = data / "server.json"
    if _within(START_S, lambda: note.exists() or started.poll() is not None) and note.exists():
        return str(json.loads(note.read_text("utf-8"))["url"])
    said = (data.parent / "server.log").read_text("utf-8").strip().splitlines()
    raise Unavailable(what="The demo's server does not start.", why=said[-1] if said else "It said nothing.")


def _stop_jobs(client: Client, instances: Path) -> None:
    """The server is asked; when it does not answer, or not in time, the supervisors are told themselves."""
    try:
        if _within(END_S, lambda: _are_stopped(client)):
            return
    except Unavailable:  # the server is gone; what it started is not
        pass
    for directory in _live(instances):
        files.write(str(directory), files.STOP, {"reason": "stopped", "at_ms": files.now_ms()})
        files.wake(str(directory))
    _within(END_S, lambda: not _live(instances))


def _are_stopped(client: Client) -> bool:
    live = [job for job in client.get(f"{API}/jobs")["items"] if job["state"] not in FINAL]
    for job in live:
        if job["state"] != "stopping":
            client.post(f"{API}/jobs/{job['id']}/stop")
    return not live


def _live(instances: Path) -> list[Path]:
    """Directories of instances that were started and have not ended."""
    return [path.parent for path in instances.glob("*/*/*/start.json") if not (path.parent / files.END).exists()]


def _within(seconds: float, is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


@contextmanager
def ended_in_order() -> Iterator[Callable[[], None]]:
    """SIGTERM ends the demo like Ctrl-C. After the call of what is given, neither disturbs the cleaning up."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    heard = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in heard}

    def hear(handler: Callable[[int, object], None] | signal.Handlers) -> None:
        for number in heard:
            signal.signal(number, handler)

    hear(interrupt)
    try:
        yield lambda: hear(signal.SIG_IGN)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
