"""Where each byte of a rank's state lies: tensors at 64-byte steps in one stream, the stream in chunks, chunks in
files.

Rule: everything here is a frozen value with a JSON form; the agent, the reader and the tools share it and import no
torch.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

ALIGN_BYTES = 64
PAGE_BYTES = 4096
CHUNK_BYTES = 8 << 20

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16, "complex32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A box of a tensor: rows `start` … `start + shape` of the whole `global_shape`, row-major at `offset` of the
    stream.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    offset: int = 0
    per_rank: bool = False  # each rank has its own; never put together with another rank's

    @property
    def bytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`bytes` of the stream, kept in `file` at `offset`. `age` counts the checkpoints that have carried it over."""

    file: str
    offset: int
    bytes: int
    xxh3_128: str
    age: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One data file of a rank; `xxh3_128` is the hash of the digests of its chunks used here, in stream order."""

    name: str
    bytes: int
    linked: bool = False  # a hard link to a file of an older checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What one rank wrote: its tree of values, its tensors, and the chunks of its stream in order."""

    rank: int
    world: int
    step: int
    stream_bytes: int
    chunk_bytes: int
    tree: Any
    tensors: tuple[Tensor, ...]
    chunks: tuple[Chunk, ...] = ()
    files: tuple[File, ...] = ()


def up(value: int, to: int) -> int:
    return -(-value // to) * to


def placed(tensors: list[Tensor]) -> tuple[tuple[Tensor, ...], int]:
    """The tensors with offsets in the order given, and the length of the stream."""
    offset, out = 0, []
    for tensor in tensors:
        out.append(replace(tensor, offset=offset))
        offset = up(offset + tensor.bytes, ALIGN_BYTES)
    return tuple(out), offset


def chunk_count(stream_bytes: int, chunk_bytes: int) -> int:
    return -(-stream_bytes // chunk_bytes)


def tensor_json(tensor: Tensor) -> list[Any]:
    return [tensor.name, tensor.dtype, tensor.shape, tensor.global_shape, tensor.start, tensor.offset, tensor.per_rank]


def tensor_from(row: list[Any]) -> Tensor:
    name, dtype, shape, whole, start, offset, per_rank = row
    if dtype not in ITEM_BYTES or not len(shape) == len(whole) == len(start):
        raise ValueError(f"tensor {name!r} of dtype {dtype!r}")
    return Tensor(name=name, dtype=dtype, shape=tuple(shape), global_shape=tuple(whole), start=tuple(start),
                  offset=offset, per_rank=per_rank)  # fmt: skip


def index_json(index: Index) -> dict[str, Any]:
    return {
        "rank": index.rank,
        "world": index.world,
        "step": index.step,
        "stream_bytes": index.stream_bytes,
        "chunk_bytes": index.chunk_bytes,
        "tree": index.tree,
        "tensors": [tensor_json(tensor) for tensor in index.tensors],
        "chunks": [[c.file, c.offset, c.bytes, c.xxh3_128, c.age] for c in index.chunks],
        "files": [asdict(file) for file in index.files],
    }


def index_from(value: dict[str, Any]) -> Index:
    """The index of its JSON form; KeyError, TypeError or ValueError if it is not one."""
    return Index(
        rank=value["rank"],
        world=value["world"],
        step=value["step"],
        stream_bytes=value["stream_bytes"],
        chunk_bytes=value["chunk_bytes"],
        tree=value["tree"],
        tensors=tuple(tensor_from(row) for row in value["tensors"]),
        chunks=tuple(
            Chunk(file=file, offset=offset, bytes=size, xxh3_128=digest, age=age)
            for file, offset, size, digest, age in value["chunks"]
        ),
        files=tuple(File(**file) for file in value["files"]),
    )
