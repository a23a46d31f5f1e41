"""A training of several processes over gloo: each step adds the ranks up; rank 0 saves each step, all resume from it.

`gang.py STEPS [trouble STEP]`: in the first attempt `trouble` befalls one rank at STEP: `absent` (it does not come to
the all-reduce), `slow` (its own part takes long from the start), `stay` (it does not leave at the end).
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from sublet.job import checkpointed, notice, progress, waiting


def somewhere_else() -> None:
    time.sleep(600)


def main() -> None:
    steps, trouble = int(sys.argv[1]), sys.argv[2:]
    kind, at = (trouble[0], int(trouble[1])) if trouble and os.environ["SUBLET_ATTEMPT"] == "1" else ("", -1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    file = Path(os.environ["SUBLET_CHECKPOINT_DIR"]) / "state.json"
    state = json.loads(file.read_text()) if file.exists() else {"step": 0, "sum": 0.0}
    print(f"rank {rank} of {world} begins behind step {state['step']} as {os.getpid()}", flush=True)
    for step in range(state["step"] + 1, steps + 1):
        if kind == "absent" and rank == 1 and step == at:
            somewhere_else()
        time.sleep(0.06 if kind == "slow" and rank == 1 else 0.02)
        value = torch.tensor(float(step * (rank + 1)), dtype=torch.float64)
        with waiting():
            dist.all_reduce(value)
        state = {"step": step, "sum": state["sum"] * 0.5 + float(value)}
        if rank == 0:
            new = file.with_suffix(".new")
            new.write_text(json.dumps(state))
            new.replace(file)
            checkpointed(step)
        progress(step, steps)
        if notice.received():
            print(f"rank {rank} leaves behind step {step}", flush=True)
            raise SystemExit(85)
    dist.barrier()  # gloo tears at whoever is still in the last step when a peer leaves
    print(f"rank {rank} ends with {state['sum']!r}", flush=True)
    if kind == "stay" and rank == 1:
        somewhere_else()


main()
