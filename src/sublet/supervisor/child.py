"""Starts the program of an instance and knows when it is over, also for a supervisor that did not start it.

Rule: a program is started at most once. Between the supervisor and the program stands a keeper, a shell that does
nothing but write the exit code down, so that the code survives the supervisor.
"""

import os
import signal
import subprocess
from dataclasses import dataclass
from typing import Any

from sublet.supervisor import files, processes

# The trap keeps the shell alive when the program signals its own group; a handler, unlike an ignored signal, is not
# inherited by the program. The first line moves the shell, and so all that follows, into the instance's cgroups. What
# the shell itself would say ("Terminated") is kept out of the program's log.
KEEPER = """
for group in $SUBLET_KEEPER_GROUPS; do echo $$ > "$group/cgroup.procs"; done
exit_file=$1; shift; unset SUBLET_KEEPER_GROUPS
trap : TERM INT HUP QUIT USR1 USR2
exec 3>&2 2>/dev/null
(exec "$@" 2>&3 3>&-)
code=$?
echo $code > "$exit_file.new" && mv "$exit_file.new" "$exit_file"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """`descriptor` becomes readable when it is gone; None: it is gone already."""

    pid: int
    descriptor: int | None
    process: subprocess.Popen[bytes] | None = None  # when we started it ourselves


def start(directory: str, settings: dict[str, Any]) -> Keeper:
    """OSError when the working directory is not there or the shell cannot be started."""
    files.write(directory, files.STARTING, {})
    groups = " ".join(sorted({settings["cgroup"], settings["memory_group"]} - {""}))
    environment = {**os.environ, **settings["environment"], "SUBLET_KEEPER_GROUPS": groups}
    exit_file = os.path.join(directory, files.EXIT)
    with open(settings["log"], "ab") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, "sublet", exit_file, *settings["argv"]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=settings["workdir"] or directory,
            env=environment,
            start_new_session=True,
        )
    descriptor = os.pidfd_open(process.pid)
    record(directory, process.pid)
    return Keeper(pid=process.pid, descriptor=descriptor, process=process)


def record(directory: str, pid: int) -> None:
    files.write(directory, files.KEEPER, {"pid": pid, "start_ticks": processes.start_ticks(pid)})


def adopt(directory: str, mark: str) -> Keeper | None:
    """The keeper that an earlier supervisor started; None when none was started as far as can be seen."""
    known = files.read(directory, files.KEEPER)
    if known is not None:
        return _if_same(known["pid"], known["start_ticks"])
    if not files.exists(directory, files.STARTING):
        return None
    sessions = {session for pid in processes.members(None, mark, "") if (session := _session(pid)) is not None}
    for pid in sorted(sessions):
        record(directory, pid)
        return _if_same(pid, processes.start_ticks(pid))
    return Keeper(pid=0, descriptor=None)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _if_same(pid: int, ticks: int | None) -> Keeper:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return Keeper(pid=pid, descriptor=None)
    if ticks is None or processes.start_ticks(pid) != ticks:
        os.close(descriptor)
        return Keeper(pid=pid, descriptor=None)
    return Keeper(pid=pid, descriptor=descriptor)


def exit_code(directory: str, keeper: Keeper) -> int | None:
    """128 + n for signal n; None when nobody knows."""
    try:
        with open(os.path.join(directory, files.EXIT)) as file:
            return int(file.read())
    except FileNotFoundError:
        return _status(keeper)


def _status(keeper: Keeper) -> int | None:
    """Of a keeper that was killed itself, when it is our own child."""
    status = keeper.process.wait() if keeper.process is not None else None
    return 128 - status if status is not None and status < 0 else None


def terminate_leader(keeper: Keeper) -> bool:
    """SIGTERM to the program's leader alone: its data loaders must not die under it. False: it is not there (yet)."""
    leaders = processes.leaders_of(keeper.pid)
    for leader in leaders:
        processes.send(leader, signal.SIGTERM)
    return bool(leaders)
