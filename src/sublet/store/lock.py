"""One writer a directory: the lock that a second server meets.

One rule: the kernel holds it (flock), so it goes when its process goes, however that ends.
"""

import fcntl
import os
from pathlib import Path

from sublet.domain.errors import Unavailable

NAME = "lock"


def take(directory: Path) -> int:
    """The descriptor that holds the lock until it is closed. The directory is made when it is not there.

    Unavailable when another process holds it, or when the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise _held(directory, holder) from error
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise _unwritable(directory, error) from error
    return descriptor


def _held(directory: Path, holder: str) -> Unavailable:
    return Unavailable(
        what=f"Another server works on {directory}{f' (process {holder})' if holder else ''}.",
        why="A data directory has one writer.",
        hint="Stop that server first, or give this one another --data directory.",
        code="directory_in_use",
    )


def _unwritable(directory: Path, error: OSError) -> Unavailable:
    return Unavailable(
        what=f"The data directory {directory} cannot be written.",
        why=f"The system says: {error.strerror}.",
        hint="Free space there, change its permissions, or choose another with --data.",
        code="directory_unwritable",
    )
