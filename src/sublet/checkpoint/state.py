"""A training state as a tree of values and a list of tensors, and back. Rule: no pickle; what has no plain form is
refused.

The tree is JSON: null, booleans, numbers and strings are themselves; everything else is {"kind": …}. Tensors are
named by their path, as model/layers.0.weight; a tensor that occurs twice is kept once.
"""

import base64
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sublet.checkpoint.errors import Broken, Refused
from sublet.checkpoint.sharding import Leaf, PerRank, Shard, leaf_of

Node = Any
RNG = "sublet.rng"  # the path below which a checkpoint keeps random states
MAX_DEPTH = 100


@dataclass(slots=True, kw_only=True)
class Flat:
    """A state taken apart. `objects` are those with a state_dict, by path; their tensors are live."""

    tree: Node = None
    leaves: list[Leaf] = field(default_factory=list)
    objects: list[tuple[str, Any]] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)
    seen: dict[tuple[Any, ...], str] = field(default_factory=dict)
    paths: dict[str, Leaf] = field(default_factory=dict)  # every occurrence, a second one of a tensor too


def flatten(state: Any, prefix: str = "") -> Flat:
    """Take a state apart. Refused, with the path, if something in it cannot be kept."""
    flat = Flat()
    flat.tree = encode(flat, state, prefix, per_rank=False)
    flat.leaves.sort(key=lambda leaf: leaf.name not in flat.frozen)  # what never changes shares no chunk with what does
    return flat


def below(path: str, key: object) -> str:
    """The path of an entry: a slash in its key is written ~1, a tilde ~0, an empty key ~2."""
    name = str(key)
    if not name:
        name = "~2"
    elif "/" in name or "~" in name:
        name = name.replace("~", "~0").replace("/", "~1")
    return f"{path}/{name}" if path else name


def encode(flat: Flat, value: Any, path: str, *, per_rank: bool) -> Node:
    """The node of a value; its tensors go into `flat`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor | Shard):
        return {"kind": "tensor", "name": add_tensor(flat, value, path, per_rank=per_rank)}
    if isinstance(value, PerRank):
        return {"kind": "per_rank", "value": encode(flat, value.value, path, per_rank=True)}
    if is_numpy(value):
        return encode_numpy(flat, value, path, per_rank=per_rank)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"kind": "float", "value": str(float(value))}
    if has_state(value):
        value = unwrapped(value)
        flat.objects.append((path, value))
        note_frozen(flat, value, path)
        return encode(flat, value.state_dict(), path, per_rank=per_rank)
    if path.count("/") > MAX_DEPTH:
        raise Refused(
            what="The state cannot be kept.", why=f"It is more than {MAX_DEPTH} levels deep, or holds itself."
        )
    if isinstance(value, Mapping):
        check_keys(value, path)
        rows = [[key_node(key, path), encode(flat, each, below(path, key), per_rank=per_rank)]
                for key, each in value.items()]  # fmt: skip
        return {"kind": "dict", "items": rows}
    if isinstance(value, torch.Size):
        return {"kind": "tuple", "items": [int(each) for each in value]}
    if isinstance(value, list | tuple):
        rows = [encode(flat, each, below(path, i), per_rank=per_rank) for i, each in enumerate(value)]
        return {"kind": "tuple" if isinstance(value, tuple) else "list", "items": rows}
    if isinstance(value, bytes):
        return {"kind": "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        return {"kind": type(value).__name__, "value": str(value).removeprefix("torch.")}
    if isinstance(value, complex):
        return {"kind": "complex", "value": [str(value.real), str(value.imag)]}
    raise Refused(
        what=f"{path or 'The state'} cannot be kept.",
        why=f"It is a {type(value).__module__}.{type(value).__qualname__}, and checkpoints hold no pickled objects.",
        hint="Keep its numbers, strings and tensors, or give it state_dict and load_state_dict.",
    )


def key_node(key: Any, path: str) -> Node:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise Refused(
            what=f"The key {key!r} in {path or 'the state'} cannot be kept.", why="Keys are strings or integers."
        )
    return key


def check_keys(value: Mapping[Any, Any], path: str) -> None:
    """Refused if two entries would have one path: 1 beside "1", or what is ours."""
    names = {str(key) for key in value}
    if len(names) < len(value):
        raise Refused(what=f"The keys of {path or 'the state'} cannot be kept.", why="A number and a string are alike.")
    if not path and RNG in names:
        raise Refused(what=f"The key {RNG} cannot be kept.", why="Random states are kept under that name.")


def has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def unwrapped(value: Any) -> Any:
    """The module inside DistributedDataParallel, DataParallel or torch.compile:
    its names do not depend on how it runs.
    """
    while isinstance(value, torch.nn.Module):
        if isinstance(value, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            value = value.module
        elif "_orig_mod" in value._modules:
            value = value._modules["_orig_mod"]
        else:
            break
    return value


def note_frozen(flat: Flat, value: Any, path: str) -> None:
    if isinstance(value, torch.nn.Module):
        for name, parameter in value.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                flat.frozen.add(below(path, name))


def add_tensor(flat: Flat, value: torch.Tensor | Shard, path: str, *, per_rank: bool) -> str:
    """Add a tensor; the name under which it is kept, that of its first occurrence."""
    leaf = leaf_of(path, value, per_rank=per_rank)
    tensor = leaf.tensor
    key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), leaf.start, per_rank,
           tensor.is_conj(), tensor.is_neg())  # fmt: skip
    flat.paths[path] = leaf
    if tensor.numel() and key in flat.seen:
        return flat.seen[key]
    flat.seen[key] = path
    flat.leaves.append(leaf)
    return path


def is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def encode_numpy(flat: Flat, value: Any, path: str, *, per_rank: bool) -> Node:
    import numpy

    if value.dtype.kind not in "biufc" or value.dtype.itemsize > 16 or value.dtype == numpy.longdouble:
        raise Refused(what=f"{path} cannot be kept.", why=f"It is a numpy array of {value.dtype}.")
    array = numpy.asarray(value, dtype=value.dtype.newbyteorder("="), order="C")
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    name = add_tensor(flat, tensor, path, per_rank=per_rank)
    return {"kind": "array", "name": name, "scalar": isinstance(value, numpy.generic)}


def decode(node: Node, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value of a node. Broken if the node is of no known kind."""
    if not isinstance(node, dict):
        return node
    kind = node.get("kind")
    if kind == "tensor":
        return tensor(node["name"])
    if kind == "dict":
        return {key: decode(each, tensor) for key, each in node["items"]}
    if kind in ("list", "tuple"):
        items = [decode(each, tensor) for each in node["items"]]
        return items if kind == "list" else tuple(items)
    if kind == "per_rank":
        return decode(node["value"], tensor)
    if kind == "float":
        return float(node["value"])
    if kind == "array":
        array = tensor(node["name"]).numpy()
        return array[()] if node["scalar"] else array
    if kind == "bytes":
        return base64.b64decode(node["base64"])
    if kind == "dtype" and isinstance(getattr(torch, str(node["value"]), None), torch.dtype):
        return getattr(torch, node["value"])
    if kind == "device":
        return torch.device(node["value"])
    if kind == "complex":
        real, imaginary = node["value"]
        return complex(float(real), float(imaginary))
    raise Broken(what=f"The checkpoint holds a value of kind {kind!r}.", why="This version does not know it.")


def tensor_paths(node: Node, path: str = "") -> dict[str, str]:
    """Where the tree has tensors: path to name; they differ where a tensor occurs twice."""
    if not isinstance(node, dict):
        return {}
    kind = node.get("kind")
    if kind in ("tensor", "array"):
        return {path: node["name"]}
    if kind == "per_rank":
        return tensor_paths(node["value"], path)
    rows = node["items"] if kind == "dict" else enumerate(node.get("items", ()))
    out: dict[str, str] = {}
    for key, each in rows:
        out |= tensor_paths(each, below(path, key))
    return out


def put_back(target: Any, value: Any, path: str, filled: set[str]) -> Any:
    """Give `value` to `target`; tensors in `filled` are in place already. What is to stand where `target` stood."""
    if isinstance(target, PerRank):
        target.value = put_back(target.value, value, path, filled)
        return target
    if isinstance(target, torch.Tensor | Shard):
        return target if path in filled else value
    if is_numpy(target):
        return value
    if has_state(target):
        target = unwrapped(target)
        if not (type(target).load_state_dict is torch.nn.Module.load_state_dict and all_in_place(value, path, filled)):
            target.load_state_dict(value)
        return target
    if isinstance(target, dict) and isinstance(value, dict):
        for key, each in value.items():
            target[key] = put_back(target[key], each, below(path, key), filled) if key in target else each
        return target
    if isinstance(target, list) and isinstance(value, list) and len(target) == len(value):
        target[:] = [
            put_back(old, new, below(path, i), filled) for i, (old, new) in enumerate(zip(target, value, strict=True))
        ]
        return target
    if isinstance(target, tuple) and isinstance(value, tuple) and len(target) == len(value):
        pairs = enumerate(zip(target, value, strict=True))
        return tuple(put_back(old, new, below(path, i), filled) for i, (old, new) in pairs)
    return value


def all_in_place(value: Any, path: str, filled: set[str]) -> bool:
    """Is every entry of a module's state a tensor that has been filled already?"""
    return isinstance(value, dict) and all(below(path, key) in filled for key in value)
