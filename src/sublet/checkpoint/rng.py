"""The random states of a process: python, numpy (if it is loaded), torch, CUDA. Rule:
each rank keeps and gets its own.
"""

import hashlib
import random
import sys
from typing import Any

import torch

from sublet.checkpoint.sharding import PerRank


def capture() -> PerRank:
    """All random states now, as plain values and tensors."""
    version, words, gauss = random.getstate()
    python = {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}
    state: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return PerRank(state)


def restore(state: dict[str, Any]) -> None:
    """Set all random states that were captured and that this process has."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def derive(state: dict[str, Any], rank: int) -> None:
    """For a rank that did not exist when the state was kept: its own seed, from rank 0's state and its number."""
    words = bytes(state["torch"].numpy().tobytes()) if "numpy" in sys.modules else bytes(state["torch"].tolist())
    seed = int.from_bytes(hashlib.sha256(words + rank.to_bytes(8, "little")).digest()[:7], "little")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
