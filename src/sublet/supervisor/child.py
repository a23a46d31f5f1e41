"""Starts the program of an instance and knows when it is over, also for a supervisor that did not start it.

Rule: a program is started at most once. Between the supervisor and the program stands a keeper, a shell that does
nothing but write the exit code down, so that the code survives the supervisor.
"""

from __future__ import annotations

import os
import signal

from sublet.supervisor import files, processes

TYPE_CHECKING = False  # as in `typing`, which is not loaded: see watch.py
if TYPE_CHECKING:
    from typing import Any

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


class Keeper:
    """`descriptor` becomes readable when it is gone; None: it is gone already. `is_ours`: we started it ourselves."""

    __slots__ = ("descriptor", "is_ours", "pid")

    def __init__(self, *, pid: int, descriptor: int | None, is_ours: bool = False) -> None:
        self.pid, self.descriptor, self.is_ours = pid, descriptor, is_ours


def start(directory: str, settings: dict[str, Any]) -> Keeper:
    """OSError when the working directory is not there or the shell cannot be started."""
    files.write(directory, files.STARTING, {})
    groups = " ".join(sorted({settings["cgroup"], settings["memory_group"]} - {""}))
    environment = {**os.environ, **settings["environment"], "SUBLET_KEEPER_GROUPS": groups}
    exit_file = os.path.join(directory, files.EXIT)
    os.chdir(settings["workdir"] or directory)
    try:
        pid = os.posix_spawn(
            "/bin/sh",
            ["/bin/sh", "-c", KEEPER, "sublet", exit_file, *settings["argv"]],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, settings["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them; the program has not asked for that
        )
    finally:
        os.chdir("/")
    descriptor = os.pidfd_open(pid)
    record(directory, pid)
    return Keeper(pid=pid, descriptor=descriptor, is_ours=True)


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
    if not keeper.is_ours:
        return None
    status = os.waitstatus_to_exitcode(os.waitpid(keeper.pid, 0)[1])
    return 128 - status if status < 0 else None


def terminate_leader(keeper: Keeper) -> list[int]:
    """SIGTERM to the program's leader alone: its data loaders must not die under it. Who was told; nobody: it is not
    there (yet)."""
    leaders = processes.leaders_of(keeper.pid)
    for leader in leaders:
        _terminate(leader)
    return leaders


def terminate_shell(keeper: Keeper) -> None:
    """And the shell before it, which goes on with its next command."""
    shell = processes.child_of(keeper.pid)
    if shell is not None:
        _terminate(shell)
    terminate_leader(keeper)


def _terminate(pid: int) -> None:
    processes.send(pid, signal.SIGTERM)
    processes.send(pid, signal.SIGCONT)  # one that is stopped would hear nothing
