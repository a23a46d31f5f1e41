"""Plays the demo: two teams, borrowed GPUs, a reclaim, a resume. Rule: it uses only what every client may use."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from sublet.client.http import API, Client
from sublet.demo import checks
from sublet.demo.checks import Claim
from sublet.domain.errors import Unavailable

LIMIT_S = 170
POLL_S = 0.2
END_S = 10  # what an ending process may take
FINAL = ("succeeded", "failed", "stopped")

Show = Callable[[str, float], None]  # what happens now, and how much of the training is done (0 to 1)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """`rows`: time, who, sentence. `directory` is kept when a claim does not hold."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return bool(self.claims) and all(claim.holds for claim in self.claims)


def play(steps: int, owner_steps: int, show: Show) -> Outcome:
    """Unavailable when the server does not start or something takes longer than it may."""
    began = time.monotonic()
    with ExitStack() as ends:
        base = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="sublet-demo-", ignore_cleanup_errors=True)))
        server = ends.enter_context(_server(base / "data"))
        ends.enter_context(_jobs_stopped(server))
        reference = ends.enter_context(_process(_training(steps, base / "uninterrupted"), base / "uninterrupted.log"))
        stage = _Stage(server=server, base=base, steps=steps, began=began, show=show, reference=reference)
        outcome = stage.play(owner_steps)
        outcome.seconds = time.monotonic() - began
    return outcome


@dataclass(slots=True, kw_only=True)
class _Stage:
    server: Client
    base: Path
    steps: int
    began: float
    show: Show
    reference: subprocess.Popen[bytes]

    def play(self, owner_steps: int) -> Outcome:
        first = self.submit("bea", "evaluate", "team-b", "never", "sleep 600")
        self.until(first, "in team-b's own quota bea's job runs", lambda job: job["state"] == "running")
        borrower = self.submit("ben", "train", "team-b", "acceptable", self.command(self.steps, "ben"))
        self.until(borrower, "ben trains on what team-a does not use", self.is_far_enough(borrower))
        owner = self.submit("ana", "urgent", "team-a", "never", self.command(owner_steps, "ana"))
        self.until(owner, "ana's job takes team-a's GPUs back", lambda job: job["state"] in ("running", *FINAL))
        self.until(owner, "ana's job runs, ben's waits", lambda job: job["state"] in FINAL)
        self.until(borrower, "ben's job goes on from its checkpoint", lambda job: job["state"] in FINAL)
        self.server.post(f"{API}/jobs/{first}/stop")
        self.until(first, "the stage is cleared", lambda job: job["state"] in FINAL)
        self.wait("the run without interruption comes to its end", lambda: self.reference.poll() is not None)
        return self.judge(borrower, owner)

    def submit(self, user: str, name: str, quota: str, idle: str, command: str) -> str:
        body = {
            "name": name,
            "quota": quota,
            "idle": idle,
            "gpu": 2,
            "command": command,
            "checkpoint": {"dir": str(self.base / user)},
        }
        answer = Client(url=self.server.url, user=user).post(f"{API}/jobs", body)
        return str(answer["id"] if "id" in answer else answer["job"]["id"])

    def command(self, steps: int, user: str) -> str:
        return " ".join(map(_quoted, _training(steps, self.base / user)))

    def is_far_enough(self, job: str) -> Callable[[dict[str, Any]], bool]:
        """A third of the steps are done: then there is something to lose."""
        return lambda view: view["state"] in FINAL or self.step_of(job) >= self.steps // 3

    def step_of(self, job: str) -> int:
        with self.server.stream(f"{API}/jobs/{job}/logs") as chunks:
            found = re.findall(rb"step (\d+) loss", b"".join(chunks))
        return int(found[-1]) if found else 0

    def steps_done_again(self, job: str) -> int:
        """Steps that were printed more than once: work that was lost."""
        with self.server.stream(f"{API}/jobs/{job}/logs") as chunks:
            found = re.findall(rb"step (\d+) loss", b"".join(chunks))
        return len(found) - len(set(found))

    def until(self, job: str, what: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
        self.wait(what, lambda: is_so(self.server.get(f"{API}/jobs/{job}")["job"]))

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if time.monotonic() - self.began > LIMIT_S:
                hint = "Try again when the machine is less busy."
                raise Unavailable(what="The demo takes too long.", why=f"It waits until {what}.", hint=hint)
            self.show(what, self.done())
            time.sleep(POLL_S)

    def done(self) -> float:
        found = sorted((self.base / "ben").glob("step-*.pt"))
        return int(found[-1].stem.removeprefix("step-")) / self.steps if found else 0.0

    # ---- afterwards

    def judge(self, borrower: str, owner: str) -> Outcome:
        ben, ana = (self.server.get(f"{API}/jobs/{job}") for job in (borrower, owner))
        events = list(_events(self.server))
        of_ben = [event for event in events if event["job"] == borrower]
        outcome = Outcome(rows=_rows(events, ben, ana, self.steps_done_again(borrower)))
        ended = [ben["job"]["state"], ana["job"]["state"]]
        outcome.claims.append(_claim("both trainings came to their end", ended == ["succeeded"] * 2, ", ".join(ended)))
        preempted = [one["outcome"] for one in ben["attempts"]] == ["preempted", "succeeded"]
        kinds = [one["idle_resources"] for one in ben["attempts"]]
        outcome.claims.append(
            _claim(
                "ben's job ran Not in Quota, was preempted once and resumed as attempt 2",
                preempted and kinds == ["not_in_quota"] * 2,
                ", ".join(f"attempt {one['attempt']} {one['outcome']}" for one in ben["attempts"]),
            )
        )
        if outcome.claims[0].holds:
            outcome.claims += checks.same_result(self.base / "ben", self.base / "uninterrupted")
        outcome.claims.append(checks.budget_untouched(ben["job"]))
        outcome.claims.append(checks.submit_time_kept(of_ben, len(ben["attempts"])))
        outcome.claims.append(checks.one_owner_a_device(self.base / "data" / "instances"))
        return outcome


def _claim(text: str, holds: bool, evidence: str) -> Claim:
    return Claim(text=text, holds=holds, evidence=evidence)


def _rows(
    events: list[dict[str, Any]], ben: dict[str, Any], ana: dict[str, Any], lost: int
) -> list[tuple[str, str, str]]:
    """The story as people tell it, from the server's log and the attempts. `lost`: steps done again."""
    told = ("queued", "granted", "notice", "preempted", "requeued", "succeeded", "failed", "upgraded")
    jobs = {ben["job"]["id"]: "ben", ana["job"]["id"]: "ana"}
    rows = [(e["time"], jobs[e["job"]], e["text"]) for e in events if e["job"] in jobs and e["type"] in told]
    start = rows[0][0] if rows else ""
    table = [(f"{_seconds(start, at):6.1f} s", who, text) for at, who, text in rows]
    used = ben["attempts"][0]["notice_used_ms"]
    if used is not None:
        table.append(("", "ben", f"notice used: {used / 1000:.1f} s · steps lost: {lost}"))
    waited = _seconds(ana["job"]["submitted"], ana["attempts"][0]["granted"])
    table.append(("", "ana", f"from her submit to the grant: {waited:.1f} s"))
    return table


def _seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def _events(server: Client) -> Iterator[dict[str, Any]]:
    cursor: str | None = "0"
    while cursor is not None:
        page = server.get(f"{API}/events", {"after": cursor})
        yield from page["items"]
        cursor = page["next"]


def _training(steps: int, directory: Path) -> list[str]:
    return [sys.executable, "-m", "sublet.demo.train", "--steps", str(steps), "--out", str(directory)]


def _quoted(word: str) -> str:
    import shlex

    return shlex.quote(word)


# ---- processes: each is ended by its pid


@contextmanager
def _server(data: Path) -> Iterator[Client]:
    data.mkdir()
    command = [sys.executable, "-m", "sublet", "up", "--data", str(data), "--port", "0"]
    with _process(command, data.parent / "server.log") as process:
        yield Client(url=_url(process, data), user="demo")


def _url(process: subprocess.Popen[bytes], data: Path) -> str:
    """As soon as the server has written where it listens."""
    note, until = data / "server.json", time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if note.exists():
            return str(json.loads(note.read_text("utf-8"))["url"])
        time.sleep(POLL_S / 4)
    said = (data.parent / "server.log").read_text("utf-8").strip().splitlines()
    raise Unavailable(what="The demo's server does not start.", why=said[-1] if said else "It said nothing.")


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _jobs_stopped(server: Client) -> Iterator[None]:
    """Whatever ends the demo, no job of its goes on."""
    try:
        yield
    finally:
        _stop_all(server)


def _stop_all(server: Client) -> None:
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        live = [job for job in server.get(f"{API}/jobs")["items"] if job["state"] not in FINAL]
        if not live:
            return
        for job in live:
            if job["state"] != "stopping":
                server.post(f"{API}/jobs/{job['id']}/stop")
        time.sleep(POLL_S)
