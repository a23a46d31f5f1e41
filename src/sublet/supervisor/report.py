"""What the program says of itself, and word to the engine that something has changed.

`report.jsonl` holds what must be kept: checkpoints, that it is finished. `progress.N`, one for each local rank, holds
the newest step and how long steps take.

Rule: a line that is not whole or not ours is passed over; a program cannot harm its supervisor.
"""

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from sublet.supervisor import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The newest word of one process; `steps`: how many were timed. `busy_ms`: without waiting for others."""

    pid: int
    rank: str
    step: int | None
    total: int | None
    at_ms: int
    steps: int
    longest_ms: float
    step_ms: float
    busy_ms: float | None
    phase: str
    phase_since_ms: int

    @property
    def is_through(self) -> bool:
        return self.step is not None and self.total is not None and self.step >= self.total


def lines(directory: str, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from there on, and how far they reach."""
    try:
        with open(os.path.join(directory, files.REPORT), "rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    whole = data.rpartition(b"\n")[0]
    said = []
    for line in whole.split(b"\n"):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                said.append(value)
    return said, offset + (len(whole) + 1 if whole else 0)


def ranks(directory: str) -> list[Rank]:
    """Of all processes of the instance that reported a step or a phase, by local rank."""
    names = sorted(name for name in os.listdir(directory) if name.startswith("progress."))
    found = (_rank(os.path.join(directory, name)) for name in names)
    return [rank for rank in found if rank is not None]


def _rank(path: str) -> Rank | None:
    for _ in range(2):  # a line that is half the old and half the new one is whole at the second look
        try:
            with open(path, "rb") as file:
                said = json.loads(file.read(4096))
            return Rank(**{name: said[name] for name in Rank.__slots__})
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def is_finished(directory: str, exit_code: int | None, *, was_noticed: bool) -> bool:
    """It said so, or left with 0: after a notice that alone may mean that it made room, unless its last step was the
    last there is. Whatever its steps, one that was killed may not have written what it was for."""
    if any(line.get("finished") is True for line in lines(directory)[0]):
        return True
    told = ranks(directory)
    return exit_code == 0 and (not was_noticed or (bool(told) and all(rank.is_through for rank in told)))


def phase_of(directory: str) -> str:
    """start, step, save, exit or what the program called it; nothing when it never said anything."""
    told = ranks(directory)
    named = next((rank.phase for rank in told if rank.phase), "")
    if named or not told:
        return named
    if all(rank.is_through for rank in told):
        return "exit"
    return "step" if any(rank.step is not None for rank in told) else "start"


def tell_engine(directory: str) -> None:
    """Nothing, when no engine listens: it reads the files when it comes back."""
    parts = os.path.normpath(directory).split(os.sep)
    descriptor = os.open(os.path.join(directory, "..", "..", ".."), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            # A path through the descriptor is short, however long the data directory's own path is.
            sender.sendto("/".join(parts[-3:]).encode(), f"/proc/self/fd/{descriptor}/{files.SOCKET}")
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        return
    finally:
        os.close(descriptor)
