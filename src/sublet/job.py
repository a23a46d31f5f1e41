"""What training code imports: is a notice there, how far is it, what was saved. Standard library only.

    from sublet.job import checkpointed, notice, phase, progress

Rule: outside of Sublet every call does nothing, so that the same program runs anywhere.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

SAVED = 85  # exit code: saved on notice, take the GPUs back
RETRY = 75  # exit code: please start me again, it is not my fault

VOTE_EVERY_MS = 1_000  # so often the ranks ask each other, as near as their steps allow
MOST_CALLS_BETWEEN_VOTES = 64
PROGRESS_BYTES = 512  # one write of one size: a reader sees the old line or the new one
RECENT = 0.1  # weight of the newest step in the means


class Notice:
    """The word that the job has to leave. Cheap enough to be asked at each step: one look at a file."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._path = environment.get("SUBLET_NOTICE_FILE", "")
        self._calls = self._calls_at_vote = 0
        self._vote_at = 0
        self._voted_ns = time.monotonic_ns()
        self._agreed = False

    def received(self, *, agree: bool = True) -> bool:
        """Whether there is one. With torch.distributed all ranks get the same answer at the same call, so that all
        save the same step; then every rank must call this equally often. `agree=False`: only what this rank sees.

        The ranks ask each other about once a second, by an all-reduce of two numbers.
        """
        here = bool(self._path) and os.path.exists(self._path)
        distributed = _distributed() if agree and self._path else None
        return here if distributed is None else self._vote(distributed, here)

    def _vote(self, distributed: Any, here: bool) -> bool:
        self._calls += 1
        if self._calls < self._vote_at:
            return self._agreed
        now_ns = time.monotonic_ns()
        calls = max(1, self._calls - self._calls_at_vote)
        call_ms = (now_ns - self._voted_ns) // 1_000_000 // calls
        torch: Any = sys.modules["torch"]
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        ballot = torch.tensor([int(here), call_ms], dtype=torch.int64, device=device)
        distributed.all_reduce(ballot, distributed.ReduceOp.MAX)
        found, slowest_ms = (int(each) for each in ballot.tolist())
        self._vote_at = self._calls + max(1, min(MOST_CALLS_BETWEEN_VOTES, VOTE_EVERY_MS // max(1, slowest_ms)))
        self._calls_at_vote, self._voted_ns, self._agreed = self._calls, now_ns, bool(found)
        return self._agreed

    def read(self) -> dict[str, Any] | None:
        """`deadline_ms` (UTC), `reason`, `claimant`; None when there is none."""
        try:
            with open(self._path, "rb") as file:
                found = json.loads(file.read())
        except OSError:
            return None
        return found if isinstance(found, dict) else None


def _distributed() -> Any:
    """torch.distributed, when this process has joined others through it; torch is not imported for that."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed if distributed.get_world_size() > 1 else None


class _Progress:
    """What this process tells of its steps: the newest one, and how long steps take. Times in ms, UTC."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.step: int | None = None
        self.total: int | None = None
        self.at_ms = 0
        self.last_ns = 0
        self.steps = 0  # that were timed
        self.longest_ms = self.step_ms = 0.0
        self.busy_ms: float | None = None
        self.phase = ""
        self.phase_since_ms = 0
        self.aside_ns = 0  # spent in phases since the last step
        self.waited_ns = 0  # spent on waiting for others since the last step

    def stepped(self, step: int, total: int | None, busy_ms: float | None) -> None:
        now_ns = time.monotonic_ns()
        if self.last_ns:
            took_ms = max(0, now_ns - self.last_ns - self.aside_ns) / 1e6
            if busy_ms is None and self.waited_ns:
                busy_ms = max(0.0, took_ms - self.waited_ns / 1e6)
            self.steps += 1
            self.longest_ms = max(self.longest_ms, took_ms)
            self.step_ms = _mean(self.step_ms, took_ms, self.steps)
            if busy_ms is not None:
                self.busy_ms = _mean(self.busy_ms or 0.0, busy_ms, self.steps)
        self.step, self.total = step, total
        self.last_ns, self.aside_ns, self.waited_ns = now_ns, 0, 0
        self.write()

    def write(self) -> None:
        self.at_ms = time.time_ns() // 1_000_000
        line = {
            "pid": os.getpid(),
            "rank": os.environ.get("RANK", ""),
            "step": self.step,
            "total": self.total,
            "at_ms": self.at_ms,
            "steps": self.steps,
            "longest_ms": round(self.longest_ms, 3),
            "step_ms": round(self.step_ms, 3),
            "busy_ms": None if self.busy_ms is None else round(self.busy_ms, 3),
            "phase": self.phase[:40],
            "phase_since_ms": self.phase_since_ms,
        }
        if self.descriptor < 0:
            self.descriptor = _open_progress()
        os.pwrite(self.descriptor, json.dumps(line).ljust(PROGRESS_BYTES - 1).encode() + b"\n", 0)


def _mean(before: float, new: float, count: int) -> float:
    weight = max(RECENT, 1 / count)
    return before + weight * (new - before)


_progress = _Progress()


def _open_progress() -> int:
    directory = os.path.dirname(os.environ["SUBLET_REPORT_FILE"])
    _be_ready_to_show_the_stack(directory)
    path = os.path.join(directory, f"progress.{os.environ.get('LOCAL_RANK', '0')}")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _be_ready_to_show_the_stack(directory: str) -> None:
    """On SIGUSR2, where the program has no use for it, all stacks go to a file; its name says that this is so."""
    import faulthandler
    import signal

    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        file = open(os.path.join(directory, f"stacks.{os.getpid()}"), "wb", buffering=0)  # noqa: SIM115 (stays open)
        faulthandler.register(signal.SIGUSR2, file, all_threads=True)
        _kept_open.append(file)


_kept_open: list[Any] = []


def progress(step: int, total: int | None = None, *, busy_ms: float | None = None) -> None:
    """This step is done, of so many. Feeds the list of jobs, the detection of hangs and of slow ranks.

    `busy_ms`: what the step took without waiting for other ranks, where the program knows it; see also `waiting`.
    """
    if os.environ.get("SUBLET_REPORT_FILE"):
        _progress.stepped(step, total, busy_ms)


class phase:
    """`with phase("save"): …`: what the program does beside its steps. It has a time limit of its own, and the steps'
    times leave it out. Usual names: save, eval, compile."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._began_ns = time.monotonic_ns()
        self._tell(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _progress.aside_ns += time.monotonic_ns() - self._began_ns
        self._tell("")

    def _tell(self, name: str) -> None:
        if os.environ.get("SUBLET_REPORT_FILE"):
            _progress.phase, _progress.phase_since_ms = name, time.time_ns() // 1_000_000
            _progress.write()


class waiting:
    """`with waiting(): dist.all_reduce(x)`: time spent on waiting for other ranks. Who waits least holds them up."""

    def __enter__(self) -> None:
        self._began_ns = time.monotonic_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _progress.waited_ns += time.monotonic_ns() - self._began_ns


notice = Notice()


def checkpointed(step: int) -> None:
    """A checkpoint at this step is durable: the files and their directory were synced."""
    _report({"checkpoint": step}, wakes=True)


def finished() -> None:
    """All work is done; needed only by programs that leave with 0 on a notice as well."""
    _report({"finished": True})


def _report(line: dict[str, Any], *, wakes: bool = False) -> None:
    path = os.environ.get("SUBLET_REPORT_FILE", "")
    if not path:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
    finally:
        os.close(descriptor)
    if wakes:
        _wake(os.path.join(os.path.dirname(path), "wake"))


def _wake(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # nobody listens: the supervisor reads the report when it comes back
        return
    try:
        os.write(descriptor, b".")
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
