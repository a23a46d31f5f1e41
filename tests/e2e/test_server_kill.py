"""kill -9 of the server at moments drawn from a seed, while jobs come, run, are preempted and end. Nothing is lost.

Judged from what the jobs themselves leave behind (each attempt makes a file that must not be there yet) and from the
log that the store keeps. The seed is printed; SUBLET_SEED runs another one.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet.client.http import API, Client
from sublet.domain.effects import EndJob, QueueJob, ReleaseInstances, StartGang
from sublet.domain.errors import SubletError, Unavailable
from sublet.domain.events import InstanceEnded
from sublet.store.sql import open_sqlite

KILLS = 22
LIMIT_S = 240
# Starts at most once: `set -C` makes the shell refuse to write to a file that exists.
JOB = """set -C; : > "{marks}/$SUBLET_JOB_ID.$SUBLET_ATTEMPT.$SUBLET_INSTANCE" || {{ : > "{marks}/TWICE"; exit 9; }}
n=0; while [ $n -lt {tenths} ]; do [ -e "$SUBLET_NOTICE_FILE" ] && exit 85; sleep 0.1; n=$((n+1)); done"""


class Server:
    """A real `sublet up` that is killed and started again on the same directory."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "sublet", "up", "--data", str(self.data), "--port", "0"]
        with (self.data.parent / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        (self.data / "server.json").unlink(missing_ok=True)

    def client(self) -> Client | None:
        note = self.data / "server.json"
        return Client(url=json.loads(note.read_text())["url"], user="tester", timeout_s=15) if note.exists() else None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "data").mkdir()
    (tmp_path / "marks").mkdir()
    made = Server(tmp_path / "data")
    made.start()
    yield made
    made.kill()


def attempt(call: Callable[[Client], object], server: Server, deadline: float) -> object:
    """The call, again and again, until a server answers it."""
    while time.monotonic() < deadline:
        client = server.client()
        if client is not None:
            try:
                return call(client)
            except Unavailable:
                pass
        time.sleep(0.05)
    raise AssertionError("no server answered in time")


@pytest.mark.timeout(LIMIT_S + 50)
def test_kill_9_loses_nothing(server: Server, tmp_path: Path) -> None:
    seed = int(os.environ.get("SUBLET_SEED", "20261201"))
    print(f"seed {seed}, {KILLS} kills")
    chance, deadline = random.Random(seed), time.monotonic() + LIMIT_S
    submitted: list[str] = []
    for number in range(KILLS):
        for _ in range(chance.randint(1, 2)):
            submitted += [submit(server, tmp_path / "marks", chance, f"key-{number}-{len(submitted)}", deadline)]
        until = time.monotonic() + chance.uniform(0.0, 1.2)
        while time.monotonic() < until:
            time.sleep(0.01)
        server.kill()
        server.start()
    attempt(lambda client: all_ended(client) or _not_yet(), server, deadline)
    server.kill()
    judge(tmp_path, submitted)


def submit(server: Server, marks: Path, chance: random.Random, key: str, deadline: float) -> str:
    body = {
        "name": key,
        "quota": chance.choice(["team-a", "team-b"]),
        "idle": chance.choice(["never", "acceptable", "acceptable"]),
        "gpu": chance.choice([1, 2]),
        "command": JOB.format(marks=marks, tenths=chance.randint(1, 12)),
        "fault_tolerance": {"grace": "5s"},
    }
    answer = attempt(lambda client: client.post(f"{API}/jobs", body, key=key), server, deadline)
    assert isinstance(answer, dict)
    return str(answer["id"] if "id" in answer else answer["job"]["id"])


def all_ended(client: Client) -> bool:
    return not [job for job in client.get(f"{API}/jobs")["items"] if job["state"] not in ("succeeded", "failed")]


def _not_yet() -> None:
    raise Unavailable(what="Some jobs have not ended.")


def judge(tmp_path: Path, submitted: list[str]) -> None:
    assert not (tmp_path / "marks" / "TWICE").exists(), "an attempt was started twice"
    store = open_sqlite(tmp_path / "data")
    try:
        entries = store.entries(limit=100_000)
        records = {record.request.id: record for record in store.jobs()}
    finally:
        store.close()
    effects = [effect for entry in entries for effect in entry.effects]
    queued = Counter(e.job for e in effects if isinstance(e, QueueJob))
    ended = Counter(e.job for e in effects if isinstance(e, EndJob))
    assert set(submitted) == set(queued) == set(ended) == set(records), "an accepted job is lost"
    assert set(queued.values()) == set(ended.values()) == {1}
    assert {record.state for record in records.values()} == {"succeeded"}
    released = Counter(
        (e.job, e.attempt, one) for e in effects if isinstance(e, ReleaseInstances) for one in e.instances
    )
    granted = Counter((e.job, e.attempt, one) for e in effects if isinstance(e, StartGang) for one in e.instances)
    assert released == granted and set(released.values()) == {1}, "an end was not told exactly once"
    marks = {tuple(path.name.rsplit(".", 2)) for path in (tmp_path / "marks").iterdir()}
    assert marks <= {(job, str(number), str(one)) for job, number, one in granted}
    codes = {e.event.exit_code for e in entries if isinstance(e.event, InstanceEnded)}
    assert codes <= {0, 85, 137, 143}, f"exit codes got lost: {codes}"
    assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))


def test_what_is_refused_is_not_stored(server: Server, tmp_path: Path) -> None:
    deadline = time.monotonic() + 60
    body = {"quota": "team-a", "gpu": 3, "command": "true"}
    with pytest.raises(SubletError):
        attempt(lambda client: client.post(f"{API}/jobs", body), server, deadline)
    assert attempt(lambda client: client.get(f"{API}/jobs")["items"] == [], server, deadline)
