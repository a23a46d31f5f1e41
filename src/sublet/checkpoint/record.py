"""Records that prove themselves: one line of JSON, then a line with its xxh3-128. Rule: what does not hold is not read.

COMMIT is the record that makes a checkpoint exist; it names every rank's index and files with sizes and hashes, and the
index names every chunk with its hash, so one valid COMMIT vouches for every byte.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from sublet.checkpoint.errors import Broken
from sublet.checkpoint.layout import Index, index_from

FORMAT = "sublet-checkpoint/1"
COMMIT = "COMMIT"
PINNED = "PINNED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file as COMMIT names it. For a data file the hash is that of its chunk digests in stream order."""

    name: str
    bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEntry:
    rank: int
    index: Entry
    files: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The commit record. `sequence` grows with every commit of the directory: the highest is the newest."""

    name: str
    step: int
    sequence: int
    run: str
    saved_ms: int
    world: int
    ranks: tuple[RankEntry, ...]
    metric: float | None = None

    @property
    def bytes(self) -> int:
        return sum(file.bytes for rank in self.ranks for file in rank.files)


def digest(data: bytes | memoryview) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))


def index_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def seal(value: dict[str, Any]) -> bytes:
    """The bytes of a record."""
    return sealed(json.dumps({"format": FORMAT, **value}, separators=(",", ":"), allow_nan=False).encode() + b"\n")


def sealed(line: bytes) -> bytes:
    """A line of JSON, its end included, with its hash behind it."""
    return line + f"xxh3-128 {digest(line)}\n".encode()


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """The value of a record; Broken if its hash does not hold or the format is another."""
    line, _, tail = data.partition(b"\n")
    if tail.decode("ascii", "replace").split() != ["xxh3-128", digest(line + b"\n")]:
        raise Broken(what=f"The record {what} is damaged.", why="Its hash does not hold.")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Broken(what=f"The record {what} is not JSON.", why=f"{error}.") from error
    found = value.get("format") if isinstance(value, dict) else type(value).__name__
    if found != FORMAT:
        raise Broken(what=f"The record {what} is of format {found}.", why=f"This version reads {FORMAT}.")
    return dict(value)


def commit_bytes(commit: Commit) -> bytes:
    return seal(asdict(commit))


def read_commit(directory: Path) -> Commit:
    """The commit record of a checkpoint directory; Broken if it is damaged, FileNotFoundError if there is none."""
    path = directory / COMMIT
    value = unseal(path.read_bytes(), str(path))
    try:
        ranks = tuple(
            RankEntry(rank=r["rank"], index=Entry(**r["index"]), files=tuple(Entry(**f) for f in r["files"]))
            for r in value["ranks"]
        )
        commit = Commit(ranks=ranks, **{key: value[key] for key in COMMIT_FIELDS})
        numbers = (commit.step, commit.sequence, commit.saved_ms, commit.world, *(rank.rank for rank in ranks))
        if any(type(number) is not int for number in numbers) or not isinstance(commit.metric, float | int | None):
            raise TypeError("what should be a number is none")
    except (KeyError, TypeError) as error:
        raise Broken(what=f"The record {path} is not understood.", why=f"{error!r}.") from error
    if [rank.rank for rank in ranks] != list(range(commit.world)) or any(not plain_names(rank) for rank in ranks):
        raise Broken(what=f"The record {path} does not name its {commit.world} ranks.")
    return commit


COMMIT_FIELDS = ("name", "step", "sequence", "run", "saved_ms", "world", "metric")


def plain_names(rank: RankEntry) -> bool:
    """No file name may lead out of its directory."""
    return all(Path(entry.name).name == entry.name for entry in (rank.index, *rank.files))


def read_index(directory: Path, entry: RankEntry) -> Index:
    """A rank's index, checked against the commit record; Broken if it does not hold."""
    path = directory / entry.index.name
    data = path.read_bytes()
    if len(data) != entry.index.bytes or digest(data) != entry.index.xxh3_128:
        raise Broken(what=f"The index {path} is damaged.", why="It is not the one that COMMIT names.")
    return parse_index(data, str(path))


def parse_index(data: bytes, what: str, *, whole: bool = True) -> Index:
    """The index in a record; Broken if it is none. Not `whole`: one that has no chunks yet."""
    try:
        index = index_from(unseal(data, what))
        trouble = contradiction(index) if whole else ""
    except (KeyError, TypeError, ValueError) as error:
        raise Broken(what=f"The index {what} is not understood.", why=f"{error!r}.") from error
    if trouble:
        raise Broken(what=f"The index {what} contradicts itself.", why=trouble)
    return index


def contradiction(index: Index) -> str:
    """What in an index cannot be, or nothing. After it no reader steps outside the stream or the files."""
    known = {file.name for file in index.files}
    sizes = [chunk.bytes for chunk in index.chunks]
    even = all(size == index.chunk_bytes for size in sizes[:-1]) and all(
        0 < size <= index.chunk_bytes for size in sizes
    )
    if any(chunk.file not in known for chunk in index.chunks) or not even or sum(sizes) != index.stream_bytes:
        return "Its chunks do not make up its stream."
    for tensor in index.tensors:
        boxes = zip(tensor.start, tensor.shape, tensor.global_shape, strict=True)
        if any(low < 0 or size < 0 or low + size > whole for low, size, whole in boxes):
            return f"The box of {tensor.name} is not inside its tensor."
        if tensor.offset < 0 or tensor.offset + tensor.bytes > index.stream_bytes:
            return f"{tensor.name} is not inside the stream."
    return ""


def file_entries(index: Index) -> tuple[Entry, ...]:
    """The data files of an index as COMMIT names them."""
    out = []
    for file in index.files:
        digests = "".join(chunk.xxh3_128 for chunk in index.chunks if chunk.file == file.name)
        out.append(Entry(name=file.name, bytes=file.bytes, xxh3_128=digest(bytes.fromhex(digests))))
    return tuple(out)
