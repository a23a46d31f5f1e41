"""A state that is small and whole, and a trainer inside the test's own process; its agent is a real process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sublet.checkpoint import Checkpointer


@dataclass(slots=True)
class Small:
    """A model and its optimizer; each step moves all of it."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    state: dict[str, Any]

    def train(self) -> None:
        loss = self.model(torch.ones(2, 16)).pow(2).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def small(width: int = 600) -> Small:
    """About width · width · 12 bytes of state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Small(model, optimizer, {"model": model, "optimizer": optimizer, "words": {"epoch": 1}})


def print_of(state: Any) -> dict[str, bytes]:
    """Every tensor of a state as bytes, by name."""
    from sublet.checkpoint.state import flatten

    return {
        leaf.name: leaf.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for leaf in flatten(state).leaves
    }


def saved(directory: Path, steps: int, width: int = 600, **options: Any) -> dict[int, dict[str, bytes]]:
    """Train and save each step durably; the prints of the state after each."""
    prints = {}
    run = small(width)
    with Checkpointer(directory, every=1, **options) as ckpt:
        for step in range(1, steps + 1):
            run.train()
            assert ckpt.save_now(step, run.state, wait=True)
            prints[step] = print_of(run.state)
    return prints


def crash(ckpt: Checkpointer) -> None:
    """As the agent sees a trainer's death: the connection ends without a goodbye."""
    from sublet.checkpoint.client import close_link

    ckpt._planner.spots.clear()
    if ckpt._link is not None:
        close_link(ckpt._link, goodbye=False)
