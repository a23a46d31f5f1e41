"""What survives which fault: this library beside torch.save, safetensors, DCP and (if installed) DLRover.

Each row does the same to every method: save step 1, then step 2 with a fault, then load in a fresh look and compare
bits. An outcome is one of: right (the bits of a step that was saved), fell back (of the step before), refused (an
error, nothing loaded), WRONG (loaded, other bits), LOST (a step that was whole is gone). `left` are files or memory
that nobody will remove. Rule: no outcome is assumed; each is read off what was loaded.

    python benchmarks/checkpoint_faults.py [--only ours,torch.save] [--kills 12]

For a full disk a small tmpfs is mounted, which needs root; without it that row is left out.
"""

import argparse
import importlib.util
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ELEMENTS = 2_000_000
FLIPS = 8
METHODS = ("ours", "torch.save", "safetensors", "dcp")
POINTS = (
    "begin", "copied", "copying", "complete", "chunk-write", "data-written", "data-synced", "index-written",
    "before-rename", "renamed", "committed", "retention-renamed",
)  # fmt: skip


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"a": torch.randn(ELEMENTS, generator=generator), "b": torch.randn(1000, generator=generator)}


def which(found: dict[str, torch.Tensor]) -> int:
    """The step whose bits these are; 0 if of none."""
    for step in (1, 2, 3):
        if all(torch.equal(found[name], value) for name, value in tensors(step).items()):
            return step
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How to save a step into a directory and how to load the newest."""

    save: Callable[[Path, int], None]
    load: Callable[[Path], dict[str, torch.Tensor] | None]


def ours(*, agent: bool = False) -> Method:
    from sublet.checkpoint import Checkpointer

    def save(directory: Path, step: int) -> None:
        with Checkpointer(directory, every=1, agent=False, capture_rng=False, chunk_bytes=1 << 20) as ckpt:
            if not ckpt.save_now(step, tensors(step)):
                raise OSError(ckpt.events[-1].message)

    def load(directory: Path) -> dict[str, torch.Tensor] | None:
        with Checkpointer(directory, agent=agent) as ckpt:
            loaded = ckpt.load()
            return loaded.state if loaded else None

    return Method(save=save, load=load)


def by_file(write: Callable[[dict[str, torch.Tensor], Path], Any], read: Callable[[Path], Any], suffix: str) -> Method:
    """One file a step under its final name, the newest name is loaded: as people do it."""

    def newest(directory: Path) -> Path | None:
        return max(directory.glob(f"*{suffix}"), default=None)

    def load(directory: Path) -> dict[str, torch.Tensor] | None:
        path = newest(directory)
        return read(path) if path else None

    return Method(save=lambda directory, step: write(tensors(step), directory / f"{step}{suffix}"), load=load)


def torch_save() -> Method:
    return by_file(torch.save, lambda path: torch.load(path, weights_only=True), ".pt")


def safetensors() -> Method:
    from safetensors.torch import load_file, save_file

    return by_file(save_file, load_file, ".safetensors")


def dcp() -> Method:
    import torch.distributed.checkpoint as checkpoint

    def load(directory: Path) -> dict[str, torch.Tensor] | None:
        path = max((p for p in directory.iterdir() if p.is_dir()), default=None)
        if path is None:
            return None
        state = {name: torch.zeros_like(value) for name, value in tensors(1).items()}
        checkpoint.load(state, checkpoint_id=path, no_dist=True)
        return state

    return Method(save=lambda d, s: checkpoint.save(tensors(s), checkpoint_id=d / str(s), no_dist=True), load=load)


OPENERS: dict[str, Callable[[], Method]] = {
    "ours": ours, "torch.save": torch_save, "safetensors": safetensors, "dcp": dcp,
}  # fmt: skip


def look(method: Method, directory: Path) -> tuple[str, int]:
    """What a fresh look finds: loaded, none or the error's name; and the step whose bits they are, 0 if of none."""
    try:
        found = method.load(directory)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return type(error).__name__, 0
    return ("none", 0) if found is None else ("loaded", which(found))


def outcome(method: Method, directory: Path, expected: int) -> str:
    """What became of `expected`, the newest step that was whole before the fault."""
    answer, step = look(method, directory)
    if answer == "loaded":
        return "WRONG" if step == 0 else "right" if step >= expected else "LOST"
    return f"LOST ({answer})"


def data_files(directory: Path) -> list[Path]:
    return [p for p in directory.rglob("*") if p.is_file() and p.stat().st_size > ELEMENTS and not p.is_symlink()]


def newest_data(directory: Path) -> Path:
    return max(data_files(directory), key=lambda path: path.stat().st_mtime_ns)


def flipped(method: Method, directory: Path) -> Counter[str]:
    """One bit of the tensor data of the newest step."""
    chance, out = random.Random(1), Counter[str]()
    method.save(directory, 1)
    method.save(directory, 2)
    path = newest_data(directory)
    good = path.read_bytes()
    for _ in range(FLIPS):
        bad = bytearray(good)
        bad[chance.randrange(len(bad) // 4, len(bad) * 3 // 4)] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        out[damage_answer(method, directory)] += 1
    return out


def damage_answer(method: Method, directory: Path) -> str:
    """After damage to step 2: falling back to step 1 is best, an error is honest, other bits are wrong."""
    answer, step = look(method, directory)
    if answer == "loaded":
        return {0: "WRONG", 1: "fell back"}.get(step, "unharmed")
    return f"refused ({answer})"


def truncated(method: Method, directory: Path) -> Counter[str]:
    method.save(directory, 1)
    method.save(directory, 2)
    path = newest_data(directory)
    os.truncate(path, path.stat().st_size - 4096)
    return Counter([damage_answer(method, directory)])


def torn_rename(method: Method, directory: Path) -> Counter[str]:
    """The newest step has its directory entry and half of its bytes: what a crash without fsync leaves."""
    method.save(directory, 1)
    method.save(directory, 2)
    path = newest_data(directory)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    return Counter([damage_answer(method, directory)])


def full_disk(method: Method, directory: Path) -> Counter[str]:
    """A file system that holds one and a half steps."""
    size = ELEMENTS * 6
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=False)
    if mounted.returncode:
        return Counter(["needs root"])
    try:
        method.save(directory, 1)
        raised = "no error"
        try:
            method.save(directory, 2)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raised = "error raised"
        left = [p for p in data_files(directory) if p.stat().st_size < ELEMENTS * 4]
        return Counter([f"{raised}, {outcome(method, directory, 1)}{', torn file left' if left else ''}"])
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def killed(name: str, method: Method, directory: Path, kills: int) -> Counter[str]:
    """kill -9 of the saving process at moments drawn from a seed, while it saves step 2 over and over under new
    names.
    """
    chance, out = random.Random(3), Counter[str]()
    for number in range(kills):
        place = directory / str(number)
        place.mkdir()
        method.save(place, 1)
        command = [sys.executable, __file__, "--child", name, "--directory", str(place)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()  # it begins to save
        try:
            process.wait(chance.uniform(0.0, 0.03))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.wait()
        out[outcome(method, place, 1)] += 1
        shutil.rmtree(place)
    return out


def killed_with_agent(directory: Path) -> Counter[str]:
    """Ours only: trainer, agent, or both die at every named point of the protocol, in the middle of a copy too."""
    out: Counter[str] = Counter()
    for point in POINTS:
        for victim in ("trainer",) if point == "copying" else ("agent", "both"):
            place = directory / f"{point}-{victim}"
            place.mkdir()
            command = [sys.executable, __file__, "--child", f"agent:{point}:{victim}", "--directory", str(place)]
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            out[outcome(ours(agent=victim == "trainer"), place, 1)] += 1  # the agent waits for the next trainer
            left = [path.name for path in place.iterdir() if path.name.startswith(("tmp-", "gone-"))]
            out["left behind"] += len(left)
    return +out


def agent_child(place: Path, point: str, victim: str) -> None:
    from sublet.checkpoint import Checkpointer, copying

    copying.TELL_BYTES = 1 << 20
    os.environ["SUBLET_CHECKPOINT_FAULT"] = f"{point}@{2 if point != 'retention-renamed' else 1}=die"
    ckpt = Checkpointer(place, every=1, keep=1, capture_rng=False, chunk_bytes=32 << 20)
    if victim != "trainer":
        del os.environ["SUBLET_CHECKPOINT_FAULT"]
    ckpt.save_now(1, tensors(1), wait=True)
    ckpt.save_now(2, tensors(2))
    if victim == "both":
        agent = ckpt._link.agent_pid if ckpt._link else 0
        with open(f"/proc/{agent}/cmdline", "rb"):  # noqa: PTH123  it may be dead already
            pass
        os.kill(agent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()


FAULTS: dict[str, Callable[[Method, Path], Counter[str]]] = {
    "flipped bit": flipped, "truncated file": truncated, "torn rename": torn_rename, "full disk": full_disk,
}  # fmt: skip


def text(found: Counter[str]) -> str:
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in found.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(METHODS))
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--child", default="")
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    if options.child.startswith("agent:"):
        agent_child(options.directory, *options.child.split(":")[1:])
        return 0
    if options.child:
        method = OPENERS[options.child]()
        print(json.dumps("begins"), flush=True)
        method.save(options.directory, 2)
        return 0
    logging.disable()
    warnings.simplefilter("ignore")
    bad = 0
    for name in options.only.split(","):
        if name == "safetensors" and importlib.util.find_spec("safetensors") is None:
            print(f"{name:12} not installed")
            continue
        method = OPENERS[name]()
        for fault, run in FAULTS.items():
            with tempfile.TemporaryDirectory() as place:
                found = run(method, Path(place))
            bad += report(name, fault, found)
        with tempfile.TemporaryDirectory() as place:
            bad += report(name, "kill -9", killed(name, method, Path(place), options.kills))
        if name == "ours":
            with tempfile.TemporaryDirectory() as place:
                bad += report(name, "kill at points", killed_with_agent(Path(place)))
    return 1 if bad else 0


def report(name: str, fault: str, found: Counter[str]) -> int:
    """Print a row; how often ours did what it must never do."""
    print(f"{name:12} {fault:16} {text(found)}", flush=True)
    wrong = sum(count for word, count in found.items() if "WRONG" in word or "LOST" in word or "left" in word)
    return wrong if name == "ours" else 0


if __name__ == "__main__":
    sys.exit(main())
