"""Bytes of a checkpoint on disk, verified. Rule: no byte is handed over that was not hashed in the very buffer it
came from.

A load of live objects proves every chunk it needs before it changes the first tensor, so that a damaged checkpoint
leaves them as they were.
"""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublet.checkpoint.disk import opened
from sublet.checkpoint.errors import Broken
from sublet.checkpoint.layout import Chunk, Index, up
from sublet.checkpoint.record import Commit, digest, read_index

THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """Stream bytes from `start` that go to `into`; with None they are only proved."""

    start: int
    size: int
    into: memoryview | None


@dataclass(slots=True, kw_only=True)
class Stream:
    """One rank's stream, open for reading."""

    index: Index
    files: dict[str, int]
    scratch: threading.local


def indexes(directory: Path, commit: Commit) -> list[Index]:
    """The indexes of all ranks, proved; Broken or OSError if one does not hold."""
    return [read_index(directory / commit.name, entry) for entry in commit.ranks]


@contextmanager
def open_stream(checkpoint: Path, index: Index) -> Iterator[Stream]:
    """The rank's data files, open; Broken if one is missing or of another length."""
    with ExitStack() as stack:
        files = {}
        for file in index.files:
            try:
                fd = stack.enter_context(opened(checkpoint / file.name, os.O_RDONLY))
            except FileNotFoundError as error:
                raise Broken(what=f"The file {checkpoint / file.name} is missing.") from error
            size = os.fstat(fd).st_size
            if size != file.bytes:
                raise Broken(
                    what=f"The file {checkpoint / file.name} is {size} bytes long.", why=f"It was {file.bytes}."
                )
            files[file.name] = fd
        yield Stream(index=index, files=files, scratch=threading.local())


def read_spans(stream: Stream, spans: Sequence[Span], threads: int = THREADS) -> None:
    """Prove every chunk that the spans touch and copy the spans out of it.

    Broken at the first chunk that does not hold.
    """
    by_chunk: dict[int, list[Span]] = {}
    step = stream.index.chunk_bytes
    for span in spans:
        if span.size:
            for number in range(span.start // step, (span.start + span.size - 1) // step + 1):
                by_chunk.setdefault(number, []).append(span)
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda number: read_chunk(stream, number, by_chunk[number]), sorted(by_chunk)):
            pass


def read_chunk(stream: Stream, number: int, spans: Sequence[Span]) -> None:
    chunk, start = stream.index.chunks[number], number * stream.index.chunk_bytes
    view = proved(stream, chunk)
    for span in spans:
        if span.into is not None:
            low, high = max(span.start, start), min(span.start + span.size, start + chunk.bytes)
            span.into[low - span.start : high - span.start] = view[low - start : high - start]


def proved(stream: Stream, chunk: Chunk) -> memoryview:
    """A chunk's bytes in this thread's scratch, good until the thread's next chunk."""
    area = getattr(stream.scratch, "area", None)
    if area is None or len(area) < chunk.bytes:
        area = stream.scratch.area = memoryview(mmap.mmap(-1, up(max(chunk.bytes, stream.index.chunk_bytes), 4096)))
    view, done = area[: chunk.bytes], 0
    while done < chunk.bytes:
        got = os.preadv(stream.files[chunk.file], [view[done:]], chunk.offset + done)
        if not got:
            break
        done += got
    if done < chunk.bytes or digest(view) != chunk.xxh3_128:
        raise Broken(what=f"{chunk.file} is damaged at {chunk.offset}.", why="A chunk is not what was written.")
    return view


def verify(directory: Path, commit: Commit) -> int:
    """Prove a whole checkpoint; the bytes that were read. Broken or OSError if anything does not hold."""
    total = 0
    for index in indexes(directory, commit):
        with open_stream(directory / commit.name, index) as stream:
            read_spans(stream, [Span(start=0, size=index.stream_bytes, into=None)])
        total += index.stream_bytes
    return total


def values_of(node: Any, path: str = "") -> dict[str, Any]:
    """The plain values of a tree by path; tensors are left out."""
    if not isinstance(node, dict):
        return {path: node}
    kind = node["kind"]
    if kind in ("tensor", "array"):
        return {}
    if kind == "per_rank":
        return values_of(node["value"], path)
    if kind not in ("dict", "list", "tuple"):
        return {path: {key: value for key, value in node.items() if key != "kind"}}
    out: dict[str, Any] = {}
    for key, each in node["items"] if kind == "dict" else enumerate(node["items"]):
        out |= values_of(each, f"{path}/{key}" if path else str(key))
    return out
