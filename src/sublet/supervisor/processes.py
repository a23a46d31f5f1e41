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
    """The only child of the keeper: the program, or the shell that it is run by."""
    children = _children(pid)
    return children[0] if children else None


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


SHELLS = ("sh", "dash", "bash", "ash", "ksh", "zsh")
FILTERS = ("tee", "cat", "grep", "sed", "awk", "ts")  # behind a pipe: they end with what they read from


def leaders_of(keeper: int, number: int = signal.SIGTERM) -> list[int]:
    """Who is to get this signal: the program itself, though a shell that passes nothing on may stand before it."""
    found = child_of(keeper)
    if found is not None and _command(found) == _command(keeper):
        return []  # forked, and not yet the program: it would not hear
    while found is not None and _name(found) in SHELLS and not _hears(found, number):
        below = [pid for pid in _children(found) if _name(pid) not in FILTERS]
        if len(below) != 1:
            return below or [found]
        found = below[0]
    return [] if found is None else [found]


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:  # gone
        return b""


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:  # gone
        return ""


def _hears(pid: int, number: int) -> bool:
    """It catches or ignores the signal."""
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = dict(line.rstrip().split(":\t", 1) for line in file if line.startswith(("SigCgt", "SigIgn")))
    except OSError:  # gone
        return False
    bit = 1 << (number - 1)
    return any(int(mask, 16) & bit for mask in masks.values())


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
    base = _base("cgroup2", "")
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


def limit_memory(cgroup: str, name: str, most: int) -> str:
    """A group that may use so many bytes: `cgroup` itself where the unified hierarchy counts memory, else one of the
    older hierarchy; nothing where neither can be had."""
    if cgroup and os.path.exists(os.path.join(cgroup, "memory.max")):
        return cgroup if _put(os.path.join(cgroup, "memory.max"), most) else ""
    base = _base("cgroup", "memory")
    if not base:
        return ""
    path = os.path.join(base, "sublet", name)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:  # no right to
        return ""
    return path if _put(os.path.join(path, "memory.limit_in_bytes"), most) else ""


def _put(path: str, value: int) -> bool:
    try:
        with open(path, "w") as file:
            file.write(str(value))
    except OSError:  # not there, or no right to
        return False
    return True


def oom_kills(group: str) -> int:
    """How often the kernel killed something in the group because its memory was used up."""
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError), open(os.path.join(group, name)) as file:
            counts = dict(line.split() for line in file)
            return int(counts.get("oom_kill", 0))
    return 0


def cpu_ticks(pids: list[int]) -> int:
    """Processor time that these have used so far, in clock ticks."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total


def state_of(pid: int) -> str:
    """R, S, D, T, Z … as the kernel has it; nothing when it is gone."""
    found = _stat(pid)
    return "" if found is None else found[0]


def remove_cgroup(path: str) -> None:
    """Nothing when it is gone, or when something in it has not quite ended."""
    if path:
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _base(kind: str, controller: str) -> str:
    """Where this process stands in a hierarchy of cgroups: the unified one, or that of a controller."""
    try:
        with open("/proc/self/mounts") as file:
            mounts = [fields for fields in map(str.split, file) if fields[2] == kind]
        with open("/proc/self/cgroup") as file:
            own = dict(line.strip().split(":", 2)[1:] for line in file)
    except OSError:
        return ""
    mounts = [fields for fields in mounts if not controller or controller in fields[3].split(",")]
    inside = next((path for names, path in own.items() if controller in names.split(",")), None)
    return os.path.join(mounts[0][1], inside.lstrip("/")) if mounts and inside is not None else ""
