"""Where every process of an instance stands: collected on its machine, merged over the gang, the odd one named.

Rule: looking must not disturb. py-spy reads without stopping the process; without py-spy only a process that has said
so (its file `stacks.PID` is there) gets the signal that makes it write its own stacks.
"""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sublet.supervisor import files, processes, report

PATIENCE_S = 10
SHOWN_FRAMES = 12
WAITING = re.compile(
    r"all_?reduce|barrier|all_?gather|reduce_scatter|broadcast|all_to_all|_?recv|\bwait\b|monitored", re.I
)
NOT_THEIRS = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", "<string>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Of one process's main thread. `frames`: the innermost first, as (function, file, line). `state`: the kernel's."""

    pid: int
    rank: str
    state: str
    step: int | None
    frames: tuple[tuple[str, str, int], ...]

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    def place(self) -> str:
        """The innermost line of the program's own code and what it calls there."""
        if not self.frames:
            return "nowhere that could be seen"
        own = next((frame for frame in self.frames if not _is_foreign(frame[1])), self.frames[0])
        called = self.frames[0][0]
        at = f"{os.path.basename(own[1])}:{own[2]} {own[0]}"
        return at if called == own[0] else f"{at} → {called}"

    def is_waiting(self) -> bool:
        """For others, in a collective operation."""
        return any(WAITING.search(function) for function, _, _ in self.frames[:6])


def _is_foreign(path: str) -> bool:
    return any(part in path for part in NOT_THEIRS)


# ---- collecting, on the machine of the instance


def collect(directory: str) -> None:
    """Write `stacks.json`, and tell the engine."""
    settings = files.read(directory, files.START)
    keeper = files.read(directory, files.KEEPER) or {"pid": None}
    pids = _programs(processes.members(keeper["pid"], settings["mark"], settings["cgroup"]))
    steps = {rank.pid: rank for rank in report.ranks(directory)}
    found = []
    for pid in pids:
        rank = steps[pid].rank if pid in steps else _environment(pid).get("RANK", "")
        step = steps[pid].step if pid in steps else None
        state, frames = processes.state_of(pid), _frames(directory, pid, settings["environment"].get("PATH"))
        found.append(asdict(Stack(pid=pid, rank=rank, state=state, step=step, frames=tuple(frames))))
    files.write(directory, files.STACKS, {"at_ms": files.now_ms(), "stacks": found})
    report.tell_engine(directory)


def _programs(pids: Sequence[int]) -> list[int]:
    """The Python processes that train: not their children, nor the launcher above them."""
    pythons = [pid for pid in pids if "python" in os.path.basename(_executable(pid))]
    ranked = [pid for pid in pythons if "LOCAL_RANK" in _environment(pid)] or pythons
    known = set(ranked)
    return [pid for pid in ranked if not known & set(_ancestors(pid))]


def _executable(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:  # gone, or another user's
        return ""


def _environment(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (item.partition(b"=") for item in file.read().split(b"\0"))
            return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, _, value in pairs}
    except OSError:  # gone, or another user's
        return {}


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return
        yield pid


def _frames(directory: str, pid: int, path: str | None) -> list[tuple[str, str, int]]:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    tool = shutil.which("py-spy", path=path) or shutil.which("py-spy") or (beside if os.path.exists(beside) else "")
    return (_by_py_spy(tool, pid) if tool else []) or _by_signal(directory, pid)


def _by_py_spy(tool: str, pid: int) -> list[tuple[str, str, int]]:
    """Empty when it is not permitted, or when it takes too long."""
    command = [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
        threads: list[dict[str, Any]] = json.loads(done.stdout) if done.returncode == 0 else []
    except (subprocess.TimeoutExpired, ValueError):
        return []
    threads.sort(key=lambda thread: thread.get("thread_name") != "MainThread")
    frames = threads[0]["frames"] if threads else []
    return [(frame["name"], frame["filename"], frame["line"]) for frame in frames[:SHOWN_FRAMES]]


def _by_signal(directory: str, pid: int) -> list[tuple[str, str, int]]:
    """Only where the program listens; one that is stopped does not."""
    path = os.path.join(directory, f"stacks.{pid}")
    if not os.path.exists(path) or processes.state_of(pid) in ("T", "t"):
        return []
    before = os.stat(path).st_size
    processes.send(pid, signal.SIGUSR2)
    for _ in range(20 * PATIENCE_S):
        with open(path, "rb") as file:
            file.seek(before)
            text = file.read().decode("utf-8", "replace")
        if re.search(r"Current thread .*\n(  File .*\n)+", text):
            return parse_faulthandler(text)
        select.select([], [], [], 0.05)
    return []


def parse_faulthandler(text: str) -> list[tuple[str, str, int]]:
    """The frames of the thread that got the signal, which is the main one; the innermost first."""
    current = text.partition("Current thread")[2].partition("\n\n")[0]
    found = re.findall(r'  File "(.*)", line (\d+) in (.*)', current)
    return [(function, path, int(line)) for path, line, function in found[:SHOWN_FRAMES]]


# ---- merging, over the gang


def read(directory: str) -> tuple[int, list[Stack]]:
    """When it was collected (0: never), and what."""
    known = files.read(directory, files.STACKS)
    if known is None:
        return 0, []
    stacks = [
        Stack(**{**one, "frames": tuple((name, path, line) for name, path, line in one["frames"])})
        for one in known["stacks"]
    ]
    return known["at_ms"], stacks


def odd_one(gang: Sequence[tuple[int, Stack]]) -> tuple[int, Stack] | None:
    """The process that stands out, with its instance: it is stopped, or it is not where most of the others wait."""
    stopped = [one for one in gang if one[1].is_stopped]
    if stopped and len(stopped) < len(gang):
        return stopped[0]
    places = Counter(stack.place() for _, stack in gang)
    (common, most), *_ = places.most_common(1) or [("", 0)]
    if most > len(gang) / 2:
        return next((one for one in gang if one[1].place() != common), None)
    busy = [one for one in gang if not one[1].is_waiting()]
    if 0 < len(busy) < len(gang):
        return busy[0]
    steps = {stack.step for _, stack in gang if stack.step is not None}
    return min(gang, key=lambda one: one[1].step or 0) if len(steps) > 1 else None


def sentence(gang: Sequence[tuple[int, Stack]]) -> str:
    """One line: who stands out and where, and where the others are. Empty when nothing could be seen."""
    if not any(stack.frames or stack.is_stopped for _, stack in gang):
        return ""
    odd = odd_one(gang)
    others = Counter(one[1].place() for one in gang if one is not odd)
    (common, _), *_ = others.most_common(1) or [("", 0)]
    if odd is None:
        return f"all {len(gang)} processes stand in {common}" if len(gang) > 1 else f"it stands in {common}"
    instance, stack = odd
    who = f"instance {instance}" + (f" (rank {stack.rank})" if stack.rank else "")
    where = f"is stopped in {stack.place()}" if stack.is_stopped else f"stands in {stack.place()}"
    return f"{who} {where}, the others in {common}" if common else f"{who} {where}"


def merged(gang: Sequence[tuple[int, Stack]]) -> str:
    """All stacks, like ones once, the odd ones first, for people to read."""
    groups: dict[tuple[tuple[str, str, int], ...], list[str]] = {}
    for instance, stack in gang:
        name = f"instance {instance}" + (f" rank {stack.rank}" if stack.rank else "")
        groups.setdefault(stack.frames, []).append(name + (" (stopped)" if stack.is_stopped else ""))
    lines: list[str] = []
    for frames, names in sorted(groups.items(), key=lambda item: len(item[1])):
        lines.append(", ".join(names))
        lines += [f"    {function} ({path}:{line})" for function, path, line in frames] or ["    could not be seen"]
    return "\n".join(lines) + "\n"
