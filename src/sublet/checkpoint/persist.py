"""From a slot to the disk: what the agent's writer does with one copy. Rule:
the copy in memory stays until it is durable.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sublet.checkpoint.disk import make_directory
from sublet.checkpoint.errors import Broken, CheckpointError
from sublet.checkpoint.layout import PAGE_BYTES, Index, up
from sublet.checkpoint.record import digest, parse_index, read_index
from sublet.checkpoint.retention import Keep
from sublet.checkpoint.slots import WRITING, Slot
from sublet.checkpoint.store import Lock, listed, retain, sweep
from sublet.checkpoint.write import Previous, Save, abandon, await_commit, commit, write_rank

LOCK_WAIT_MS = 10_000


@dataclass(slots=True, kw_only=True)
class Disk:
    """The directory as this rank writes it."""

    directory: Path
    rank: int
    world: int
    chunk_bytes: int
    direct: bool
    keep: Keep
    lock: Lock | None
    sequence: int  # of the newest commit
    previous: Previous | None


def open_disk(directory: Path, rank: int, world: int, chunk_bytes: int, direct: bool, *, lock: bool = True) -> Disk:
    """Become the directory's writer: rank 0 takes its lock and sweeps it. Unavailable if another run holds it."""
    make_directory(directory)
    held = None
    if rank == 0 and lock:
        held = Lock(directory, LOCK_WAIT_MS)
        sweep(directory)
    commits, _ = listed(directory)
    previous = None
    if commits and rank < commits[0].world:
        with contextlib.suppress(Broken, OSError):  # then nothing is taken over from it
            index = read_index(directory / commits[0].name, commits[0].ranks[rank])
            previous = Previous(name=commits[0].name, index=index)
    return Disk(directory=directory, rank=rank, world=world, chunk_bytes=chunk_bytes, direct=direct, keep=Keep(),
                lock=held, sequence=commits[0].sequence if commits else 0, previous=previous)  # fmt: skip


def index_in(slot: Slot) -> Index:
    """The index that the trainer wrote behind the stream of a copy; Broken if it is not what the trainer said."""
    start, size = up(int(slot.copy["stream_bytes"]), PAGE_BYTES), int(slot.copy["index_bytes"])
    data = slot.map[start : start + size]
    if digest(data) != slot.copy["index_xxh3_128"]:
        raise Broken(what=f"The copy of step {slot.copy['step']} in memory is damaged.", why="Its index changed.")
    return parse_index(data, "of a copy in memory", whole=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A copy that is durable: its commit's sequence, its index as written, the bytes that were new on disk."""

    sequence: int
    index: Index
    fresh_bytes: int


class CopyEnded(Exception):
    """The trainer did not finish the copy that was on its way to disk."""


def persist_copy(disk: Disk, slot: Slot, there: Callable[[int | None], None], give_up: Callable[[], bool]) -> Done:
    """Write and commit. CheckpointError or OSError if it is not durable;
    then nothing of it is left, if the disk lets us.

    `there(end)` returns when the stream is in the slot up to `end`, `there(None)` when the index is too; CopyEnded
    comes from there.
    """
    copy = slot.copy
    save = Save(directory=disk.directory, name=copy["name"], run=copy["run"], metric=copy["metric"])
    head = Index(rank=disk.rank, world=copy["world"], step=copy["step"], stream_bytes=copy["stream_bytes"],
                 chunk_bytes=copy["chunk_bytes"], tree=None, tensors=())  # fmt: skip

    def whole() -> Index:
        there(None)
        return index_in(slot)

    try:
        with memoryview(slot.map) as view:

            def source(start: int, size: int) -> memoryview:
                there(start + size)
                return view[start : start + up(size, PAGE_BYTES)]

            done, fresh_bytes = write_rank(save, head, source, disk.previous, direct=disk.direct, whole=whole)
        if disk.rank == 0:
            disk.sequence = commit(save, head.step, head.world, disk.sequence + 1, give_up).sequence
        else:
            await_commit(save, give_up)
            disk.sequence += 1
    except CopyEnded:
        if slot.state != WRITING or head.world == 1:  # else the others' parts stay: this one follows
            with contextlib.suppress(OSError):
                abandon(save, disk.rank)
        raise
    except (CheckpointError, OSError):
        with contextlib.suppress(OSError):  # the disk fails; what is left is swept later
            abandon(save, disk.rank)
        raise
    disk.previous = Previous(name=save.name, index=done)
    return Done(sequence=disk.sequence, index=done, fresh_bytes=fresh_bytes)


def apply_retention(disk: Disk) -> str:
    """Delete what need not be kept, after a commit. What went wrong, or nothing: the checkpoint itself is safe."""
    if disk.rank:
        return ""
    try:
        retain(disk.directory, disk.keep)
    except OSError as error:
        return f"Old checkpoints in {disk.directory} could not be deleted. {error}."
    return ""


def digests_of(slot: Slot) -> list[str]:
    """The hashes of a copy's chunks as they are in memory now."""
    total, chunk_bytes = int(slot.copy["stream_bytes"]), int(slot.copy["chunk_bytes"])
    with memoryview(slot.map) as view:
        return [digest(view[at : min(at + chunk_bytes, total)]) for at in range(0, total, chunk_bytes)]
