"""The files of an instance's directory, and how they are written: whole or not at all.

start.json    the engine: what to run            stop.json     the engine: end at once
notice.json   the engine: leave by a deadline    acknowledged  the engine: the end is known, nothing is owed
notice.json.safe  the program: all is saved, a stop costs nothing (the checkpoint library writes it)
starting      the supervisor: from here on the program may have been started
keeper.json   the supervisor: the process that holds the program
exit          the keeper: the program's exit code
report.jsonl  the program: checkpoints, that it is finished
progress.N    the program: its newest step, of the local rank N
stacks.PID    the program: its stacks, when it was asked for them
end.json      the supervisor: all processes are gone
wake          a pipe: look at the files again    lock          held by the one supervisor
log           what the program printed            log.cut        what was left out of the middle of it
stacks.json   where every process stood when the program hung

In the directory of an attempt: trouble.json, what the engine has told of it.
"""

from __future__ import annotations

import json
import os
import time

TYPE_CHECKING = False  # as in `typing`, which is not loaded: see watch.py
if TYPE_CHECKING:
    from typing import Any

START, STOP, NOTICE, STARTING, KEEPER, EXIT = (
    "start.json",
    "stop.json",
    "notice.json",
    "starting",
    "keeper.json",
    "exit",
)
REPORT, END, WAKE, LOCK, LOG, ACKNOWLEDGED = "report.jsonl", "end.json", "wake", "lock", "log", "acknowledged"
CUT, STACKS, TROUBLE = "log.cut", "stacks.json", "trouble.json"
SAFE = NOTICE + ".safe"
SOCKET = "engine.sock"  # in the directory above all jobs: word to the engine that something has changed


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def read(directory: str, name: str) -> Any:
    """The JSON value, or None when there is no such file."""
    try:
        with open(os.path.join(directory, name), "rb") as file:
            return json.loads(file.read())
    except FileNotFoundError:
        return None


def write(directory: str, name: str, value: Any) -> None:
    """Durable when it returns; a reader sees the old file or the new one."""
    path = os.path.join(directory, name)
    with open(path + ".new", "wb") as file:
        file.write(json.dumps(value, separators=(",", ":")).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
    sync_directory(directory)


def sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(directory: str, name: str) -> None:
    try:
        os.unlink(os.path.join(directory, name))
    except FileNotFoundError:
        return
    sync_directory(directory)


def exists(directory: str, name: str) -> bool:
    return os.path.exists(os.path.join(directory, name))


def wake(directory: str) -> None:
    """Make the supervisor look at the files; nothing, when there is none: it looks when it starts."""
    try:
        descriptor = os.open(os.path.join(directory, WAKE), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no pipe yet, or nobody at its other end
        return
    try:
        os.write(descriptor, b".")
    except BlockingIOError:  # it has more than enough to wake up to
        pass
    finally:
        os.close(descriptor)
