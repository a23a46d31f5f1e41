"""Which part of a tensor a rank holds and which part it writes. Rule: the parts that ranks write are disjoint boxes.

A DTensor says itself what it holds. A plain tensor is taken to be the same on every rank that has it, as under DDP, and
each of those ranks writes some of its rows. What is neither is marked: Shard for a part, PerRank for a rank's own
value.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sublet.checkpoint.errors import Refused

Shape = tuple[int, ...]


@dataclass(slots=True)
class Shard:
    """`tensor` is the box of a tensor of `global_shape` that begins at `start`; `replicas` ranks hold the same box."""

    tensor: torch.Tensor
    global_shape: Shape
    start: Shape

    def __post_init__(self) -> None:
        self.global_shape, self.start = tuple(self.global_shape), tuple(self.start)
        shape = tuple(self.tensor.shape)
        fits = len(shape) == len(self.global_shape) == len(self.start) and all(
            at >= 0 and at + size <= whole for at, size, whole in zip(self.start, shape, self.global_shape, strict=True)
        )
        if not fits:
            raise Refused(what=f"A shard of shape {shape} at {self.start} is not inside {self.global_shape}.")


@dataclass(slots=True)
class PerRank:
    """A value of which each rank keeps its own, such as a random state."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leaf:
    """A tensor in a state: the local box, where it lies in the whole, and who else holds the same box."""

    name: str
    tensor: torch.Tensor  # plain, local, detached; its memory is the live one
    global_shape: Shape
    start: Shape
    per_rank: bool = False
    replicated: bool = False  # plain: every rank that has the name holds it whole
    replica: tuple[int, int] = (0, 1)  # which of how many holders of this very box
    distributed: Any = None  # the live DTensor of which `tensor` is the local part

    @property
    def layout(self) -> tuple[Any, ...]:
        shape = tuple(self.tensor.shape)
        return (self.name, str(self.tensor.dtype), shape, self.global_shape, self.start, self.per_rank, self.replicated)


def leaf_of(name: str, value: torch.Tensor | Shard, *, per_rank: bool) -> Leaf:
    """The leaf of a tensor, DTensor or Shard."""
    if isinstance(value, Shard):
        return Leaf(name=name, tensor=value.tensor.detach(), global_shape=value.global_shape, start=value.start,
                    per_rank=per_rank)  # fmt: skip
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    value = value.detach()
    if not plain and is_distributed(value):
        return distributed_leaf(name, value)
    if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        kinds = {"meta": value.is_meta, "quantized": value.is_quantized, "nested": value.is_nested, "sparse": True}
        kind = next(kind for kind, holds in kinds.items() if holds)
        raise Refused(what=f"{name} cannot be kept.", why=f"It is a {kind} tensor.", hint="Keep its dense parts.")
    zeros = (0,) * value.dim()
    return Leaf(name=name, tensor=value, global_shape=tuple(value.shape), start=zeros, per_rank=per_rank,
                replicated=not per_rank)  # fmt: skip


def is_distributed(value: torch.Tensor) -> bool:
    """Is it a DTensor?"""
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


def distributed_leaf(name: str, value: Any) -> Leaf:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = value.device_mesh, value.placements
    shape, start = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    local = value.to_local()
    if tuple(local.shape) != tuple(shape):
        raise Refused(
            what=f"{name} cannot be kept.", why=f"Its local shape {tuple(local.shape)} is not {tuple(shape)}."
        )
    index, count = 0, 1
    coordinate = mesh.get_coordinate() or [0] * len(placements)
    for at, size, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if isinstance(placement, Replicate):
            index, count = index * size + at, count * size
        elif not placement.is_shard():
            raise Refused(what=f"{name} cannot be kept.", why=f"It is placed as {placement}.", hint="Reduce it first.")
    start = tuple(start) if local.numel() else (0,) * len(start)
    return Leaf(name=name, tensor=local, global_shape=tuple(value.shape), start=start, replica=(index, count),
                distributed=value)  # fmt: skip


def row_bytes(leaf: Leaf) -> tuple[int, int]:
    """Rows of the local box and bytes of one row; a scalar is one row."""
    rows = leaf.tensor.shape[0] if leaf.tensor.dim() else 1
    return rows, (leaf.tensor.numel() // rows if rows else 0) * leaf.tensor.element_size()


def part(leaf: Leaf, first: int, last: int) -> Leaf:
    """Rows `first` to `last` of a leaf's own box."""
    if leaf.tensor.dim() == 0 or (first == 0 and last == leaf.tensor.shape[0]):
        return leaf
    start = (leaf.start[0] + first, *leaf.start[1:])
    return replace(leaf, tensor=leaf.tensor[first:last], start=start)


def shares(leaves: Sequence[Leaf], index: int, count: int) -> list[Leaf]:
    """What holder `index` of `count` equal holders writes: an even share by bytes, cut between rows."""
    sizes = [row_bytes(leaf) for leaf in leaves]
    total = sum(rows * size for rows, size in sizes)
    low, high = total * index // count, total * (index + 1) // count
    out, at = [], 0
    for leaf, (rows, size) in zip(leaves, sizes, strict=True):
        if size == 0:
            first, last = (0, rows) if index == 0 else (0, 0)
        else:
            first, last = (min(max(-(-(bound - at) // size), 0), rows) for bound in (low, high))
        at += rows * size
        if first < last or (size == 0 and index == 0):
            out.append(part(leaf, first, last))
    return out


def owned(leaves: Sequence[Leaf], holders: dict[str, tuple[int, ...]], rank: int) -> list[Leaf]:
    """What `rank` writes of its leaves. `holders` names, for each replicated leaf, the ranks that have it."""
    groups: dict[tuple[int, int, tuple[int, ...]], list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        if leaf.per_rank:
            groups[(0, 1, ())].append(leaf)
        elif leaf.replicated:
            ranks = holders.get(leaf.name, (rank,))
            groups[(ranks.index(rank), len(ranks), ranks)].append(leaf)
        else:
            groups[(*leaf.replica, ())].append(leaf)
    mine = {(leaf.name): leaf for (index, count, _), group in groups.items() for leaf in shares(group, index, count)}
    return [mine[leaf.name] for leaf in leaves if leaf.name in mine]


def holders_of(layouts: Sequence[Sequence[Sequence[Any]]]) -> dict[str, tuple[int, ...]]:
    """From each rank's [name, dtype, shape] of replicated leaves: who holds what. Refused if they differ in shape."""
    seen: dict[str, tuple[Any, Any, list[int]]] = {}
    for rank, rows in enumerate(layouts):
        for name, dtype, shape in rows:
            known = seen.setdefault(name, (dtype, shape, []))
            if known[:2] != (dtype, shape):
                raise Refused(
                    what=f"{name} differs between ranks.",
                    why=f"It is {dtype} {known[1]} on rank {known[2][0]} and {dtype} {shape} on rank {rank}.",
                    hint="Mark a part of a tensor with Shard, a rank's own value with PerRank.",
                )
            known[2].append(rank)
    return {name: tuple(ranks) for name, (_, _, ranks) in seen.items()}
