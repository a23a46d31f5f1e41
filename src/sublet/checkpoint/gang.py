"""The ranks of a distributed run agree. Rule: every rank calls the same things in the same order, and all get one
answer.

Votes and records go over a gloo group of our own, so that they neither wait for nor disturb the training's collectives.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(slots=True, kw_only=True)
class Gang:
    """This rank among all; `group` is None for a process alone."""

    rank: int = 0
    world: int = 1
    group: Any = None
    pending: tuple[torch.Tensor, Any] | None = None


def join_gang() -> Gang:
    """All ranks of the default process group, if there is one. Collective: every rank must come here."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Gang()
    return Gang(rank=dist.get_rank(), world=dist.get_world_size(), group=dist.new_group(backend="gloo"))


def most(gang: Gang, flags: Sequence[int]) -> list[int]:
    """The largest of each flag over all ranks; waits for all."""
    if gang.group is None:
        return list(flags)
    tensor = torch.tensor(flags, dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=gang.group)
    return [int(each) for each in tensor.tolist()]


def ask_all(gang: Gang, flags: Sequence[int]) -> None:
    """Begin a vote that `hear_all` ends one call later; costs no waiting."""
    tensor = torch.tensor(flags, dtype=torch.int64)
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=gang.group, async_op=True) if gang.group else None
    gang.pending = (tensor, work)


def hear_all(gang: Gang) -> list[int]:
    """The answer of the vote before; all zero if there was none."""
    if gang.pending is None:
        return []
    tensor, work = gang.pending
    gang.pending = None
    if work is not None:
        work.wait()
    return [int(each) for each in tensor.tolist()]


def gather(gang: Gang, value: Any) -> list[Any]:
    """Every rank's JSON value, in the order of ranks."""
    if gang.group is None:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(gang.world)]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=gang.group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(gang.world)]
    dist.all_gather(rows, padded, group=gang.group)
    return [json.loads(bytes(row[: int(size)].tolist())) for row, size in zip(rows, sizes, strict=True)]


def send_from(gang: Gang, tensor: torch.Tensor, rank: int) -> None:
    """`tensor` of `rank` becomes everybody's, in place."""
    dist.broadcast(tensor, src=dist.get_global_rank(gang.group, rank), group=gang.group)


def leave_gang(gang: Gang) -> None:
    """Give the group back. Collective."""
    if gang.pending is not None and gang.pending[1] is not None:
        gang.pending[1].wait()
    gang.pending = None
    if gang.group is not None and dist.is_initialized():
        dist.destroy_process_group(gang.group)
    gang.group = None
