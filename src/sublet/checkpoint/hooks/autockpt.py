"""The names that EasyCkpt's users know, over this library. Rule: the names and their order of arguments; the rest
is ours.

What is public of EasyCkpt's interface is this set of functions; what it does inside is not copied.
`save_mem_interval` is how often a copy is made. A copy goes to disk as soon as the disk is free, so
`save_storage_interval` is met or bettered.
"""

from typing import Any

from sublet.checkpoint.checkpointer import Checkpointer
from sublet.checkpoint.errors import Refused
from sublet.checkpoint.hooks import megatron

_open: dict[str, Checkpointer] = {}


def initialize_autockpt(
    save_mem_interval: int, save_storage_interval: int, max_ckpt_num: int, save_dir: str = "checkpoints"
) -> Checkpointer:
    """Once, before training, on every rank."""
    if save_mem_interval < 1 or save_storage_interval < save_mem_interval:
        raise Refused(
            what=f"Intervals of {save_mem_interval} and {save_storage_interval} steps make no sense.",
            why="A copy in memory comes first, so it is made at least as often as one on disk.",
        )
    _open["ckpt"] = Checkpointer(save_dir, every=save_mem_interval, keep=max_ckpt_num, slots=3)
    return _open["ckpt"]


def opened() -> Checkpointer:
    if "ckpt" not in _open:
        raise Refused(what="There is no checkpointer.", hint="Call initialize_autockpt first.")
    return _open["ckpt"]


def save_checkpoint_if_needed(iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> bool:
    """After each iteration; True if a copy was made."""
    return opened().step(iteration, megatron.state_of(model, optimizer, opt_param_scheduler))


def load_checkpoint(model: Any, optimizer: Any, opt_param_scheduler: Any) -> int:
    """Before the first iteration; the iteration that was loaded, 0 if none."""
    return megatron.load_checkpoint(opened(), model, optimizer, opt_param_scheduler)


def save_checkpoint_done() -> None:
    """At the end: everything goes to disk, the memory is given back."""
    opened().close()
    del _open["ckpt"]
