"""From a checkpoint, in memory or on disk, into live objects. Rule: find, prove, then fill; a copy that fails is a hop.

All ranks take the same copy: rank 0 orders them, newest first, memory before disk, and a copy counts only if every rank
can read its part.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sublet.checkpoint import rng
from sublet.checkpoint.errors import Broken, CheckpointError, Refused, Unavailable
from sublet.checkpoint.filling import Pieces, Run, Wanted, Work, pieces_of, plan_work
from sublet.checkpoint.gang import Gang, gather, send_from
from sublet.checkpoint.layout import Index, Tensor, tensor_from, tensor_json
from sublet.checkpoint.memory import arena, bytes_of, dtype_name, dtype_of
from sublet.checkpoint.persist import index_in
from sublet.checkpoint.read import Span, indexes, open_stream, read_spans
from sublet.checkpoint.record import Commit
from sublet.checkpoint.slots import Slot
from sublet.checkpoint.state import RNG, Flat, decode, flatten, put_back, tensor_paths
from sublet.checkpoint.store import in_use, listed
from sublet.checkpoint.words import Hop, Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A copy that may be loaded: a commit on disk, or a slot in memory (on this rank, perhaps missing)."""

    tier: str
    name: str
    step: int
    order: tuple[int, ...]
    commit: Commit | None = None
    slot: Slot | None = None


@dataclass(slots=True, kw_only=True)
class Target:
    """What is to be filled: the caller's objects, or nothing."""

    state: Any
    flat: Flat
    strict: bool
    restore_rng: bool
    given: bool = True
    wanted: list[Wanted] = field(default_factory=list)
    primed: list[torch.optim.Optimizer] = field(default_factory=list)  # given a state so that it could be filled


def candidates(
    directory: Path, slots: Sequence[tuple[Slot, list[int]]], step: int | None
) -> tuple[list[Candidate], list[Hop]]:
    """All copies, newest first, memory before disk; hops for the records on disk that do not hold."""
    commits, damaged = listed(directory) if directory.exists() else ([], [])
    out = [Candidate(tier="disk", name=c.name, step=c.step, order=(c.sequence, 0), commit=c) for c in commits]
    for slot, order in slots:
        copy = slot.copy
        out.append(Candidate(tier="memory", name=copy["name"], step=copy["step"], order=tuple(order), slot=slot))
    if step is not None:
        out = [each for each in out if each.step == step]
    hops = [Hop(tier="disk", name=name, step=step_in(name), why=why) for name, why in damaged if "no COMMIT" not in why]
    return sorted(out, key=lambda each: each.order, reverse=True), hops


def step_in(name: str) -> int:
    """The step that a directory's name says."""
    digits = name.split("-")[1] if name.count("-") else ""
    return int(digits) if digits.isdigit() else 0


def load_newest(
    directory: Path, gang: Gang, slots: Sequence[tuple[Slot, list[int]]], target: Target, step: int | None = None
) -> Loaded | None:
    """The newest copy that every rank can read, filled into the target; None if there is none at all.

    Unavailable if there are checkpoints and none of them holds: going on from scratch must be somebody's decision.
    """
    found, hops = candidates(directory, slots, step)
    order = gather(gang, [[each.tier, each.name, each.step] for each in found])[0]
    known = {(each.tier, each.name): each for each in found}
    for tier, name, at in order:
        with ExitStack() as stack:
            opened, why = try_copy(stack, directory, gang, tier, known.get((tier, name)), target)
            if opened is None:
                hops.append(Hop(tier=tier, name=name, step=at, why=why))
                continue
            values = fill(opened, target, gang)
        hops.append(Hop(tier=tier, name=name, step=at))
        return Loaded(step=at, name=name, tier=tier, state=values, hops=tuple(hops))
    for optimizer in target.primed:
        optimizer.state.clear()
    if hops:
        raise Unavailable(
            what=f"No checkpoint in {directory} can be loaded.",
            why=" ".join(f"{hop.name}: {hop.why}" for hop in hops),
            hint="Repair or remove them; nothing was changed.",
        )
    return None


def try_copy(
    stack: ExitStack, directory: Path, gang: Gang, tier: str, candidate: Candidate | None, target: Target
) -> tuple["Opened | None", str]:
    """The copy, open and proved on every rank, or why not. Refused on all ranks if it does not fit the state of one."""
    opened, refused, why = None, None, ""
    try:
        opened = (
            open_memory_copy(gang, candidate) if tier == "memory" else open_disk_copy(stack, directory, gang, candidate)
        )
        prove(opened, target)
    except Refused as error:
        refused = error
    except (CheckpointError, OSError) as error:
        why = str(error)
    answers = gather(gang, [why, str(refused or "")])
    for rank, (_, other) in enumerate(answers):
        if other:
            raise refused or Refused(what=f"Rank {rank} refused the checkpoint.", why=other)
    first = next((each for each, _ in answers if each), "")
    return (None, why or f"Another rank: {first}") if first else (opened, "")


@dataclass(slots=True, kw_only=True)
class Opened:
    """A copy whose indexes hold. `read` fills the runs of a rank's stream;
    `reachable` are the ranks it can read here.
    """

    tree: Any
    indexes: list[Index]
    pieces: Pieces
    own: int
    world: int
    read: Callable[[int, list[Run]], None]
    check: Callable[[int, list[Run]], None]
    in_memory: bool
    derived_rng: bool
    work: Work = field(default_factory=Work)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def open_disk_copy(stack: ExitStack, directory: Path, gang: Gang, candidate: Candidate | None) -> Opened:
    """A committed checkpoint: any rank can read all of it."""
    commit = candidate.commit if candidate else None
    if commit is None:
        raise Unavailable(
            what="This rank does not see the checkpoint.", hint="Is the directory on a shared file system?"
        )
    stack.enter_context(in_use(directory, commit.name))
    all_indexes = indexes(directory, commit)
    streams = [stack.enter_context(open_stream(directory / commit.name, index)) for index in all_indexes]
    own = gang.rank if gang.rank < commit.world else 0
    base = own if commit.world == gang.world else 0

    def read(rank: int, runs: list[Run]) -> None:
        read_spans(streams[rank], [Span(start=run.start, size=len(run.into), into=run.into) for run in runs])

    def check(rank: int, runs: list[Run]) -> None:
        read_spans(streams[rank], [Span(start=run.start, size=len(run.into), into=None) for run in runs])

    tree = with_own(all_indexes[base].tree, all_indexes[own].tree)
    return Opened(tree=tree, indexes=all_indexes, pieces=pieces_of(all_indexes, own), own=own,
                  world=commit.world, read=read, check=check, in_memory=False,
                  derived_rng=gang.rank >= commit.world)  # fmt: skip


def with_own(base: Any, own: Any) -> Any:
    """`base` with each rank's own values taken from its own tree."""
    if isinstance(base, dict) and isinstance(own, dict):
        if "kind" not in base:
            return {key: with_own(base[key], own.get(key)) for key in base}
        if base["kind"] == "per_rank" == own.get("kind"):
            return own
        if base["kind"] == "dict" == own.get("kind"):
            known = {str(key): each for key, each in own["items"]}
            return {**base, "items": [[key, with_own(each, known.get(str(key)))] for key, each in base["items"]]}
        if base["kind"] == own.get("kind") and base["kind"] in ("list", "tuple"):
            pairs = zip(base["items"], own["items"], strict=False)
            return (
                {**base, "items": [with_own(a, b) for a, b in pairs]}
                if len(own["items"]) == len(base["items"])
                else base
            )
    return base


def open_memory_copy(gang: Gang, candidate: Candidate | None) -> Opened:
    """The copy in this rank's slot; its hashes were proved by the agent after the last trainer's death. Collective."""
    index, why, slot = None, "This rank has no such copy in memory.", candidate.slot if candidate else None
    if slot is not None:
        try:
            index, why = index_in(slot), ""
        except Broken as error:
            why = str(error)
    if index is not None and index.world != gang.world:
        why = f"It was made by {index.world} ranks."
    tables = gather(gang, [why, [tensor_json(tensor) for tensor in index.tensors] if index else []])
    if any(each for each, _ in tables) or index is None or slot is None:
        raise Unavailable(what="The copy in memory is not whole.", why=why or "Another rank lacks its part.")
    mine, held = index, slot
    others = [replace(mine, rank=rank, tensors=tuple(tensor_from(row) for row in rows))
              for rank, (_, rows) in enumerate(tables)]  # fmt: skip

    def read(rank: int, runs: list[Run]) -> None:
        for run in runs:
            read_slot(held, run)

    return Opened(tree=index.tree, indexes=others, pieces=pieces_of(others, gang.rank), own=gang.rank,
                  world=index.world, read=read, check=lambda rank, runs: None, in_memory=True,
                  derived_rng=False)  # fmt: skip


def read_slot(slot: Slot, run: Run) -> None:
    """By a copy in memory if the slot is mapped already, else by the kernel's, which need not map it."""
    if slot.is_present:
        with memoryview(slot.map) as view:
            run.into[:] = view[run.start : run.start + len(run.into)]
        return
    done = 0
    while done < len(run.into):
        got = os.preadv(slot.fd, [run.into[done:]], run.start + done)
        if not got:
            raise Broken(what="A copy in memory is shorter than its index says.")
        done += got


# --- what is wanted


def prove(opened: Opened, target: Target) -> None:
    """Find for every stored tensor the live one or make a new one, and prove the chunks that are needed."""
    init_distributed_optimizers(target, opened.tree)
    names, shapes = tensor_paths(opened.tree["state"]), stored_shapes(opened)
    check_fit(names, shapes, target)
    target.wanted, fresh = [], []
    opened.tensors = {}
    for path, name in names.items():
        leaf = target.flat.paths.get(path)
        if leaf is not None:
            opened.tensors.setdefault(name, leaf.tensor if leaf.distributed is None else leaf.distributed)
            target.wanted.append(
                Wanted(name=name, tensor=leaf.tensor, global_shape=leaf.global_shape, start=leaf.start)
            )
    needed = [name for name in dict.fromkeys([*names.values(), *tensor_paths(opened.tree["rng"] or {}, RNG).values()])
              if name not in opened.tensors and name in shapes]  # fmt: skip
    specs = [(dtype_of(shapes[name].dtype), shapes[name].global_shape) for name in needed]
    for name, tensor in zip(needed, arena(specs), strict=True):
        opened.tensors[name] = tensor
        shape = shapes[name].global_shape
        fresh.append(Wanted(name=name, tensor=tensor, global_shape=shape, start=(0,) * len(shape)))
    target.wanted += fresh
    if opened.in_memory and opened.world > 1:
        return  # what the other ranks hold comes over the group, in fill()
    opened.work = plan_work(target.wanted, opened.pieces)
    for rank, runs in opened.work.runs.items():  # new tensors may be filled at once: a failure costs nothing
        opened.check(rank, runs) if target.given else opened.read(rank, runs)


def stored_shapes(opened: Opened) -> dict[str, Tensor]:
    return {name: rows[0][1] for name, rows in opened.pieces.items() if rows}


def check_fit(names: dict[str, str], shapes: dict[str, Tensor], target: Target) -> None:
    """Refused, before anything is changed, if a live tensor is not in the checkpoint or has another shape there."""
    loose = tuple(path + "/" for path, each in target.flat.objects if not isinstance(each, torch.nn.Module))
    trouble = []
    for path, leaf in target.flat.paths.items():
        stored = shapes.get(names.get(path, ""))
        if stored is None:
            if target.strict and not path.startswith(loose):  # an optimizer makes what it lacks
                trouble.append(f"{path} is not in it")
        elif stored.global_shape != leaf.global_shape:
            trouble.append(f"{path} is {list(stored.global_shape)} there and {list(leaf.global_shape)} here")
        elif kind_of(dtype_of(stored.dtype)) != kind_of(leaf.tensor.dtype):
            trouble.append(f"{path} is {stored.dtype} there and {dtype_name(leaf.tensor.dtype)} here")
        elif overlaps(leaf.tensor):
            trouble.append(f"{path} is expanded here, one element stands for several")
    if trouble:
        more = f" and {len(trouble) - 5} more" if len(trouble) > 5 else ""
        raise Refused(
            what="The checkpoint does not fit the state.",
            why=f"{', '.join(trouble[:5])}{more}.",
            hint="Build the model as it was saved, or load with strict=False.",
        )


def kind_of(dtype: torch.dtype) -> str:
    """Numbers of one kind may be filled into another width of it, as torch does; not reals into whole numbers."""
    return "complex" if dtype.is_complex else "real" if dtype.is_floating_point else "whole"


def overlaps(tensor: torch.Tensor) -> bool:
    """Can it not be filled, because elements share memory?"""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def init_distributed_optimizers(target: Target, tree: Any) -> None:
    """An optimizer over DTensors gets its state from one step that changes nothing, so that its parts are laid out."""
    empty = [
        each for path, each in target.flat.objects
        if isinstance(each, torch.optim.Optimizer) and not each.state
        and any(hasattr(p, "device_mesh") for group in each.param_groups for p in group["params"])
        and any(stored.startswith(f"{path}/state/") for stored in tensor_paths(tree["state"]))
    ]  # fmt: skip
    for optimizer in empty:
        rates = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for group, rate in rates:
            group["lr"] = rate
    if empty:
        target.primed += empty
        target.flat = flatten(target.state)


# --- filling


def fill(opened: Opened, target: Target, gang: Gang) -> Any:
    """Read everything into place, then give the values back to the objects. The whole tree of values."""
    if opened.in_memory and opened.world > 1:
        fill_from_ranks(opened, target, gang)
    else:
        for rank, runs in opened.work.runs.items() if target.given else ():
            opened.read(rank, runs)
        opened.work.finish()
    values = decode(opened.tree["state"], lambda name: opened.tensors[name])
    if target.given:
        put_back(target.state, values, "", set(target.flat.paths) & set(tensor_paths(opened.tree["state"])))
    if target.restore_rng and opened.tree["rng"] is not None:
        state = decode(opened.tree["rng"], lambda name: opened.tensors[name])
        rng.derive(state, gang.rank) if opened.derived_rng else rng.restore(state)
    return values


def fill_from_ranks(opened: Opened, target: Target, gang: Gang) -> None:
    """From memory on several ranks: own parts from the own slot, parts that others need over the group."""
    boxes = gather(gang, [[w.name, list(w.tensor.shape), list(w.start)] for w in target.wanted])
    for rank, index in enumerate(opened.indexes):
        for tensor in index.tensors:
            box = (tensor.start, tensor.shape)
            takers = [r for r, each in enumerate(boxes)
                      if (r == rank or not tensor.per_rank) and needs(each, tensor.name, box)]  # fmt: skip
            if not takers or not tensor.bytes:
                continue
            buffer = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype))
            if rank == gang.rank:
                opened.read(rank, [Run(start=tensor.offset, into=bytes_of(buffer))])
            if takers != [rank]:
                send_from(gang, buffer.reshape(-1).view(torch.uint8), rank)
            if gang.rank in takers:
                place(target, tensor.name, box, buffer)


def needs(boxes: list[Any], name: str, box: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    start, shape = box
    return any(
        other == name and all(max(a, c) < min(a + b, c + d) for a, b, c, d in zip(start, shape, at, size, strict=True))
        for other, size, at in boxes
    )


def place(target: Target, name: str, box: tuple[tuple[int, ...], tuple[int, ...]], buffer: torch.Tensor) -> None:
    """Copy what overlaps from a box into every wanted tensor of that name."""
    start, shape = box
    for wanted in target.wanted:
        if wanted.name != name or not needs([[name, list(wanted.tensor.shape), list(wanted.start)]], name, box):
            continue
        source, into = buffer, wanted.tensor
        for dim, (a, b, c, d) in enumerate(zip(start, shape, wanted.start, wanted.tensor.shape, strict=True)):
            low, high = max(a, c), min(a + b, c + d)
            source, into = source.narrow(dim, low - a, high - low), into.narrow(dim, low - c, high - low)
        into.copy_(source)


def target_of(state: Any, *, strict: bool, restore_rng: bool) -> Target:
    """What the caller wants filled."""
    return Target(state=state, flat=flatten(state) if state is not None else Flat(), strict=strict,
                  restore_rng=restore_rng, given=state is not None)  # fmt: skip
