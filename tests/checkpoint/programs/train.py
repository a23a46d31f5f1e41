"""A small training run that prints each loss; the tests start it, stop it in every way, and start it again.

train.py DIRECTORY LAST_STEP [key=value …]     keys are in DEFAULTS
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from sublet.checkpoint import EXIT_CODE, Checkpointer, Position, copying, loader

DEFAULTS = {
    "every": "2", "keep": "3", "slots": "2", "agent": "1", "die_at": "0", "hang_at": "0", "pace_ms": "0",
    "signals": "", "chunk_bytes": "65536", "hold_at": "0", "hold_file": "", "workers": "0", "wait_each": "0",
    "width": "64", "tell_bytes": "0",
}  # fmt: skip


def build(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(width, width),
        torch.nn.ReLU(), torch.nn.Linear(width, 1),
    )  # fmt: skip
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def main(directory: str, last: int, options: dict[str, str]) -> int:
    torch.set_num_threads(1)
    copying.TELL_BYTES = int(options["tell_bytes"]) or copying.TELL_BYTES
    model, optimizer = build(int(options["width"]))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    points = torch.randn(96, 8, generator=torch.Generator().manual_seed(5))
    position = Position(96, batch_size=8, seed=3)
    batches = loader(TensorDataset(points, points.sum(1, keepdim=True)), position, num_workers=int(options["workers"]))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "position": position, "note": "begun"}
    every = options["every"]
    ckpt = Checkpointer(
        directory, every=int(every) if every.isdigit() else every, keep=int(options["keep"]),
        slots=int(options["slots"]), agent=options["agent"] == "1", chunk_bytes=int(options["chunk_bytes"]),
        signals=tuple(signal.Signals[name] for name in options["signals"].split(",") if name),
    )  # fmt: skip
    with ckpt:
        loaded = ckpt.load(state)
        agent = ckpt._link.agent_pid if ckpt._link else 0
        say(start=loaded.step if loaded else 0, tier=loaded.tier if loaded else "", agent=agent, pid=os.getpid(),
            hops=[[hop.tier, hop.step, hop.why] for hop in loaded.hops] if loaded else [])  # fmt: skip
        step = loaded.step if loaded else 0
        while step < last:
            for inputs, wanted in batches:
                step += 1
                loss = torch.nn.functional.mse_loss(model(inputs), wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                say(step=step, loss=loss.item().hex())
                if ckpt.step(step, state) and options["wait_each"] == "1":
                    ckpt.wait()
                if step == int(options["hold_at"]):
                    hold(options["hold_file"])
                if step == int(options["die_at"]):
                    os.kill(os.getpid(), signal.SIGKILL)
                if ckpt.should_stop():
                    ckpt.close()
                    say(stopped=step)
                    return EXIT_CODE
                if step >= last:
                    break
                time.sleep(int(options["pace_ms"]) / 1000)
        durable = ckpt.wait()
        digest = sum(p.double().sum().item() for p in model.parameters()).hex()
        say(done=step, durable=durable, digest=digest, counters=ckpt.counters.durable,
            alarms=[event.message for event in ckpt.events if event.kind in ("alarm", "agent_lost")],
            degraded=[event.message for event in ckpt.events if event.kind == "degraded"])  # fmt: skip
    return 0


def hold(path: str) -> None:
    """Wait until the test lets go."""
    say(holding=True)
    while not Path(path).exists():
        time.sleep(0.01)


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[3:])
    sys.exit(main(sys.argv[1], int(sys.argv[2]), DEFAULTS | given))
