"""The copy of a state into a slot: what blocks training. Rule: the plan is made once; a save is one copy per tensor.

CPU tensors are copied at once. CUDA tensors go over a side stream into the slot, which is registered as pinned
memory; the next optimizer step waits for the copy on the device, not on the host.
"""

import json
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sublet.checkpoint.layout import CHUNK_BYTES, PAGE_BYTES, Tensor, placed, tensor_json, up
from sublet.checkpoint.memory import dtype_name, view_at
from sublet.checkpoint.record import FORMAT, sealed
from sublet.checkpoint.sharding import Leaf

TELL_BYTES = 64 << 20  # so often a copy tells how far it is
TELL_FROM = 0.8  # of the stream: earlier, hashing and writing would slow the copy down by more than they gain

Layout = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where each leaf that this rank writes goes in the stream. `tensors_json` is the same, ready for the index."""

    layout: Layout
    tensors: tuple[Tensor, ...]
    stream_bytes: int
    chunk_bytes: int
    tensors_json: str


def layout_of(leaves: Sequence[Leaf]) -> Layout:
    return tuple(leaf.layout for leaf in leaves)


def make_plan(layout: Layout, leaves: Sequence[Leaf], chunk_bytes: int = CHUNK_BYTES) -> Plan:
    """A plan for the leaves that this rank writes;
    `layout` is that of all its leaves, to see when it no longer fits.
    """
    rows = [
        Tensor(name=leaf.name, dtype=dtype_name(leaf.tensor.dtype), shape=tuple(leaf.tensor.shape),
               global_shape=leaf.global_shape, start=leaf.start, per_rank=leaf.per_rank)
        for leaf in leaves
    ]  # fmt: skip
    tensors, stream_bytes = placed(rows)
    text = json.dumps([tensor_json(tensor) for tensor in tensors], separators=(",", ":"))
    return Plan(layout=layout, tensors=tensors, stream_bytes=stream_bytes, chunk_bytes=chunk_bytes, tensors_json=text)


def index_bytes(plan: Plan, *, rank: int, world: int, step: int, tree: Any) -> bytes:
    """The index record of a copy, without chunks: the writer adds them."""
    head = {"format": FORMAT, "rank": rank, "world": world, "step": step, "stream_bytes": plan.stream_bytes,
            "chunk_bytes": plan.chunk_bytes, "chunks": [], "files": [], "tree": tree}  # fmt: skip
    text = json.dumps(head, separators=(",", ":"), allow_nan=False)
    return sealed(f'{text[:-1]},"tensors":{plan.tensors_json}}}\n'.encode())


def room_for(plan: Plan, record: bytes) -> int:
    """The bytes of a slot that holds the stream, then the index, with some room for the index to grow."""
    return up(plan.stream_bytes, PAGE_BYTES) + up(2 * len(record) + (64 << 10), PAGE_BYTES)


def windows(plan: Plan, area: mmap.mmap) -> list[torch.Tensor]:
    """The places of the plan's tensors in a slot.

    The gaps between them are made zero, so that equal states hash equal.
    """
    end = 0
    for tensor in plan.tensors:
        area[end : tensor.offset] = bytes(tensor.offset - end)
        end = tensor.offset + tensor.bytes
    tail = up(plan.stream_bytes, PAGE_BYTES)
    area[end:tail] = bytes(tail - end)
    dtypes = [getattr(torch, tensor.dtype) for tensor in plan.tensors]
    return [view_at(area, t.offset, dtype, t.shape) for t, dtype in zip(plan.tensors, dtypes, strict=True)]


def copy_now(
    plan: Plan, targets: Sequence[torch.Tensor], leaves: Sequence[Leaf], copied: Callable[[int], None]
) -> None:
    """Copy on the calling thread; on return the live tensors may change. `copied` hears now and then how many bytes of
    the stream are in place.
    """
    told = int(TELL_FROM * plan.stream_bytes) - TELL_BYTES
    for place, target, leaf in zip(plan.tensors, targets, leaves, strict=True):
        target.copy_(leaf.tensor)
        if plan.stream_bytes >= TELL_BYTES <= place.offset + place.bytes - told:
            told = place.offset + place.bytes
            copied(told)


def copy_beside(
    targets: Sequence[torch.Tensor], leaves: Sequence[Leaf], stream: "torch.cuda.Stream"
) -> "torch.cuda.Event":
    """Copy CUDA tensors over `stream` behind the work queued so far; the event marks the end of the copy.

    Until the event has passed the live tensors must not change: the caller makes the next optimizer step wait for it.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for target, leaf in zip(targets, leaves, strict=True):
            target.copy_(leaf.tensor, non_blocking=True)
            if leaf.tensor.is_cuda:
                leaf.tensor.record_stream(stream)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return event
