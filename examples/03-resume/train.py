"""A small character transformer on text that ships with Python; kill it as you like, start it again, it goes on.

python train.py --steps 200                # the loss at the end is the same bit for bit, however often it was killed
"""

import argparse
import pydoc_data.topics
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset

from sublet.checkpoint import EXIT_CODE, Checkpointer, Position, loader
from sublet.job import checkpointed, progress

CONTEXT = 32


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of characters, each with the character that follows."""

    def __init__(self) -> None:
        text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))[:60_000]
        self.letters = sorted(set(text))
        place = {letter: number for number, letter in enumerate(self.letters)}
        self.codes = torch.tensor([place[letter] for letter in text])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT - 1

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes[at : at + CONTEXT], self.codes[at + 1 : at + CONTEXT + 1]


class Reader(torch.nn.Module):
    """One block of a transformer with a causal mask."""

    def __init__(self, letters: int, width: int = 48) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(letters, width)
        self.places = torch.nn.Embedding(CONTEXT, width)
        self.block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.out = torch.nn.Linear(width, letters)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        mixed = self.block(self.letters(codes) + self.places.weight, src_mask=mask, is_causal=True)
        return self.out(mixed)


def train(steps: int, directory: Path, every: str) -> int:
    """The exit code: 0 at the end, 85 if a notice came and everything is saved."""
    torch.manual_seed(1)
    torch.set_num_threads(1)  # sums in one order, so that equal means equal
    text = Text()
    model = Reader(len(text.letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    position = Position(len(text), batch_size=16, seed=1)
    batches = loader(text, position)
    state = {"model": model, "optimizer": optimizer, "position": position}

    with Checkpointer(
        directory, every=int(every) if every.isdigit() else every, keep=2,
        on_event=lambda event: checkpointed(event.step) if event.kind == "durable" else None,
    ) as ckpt:  # fmt: skip
        loaded = ckpt.load(state)
        step = loaded.step if loaded else 0
        print(f"from step {step}" + (f", from {loaded.tier}" if loaded else ""), flush=True)
        while step < steps:
            for codes, wanted in batches:
                step += 1
                loss = torch.nn.functional.cross_entropy(model(codes).flatten(0, 1), wanted.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress(step, steps)
                print(f"step {step} loss {loss.item():.6f}", flush=True)
                ckpt.step(step, state)
                if ckpt.should_stop():
                    ckpt.close()
                    print(f"saved at step {step}; start me again", flush=True)
                    return EXIT_CODE
                if step == steps:
                    break
        print(f"done: loss {loss.item().hex()}", flush=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", default="5", help="steps, a time such as 30s, or auto")
    parser.add_argument("--directory", type=Path, default=Path("checkpoints"))
    chosen = parser.parse_args()
    sys.exit(train(chosen.steps, chosen.directory, chosen.every))
