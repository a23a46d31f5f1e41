"""Learns which character follows eight others in Python's own help. The four lines that matter are marked.

Keeps its checkpoint in SUBLET_CHECKPOINT_DIR, or beside itself where there is no Sublet.
"""

import os
import pydoc_data.topics
from pathlib import Path

import torch
from torch import nn

from sublet.job import checkpointed, notice, progress

STEPS, SAVE_EVERY, CONTEXT = int(os.environ.get("STEPS", "3000")), 100, 8
SAVED = Path(os.environ.get("SUBLET_CHECKPOINT_DIR", ".")) / "checkpoint.pt"

torch.manual_seed(7)
torch.set_num_threads(1)
text = "\n".join(pydoc_data.topics.topics.values())
alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
tokens = torch.tensor([alphabet[character] for character in text])
model = nn.Sequential(
    nn.Embedding(len(alphabet), 64),
    nn.Flatten(),
    nn.Linear(64 * CONTEXT, 512),
    nn.GELU(),
    nn.Linear(512, len(alphabet)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = 0


def save() -> None:
    new = SAVED.with_suffix(".new")
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with new.open("wb") as file:
        torch.save(state | {"random": torch.get_rng_state()}, file)
        os.fsync(file.fileno())
    new.replace(SAVED)  # whole or not at all
    checkpointed(step)  # 1. tell that so much is safe


if SAVED.exists():  # 2. go on from there
    state = torch.load(SAVED)
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    print(f"resumed from step {step}", flush=True)

while step < STEPS:
    starts = torch.randint(len(tokens) - CONTEXT - 1, (512,))
    rows = tokens[starts[:, None] + torch.arange(CONTEXT + 1)]
    loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    progress(step, STEPS)  # 3. tell how far it is
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
    if notice.received() and step < STEPS:  # 4. leave when somebody needs the GPUs
        save()
        print(f"saved at step {step}, leaving", flush=True)
        raise SystemExit(85)
    if step % SAVE_EVERY == 0:
        save()
print(f"done at step {step}", flush=True)
