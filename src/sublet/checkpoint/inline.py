"""Saves without an agent: the trainer writes to disk itself and waits. Rule:
the same format, the same order of syncs.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sublet.checkpoint.copying import Plan
from sublet.checkpoint.errors import CheckpointError, Unavailable
from sublet.checkpoint.gang import Gang, gather
from sublet.checkpoint.layout import up
from sublet.checkpoint.memory import bytes_of
from sublet.checkpoint.persist import Disk, apply_retention, open_disk
from sublet.checkpoint.record import parse_index
from sublet.checkpoint.retention import Keep
from sublet.checkpoint.sharding import Leaf
from sublet.checkpoint.write import Previous, Save, abandon, commit, write_rank

Writer = Disk


def open_writer(
    directory: Path, gang: Gang, keep: Keep, chunk_bytes: int, direct: bool, *, lock: bool = True
) -> Writer:
    """Become the writer of a directory on all ranks. Unavailable on all if one cannot."""
    disk, why = None, ""
    try:
        disk = open_disk(directory, gang.rank, gang.world, chunk_bytes, direct, lock=lock)
    except CheckpointError as error:
        why = str(error)
    except OSError as error:
        why = f"{error.strerror}."
    first = next((each for each in gather(gang, why) if each), "")
    if first or disk is None:
        raise Unavailable(what=f"{directory} cannot be written.", why=why or first)
    disk.keep = keep
    return disk


def write_inline(
    disk: Writer,
    gang: Gang,
    plan: Plan,
    mine: Sequence[Leaf],
    record: bytes,
    *,
    name: str,
    run: str,
    metric: float | None,
) -> dict[str, Any]:
    """Write a state chunk by chunk, never holding more than one.

    OSError or CheckpointError on all ranks if one fails.
    """
    save = Save(directory=disk.directory, name=name, run=run, metric=metric)
    index, why, done, fresh_bytes = parse_index(record, "of this save", whole=False), "", None, 0
    failure: CheckpointError | OSError | None = None
    try:
        done, fresh_bytes = write_rank(save, index, gatherer(plan, mine), disk.previous, direct=disk.direct, ahead=0)
    except (CheckpointError, OSError) as error:
        failure, why = error, str(error)
    if any(gather(gang, why)):
        abandon(save, gang.rank)
        raise failure or Unavailable(what=f"{name} was not written.", why="Another rank failed.")
    try:
        if gang.rank == 0:
            commit(save, index.step, index.world, disk.sequence + 1, lambda: False)
    except (CheckpointError, OSError) as error:
        failure, why = error, str(error)
        abandon(save, 0)
    if any(gather(gang, why)):
        raise failure or Unavailable(what=f"{name} was not committed.", why="Rank 0 failed.")
    disk.sequence += 1
    disk.previous = Previous(name=name, index=done or index)
    trouble = apply_retention(disk)
    return {"bytes": index.stream_bytes, "fresh_bytes": fresh_bytes, "sequence": disk.sequence, "trouble": trouble}


def gatherer(plan: Plan, mine: Sequence[Leaf]) -> Any:
    """A source of chunks that copies each from the live tensors into one aligned buffer, good until the next."""
    buffer = memoryview(mmap.mmap(-1, up(max(plan.chunk_bytes, 1), mmap.PAGESIZE)))
    held: dict[str, Any] = {}

    def source(start: int, size: int) -> memoryview:
        end, filled = start + size, 0
        buffer[: up(size, mmap.PAGESIZE)] = bytes(up(size, mmap.PAGESIZE))
        for tensor, leaf in zip(plan.tensors, mine, strict=True):
            low, high = max(tensor.offset, start), min(tensor.offset + tensor.bytes, end)
            if low < high:
                if tensor.name not in held:
                    held.clear()
                    held[tensor.name] = leaf.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                raw = bytes_of(held[tensor.name])
                buffer[low - start : high - start] = raw[low - tensor.offset : high - tensor.offset]
                filled += high - low
        return buffer[: up(size, mmap.PAGESIZE)]

    return source
