"""What one rank does in the tests of several ranks.

Each function gets rank, world and a directory, and returns plain values.
"""

import hashlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sublet.checkpoint import Checkpointer, PerRank, Shard

LAYERS = (24, 30)  # divides evenly neither by 4 nor by 7


def together(work: Callable[..., Any], world: int, directory: Path, *args: Any) -> list[Any]:
    """Run `work` on `world` ranks over gloo; what each returned, in order.

    Fails with the story of the first that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch.distributed.fsdp"])
    results: Any = context.Queue()
    meeting = directory / f"meeting-{os.urandom(4).hex()}"
    ranks = [
        context.Process(target=one_rank, args=(work, rank, world, directory, meeting, results, args), daemon=False)
        for rank in range(world)
    ]
    for each in ranks:
        each.start()
    found = dict(results.get(timeout=120) for _ in range(world))
    for each in ranks:
        each.join(60)
    for rank in range(world):
        if isinstance(found[rank], str) and found[rank].startswith("Traceback"):
            raise AssertionError(f"rank {rank}: {found[rank]}")
    return [found[rank] for rank in range(world)]


def one_rank(
    work: Callable[..., Any], rank: int, world: int, directory: Path, meeting: Path, results: Any, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        results.put((rank, work(rank, world, directory, *args)))
    except Exception:  # noqa: BLE001  the edge of the process: the story goes to the test
        results.put((rank, traceback.format_exc()))
    dist.destroy_process_group()


def sharded(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small FSDP2 model and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*[torch.nn.Linear(LAYERS[0], LAYERS[0]) for _ in range(2)], torch.nn.Linear(*LAYERS))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.ones(3, LAYERS[0])).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def print_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of everything, whoever holds which part. Collective."""
    parts = [whole(value) for value in model.state_dict().values()]
    for parameter in model.parameters():
        parts += [whole(value) for _, value in sorted(optimizer.state[parameter].items())]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def flat_part(rank: int, world: int) -> Shard:
    """A ZeRO-like partition of one flat tensor of 101 numbers."""
    bounds = [101 * each // world for each in range(world + 1)]
    return Shard(torch.zeros(bounds[rank + 1] - bounds[rank]), (101,), (bounds[rank],))


def save_sharded(rank: int, world: int, directory: Path, steps: int) -> str:
    """Load whatever is there, train, save; the print of what was saved."""
    model, optimizer = sharded(seed=1)
    torch.manual_seed(100 + rank)
    part = flat_part(rank, world)
    part.tensor.copy_(torch.arange(101.0)[part.start[0] : part.start[0] + len(part.tensor)])
    state = {"model": model, "optimizer": optimizer, "flat": part, "mine": PerRank({"rank": rank}), "seen": 0}
    with Checkpointer(directory / "ckpt", every=1000, keep=9, chunk_bytes=4096) as ckpt:
        loaded = ckpt.load(state)
        first = loaded.step if loaded else 0
        for step in range(first + 1, first + steps + 1):
            train(model, optimizer)
            state["seen"] = step
        assert ckpt.save_now(first + steps, state, wait=True)
        return print_of(model, optimizer)


def load_sharded(rank: int, world: int, directory: Path) -> tuple[str, int, int, float, str]:
    model, optimizer = sharded(seed=99)
    part = flat_part(rank, world)
    state = {"model": model, "optimizer": optimizer, "flat": part, "mine": PerRank({"rank": -1}), "seen": 0}
    with Checkpointer(directory / "ckpt", every=1000, chunk_bytes=4096) as ckpt:
        loaded = ckpt.load(state)
        assert loaded is not None
        assert torch.equal(part.tensor, torch.arange(101.0)[part.start[0] : part.start[0] + len(part.tensor)])
        found = print_of(model, optimizer)
        chance = torch.rand(()).item()
        return found, state["seen"], state["mine"].value["rank"], chance, loaded.tier


def replicas(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 3))
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def ddp_run(rank: int, world: int, directory: Path, last: int, die_at: int) -> dict[str, Any]:
    """Data-parallel training of a global batch; each rank says what it loaded and what it has in the end."""
    model, optimizer = replicas(seed=1 + (rank if die_at else 0))
    state = {"model": model, "optimizer": optimizer}
    ckpt = Checkpointer(directory / "ckpt", every=1, slots=3, keep=2, chunk_bytes=4096)
    loaded = ckpt.load(state)
    first = loaded.step if loaded else 0
    for step in range(first + 1, last + 1):
        data = torch.randn(12, 40, generator=torch.Generator().manual_seed(step))
        loss = model(data[rank::world]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert ckpt.step(step, state) or ckpt.save_now(step, state, wait=True)
        if step == die_at:
            break
    written = ckpt._planner.plan.stream_bytes if ckpt._planner.plan else 0
    out = {"start": first, "tier": loaded.tier if loaded else "", "print": ddp_print(model), "bytes": written,
           "agent": ckpt._link.agent_pid if ckpt._link else 0}  # fmt: skip
    if die_at:
        ckpt.__exit__(KeyboardInterrupt, None, None)  # as the agents see a crash
    else:
        ckpt.close()
    return out


def ddp_print(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def noticed(rank: int, world: int, directory: Path) -> tuple[int, bool]:
    """Only rank 1 hears the notice; all ranks must stop at one step."""
    model, optimizer = replicas(seed=1)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(directory / "ckpt", every=10_000, chunk_bytes=4096) as ckpt:
        for step in range(1, 500):
            model(torch.ones(2, 40)).sum().backward()
            optimizer.step()
            if step == 3 and rank == 1:
                ckpt.give_notice(reason="only this rank was told")
            ckpt.step(step, state)
            if ckpt.should_stop():
                return step, ckpt.wait()
    return 0, False


def one_rank_fails(rank: int, world: int, directory: Path) -> tuple[bool, bool]:
    """The disk of one rank fails once; the save is tried again and comes through on all."""
    if rank == 1:
        os.environ["SUBLET_CHECKPOINT_FAULT"] = "data-written@1=errno:EIO"
    model, optimizer = replicas(seed=1)
    with Checkpointer(directory / "ckpt", every=10_000, chunk_bytes=4096) as ckpt:
        ckpt.save_now(1, {"model": model, "optimizer": optimizer})
        at_first = ckpt.wait()
        return at_first, ckpt.wait()


def differing(rank: int, world: int, directory: Path) -> str:
    """A plain tensor of another shape on each rank is no replica."""
    from sublet.checkpoint import Refused

    with Checkpointer(directory / "ckpt", every=1) as ckpt:
        try:
            ckpt.save_now(1, {"x": torch.zeros(rank + 1)})
        except Refused as error:
            return str(error)
    return ""


def deepspeed_files(rank: int, world: int, directory: Path) -> list[str]:
    """As DeepSpeed does it: rank 0 writes the model's file, each rank its part of the optimizer; all read the model."""
    from sublet.checkpoint.hooks.deepspeed import SubletCheckpointEngine

    model, part = (str(directory / "ds" / "global_step1" / name) for name in ("mp_00.pt", f"zero_{rank}.pt"))
    with Checkpointer(directory / "ckpt") as ckpt:
        engine = SubletCheckpointEngine(ckpt)
        engine.create("global_step1")
        if rank == 0:
            engine.save({"what": f"model of {rank}", "x": torch.full((5,), 7.0)}, model)
        engine.save({"what": f"part of {rank}", "x": torch.full((3,), float(rank))}, part)
        assert engine.commit("global_step1")
    dist.barrier()
    with Checkpointer(directory / "ckpt") as ckpt:
        engine = SubletCheckpointEngine(ckpt)
        found = [engine.load(path) for path in (model, part)]
    assert [float(each["x"][0]) for each in found] == [7.0, float(rank)]
    return [each["what"] for each in found]
