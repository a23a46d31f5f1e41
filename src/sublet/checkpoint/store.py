"""A directory of checkpoints. Rule: a checkpoint exists if and only if its COMMIT holds; everything else is rubbish.

step-000000000100-…/COMMIT, rank-00000.json, r00000-….data     a checkpoint
tmp-step-…/                                                     being written; swept by the next writer
gone-step-…/                                                    being deleted; swept likewise
.lock                                                           held by the writer
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from sublet.checkpoint.disk import opened, sync_directory, write_whole
from sublet.checkpoint.errors import Broken, Refused, Unavailable
from sublet.checkpoint.points import reach
from sublet.checkpoint.record import COMMIT, PINNED, Commit, commit_bytes, read_commit
from sublet.checkpoint.retention import Keep, doomed

PREFIX, TEMPORARY, GONE, LOCK = "step-", "tmp-", "gone-", ".lock"


def checkpoint_name(step: int, run: str, count: int) -> str:
    """The name of the `count`-th save of a run; no two saves share one."""
    return f"{PREFIX}{step:012d}-{run}{count:05x}"


def listed(directory: Path) -> tuple[list[Commit], list[tuple[str, str]]]:
    """The checkpoints, newest first, and those whose record does not hold: name and why."""
    commits, damaged = [], []
    for path in directory.glob(f"{PREFIX}*"):
        try:
            commit = read_commit(path)
        except (Broken, OSError) as error:
            damaged.append((path.name, "It has no COMMIT." if isinstance(error, FileNotFoundError) else str(error)))
            continue
        if commit.name == path.name:
            commits.append(commit)
        else:
            damaged.append((path.name, f"Its COMMIT is that of {commit.name}."))
    return sorted(commits, key=lambda commit: -commit.sequence), sorted(damaged)


def publish(directory: Path, commit: Commit) -> None:
    """The temporary directory becomes the checkpoint: rename, then the record that makes it exist."""
    temporary, final = directory / (TEMPORARY + commit.name), directory / commit.name
    sync_directory(temporary)
    reach("before-rename")
    temporary.rename(final)
    sync_directory(directory)
    reach("renamed")
    write_whole(final / COMMIT, commit_bytes(commit))
    reach("committed")


def sweep(directory: Path) -> list[str]:
    """Remove what no checkpoint needs: half-written, half-deleted, renamed without a record. The writer's right alone.

    A directory with a damaged COMMIT stays: it may be evidence, and `gc --damaged` removes it.
    """
    swept = []
    for path in directory.iterdir():
        torn = path.name.startswith(PREFIX) and path.is_dir() and not (path / COMMIT).exists()
        if torn or path.name.startswith((TEMPORARY + PREFIX, GONE + PREFIX)):
            shutil.rmtree(path)
            swept.append(path.name)
    return sorted(swept)


def remove(directory: Path, name: str) -> bool:
    """Delete a checkpoint unless somebody is loading it: it vanishes at once, its files follow. False if in use."""
    path, gone = directory / name, directory / (GONE + name)
    with contextlib.suppress(FileNotFoundError), opened(path / COMMIT, os.O_RDONLY) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        path.rename(gone)
        sync_directory(directory)
    reach("retention-renamed")
    if gone.exists():
        shutil.rmtree(gone)
    elif path.exists():
        shutil.rmtree(path)
    return True


@contextlib.contextmanager
def in_use(directory: Path, name: str) -> Iterator[None]:
    """While a checkpoint is read, retention of this machine (or of a file system with locks) leaves it alone."""
    with opened(directory / name / COMMIT, os.O_RDONLY) as fd:
        with contextlib.suppress(OSError):  # a file system without locks: the read is verified in any case
            fcntl.flock(fd, fcntl.LOCK_SH)
        yield


def pinned(directory: Path) -> frozenset[str]:
    return frozenset(path.parent.name for path in directory.glob(f"{PREFIX}*/{PINNED}"))


def retain(directory: Path, keep: Keep) -> list[str]:
    """Apply `keep`; call it only after a commit is durable. The names that went."""
    commits, _ = listed(directory)
    return [commit.name for commit in doomed(commits, keep, pinned(directory)) if remove(directory, commit.name)]


class Lock:
    """The writer's lock of a directory; the kernel frees it when its holder dies."""

    __slots__ = ("fd",)

    def __init__(self, directory: Path, wait_ms: int = 0) -> None:
        """Unavailable if another writer holds it for longer than `wait_ms`."""
        path = directory / LOCK
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_ms / 1000
        while not self.taken():
            if time.monotonic() >= deadline:
                holder = os.pread(self.fd, 4096, 0).decode(errors="replace").strip()
                self.release()
                raise Unavailable(
                    what=f"{directory} is being written by another trainer.",
                    why=f"It is held by {holder or 'an unknown process'}.",
                    hint="Give this run a directory of its own, or stop the other one.",
                )
            time.sleep(0.05)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)

    def taken(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        return True

    def release(self) -> None:
        os.close(self.fd)


def find(directory: Path, wanted: str) -> Commit:
    """A checkpoint by name, by step, or `newest`; Refused if there is none."""
    commits, _ = listed(directory)
    for commit in commits:
        if wanted in ("newest", commit.name, str(commit.step)):
            return commit
    raise Refused(
        what=f"There is no checkpoint {wanted} in {directory}.",
        why=f"It holds {', '.join(str(commit.step) for commit in commits) or 'none'}.",
    )
