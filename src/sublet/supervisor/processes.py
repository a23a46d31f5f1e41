"""The processes of an instance: who they are, and how to end all of them.

Rule: a process is its pid together with its start time, so that a pid that was given away again is never hit. All of an
instance are in its cgroup where there is one; else they share the keeper's session or carry the instance's mark in
their environment.
"""

import contextlib
import os
import signal

MARK = "SUBLET_INSTANCE_MARK"


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is no such process or it is a zombie."""
    found = _stat(pid)
    return None if found is None or found[0] == "Z" else found[2]


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, session, start time."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), int(fields[3]), int(fields[19])


def child_of(pid: int) -> int | None:
    """The only child of the keeper: the program's leader."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            children = file.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(children[0]) if children else None


def members(session: int | None, mark: str, cgroup: str) -> list[int]:
    """Pids of all that is left of an instance."""
    if cgroup:
        try:
            with open(os.path.join(cgroup, "cgroup.procs"), "rb") as file:
                return [int(pid) for pid in file.read().split()]
        except FileNotFoundError:
            return []
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _belongs(pid, session, wanted)]


def _belongs(pid: int, session: int | None, wanted: bytes) -> bool:
    found = _stat(pid)
    if found is None or found[0] in "ZX" or pid == os.getpid():
        return False
    if session is not None and found[1] == session:
        return True
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return wanted in file.read().split(b"\0")
    except OSError:  # gone meanwhile, or another user's
        return False


def kill_all(session: int | None, mark: str, cgroup: str) -> None:
    """SIGKILL to everything that is left."""
    if cgroup:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(cgroup, "cgroup.kill"), "w") as file:
            file.write("1")
        return
    for pid in members(session, mark, ""):
        send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def make_cgroup(name: str) -> str:
    """A new group of the unified hierarchy, where one can be made; else nothing."""
    base = _unified_base()
    if not base:
        return ""
    path = os.path.join(base, "sublet", name)
    try:
        os.makedirs(path, exist_ok=True)
        if os.access(os.path.join(path, "cgroup.procs"), os.W_OK) and os.path.exists(os.path.join(path, "cgroup.kill")):
            return path
    except OSError:  # no right to, or read-only: the session has to do
        return ""
    return ""


def remove_cgroup(path: str) -> None:
    """Nothing when it is gone, or when something in it has not quite ended."""
    if path:
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _unified_base() -> str:
    """Where this process stands in the unified hierarchy."""
    try:
        with open("/proc/self/mounts") as file:
            mounts = [fields[1] for fields in map(str.split, file) if fields[2] == "cgroup2"]
        with open("/proc/self/cgroup") as file:
            own = [line.strip()[3:] for line in file if line.startswith("0::")]
    except OSError:
        return ""
    return os.path.join(mounts[0], own[0].lstrip("/")) if mounts and own else ""
