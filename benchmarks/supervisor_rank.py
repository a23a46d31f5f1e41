"""One rank of the training that benchmarks/supervisor.py kills ranks of: it adds the ranks up each step.

Rule: it is the same program under every launcher, and it knows none of them; it resumes from what rank 0 wrote down.
Each step is a line `rank step nanoseconds pid` in FOLDER/steps.

    python benchmarks/supervisor_rank.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

began_ns = time.time_ns()

import torch  # noqa: E402 (what comes before the import is measured)
import torch.distributed as dist  # noqa: E402

from sublet.job import checkpointed, progress  # noqa: E402

STEP_S = 0.02


def main(folder: Path) -> None:
    imported_ns = time.time_ns()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps = os.open(folder / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(step: int, at_ns: int) -> None:
        os.write(steps, f"{rank} {step} {at_ns} {os.getpid()}\n".encode())

    note(-3, began_ns)
    note(-2, imported_ns)
    note(-1, time.time_ns())
    saved = folder / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    while True:
        step += 1
        time.sleep(STEP_S)
        value = torch.tensor(float(step))
        dist.all_reduce(value)
        note(step, time.time_ns())
        if rank == 0:
            (folder / "new").write_text(str(step))
            (folder / "new").replace(saved)
            checkpointed(step)
        progress(step)


main(Path(sys.argv[1]))
