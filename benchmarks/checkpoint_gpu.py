"""The CUDA path on a machine that has a GPU: is the copy right while training goes on, and what does a save block?

    python benchmarks/checkpoint_gpu.py [--mb 2000] [--device cuda]

With --device cpu the script itself can be tried on a machine without a GPU; that says nothing of the CUDA path.

Checks, with exit code 1 if one fails: the slots are pinned; a save returns before its copy is done; the next optimizer
step does not change what is being copied (the loaded state equals the state at the save, bit for bit); a restore from
memory and one from disk give the same. Then prints the seconds that a save blocks beside a synchronous copy to the
host.
"""

import argparse
import statistics
import sys
import tempfile
import time

import torch

from sublet.checkpoint import Checkpointer


def build(megabytes: int, device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    width = 2048
    layers = max(1, round(megabytes * 1e6 / 12 / width / width))
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)]).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(8, 2048, device=next(model.parameters()).device)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [v for s in optimizer.state.values() for v in s.values()]
    return [t.detach().clone().cpu() for t in [*model.parameters(), *moments]]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, default=2000)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    finish = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    if options.device == "cuda" and not torch.cuda.is_available():
        print("This machine has no CUDA device; nothing was checked.")
        return 2
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        model, optimizer = build(options.mb, options.device)
        state = {"model": model, "optimizer": optimizer}
        ckpt = Checkpointer(directory, every=10**9, slots=3)
        train(model, optimizer)
        ckpt.prepare(state, wait=True)
        blocked, plain = [], []
        for step in range(1, 7):
            expected = bits(model, optimizer)
            finish()
            began = time.perf_counter()
            assert ckpt.save_now(step, state)
            blocked.append(time.perf_counter() - began)
            for _ in range(3):
                train(model, optimizer)  # goes on while the copy does
            finish()
            began = time.perf_counter()
            for tensor in bits(model, optimizer):
                del tensor
            plain.append(time.perf_counter() - began)
            if not ckpt.wait("120s"):
                failed.append(f"step {step} is not on disk")
        if options.device == "cuda" and (ckpt._device is None or not ckpt._device.pinned):
            failed.append("the slots are not pinned")
        for tier in ("memory", "disk"):
            if tier == "memory":
                ckpt.__exit__(KeyboardInterrupt, None, None)  # as after a crash: the agent keeps the copies
            other, other_optimizer = build(options.mb, options.device)
            with Checkpointer(directory, every=10**9) as again:
                loaded = again.load({"model": other, "optimizer": other_optimizer})
                if loaded is None or loaded.tier != tier:
                    failed.append(f"loaded {loaded and loaded.tier} instead of {tier}")
            if not same(bits(other, other_optimizer), expected):
                failed.append(f"what came back from {tier} is not what was saved")
    print(f"blocked {statistics.median(blocked):.4f} s (first {blocked[0]:.4f}); "
          f"synchronous copy to the host {statistics.median(plain):.4f} s")  # fmt: skip
    for each in failed:
        print(f"FAILED: {each}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
