"""A training that saves through the checkpoint library and leaves the notice to it: it never asks for one itself."""

import os
import time

import torch

from sublet.checkpoint import Checkpointer

ckpt = Checkpointer(os.environ["SUBLET_CHECKPOINT_DIR"], every=1_000_000)
state = {"weight": torch.zeros(1000)}
found = ckpt.load()
step = 0 if found is None else found.step
if found is not None:
    state = found.state
print(f"begins behind step {step}, weight {float(state['weight'][0])}", flush=True)
while True:
    step += 1
    state["weight"] += 1
    ckpt.step(step, state)
    print(f"step {step}", flush=True)
    time.sleep(0.05)
