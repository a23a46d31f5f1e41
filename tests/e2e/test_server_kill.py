"""kill -9 of the server at moments drawn from a seed, while jobs come, run, are preempted and end. Nothing is lost.

Judged from what the jobs themselves leave behind (each instance makes a file that must not be there yet, and writes
down the code that it ends with) and from the log that the store keeps. The seed is printed; SUBLET_SEED runs another.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sublet.client.http import API, Client
from sublet.domain.changes import Entry
from sublet.domain.effects import EndJob, GiveNotice, QueueJob, ReleaseInstances, StartGang, WithdrawNotice
from sublet.domain.errors import SubletError, Unavailable
from sublet.domain.events import InstanceEnded
from sublet.domain.jobs import JobRecord, Outcome
from sublet.store.sql import open_sqlite

KILLS = 22
LIMIT_S = 240
SAVED, NEVER_BEGAN = 85, 143
# `set -C` makes the shell refuse to write to a file that exists: who starts twice, or ends twice, is seen.
JOB = """set -C; mine="$SUBLET_JOB_ID.$SUBLET_ATTEMPT.$SUBLET_INSTANCE"
: > "{marks}/started.$mine" || {{ : > "{marks}/TWICE.$mine"; exit 9; }}
code={code}; n=0
while [ $n -lt {tenths} ]; do [ -e "$SUBLET_NOTICE_FILE" ] && {{ code=85; break; }}; sleep 0.1; n=$((n+1)); done
echo $code > "{marks}/ended.$mine" || : > "{marks}/TWICE.$mine"
exit $code"""
Instance = tuple[str, int, int]


@dataclass(slots=True)
class Server:
    """A real `sublet up` that is killed and started again on the same directory."""

    data: Path
    process: subprocess.Popen[bytes] | None = None
    away_ms: list[tuple[int, int]] = field(default_factory=list)  # from each kill until the next server answered

    @property
    def note(self) -> Path:
        return self.data / "server.json"

    def start(self) -> None:
        command = [sys.executable, "-m", "sublet", "up", "--data", str(self.data), "--port", "0"]
        with (self.data.parent / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.note.unlink(missing_ok=True)

    def client(self) -> Client | None:
        try:
            return Client(url=json.loads(self.note.read_text())["url"], user="tester", timeout_s=15)
        except FileNotFoundError:
            return None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "data").mkdir()
    (tmp_path / "marks").mkdir()
    made = Server(tmp_path / "data")
    made.start()
    yield made
    made.kill()


def until(is_so: Callable[[], bool], deadline: float, what: str) -> None:
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come in time"
        time.sleep(0.02)


def answered(call: Callable[[Client], Any], server: Server, deadline: float) -> Any:
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


@dataclass(slots=True)
class Submitting:
    """Submits drawn jobs one by one in a thread, also while the server is killed. `codes`: how each will end."""

    server: Server
    marks: Path
    chance: random.Random
    deadline: float
    codes: dict[str, int] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)
    trouble: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        try:
            while not self.is_over.wait(self.chance.uniform(0.05, 0.6)):
                self.submit(f"key-{len(self.codes)}")
        except (AssertionError, SubletError) as error:
            self.trouble.append(error)

    def submit(self, key: str) -> None:
        code, is_owner = self.chance.choice([0, 0, 0, 3]), self.chance.random() < 0.6
        body = {
            "name": key,
            "quota": self.chance.choice(["team-a", "team-b"]),
            "idle": "never" if is_owner else self.chance.choice(["only", "acceptable"]),
            "gpu": self.chance.choice([1, 2]) if is_owner else 2,
            "command": JOB.format(
                marks=self.marks, code=code, tenths=self.chance.randint(*((1, 4) if is_owner else (15, 40)))
            ),
            "fault_tolerance": {"grace": "5s", "max_restarts": 0},
        }
        view = answered(lambda client: client.post(f"{API}/jobs", body, key=key), self.server, self.deadline)
        assert view["id"] not in self.codes, "two keys gave one job"
        self.codes[view["id"]] = code


@pytest.mark.timeout(LIMIT_S + 50)
def test_kill_9_loses_nothing(server: Server, tmp_path: Path) -> None:
    seed = int(os.environ.get("SUBLET_SEED", "20261201"))
    print(f"seed {seed}")
    chance, deadline = random.Random(seed), time.monotonic() + LIMIT_S
    jobs = Submitting(server, tmp_path / "marks", random.Random(seed + 1), deadline)
    thread = threading.Thread(target=jobs.run)
    thread.start()
    try:
        kills = 0
        while kills < KILLS or not answered(has_preempted, server, deadline):
            kill_at_a_moment(server, chance, deadline)
            kills += 1
    finally:
        jobs.is_over.set()
        thread.join()
    assert jobs.trouble == []
    print(f"{kills} kills")
    until(lambda: answered(all_ended, server, deadline), deadline, "the end of all jobs")
    server.kill()
    judge(tmp_path, jobs.codes, server.away_ms)


def kill_at_a_moment(server: Server, chance: random.Random, deadline: float) -> None:
    """Mostly while it works; every fourth time while it starts and takes over."""
    if chance.random() < 0.75:
        until(server.note.exists, deadline, "the server")
        if server.away_ms and server.away_ms[-1][1] == 0:
            server.away_ms[-1] = (server.away_ms[-1][0], now_ms())
    moment = time.monotonic() + chance.uniform(0.0, 1.2)
    while time.monotonic() < moment:  # a moment that was drawn, not a wait for anything
        time.sleep(0.005)
    was_up = server.note.exists()
    server.kill()
    if was_up or not server.away_ms:
        server.away_ms.append((now_ms(), 0))
    server.start()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def all_ended(client: Client) -> bool:
    return not client.get(f"{API}/jobs")["items"]


def has_preempted(client: Client) -> bool:
    return any(job["preemptions"] for job in client.get(f"{API}/jobs", {"all_states": "true"})["items"])


def judge(tmp_path: Path, codes: dict[str, int], away_ms: list[tuple[int, int]]) -> None:
    marks = {path.name: path for path in (tmp_path / "marks").iterdir()}
    assert not [name for name in marks if name.startswith("TWICE")], "an instance was started twice"
    store = open_sqlite(tmp_path / "data")
    try:
        entries = store.entries(limit=100_000)
        records = {record.request.id: record for record in store.jobs()}
    finally:
        store.close()
    assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
    no_job_is_lost(entries, records, codes)
    ends_are_told_once(entries, marks)
    ended = [marks[name].stat().st_mtime_ns // 1_000_000 for name in marks if name.startswith("ended.")]
    alone = sum(1 for at in ended if any(begin < at < (end or at) for begin, end in away_ms))
    notices = sum(isinstance(effect, GiveNotice) for entry in entries for effect in entry.effects)
    print(f"{len(codes)} jobs, {len(ended)} instances ended, {alone} of them without a server, {notices} notices")
    assert alone > 0 and notices > 0, "the moments that this test is about did not come"


def no_job_is_lost(entries: list[Entry], records: dict[str, JobRecord], codes: dict[str, int]) -> None:
    effects = [effect for entry in entries for effect in entry.effects]
    queued = Counter(effect.job for effect in effects if isinstance(effect, QueueJob))
    ended = Counter(effect.job for effect in effects if isinstance(effect, EndJob))
    assert set(codes) == set(queued) == set(ended) == set(records), "an accepted job is lost"
    assert set(queued.values()) == set(ended.values()) == {1}
    wanted = {job: "failed" if code else "succeeded" for job, code in codes.items()}
    assert {job: record.state.value for job, record in records.items()} == wanted


def ends_are_told_once(entries: list[Entry], marks: dict[str, Path]) -> None:
    """What the program wrote down as its code is what was delivered, and it took effect exactly once."""
    granted: Counter[Instance] = Counter()
    released: Counter[Instance] = Counter()
    told: dict[Instance, set[int | None]] = {}
    outcomes: dict[Instance, Outcome] = {}
    withdrawn: set[tuple[str, int]] = set()
    for entry in entries:
        if isinstance(event := entry.event, InstanceEnded):
            told.setdefault((event.job, event.attempt, event.instance), set()).add(event.exit_code)
        for effect in entry.effects:
            if isinstance(effect, StartGang):
                granted.update((effect.job, effect.attempt, one) for one in effect.instances)
            elif isinstance(effect, ReleaseInstances):
                names = [(effect.job, effect.attempt, one) for one in effect.instances]
                released.update(names)
                outcomes |= dict.fromkeys(names, effect.outcome)
            elif isinstance(effect, WithdrawNotice):
                withdrawn.add((effect.job, effect.attempt))
    assert released == granted and set(released.values()) == {1}, "an end did not take effect exactly once"
    for name in granted:
        mine = ".".join(map(str, name))
        if f"started.{mine}" in marks and f"ended.{mine}" not in marks:
            # Told to leave before the server knew that it had begun: then no grace is due, and it writes nothing down.
            assert told[name] <= {NEVER_BEGAN, 137} and outcomes[name] is Outcome.PREEMPTED, f"{mine} was cut off"
        elif f"started.{mine}" in marks:
            assert told[name] == {int(marks[f"ended.{mine}"].read_text())}, f"{mine}: another exit code was delivered"
        else:
            assert told[name] == {NEVER_BEGAN} and outcomes[name] is Outcome.PREEMPTED, f"{mine} was never started"
        if told[name] == {SAVED} and outcomes[name] is not Outcome.PREEMPTED:
            assert name[:2] in withdrawn, f"{mine} left on its notice and was not preempted"
    begun = {tuple(name.split(".")[1:]) for name in marks if name.startswith("started.")}
    assert begun <= {(job, str(attempt), str(one)) for job, attempt, one in granted}


def test_what_is_refused_is_not_stored(server: Server) -> None:
    deadline = time.monotonic() + 60
    body = {"quota": "team-a", "gpu": 3, "command": "true"}
    with pytest.raises(SubletError):
        answered(lambda client: client.post(f"{API}/jobs", body), server, deadline)
    assert answered(lambda client: client.get(f"{API}/jobs", {"all_states": "true"})["items"], server, deadline) == []
