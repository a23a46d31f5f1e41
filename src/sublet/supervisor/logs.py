"""The log of an instance: bounded in size, with its first and its last part kept.

Rule: what was printed keeps its place in the file for ever. The program writes to the file itself, so that its output
survives whoever watches; what is too much is punched out of the middle, where the file system can do that.
"""

from __future__ import annotations

import os

from sublet.supervisor import files

TYPE_CHECKING = False  # as in `typing`, which is not loaded: see watch.py
if TYPE_CHECKING:
    from typing import Any

KEEP_FIRST_BYTES = 8 * 1024 * 1024
KEEP_LAST_BYTES = 56 * 1024 * 1024
PAGE = 4096
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def bound(directory: str, log: str, first: int, last: int) -> bool:
    """Give the middle back when there is too much of it. False: the file system cannot."""
    try:
        size = os.stat(log).st_size
    except FileNotFoundError:
        return True
    before: dict[str, Any] = files.read(directory, files.CUT) or {"from": _up(first), "to": _up(first)}
    until = (size - last) // PAGE * PAGE
    if until - before["to"] < max(PAGE, last // 4):
        return True
    files.write(directory, files.CUT, {"from": before["from"], "to": until})
    if _punch(log, before["from"], until - before["from"]):
        return True
    files.remove(directory, files.CUT)
    return False


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _punch(path: str, offset: int, length: int) -> bool:
    import ctypes  # costs 2 MiB; few logs grow so large

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        return bool(libc.fallocate(descriptor, _KEEP_SIZE_PUNCH_HOLE, offset, length) == 0)
    finally:
        os.close(descriptor)


def read(path: str, offset: int, most: int) -> tuple[bytes, int]:
    """What was printed from there on, at most so much, and where the next piece begins.

    Where the middle was given back, one line says so in its place. FileNotFoundError when nothing was printed yet.
    """
    cut = files.read(os.path.dirname(path), files.CUT)
    with open(path, "rb") as file:
        if cut is None or offset >= cut["to"]:
            file.seek(offset)
            piece = file.read(most)
            return piece, offset + len(piece)
        if offset < cut["from"]:
            file.seek(offset)
            piece = file.read(min(most, cut["from"] - offset))
            return piece, offset + len(piece)
    return f"\n--- {cut['to'] - cut['from']:,} bytes are left out here ---\n".encode(), int(cut["to"])


def tail(path: str, most: int) -> str:
    """The end of what was printed; nothing when there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
