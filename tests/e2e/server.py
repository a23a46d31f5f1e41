"""A real `sublet up` in a process of its own, and the real command line against it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FINAL = ("succeeded", "failed", "stopped")
PATIENCE_S = 60  # until something that must come is given up; no test waits for it to pass


def until(is_so: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true answer; fails when none comes in time."""
    end = time.monotonic() + patience_s
    while not (answer := is_so()):
        assert time.monotonic() < end, f"{what} did not come within {patience_s} s"
        time.sleep(0.05)
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    code: int
    out: str
    err: str


def sublet(*arguments: str, data: Path, cwd: Path | None = None, more: dict[str, str] | None = None) -> Done:
    """Runs the command line to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "sublet", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=cwd,
        env=environment(data) | (more or {}),
    )
    return Done(code=done.returncode, out=done.stdout, err=done.stderr)


def environment(data: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SUBLET_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"  # `python` is this one
    return kept | {"SUBLET_DATA": str(data), "SUBLET_USER": "mei", "PYTHONUNBUFFERED": "1", "PATH": path}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    process: subprocess.Popen[bytes]
    data: Path
    folder: Path

    def run(self, *arguments: str) -> Done:
        return sublet(*arguments, data=self.data, cwd=self.folder)

    def submit(self, text: str) -> str:
        """The id of the job that this file describes."""
        (self.folder / "job.yaml").write_text(text)
        done = self.run("submit", "job.yaml", "-o", "name")
        assert done.code == 0, done.err
        return done.out.strip()

    def job(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("show", job, "-o", "json").out)
        return found["job"] | {"attempts": found["attempts"]}

    def jobs(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.run("ls", "--all-states", "-o", "json").out)["items"]
        return items

    def reaches(self, job: str, *states: str) -> dict[str, Any]:
        found: dict[str, Any] = until(
            lambda: (view := self.job(job))["state"] in states and view, f"{job} in {' or '.join(states)}"
        )
        return found

    def stop_all(self) -> None:
        for view in self.jobs():
            if view["state"] not in FINAL:
                self.run("stop", view["id"])
        until(lambda: all(view["state"] in FINAL for view in self.jobs()), "the end of all jobs")


def start(data: Path, folder: Path, *more: str, errors: Path | None = None) -> Server:
    """A server that answers; its stderr goes to `errors`."""
    note = data / "server.json"
    note.unlink(missing_ok=True)
    with (errors or Path(os.devnull)).open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "sublet", "up", "--port", "0", "--data", str(data), *more],
            stdout=subprocess.DEVNULL,
            stderr=file,
            env=environment(data),
            cwd=folder,
        )
    until(lambda: note.exists() or process.poll() is not None, "the server")
    assert process.poll() is None, f"the server ended with {process.returncode}"
    return Server(process=process, data=data, folder=folder)


def end(server: Server, signal_number: int) -> int:
    server.process.send_signal(signal_number)
    return server.process.wait(PATIENCE_S)


@contextmanager
def serving(data: Path, folder: Path, *more: str) -> Iterator[Server]:
    """A server for the length of a test; its jobs are stopped at the end."""
    server = start(data, folder, *more)
    try:
        yield server
        server.stop_all()
    finally:
        server.process.terminate()
        server.process.wait(PATIENCE_S)
