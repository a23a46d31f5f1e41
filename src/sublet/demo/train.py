"""A small but real training: a character-level transformer on text that ships with Python.

    python -m sublet.demo.train --steps 300 --out DIRECTORY

Rule: the same seed gives the same parameters bit for bit, however often it was interrupted in between. All that the
next step depends on is in the checkpoint: parameters, optimizer, the step, the generator that draws the batches (the
position in the data), and the one that dropout draws from.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from sublet.job import SAVED, checkpointed, notice, progress

WINDOW, BATCH, WIDTH, HEADS, LAYERS = 64, 12, 144, 4, 4  # about 1 M parameters
DROPOUT = 0.1
SAVE_EVERY = 40  # steps
KEEP = 2  # checkpoints


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).reshape(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        hidden: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return hidden


class CharacterModel(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.dropout, self.blocks = nn.Dropout(DROPOUT), nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.characters(tokens) + self.positions(torch.arange(tokens.shape[1])))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


@dataclass(slots=True, kw_only=True)
class Training:
    """All that a step depends on. `tokens` (T,) int64: the text."""

    tokens: Tensor
    model: CharacterModel
    optimizer: torch.optim.Optimizer
    batches: torch.Generator
    step: int = 0
    loss: float = 0.0

    def advance(self) -> None:
        starts = torch.randint(len(self.tokens) - WINDOW - 1, (BATCH,), generator=self.batches)
        rows = torch.stack([self.tokens[at : at + WINDOW + 1] for at in starts.tolist()])
        logits = self.model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.step, self.loss = self.step + 1, loss.item()

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": self.loss,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.get_state(),
            "random": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.loss = state["step"], state["loss"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.set_state(state["batches"])
        torch.set_rng_state(state["random"])


def new_training(seed: int) -> Training:
    import pydoc_data.topics

    text = "\n".join(value for _, value in sorted(pydoc_data.topics.topics.items()))
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    torch.manual_seed(seed)
    model = CharacterModel(len(alphabet))
    return Training(
        tokens=torch.tensor([alphabet[character] for character in text]),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batches=torch.Generator().manual_seed(seed),
    )


def save(training: Training, directory: Path) -> None:
    """A durable checkpoint of this step; the oldest ones go."""
    write_whole(directory / f"step-{training.step:06d}.pt", lambda file: torch.save(training.state(), file))
    for old in sorted(directory.glob("step-*.pt"))[:-KEEP]:
        old.unlink()
    checkpointed(training.step)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Under another name first, synced, then renamed and synced again: the file is there whole or not at all."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resume(training: Training, directory: Path) -> None:
    """From the newest checkpoint; what a killed save left half done is removed."""
    for half in directory.glob("*.new"):
        half.unlink()
    found = sorted(directory.glob("step-*.pt"))
    if found:
        training.load(torch.load(found[-1], weights_only=True))
        print(f"resumed from step {training.step}", flush=True)


def digest(model: nn.Module) -> str:
    """sha256 over all parameters, in the order of their names."""
    hashed = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        hashed.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def train(steps: int, directory: Path, seed: int = 7, save_every: int = SAVE_EVERY) -> int:
    """The exit code: 0 when all steps are done, 85 when it saved on a notice."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    directory.mkdir(parents=True, exist_ok=True)
    training = new_training(seed)
    print(f"{sum(p.numel() for p in training.model.parameters()):,} parameters", flush=True)
    resume(training, directory)
    while training.step < steps:
        training.advance()
        progress(training.step, steps)
        print(f"step {training.step} loss {training.loss:.4f}", flush=True)
        if notice.received() and training.step < steps:
            save(training, directory)
            print(f"notice: saved at step {training.step}, leaving", flush=True)
            return SAVED
        if training.step % save_every == 0:
            save(training, directory)
    result = {"step": training.step, "loss": training.loss.hex(), "parameters": digest(training.model)}
    write_whole(directory / "result.json", lambda file: file.write(json.dumps(result).encode()))
    print(f"done: {json.dumps(result)}", flush=True)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer; resumes by itself.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--save-every", type=int, default=SAVE_EVERY, help="Steps from one checkpoint to the next.")
    parser.add_argument("--out", type=Path, default=os.environ.get("SUBLET_CHECKPOINT_DIR", "checkpoints"))
    given = parser.parse_args()
    code = train(given.steps, Path(given.out), given.seed, given.save_every)
    sys.stdout.flush()
    os._exit(code)  # all is synced; to take the libraries down in order would hold the GPUs for another second


if __name__ == "__main__":
    main()
