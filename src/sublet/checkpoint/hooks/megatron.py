"""Megatron-style: save_checkpoint(iteration, model, …) and load_checkpoint(model, …). Rule: the iteration is the step.

`model` is a module or a list of them, as Megatron passes its virtual pipeline chunks. With tensor or pipeline
parallelism each rank's model is its own: set `own=True`, and resume with the same layout; data-parallel replicas
then each keep theirs.
"""

from typing import Any

from sublet.checkpoint.checkpointer import Checkpointer
from sublet.checkpoint.sharding import PerRank


def state_of(model: Any, optimizer: Any, opt_param_scheduler: Any, *, own: bool = False) -> dict[str, Any]:
    """The state as Megatron holds it."""
    models = list(model) if isinstance(model, list | tuple) else [model]
    state: dict[str, Any] = {"model": PerRank(models) if own else models}
    if optimizer is not None:
        state["optimizer"] = PerRank(optimizer) if own else optimizer
    if opt_param_scheduler is not None:
        state["opt_param_scheduler"] = opt_param_scheduler
    return state


def save_checkpoint(
    ckpt: Checkpointer, iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any, *, own: bool = False
) -> bool:
    """Save now, to memory first; False if it was put off because the disk is behind."""
    return ckpt.save_now(iteration, state_of(model, optimizer, opt_param_scheduler, own=own))


def load_checkpoint(
    ckpt: Checkpointer, model: Any, optimizer: Any, opt_param_scheduler: Any, *, own: bool = False, strict: bool = True
) -> int:
    """Fill everything from the newest checkpoint; its iteration, 0 if there is none."""
    loaded = ckpt.load(state_of(model, optimizer, opt_param_scheduler, own=own), strict=strict)
    return loaded.step if loaded else 0
