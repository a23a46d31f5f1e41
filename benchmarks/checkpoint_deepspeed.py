"""Inside DeepSpeed itself, on CPU: does a run that saves and loads through our engine go on as if nothing had been?

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed     # builds against the torch that is there
    python benchmarks/checkpoint_deepspeed.py [--ranks 2] [--stages 0,1,2]

For each ZeRO stage: train 3 steps, save, train 3 more; then a new engine loads and trains the same 3. Exit code 1 if
one parameter differs by one bit. DeepSpeed is no dependency of anything here.
"""

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

TAG = "global_step3"


def build(stage: int) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "bf16": {"enabled": stage > 0},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def train(engine: Any, steps: int, rank: int) -> None:
    for _ in range(steps):
        inputs = torch.full((4, 16), 1.0 + rank, dtype=next(engine.module.parameters()).dtype)
        engine.backward(engine(inputs).float().pow(2).mean())
        engine.step()


def one_stage(stage: int, rank: int, directory: Path) -> bool:
    from sublet.checkpoint import Checkpointer
    from sublet.checkpoint.hooks.deepspeed import SubletCheckpointEngine

    engine = build(stage)
    with Checkpointer(directory / "ours") as ckpt:
        engine.checkpoint_engine = SubletCheckpointEngine(ckpt)
        train(engine, 3, rank)
        engine.save_checkpoint(str(directory / "ds"), tag=TAG, client_state={"seen": 12})
        random = torch.get_rng_state()
        train(engine, 3, rank)
    expected = [p.detach().clone() for p in engine.module.parameters()]
    again = build(stage)
    with Checkpointer(directory / "ours") as ckpt:
        again.checkpoint_engine = SubletCheckpointEngine(ckpt)
        _, client = again.load_checkpoint(str(directory / "ds"), tag=TAG)
        torch.set_rng_state(random)
        train(again, 3, rank)
    same = all(torch.equal(a, b) for a, b in zip(expected, again.module.parameters(), strict=True))
    return same and client["seen"] == 12 and again.global_steps == 6


def run_rank(rank: int, ranks: int, port: int, stages: list[int], directory: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # fmt: skip
    bad = 0
    for stage in stages:
        fine = one_stage(stage, rank, Path(directory) / str(stage))
        print(
            f"ZeRO stage {stage}, rank {rank} of {ranks}: {'equal to the last bit' if fine else 'DIFFERS'}", flush=True
        )
        bad += not fine
    torch.distributed.destroy_process_group()
    sys.exit(1 if bad else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", default="0,1,2")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stages = [int(each) for each in options.stages.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        for stage in stages:
            (Path(directory) / str(stage)).mkdir()
        torch.multiprocessing.spawn(run_rank, (options.ranks, port, stages, directory), nprocs=options.ranks)


if __name__ == "__main__":
    main()
