"""What the checkpoint tests share: the training program as a process, and a look at what is left over."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE_S = 60.0


@dataclass(slots=True)
class Run:
    """A training process and what it has said."""

    process: subprocess.Popen[str]
    said: list[dict[str, Any]] = field(default_factory=list)

    def hear(self, key: str) -> dict[str, Any]:
        """Read on until it says `key`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))
            if key in self.said[-1]:
                return self.said[-1]
        raise AssertionError(f"it ended without saying {key}: {self.said[-3:]}, {self.errors()}")

    def errors(self) -> str:
        return self.process.stderr.read() if self.process.stderr else ""

    def finish(self) -> int:
        assert self.process.stdout is not None
        self.said += [json.loads(line) for line in self.process.stdout]
        code = self.process.wait(PATIENCE_S)
        if code == 1:
            print(self.errors())  # shown by pytest when the test fails
        return code

    @property
    def losses(self) -> dict[int, str]:
        return {each["step"]: each["loss"] for each in self.said if "loss" in each}

    def word(self, key: str) -> dict[str, Any]:
        return next(each for each in self.said if key in each)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start the training program on a directory; all that is still alive at the end is killed."""
    runs: list[Run] = []

    def begin(last: int, directory: Path | None = None, env: dict[str, str] | None = None, **options: object) -> Run:
        words = [f"{key}={value}" for key, value in options.items()]
        command = [sys.executable, str(PROGRAMS / "train.py"), str(directory or tmp_path / "ckpt"), str(last), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        runs.append(Run(process))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        for word in run.said:
            if word.get("agent"):
                end_agent(int(word["agent"]))


def end_agent(pid: int) -> None:
    """An agent that waits for a next trainer is ours to end."""
    if is_agent(pid):
        os.kill(pid, 9)
        until(lambda: not is_agent(pid))


def is_agent(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and b"sublet.checkpoint.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], Any]) -> Any:
    """Poll for a condition with a bounded deadline."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)
    return value
