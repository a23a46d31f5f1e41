"""One rank's stream becomes files, then all ranks' files become a checkpoint. Rule: memory in, durable bytes out.

The hash of the next chunks is computed while a chunk is written. A chunk that the rank's last checkpoint holds already
is not written again: its file is hard-linked. A file of which less than half is still used is not linked any more; what
still holds of it moves, once, to a `-kept` file, which then stays whole. After CARRIED checkpoints a chunk is
written anew, so that one spoilt sector does not spoil every checkpoint to come.
"""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from sublet.checkpoint.disk import UNDER_WAY, DataFile, free_bytes, make_directory, sync_directory, write_whole
from sublet.checkpoint.errors import Broken, Unavailable
from sublet.checkpoint.layout import Chunk, File, Index, index_json
from sublet.checkpoint.points import reach
from sublet.checkpoint.record import (
    COMMIT,
    Commit,
    Entry,
    RankEntry,
    digest,
    file_entries,
    index_name,
    parse_index,
    seal,
)
from sublet.checkpoint.store import PREFIX, TEMPORARY, publish

CARRIED = 16
LINK_BYTES = 1 << 20  # a smaller file is written again: what is shared is lost together
AHEAD = 3  # chunks hashed before the disk asks for them
SPARE_BYTES = 1 << 20  # left free on a disk for records and directories
POLL_S = 0.02

Source = Callable[
    [int, int], memoryview
]  # start and size of a chunk; whole pages, page aligned, stays until the next call


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What all ranks agree on about one checkpoint."""

    directory: Path
    name: str
    run: str
    metric: float | None = None

    @property
    def temporary(self) -> Path:
        return self.directory / (TEMPORARY + self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """The rank's last checkpoint that is on disk, to take unchanged chunks from."""

    name: str
    index: Index


@dataclass(slots=True, kw_only=True)
class Filling:
    """The files of one save while they are written."""

    save: Save
    index: Index
    previous: Previous | None
    direct: bool
    held: dict[str, Chunk] = field(default_factory=dict)
    worth: dict[str, bool] = field(default_factory=dict)  # of a previous file: link it, or move what holds of it
    linked: dict[str, int] = field(default_factory=dict)
    open: dict[str, DataFile] = field(default_factory=dict)
    fresh_bytes: int = 0
    expected_bytes: int = 0
    pool: ThreadPoolExecutor | None = None  # of the writes


def write_rank(
    save: Save, index: Index, source: Source, previous: Previous | None, *, direct: bool = True, ahead: int = AHEAD,
    whole: Callable[[], Index] | None = None,
) -> tuple[Index, int]:  # fmt: skip
    """Write one rank's part durably into the temporary directory. Its index with chunks, and the bytes really written.

    With `whole`, `index` says only how long the stream is; the index itself is asked for when the stream is written.
    OSError on a disk that fails; the temporary directory is then of no use.
    """
    make_directory(save.temporary)
    (save.temporary / failed_name(index.rank)).unlink(missing_ok=True)
    filling = Filling(save=save, index=index, previous=previous, direct=direct)
    weigh_previous(filling)
    check_room(filling)
    try:
        if filling.expected_bytes >= LINK_BYTES:  # while the copy is still made: it can take long
            open_fresh(filling, fresh_name(filling, kept=False))
        if ahead:
            filling.pool = ThreadPoolExecutor(UNDER_WAY)
        chunks = [keep_chunk(filling, *each) for each in hashed(index, source, ahead)]
        drop_unused(filling)
        for file in filling.open.values():
            file.finish()
    finally:
        for file in filling.open.values():
            file.close()
        if filling.pool is not None:
            filling.pool.shutdown()
    sizes = filling.linked | {name: file.bytes for name, file in filling.open.items()}
    files = tuple(File(name=name, bytes=size, linked=name in filling.linked) for name, size in sizes.items())
    done = replace(whole() if whole else index, chunks=tuple(chunks), files=files)
    sync_directory(save.temporary)
    reach("data-synced")
    write_whole(save.temporary / index_name(index.rank), seal(index_json(done)))
    reach("index-written")
    return done, filling.fresh_bytes


def hashed(index: Index, source: Source, ahead: int) -> Iterator[tuple[int, memoryview, int, str]]:
    """Each chunk's number, pages, size and hash, in order; hashes run up to `ahead` chunks in front, in a thread."""
    bounds = [
        (start, min(index.chunk_bytes, index.stream_bytes - start))
        for start in range(0, index.stream_bytes, index.chunk_bytes)
    ]
    if not ahead:
        for number, (start, size) in enumerate(bounds):
            pages = source(start, size)
            yield number, pages, size, digest(pages[:size])
        return
    with ThreadPoolExecutor(1) as pool:
        under_way: deque[tuple[memoryview, Future[str]]] = deque()
        for number in range(len(bounds) + ahead):
            if number < len(bounds):
                start, size = bounds[number]
                pages = source(start, size)
                under_way.append((pages, pool.submit(digest, pages[:size])))
            if number >= ahead:
                pages, xxh3 = under_way.popleft()
                yield number - ahead, pages, bounds[number - ahead][1], xxh3.result()


def weigh_previous(filling: Filling) -> None:
    """Which chunks the last checkpoint holds, and which of its files are worth a link."""
    if filling.previous is None:
        return
    index = filling.previous.index
    filling.held = {chunk.xxh3_128: chunk for chunk in index.chunks}
    for file in index.files:
        used = sum(chunk.bytes for chunk in index.chunks if chunk.file == file.name)
        filling.worth[file.name] = used * 2 >= file.bytes and file.bytes >= LINK_BYTES


def check_room(filling: Filling) -> None:
    """OSError-free early end: the disk must hold what is expected to change, or all if nothing is known."""
    expected, index = filling.index.stream_bytes, filling.previous.index if filling.previous else None
    if index is not None:
        expected = min(expected, sum(chunk.bytes for chunk in index.chunks if chunk.age == 0))
    filling.expected_bytes = expected
    free = free_bytes(filling.save.directory)
    if free < expected + SPARE_BYTES:
        raise Unavailable(
            what=f"The checkpoint {filling.save.name} was not written.",
            why=f"It needs {expected >> 20} MiB and {filling.save.directory} has {free >> 20} MiB free.",
            hint="Free some room or keep fewer checkpoints; it is tried again.",
        )


def keep_chunk(filling: Filling, number: int, pages: memoryview, size: int, xxh3: str) -> Chunk:
    """Write the chunk, or link the file that holds it."""
    held = filling.held.get(xxh3)
    if held is not None and held.bytes == size and held.age < CARRIED and linkable(filling, held):
        return replace(held, age=held.age + 1)
    kept = held is not None and held.bytes == size and filling.index.stream_bytes >= LINK_BYTES
    name = fresh_name(filling, kept=kept)
    if name not in filling.open:
        open_fresh(filling, name)
    offset = filling.open[name].append(pages, size, filling.pool)
    filling.fresh_bytes += size
    return Chunk(file=name, offset=offset, bytes=size, xxh3_128=xxh3)


def fresh_name(filling: Filling, *, kept: bool) -> str:
    return f"r{filling.index.rank:05d}-{filling.save.name.removeprefix(PREFIX)}{'-kept' if kept else ''}.data"


def open_fresh(filling: Filling, name: str) -> None:
    """A new data file, its expected room reserved."""
    filling.open[name] = DataFile(filling.save.temporary / name, direct=filling.direct)
    if name == fresh_name(filling, kept=False):
        filling.open[name].reserve(filling.expected_bytes)


def drop_unused(filling: Filling) -> None:
    """A file that was opened in expectation, and everything was there already."""
    for name in [name for name, file in filling.open.items() if not file.bytes]:
        file = filling.open.pop(name)
        file.close()
        file.path.unlink()


def linkable(filling: Filling, held: Chunk) -> bool:
    """Link the file of a held chunk once; False if it is not worth it or the file system does not link."""
    previous = filling.previous
    if held.file in filling.linked:
        return True
    if previous is None or not filling.worth.get(held.file):
        return False
    target = filling.save.temporary / held.file
    try:
        target.unlink(missing_ok=True)
        os.link(filling.save.directory / previous.name / held.file, target)
    except OSError:  # no hard links here, too many of them, or the old file is gone: write the chunk
        filling.worth[held.file] = False
        return False
    filling.linked[held.file] = target.stat().st_size
    return True


def gather(save: Save, world: int) -> tuple[RankEntry, ...] | None:
    """All ranks' parts as COMMIT names them, or None while one is missing. Broken if one contradicts its files."""
    entries = []
    for rank in range(world):
        path = save.temporary / index_name(rank)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            if (save.temporary / failed_name(rank)).exists():
                raise Unavailable(what=f"Rank {rank} could not write its part of {save.name}.") from None
            return None
        index = parse_index(data, str(path))
        if index.rank != rank or index.world != world:
            raise Broken(what=f"{path} is of rank {index.rank} of {index.world}.", why=f"{world} ranks save.")
        files = file_entries(index)
        for file in files:
            if (save.temporary / file.name).stat().st_size != file.bytes:
                raise Broken(what=f"{file.name} of {save.name} is not {file.bytes} bytes long.")
        entry = Entry(name=path.name, bytes=len(data), xxh3_128=digest(data))
        entries.append(RankEntry(rank=rank, index=entry, files=files))
    return tuple(entries)


def failed_name(rank: int) -> str:
    return f"rank-{rank:05d}.failed"


def commit(save: Save, step: int, world: int, sequence: int, give_up: Callable[[], bool]) -> Commit:
    """Rank 0: when every rank's part is there, make the checkpoint exist. Unavailable if `give_up` says so first."""
    while (ranks := gather(save, world)) is None:
        if give_up():
            raise Unavailable(what=f"{save.name} was not committed.", why="Not all ranks wrote their part in time.")
        time.sleep(POLL_S)
    record = Commit(name=save.name, step=step, sequence=sequence, run=save.run, saved_ms=time.time_ns() // 1_000_000,
                    world=world, ranks=ranks, metric=save.metric)  # fmt: skip
    publish(save.directory, record)
    return record


def await_commit(save: Save, give_up: Callable[[], bool]) -> None:
    """The other ranks: until rank 0 has committed. Unavailable if it gave up or `give_up` says so."""
    final = save.directory / save.name
    while not (final / COMMIT).exists():
        gone = not save.temporary.exists() and not final.exists()
        if gone or give_up():
            raise Unavailable(what=f"{save.name} was not committed.", why="Rank 0 did not bring all parts together.")
        time.sleep(POLL_S)


def abandon(save: Save, rank: int) -> None:
    """A save that failed: rank 0 removes it, renamed or not; another rank leaves word so that rank 0 need not wait."""
    if rank == 0:
        shutil.rmtree(save.temporary, ignore_errors=True)
        shutil.rmtree(save.directory / save.name, ignore_errors=True)
    elif save.temporary.exists():
        (save.temporary / index_name(rank)).unlink(missing_ok=True)
        (save.temporary / failed_name(rank)).touch()
