"""What people do with checkpoints from outside: look, prove, compare, take out, bring in, clear. Rule: functions
over paths.

Each returns plain values or writes what it was asked for; none prints. `python -m sublet.checkpoint` is the thin
door on top of them. Refused for what is not there, Broken for what does not hold.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sublet.checkpoint.errors import Broken, CheckpointError, Refused
from sublet.checkpoint.layout import Index
from sublet.checkpoint.read import indexes, values_of, verify
from sublet.checkpoint.record import PINNED
from sublet.checkpoint.retention import Keep, doomed
from sublet.checkpoint.store import PREFIX, Lock, find, listed, pinned, remove, sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint in a list. `why` says what does not hold; empty if its record does."""

    name: str
    step: int
    bytes: int
    world: int
    age_ms: int
    metric: float | None = None
    pinned: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor or value that two checkpoints do not have alike."""

    name: str
    what: str


def ls(directory: Path) -> list[Row]:
    """All checkpoints of a directory, newest first, then what is there but does not hold."""
    existing(directory)
    commits, damaged = listed(directory)
    now, pins = time.time_ns() // 1_000_000, pinned(directory)
    rows = [
        Row(name=c.name, step=c.step, bytes=c.bytes, world=c.world, age_ms=now - c.saved_ms, metric=c.metric,
            pinned=c.name in pins)
        for c in commits
    ]  # fmt: skip
    return rows + [Row(name=name, step=0, bytes=0, world=0, age_ms=0, why=why) for name, why in damaged]


def existing(directory: Path) -> None:
    if not directory.is_dir():
        raise Refused(what=f"There is no directory {directory}.")


def check(directory: Path, wanted: str = "all") -> list[tuple[str, str]]:
    """Read every byte of one checkpoint or of all and prove it: names with what is wrong, or nothing."""
    existing(directory)
    commits, damaged = listed(directory)
    if wanted != "all":
        commits, damaged = [find(directory, wanted)], []
    out = list(damaged)
    for commit in commits:
        why = ""
        try:
            verify(directory, commit)
        except (CheckpointError, OSError) as error:
            why = str(error)
        out.append((commit.name, why))
    return sorted(out)


def show(directory: Path, wanted: str = "newest") -> dict[str, Any]:
    """One checkpoint: its record, its tensors, and its values without the tensors."""
    commit = find(directory, wanted)
    all_indexes = indexes(directory, commit)
    return {
        "name": commit.name, "step": commit.step, "world": commit.world, "saved_ms": commit.saved_ms,
        "metric": commit.metric, "bytes": commit.bytes, "pinned": commit.name in pinned(directory),
        "files": [[file.name, file.bytes] for rank in commit.ranks for file in rank.files],
        "carried_bytes": sum(c.bytes for index in all_indexes for c in index.chunks if c.age),
        "tensors": sorted(tensor_rows(all_indexes)), "values": values_of(all_indexes[0].tree["state"]),
    }  # fmt: skip


def tensor_rows(all_indexes: Iterable[Index]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Name, dtype, global shape and number of parts of each tensor that is not a rank's own."""
    seen: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for index in all_indexes:
        for tensor in index.tensors:
            if not tensor.per_rank:
                parts = seen.get(tensor.name, ("", (), 0))[2]
                seen[tensor.name] = (tensor.dtype, tensor.global_shape, parts + 1)
    return [(name, *rest) for name, rest in seen.items()]


def diff(directory: Path, first: str, second: str) -> list[Difference]:
    """What differs between two checkpoints of a directory, tensors by their bytes, values as they are."""
    import torch

    from sublet.checkpoint.convert import whole_state

    (one, one_values), (two, two_values) = (whole_state(directory, find(directory, each)) for each in (first, second))
    out = []
    for name in sorted(one.keys() | two.keys()):
        a, b = one.get(name), two.get(name)
        if a is None or b is None:
            out.append(Difference(name=name, what=f"only in {first if b is None else second}"))
        elif a.dtype != b.dtype or a.shape != b.shape:
            shapes = f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}".replace("torch.", "")
            out.append(Difference(name=name, what=shapes))
        elif not torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)):
            apart = (a.to(torch.float64) - b.to(torch.float64)).abs() if not a.is_complex() else (a - b).abs()
            out.append(Difference(name=name, what=f"differs by up to {apart.max().item():.3g}"))
    for name in sorted(one_values.keys() | two_values.keys()):
        if one_values.get(name) != two_values.get(name):
            out.append(Difference(name=name, what=f"{one_values.get(name)!r} and {two_values.get(name)!r}"))
    return out


def export(directory: Path, wanted: str, target: Path, form: Literal["safetensors", "torch"]) -> int:
    """Write one checkpoint, proved, as a single file of another format, durably; its bytes. No trainer is needed."""
    from sublet.checkpoint.convert import export_safetensors, export_torch

    if target.exists():
        raise Refused(what=f"{target} exists already.", hint="Name another file.")
    commit = find(directory, wanted)
    writer = {"safetensors": export_safetensors, "torch": export_torch}.get(form)
    if writer is None:
        raise Refused(what=f"There is no format {form}.", why="There are safetensors and torch.")
    return writer(directory, commit, target)


def bring_in(source: Path, directory: Path, form: Literal["torch", "safetensors", "dcp"], *, step: int) -> str:
    """Make a checkpoint of a file or directory of another format; its name. Untrusted pickles are never run."""
    from sublet.checkpoint.checkpointer import Checkpointer
    from sublet.checkpoint.convert import import_state

    if not source.exists():
        raise Refused(what=f"There is no {source}.")
    state = import_state(source, form)
    with Checkpointer(directory, agent=False, keep=Keep(last=1_000_000), capture_rng=False) as ckpt:
        if not ckpt.save_now(step, state):
            raise Broken(what=f"{source} was not written to {directory}.", why=ckpt.events[-1].message)
    return find(directory, str(step)).name


def pin(directory: Path, wanted: str, *, on: bool = True) -> str:
    """Keep a checkpoint whatever retention says, or no longer; its name."""
    name = find(directory, wanted).name
    mark = directory / name / PINNED
    mark.touch() if on else mark.unlink(missing_ok=True)
    return name


def gc(directory: Path, keep: Keep | None = None, *, damaged: bool = False, dry: bool = False) -> list[str]:
    """Delete what no checkpoint needs, what `keep` does not ask for, and with `damaged` what does not hold.

    Unavailable while a trainer writes the directory. The names that went, or with `dry` would go.
    """
    existing(directory)
    lock = Lock(directory)
    try:
        commits, broken = listed(directory)
        names = [commit.name for commit in doomed(commits, keep, pinned(directory))] if keep else []
        names += [name for name, why in broken if damaged and name.startswith(PREFIX)] if commits or damaged else []
        if dry:
            return names
        swept = sweep(directory)
        return swept + [name for name in names if name not in swept and remove(directory, name)]
    finally:
        lock.release()
