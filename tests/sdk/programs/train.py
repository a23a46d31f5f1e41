"""A training of N steps that saves after each one, and goes on from the last."""

import os
import sys
import time
from pathlib import Path

steps, pause = int(sys.argv[1]), float(sys.argv[2])
saved = Path(os.environ["SUBLET_CHECKPOINT_DIR"]) / f"step-{os.environ['RANK']}"
saved.parent.mkdir(parents=True, exist_ok=True)
first = int(saved.read_text()) if saved.exists() else 0
names = ("RANK", "WORLD_SIZE", "NPROC_PER_NODE", "DLC_JOB_ID", "COLOUR")
print("begins at", first, " ".join(f"{name}={os.environ.get(name, '')}" for name in names), flush=True)
for step in range(first, steps):
    time.sleep(pause)
    new = saved.with_suffix(".new")
    new.write_text(str(step + 1))
    new.replace(saved)
print("done at", steps, flush=True)
