"""Stored boxes into wanted boxes, whatever the layouts: the plan of a load. Rule: only the bytes that are needed
are read.

A Wanted is a tensor to fill: the box of `global_shape` at `start`. A Piece is a stored box in some rank's stream.
Rows that go over whole become a Run, bytes to bytes; anything else is read into a patch first and copied from there.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from sublet.checkpoint.errors import Broken
from sublet.checkpoint.layout import Index, Tensor
from sublet.checkpoint.memory import bytes_of, dtype_of, is_plain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """A tensor to fill from what is stored under `name`."""

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Stream bytes from `start` go to `into`."""

    start: int
    into: memoryview


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patch:
    """After the runs: `source` is copied to `target`."""

    source: torch.Tensor
    target: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Work:
    """Runs of each rank's stream, and the patches that follow."""

    runs: dict[int, list[Run]] = field(default_factory=lambda: defaultdict(list))
    patches: list[Patch] = field(default_factory=list)

    def finish(self) -> None:
        for patch in self.patches:
            patch.target.copy_(patch.source)


Pieces = dict[str, list[tuple[int, Tensor]]]


def pieces_of(indexes: Iterable[Index], own_rank: int) -> Pieces:
    """All stored boxes by name with the rank whose stream they are in; of per-rank tensors only this rank's."""
    out: Pieces = defaultdict(list)
    for index in indexes:
        for tensor in index.tensors:
            if not tensor.per_rank or index.rank == own_rank:
                out[tensor.name].append((index.rank, tensor))
    return out


def plan_work(wanted: Sequence[Wanted], pieces: Pieces) -> Work:
    """What to read for all wanted tensors. Broken if the stored boxes do not cover one of them."""
    work = Work()
    for each in wanted:
        covered = sum(overlap(work, each, rank, piece) for rank, piece in pieces.get(each.name, ()))
        if covered < each.tensor.numel():
            raise Broken(
                what=f"{each.name} is not whole in the checkpoint.",
                why=f"{covered} of {each.tensor.numel()} elements are there.",
            )
    return work


def overlap(work: Work, wanted: Wanted, rank: int, piece: Tensor) -> int:
    """Plan what of a piece goes into a wanted box; how many elements."""
    low = [max(a, b) for a, b in zip(wanted.start, piece.start, strict=True)]
    high = [
        min(a + m, b + n)
        for a, m, b, n in zip(wanted.start, wanted.tensor.shape, piece.start, piece.shape, strict=True)
    ]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return 0
    count = prod(b - a for a, b in zip(low, high, strict=True))
    rows = (low[0] - piece.start[0], high[0] - piece.start[0]) if low else (0, 1)
    row_bytes = piece.bytes // (piece.shape[0] if piece.shape else 1)
    start = piece.offset + rows[0] * row_bytes
    size = (rows[1] - rows[0]) * row_bytes
    direct = (
        is_plain(wanted.tensor)
        and wanted.tensor.dtype == dtype_of(piece.dtype)
        and tuple(wanted.tensor.shape[1:]) == piece.shape[1:]
        and wanted.start[1:] == piece.start[1:]
    )
    if direct:
        at = (low[0] - wanted.start[0]) * row_bytes if low else 0
        work.runs[rank].append(Run(start=start, into=bytes_of(wanted.tensor)[at : at + size]))
        return count
    shape = (rows[1] - rows[0], *piece.shape[1:]) if low else ()
    patch = torch.empty(shape, dtype=dtype_of(piece.dtype))
    work.runs[rank].append(Run(start=start, into=bytes_of(patch)))
    source, target = patch, wanted.tensor
    for dim, (a, b) in enumerate(zip(low, high, strict=True)):
        source = source.narrow(dim, a - piece.start[dim] - (rows[0] if dim == 0 else 0), b - a)
        target = target.narrow(dim, a - wanted.start[dim], b - a)
    work.patches.append(Patch(source=source, target=target))
    return count
