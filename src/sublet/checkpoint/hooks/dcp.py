"""torch.distributed.checkpoint: a storage writer and reader, so that an existing dcp.save and dcp.load go through
our format.

    dcp.save(state, storage_writer=SubletWriter("checkpoints", step=100))
    dcp.load(state, storage_reader=SubletReader("checkpoints"))

Rule: durable when save returns, verified when load reads. DCP itself pickles what is no tensor; we keep its bytes
as bytes, and its planner unpickles them: a checkpoint from a stranger is not safe through this door.
"""

import io
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from sublet.checkpoint.copying import index_bytes, make_plan
from sublet.checkpoint.disk import make_directory
from sublet.checkpoint.filling import Wanted, pieces_of, plan_work
from sublet.checkpoint.inline import gatherer
from sublet.checkpoint.layout import Tensor
from sublet.checkpoint.memory import dtype_of
from sublet.checkpoint.read import Span, indexes, open_stream, read_spans
from sublet.checkpoint.record import Commit, parse_index
from sublet.checkpoint.sharding import Leaf
from sublet.checkpoint.store import Lock, checkpoint_name, find, in_use, listed, sweep
from sublet.checkpoint.write import Save, commit, write_rank

BYTES = "bytes/"  # names of what is no tensor


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


class SubletWriter(StorageWriter):
    """Writes one checkpoint of `step` into `directory`. `run` tells saves of one step apart; the same on all ranks."""

    def __init__(self, directory: str | os.PathLike[str], *, step: int, run: str = "dcp00000") -> None:
        self.directory, self.step, self.run = Path(directory).absolute(), step, run
        self.rank, self.world = rank_and_world()
        self.lock: Lock | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        make_directory(self.directory)
        if is_coordinator:
            self.lock = Lock(self.directory, 10_000)
            sweep(self.directory)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def save(self) -> Save:
        return Save(directory=self.directory, name=checkpoint_name(self.step, self.run, 0), run=self.run)

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        leaves = [leaf_of(item, planner.resolve_data(item)) for item in plan.items]
        made = make_plan((), leaves)
        record = index_bytes(made, rank=self.rank, world=self.world, step=self.step, tree={"state": None, "rng": None})
        write_rank(self.save(), parse_index(record, "of DCP", whole=False), gatherer(made, leaves), None, ahead=0)
        results = [
            WriteResult(index=item.index, size_in_bytes=leaf.tensor.nbytes, storage_data=None)
            for item, leaf in zip(plan.items, leaves, strict=True)
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        commits, _ = listed(self.directory)
        sequence = commits[0].sequence + 1 if commits else 1
        commit(self.save(), self.step, self.world, sequence, lambda: False)
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def leaf_of(item: Any, data: Any) -> Leaf:
    """One write item of DCP's plan as a box."""
    if item.type == WriteItemType.BYTE_IO:
        raw = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
        return Leaf(name=BYTES + item.index.fqn, tensor=raw, global_shape=tuple(raw.shape), start=(0,))
    tensor = data.detach()
    whole = tuple(item.tensor_data.size)
    offsets = item.tensor_data.chunk.offsets
    return Leaf(name=item.index.fqn, tensor=tensor, global_shape=whole, start=tuple(offsets))


class SubletReader(StorageReader):
    """Reads a checkpoint of `directory`: the newest, or that of `step`."""

    def __init__(self, directory: str | os.PathLike[str], *, step: int | None = None) -> None:
        self.directory, self.step = Path(directory).absolute(), step
        self.commit: Commit | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        return None

    def found(self) -> Commit:
        if self.commit is None:
            self.commit = find(self.directory, "newest" if self.step is None else str(self.step))
        return self.commit

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        boxes: dict[str, list[Tensor]] = defaultdict(list)
        for index in indexes(self.directory, self.found()):
            for tensor in index.tensors:
                boxes[tensor.name].append(tensor)
        rows: dict[str, Any] = {}
        for name, parts in boxes.items():
            if name.startswith(BYTES):
                rows[name.removeprefix(BYTES)] = BytesStorageMetadata()
                continue
            chunks = [ChunkStorageMetadata(torch.Size(part.start), torch.Size(part.shape)) for part in parts]
            properties = TensorProperties(dtype=dtype_of(parts[0].dtype))
            rows[name] = TensorStorageMetadata(properties, torch.Size(parts[0].global_shape), chunks)
        return Metadata(state_dict_metadata=rows)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        found = self.found()
        all_indexes = indexes(self.directory, found)
        pieces = pieces_of(all_indexes, 0)
        wanted, finish = [], []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                name = BYTES + item.storage_index.fqn
                raw = torch.empty(pieces[name][0][1].shape, dtype=torch.uint8)
                wanted.append(Wanted(name=name, tensor=raw, global_shape=tuple(raw.shape), start=(0,)))
                finish.append((item, raw))
                continue
            target = planner.resolve_tensor(item)
            offsets = [a + b for a, b in zip(item.storage_index.offset, item.storage_offsets, strict=True)]
            whole = pieces[item.storage_index.fqn][0][1].global_shape
            box = target.detach()
            wanted.append(Wanted(name=item.storage_index.fqn, tensor=box, global_shape=whole, start=tuple(offsets)))
            finish.append((item, target))
        work = plan_work(wanted, pieces)
        with in_use(self.directory, found.name):
            for rank, runs in work.runs.items():
                with open_stream(self.directory / found.name, all_indexes[rank]) as stream:
                    read_spans(stream, [Span(start=run.start, size=len(run.into), into=run.into) for run in runs])
        work.finish()
        for item, value in finish:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(bytes(value.tolist())))
            else:
                planner.commit_tensor(item, value)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
