"""Checkpoints out of and into other formats. Rule: what goes out was proved;
what comes in runs no code of a stranger's.
"""

import os
from pathlib import Path
from typing import Any

import torch

from sublet.checkpoint.disk import sync_directory
from sublet.checkpoint.errors import Refused
from sublet.checkpoint.filling import Wanted, pieces_of, plan_work
from sublet.checkpoint.layout import ITEM_BYTES
from sublet.checkpoint.memory import arena, bytes_of, dtype_name, dtype_of
from sublet.checkpoint.read import Span, indexes, open_stream, read_spans, values_of
from sublet.checkpoint.record import Commit
from sublet.checkpoint.state import decode
from sublet.checkpoint.store import in_use

SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def whole_state(directory: Path, commit: Commit) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a checkpoint put together from the parts of all ranks, by name; and its plain values by path."""
    with in_use(directory, commit.name):
        all_indexes = indexes(directory, commit)
        pieces = {
            name: rows for name, rows in pieces_of(all_indexes, 0).items()
            if not name.startswith("sublet.rng/")
        }  # fmt: skip
        shapes = {name: rows[0][1] for name, rows in pieces.items()}
        made = arena([(dtype_of(shape.dtype), shape.global_shape) for shape in shapes.values()])
        tensors = dict(zip(shapes, made, strict=True))
        wanted = [
            Wanted(name=name, tensor=tensor, global_shape=tuple(tensor.shape), start=(0,) * tensor.dim())
            for name, tensor in tensors.items()
        ]
        work = plan_work(wanted, pieces)
        for rank, runs in work.runs.items():
            with open_stream(directory / commit.name, all_indexes[rank]) as stream:
                read_spans(stream, [Span(start=run.start, size=len(run.into), into=run.into) for run in runs])
        work.finish()
    return tensors, values_of(all_indexes[0].tree["state"])


def export_torch(directory: Path, commit: Commit, target: Path) -> int:
    """The whole tree as torch.save writes it."""
    tensors, _ = whole_state(directory, commit)
    tree = indexes(directory, commit)[0].tree["state"]
    part = target.with_name(target.name + ".part")
    with part.open("wb") as file:
        torch.save(decode(tree, lambda name: tensors[name]), file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(target)
    sync_directory(target.parent)
    return target.stat().st_size


def export_safetensors(directory: Path, commit: Commit, target: Path) -> int:
    """All tensors by name, in the safetensors format;
    the values are left out, for that format has no place for them.
    """
    import json

    tensors, _ = whole_state(directory, commit)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(commit.step)}}
    at = 0
    for name, tensor in tensors.items():
        kind = SAFETENSORS.get(dtype_name(tensor.dtype))
        if kind is None:
            raise Refused(what=f"{name} cannot be exported.", why=f"safetensors has no {tensor.dtype}.")
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    part = target.with_name(target.name + ".part")
    with part.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            file.write(bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())
    part.rename(target)
    sync_directory(target.parent)
    return target.stat().st_size


def import_state(source: Path, form: str) -> dict[str, Any]:
    """The state in a torch.save file, a safetensors file or a DCP directory."""
    if form == "torch":
        return as_dict(torch.load(source, map_location="cpu", weights_only=True))
    if form == "safetensors":
        return nested(read_safetensors(source))
    if form == "dcp":
        return read_dcp(source)
    raise Refused(what=f"There is no format {form}.", why="There are torch, safetensors and dcp.")


def as_dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {"value": value}


def nested(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A safetensors file has names only; what we exported has paths in them."""
    out: dict[str, Any] = {}
    for name, tensor in flat.items():
        *parents, last = name.split("/")
        place = out
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = tensor
    return out


def read_safetensors(source: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the file. Refused if the file is not what its header says."""
    import json

    kinds = {kind: name for name, kind in SAFETENSORS.items()}
    data = bytearray(source.read_bytes())
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        out = {}
        for name, row in header.items():
            if name == "__metadata__":
                continue
            dtype, (low, high) = kinds[row["dtype"]], row["data_offsets"]
            count = (high - low) // ITEM_BYTES[dtype]
            flat = (
                torch.frombuffer(data, dtype=dtype_of(dtype), count=count, offset=8 + size + low)
                if count
                else torch.empty(0, dtype=dtype_of(dtype))
            )
            out[name] = flat.view(row["shape"])
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise Refused(what=f"{source} is no safetensors file.", why=f"{error}.") from error
    return out


def read_dcp(source: Path) -> dict[str, Any]:
    """The tensors of a DCP directory by name. DCP pickles its metadata:
    only a directory you trust should come in here.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(source)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {
        name: torch.empty(row.size, dtype=row.properties.dtype)
        for name, row in metadata.state_dict_metadata.items()
        if isinstance(row, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    out: dict[str, Any] = {}
    for name, tensor in state.items():
        *parents, last = (metadata.planner_data or {}).get(name, (name,))
        place = out
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = tensor
    return out
