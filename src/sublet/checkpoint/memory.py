"""Tensors and raw bytes, both ways. Rule: views only; what is returned lives no longer than what it looks into."""

import ctypes
import mmap
from collections.abc import Sequence

import torch

from sublet.checkpoint.layout import up

HUGE_BYTES = 2 << 20


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def is_plain(tensor: torch.Tensor) -> bool:
    """Can its memory be read and written as bytes?"""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def view_at(buffer: mmap.mmap, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor that is a window into a writable mapping."""
    count = 1
    for extent in shape:
        count *= extent
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def arena(specs: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
    """New CPU tensors side by side in one mapping of huge pages: filling them costs a tenth of the page faults."""
    offsets, total = [], 0
    for dtype, shape in specs:
        offsets.append(total)
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        total = up(total + size, 64)
    if total < HUGE_BYTES:
        return [torch.empty(tuple(shape), dtype=dtype) for dtype, shape in specs]
    area = mmap.mmap(-1, up(total, HUGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return [view_at(area, offset, dtype, shape) for offset, (dtype, shape) in zip(offsets, specs, strict=True)]
