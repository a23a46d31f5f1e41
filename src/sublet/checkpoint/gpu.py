"""Slots as pinned memory and the gate before the next optimizer step. Rule:
nothing here runs unless the state is on CUDA.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sublet.checkpoint.slots import address


@dataclass(slots=True, kw_only=True)
class Device:
    """The side stream and what has been pinned; `pending` is the event that the next optimizer step waits for."""

    stream: "torch.cuda.Stream"
    pinned: set[int] = field(default_factory=set)
    gated: set[int] = field(default_factory=set)
    pending: "torch.cuda.Event | None" = None


def open_device() -> Device:
    return Device(stream=torch.cuda.Stream())  # type: ignore[no-untyped-call]


def pin(device: Device, area: mmap.mmap, size: int) -> bool:
    """Register a slot's mapping once. False if the driver refuses: copies are then slower, not wrong."""
    start = address(area)
    if start not in device.pinned:
        result = torch.cuda.cudart().cudaHostRegister(start, size, 0)  # type: ignore[no-untyped-call]
        if int(result) != 0:
            return False
        device.pinned.add(start)
    return True


def unpin_all(device: Device) -> None:
    """Before the mappings go."""
    for start in device.pinned:
        torch.cuda.cudart().cudaHostUnregister(start)  # type: ignore[no-untyped-call]
    device.pinned.clear()


def gate(device: Device, objects: Sequence[tuple[str, Any]]) -> bool:
    """Make every optimizer of the state wait, on the device, for a copy under way. False if there is no optimizer."""
    optimizers = [each for _, each in objects if isinstance(each, torch.optim.Optimizer)]
    for optimizer in optimizers:
        if id(optimizer) not in device.gated:
            optimizer.register_step_pre_hook(lambda *_: await_copy(device))
            device.gated.add(id(optimizer))
    return bool(optimizers)


def await_copy(device: Device) -> None:
    """The current stream goes on only after the copy; the host does not wait."""
    if device.pending is not None:
        torch.cuda.current_stream().wait_event(device.pending)
        device.pending = None
