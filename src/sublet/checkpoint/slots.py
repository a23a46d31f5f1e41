"""Memory for copies: unnamed memory files, prefaulted. Rule: what has no name cannot leak;
it goes with its last holder.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from typing import Any

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
FREE, WRITING, COMPLETE = "free", "writing", "complete"
GRAIN_BYTES = 2 << 20
PIECE_BYTES = 8 << 20

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One copy's room as the agent knows it. What is in it is described by `copy`, the trainer's own words."""

    id: int
    fd: int
    map: mmap.mmap
    capacity: int
    state: str = FREE
    copied: int = 0  # bytes of the stream that are in place while it is being written into
    generation: int = 0  # of the copy: grows with each
    copy: dict[str, Any] = field(default_factory=dict)  # name, step, stream_bytes, index_bytes, index_xxh3_128 …
    wanted: bool = False  # to be on disk
    durable: bool = False
    sequence: int = 0  # of its commit; while not durable, of the last commit before it
    users: int = 0  # threads that read it now
    retry_at: float = 0.0
    tries: int = 0
    digests: list[str] | None = None
    since_notice: bool = False
    is_present: bool = False  # all pages are mapped in this process


def make_slot(number: int, size: int) -> Slot:
    """A new slot, its pages present. OSError if the memory is not there."""
    fd = os.memfd_create("sublet-checkpoint", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        slot = open_slot(number, fd, size)
    except OSError:
        os.close(fd)
        raise
    populate(slot.map, size)
    return slot


def open_slot(number: int, fd: int, size: int) -> Slot:
    return Slot(id=number, fd=fd, map=mmap.mmap(fd, size), capacity=size)


def close_slot(slot: Slot) -> None:
    """Give the memory back as far as this process holds it. Nobody may be reading."""
    slot.map.close()
    os.close(slot.fd)


def populate(area: mmap.mmap, size: int) -> None:
    """Fault all pages in, with the interpreter's lock released; where the kernel cannot, touch each page.

    Piece by piece: while the kernel populates, no other thread of the process can map memory, not even for a large
    allocation.
    """
    start = address(area)
    for piece in range(0, size, PIECE_BYTES):
        length = min(PIECE_BYTES, size - piece)
        if _libc.madvise(ctypes.c_void_p(start + piece), ctypes.c_size_t(length), MADV_POPULATE_WRITE) != 0:
            for offset in range(piece, piece + length, mmap.PAGESIZE):
                area[offset] = area[offset]


def fault_in(slot: Slot) -> None:
    """Map all pages of a slot into this process; from then on it is memory like any other."""
    populate(slot.map, slot.capacity)
    slot.is_present = True


def address(area: mmap.mmap) -> int:
    """Where a writable mapping lies. The mapping must outlive the use of the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(area))
