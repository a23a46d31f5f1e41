"""Bytes that are on the disk when we say so. Rule: a file is durable only after fsync of the file and of its directory.

O_DIRECT is used where the file system takes it and given up file by file where it does not; a tail that is no whole
page is written padded and cut off again.
"""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from pathlib import Path

from sublet.checkpoint.layout import PAGE_BYTES, up
from sublet.checkpoint.points import reach

O_DIRECT = getattr(os, "O_DIRECT", 0)
NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
UNDER_WAY = 2  # writes at a time: the disk has the next one while a thread prepares another
FLUSH_BYTES = 64 << 20  # buffered writing flushes this often, so that the trainer's page cache stays its own


class DataFile:
    """A new file that grows by chunks. Every chunk but the last is whole pages;
    buffers hold whole pages, page aligned.
    """

    __slots__ = ("bytes", "direct", "fd", "path", "under_way", "unflushed")

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self.path, self.bytes, self.unflushed = path, 0, 0
        self.under_way: list[Future[None]] = []
        path.unlink(missing_ok=True)
        self.fd, self.direct = open_new(path, direct=direct and bool(O_DIRECT))

    def reserve(self, size: int) -> None:
        """Ask for the room at once; OSError now rather than in the middle. File systems that cannot are left alone."""
        try:
            os.posix_fallocate(self.fd, 0, up(max(size, 1), PAGE_BYTES))
        except OSError as error:
            if error.errno not in NOT_DIRECT | {errno.ENOSYS}:
                raise

    def append(self, pages: memoryview, size: int, pool: Executor | None = None) -> int:
        """Write the first `size` bytes of `pages`; the offset at which they lie.

        With a pool the write goes on after the return: `pages` must stay, and an error comes at a later append or
        finish.
        """
        offset, self.bytes = self.bytes, self.bytes + size
        reach("chunk-write")
        if pool is None:
            self.write_all(pages, size, offset)
            return offset
        while len(self.under_way) >= UNDER_WAY:
            self.under_way.pop(0).result()
        self.under_way.append(pool.submit(self.write_all, pages, size, offset))
        return offset

    def write_all(self, pages: memoryview, size: int, offset: int) -> None:
        done = 0
        while done < (end := up(size, PAGE_BYTES) if self.direct else size):
            done += self.write(pages[done:end], offset + done)

    def write(self, view: memoryview, offset: int) -> int:
        try:
            written = os.pwrite(self.fd, view, offset)
        except OSError as error:
            if not self.direct or error.errno not in NOT_DIRECT:
                raise
            self.give_up_direct()
            return 0
        if not self.direct:
            self.unflushed += written
            if self.unflushed >= FLUSH_BYTES:
                os.fdatasync(self.fd)
                self.unflushed = 0
        return written

    def give_up_direct(self) -> None:
        import fcntl

        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~O_DIRECT)
        self.direct = False

    def finish(self) -> None:
        """Cut the padding off, make the bytes durable, close."""
        try:
            for each in self.under_way:
                each.result()
            os.ftruncate(self.fd, self.bytes)
            reach("data-written")
            os.fsync(self.fd)
        finally:
            self.close()

    def close(self) -> None:
        wait(self.under_way)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_new(path: Path, *, direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno not in NOT_DIRECT:
                raise
        path.unlink(missing_ok=True)  # some file systems make the file before they refuse the flag
    return os.open(path, flags, 0o644), False


def sync_directory(path: Path) -> None:
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes) -> None:
    """A small file, whole or not there: written beside, fsynced, renamed in, the directory fsynced."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    sync_directory(path.parent)


def free_bytes(path: Path) -> int:
    """Room that an ordinary user may fill on the file system of `path`."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def make_directory(path: Path) -> None:
    """The directory and its parents, each new one durable in its parent."""
    missing = [path, *path.parents]
    missing = missing[: next(i for i, each in enumerate(missing) if each.exists())]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_directory(each.parent)
