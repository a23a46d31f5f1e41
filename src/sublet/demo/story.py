"""Plays the demo: two teams, borrowed GPUs, a reclaim, a resume. Rule: it uses only what every client may use."""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublet.client.http import API, Client
from sublet.demo import checks, processes, table
from sublet.demo.processes import FINAL
from sublet.domain.errors import Unavailable

LIMIT_S = 170
POLL_S = 0.2

Show = Callable[[str, float], None]  # what happens now, and how much of the training is done (0 to 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`kept`: where everything lies when not all claims hold."""

    rows: list[table.Row]
    claims: list[checks.Claim]
    seconds: float
    kept: Path | None

    @property
    def holds(self) -> bool:
        return bool(self.claims) and all(claim.holds for claim in self.claims)


def play(steps: int, owner_steps: int, show: Show) -> Outcome:
    """Unavailable when the server does not start or something takes longer than it may."""
    began, base = time.monotonic(), Path(tempfile.mkdtemp(prefix="sublet-demo-"))
    is_kept = False
    with processes.ended_in_order() as undisturbed:
        try:
            rows, claims = _play(steps, owner_steps, show, base, undisturbed)
            is_kept = not all(claim.holds for claim in claims)
            kept = base if is_kept else None
            return Outcome(rows=rows, claims=claims, seconds=time.monotonic() - began, kept=kept)
        except Unavailable as error:
            is_kept = True
            raise Unavailable(what=error.what, why=error.why, hint=f"Its logs are in {base}. {error.hint}") from error
        finally:
            if not is_kept:
                shutil.rmtree(base, ignore_errors=True)


def _play(
    steps: int, owner_steps: int, show: Show, base: Path, undisturbed: Callable[[], None]
) -> tuple[list[table.Row], list[checks.Claim]]:
    with ExitStack() as ends:
        server = ends.enter_context(processes.server(base / "data"))
        alone = base / "uninterrupted"
        reference = ends.enter_context(processes.process(_training(steps, alone), base / "uninterrupted.log"))
        ends.callback(undisturbed)
        stage = _Stage(server=server, base=base, steps=steps, show=show, reference=reference)
        return stage.play(owner_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    server: Client
    base: Path
    steps: int
    show: Show
    reference: subprocess.Popen[bytes]

    def play(self, owner_steps: int) -> tuple[list[table.Row], list[checks.Claim]]:
        limit = time.monotonic() + LIMIT_S
        first = self.submit("bea", "evaluate", "team-b", "never", "exec sleep 600")
        self.until(first, "bea's job fills team-b's own quota", lambda job: job["state"] == "running", limit)
        borrower = self.submit("ben", "train", "team-b", "acceptable", self.command(self.steps, "ben"))
        self.until(borrower, "ben trains on what team-a does not use", self.is_far_enough(borrower), limit)
        owner = self.submit("ana", "urgent", "team-a", "never", self.command(owner_steps, "ana"))
        is_started = ("running", *FINAL)
        self.until(owner, "ana submits, ben gets his notice", lambda job: job["state"] in is_started, limit)
        self.until(owner, "ana's job runs, ben's waits", lambda job: job["state"] in FINAL, limit)
        self.until(borrower, "ben's job goes on from its checkpoint", lambda job: job["state"] in FINAL, limit)
        self.server.post(f"{API}/jobs/{first}/stop")
        self.until(first, "bea's job is stopped", lambda job: job["state"] in FINAL, limit)
        self.wait("the run without interruption ends", lambda: self.reference.poll() is not None, limit)
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
        return str(Client(url=self.server.url, user=user).post(f"{API}/jobs", body)["id"])

    def command(self, steps: int, user: str) -> str:
        return shlex.join(_training(steps, self.base / user))

    def is_far_enough(self, job: str) -> Callable[[dict[str, Any]], bool]:
        """A third of the steps are done: then there is something to lose."""
        return lambda view: view["state"] in FINAL or max(self.printed(job), default=0) >= self.steps // 3

    def printed(self, job: str, words: str = r"step (\d+) loss") -> list[int]:
        """The numbers of the lines that read so in what the job printed, all attempts."""
        with self.server.stream(f"{API}/jobs/{job}/logs") as chunks:
            return [int(number) for number in re.findall(words.encode(), b"".join(chunks))]

    def until(self, job: str, what: str, is_so: Callable[[dict[str, Any]], bool], limit: float) -> None:
        self.wait(what, lambda: is_so(self.server.get(f"{API}/jobs/{job}")["job"]), limit)

    def wait(self, what: str, is_so: Callable[[], bool], limit: float) -> None:
        while not is_so():
            if time.monotonic() > limit:
                hint = "Try again when the machine is less busy."
                raise Unavailable(what="The demo takes too long.", why=f"It waits here: {what}.", hint=hint)
            self.show(what, self.done())
            time.sleep(POLL_S)

    def done(self) -> float:
        """How much of ben's training is saved."""
        if (self.base / "ben" / "result.json").exists():
            return 1.0
        found = sorted((self.base / "ben").glob("step-*.pt"))
        return int(found[-1].stem.removeprefix("step-")) / self.steps if found else 0.0

    # ---- afterwards

    def judge(self, borrower: str, owner: str) -> tuple[list[table.Row], list[checks.Claim]]:
        ben, ana = (self.server.get(f"{API}/jobs/{job}") for job in (borrower, owner))
        events = list(_events(self.server))
        every = self.server.get(f"{API}/jobs", {"all_states": "true"})["items"]
        total = sum(node["gpu"] for node in self.server.get(f"{API}/nodes")["items"])
        claims = [
            checks.both_succeeded(ben, ana),
            checks.lent_twice(ben),
            *checks.same_result(self.base / "ben", self.base / "uninterrupted"),
            checks.budget_untouched(ben["job"]),
            checks.submit_time_kept([one for one in events if one["job"] == borrower], ben["job"]["submitted"]),
            checks.never_more_than_there_is(events, {job["id"]: job["gpu"] for job in every}, total),
            checks.one_owner_a_device(self.base / "data" / "instances"),
        ]
        people = {job["id"]: job["user"] for job in every}
        return table.rows(events, people, ben, ana, self.work_of(borrower)), claims

    def work_of(self, job: str) -> table.Work:
        steps = self.printed(job)
        return table.Work(
            left_at=max(self.printed(job, r"notice: saved at step (\d+)"), default=0),
            resumed_at=max(self.printed(job, r"resumed from step (\d+)"), default=0),
            done_twice=len(steps) - len(set(steps)),
        )


def _events(server: Client) -> Iterator[dict[str, Any]]:
    cursor: str | None = "0"
    while cursor is not None:
        page = server.get(f"{API}/events", {"after": cursor})
        yield from page["items"]
        cursor = page["next"]


def _training(steps: int, directory: Path) -> list[str]:
    return [sys.executable, "-m", "sublet.demo.train", "--steps", str(steps), "--out", str(directory)]
