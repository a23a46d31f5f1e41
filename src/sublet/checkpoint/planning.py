"""Which rank copies what to where, kept from save to save. Rule:
a plan is made anew only when the layout has changed.
"""

import mmap
from dataclasses import dataclass, field

import torch

from sublet.checkpoint.copying import Plan, layout_of, make_plan, windows
from sublet.checkpoint.gang import Gang, gather, most
from sublet.checkpoint.layout import PAGE_BYTES, up
from sublet.checkpoint.sharding import Leaf, holders_of, owned
from sublet.checkpoint.state import Flat


@dataclass(slots=True, kw_only=True)
class Planner:
    """The plan in force, who holds which replica, and the plan's windows into each slot that has been used."""

    gang: Gang
    chunk_bytes: int
    plan: Plan | None = None
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    spots: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def made(planner: Planner) -> Plan:
    if planner.plan is None:
        raise AssertionError("no plan has been made")
    return planner.plan


def plan_for(planner: Planner, leaves: list[Leaf]) -> list[Leaf]:
    """What this rank writes of its leaves; the plan is made anew when the layout has changed on any rank.

    Collective.
    """
    gang, layout = planner.gang, layout_of(leaves)
    changed = planner.plan is None or planner.plan.layout != layout
    if not most(gang, [int(changed)])[0]:
        return owned(leaves, planner.holders, gang.rank) if gang.world > 1 else leaves
    if gang.world > 1:
        rows = [[each.name, str(each.tensor.dtype), list(each.tensor.shape)] for each in leaves if each.replicated]
        planner.holders = holders_of(gather(gang, rows))
    mine = owned(leaves, planner.holders, gang.rank) if gang.world > 1 else leaves
    planner.plan = make_plan(layout, mine, planner.chunk_bytes)
    planner.spots.clear()
    return mine


def targets_in(planner: Planner, slot: int, area: mmap.mmap) -> list[torch.Tensor]:
    """The plan's windows into a slot."""
    if slot not in planner.spots:
        planner.spots[slot] = windows(made(planner), area)
    return planner.spots[slot]


def estimate(planner: Planner, flat: Flat) -> int:
    """The bytes of a slot for a state that may still grow its optimizer's moments; asks no other rank."""
    gang, leaves = planner.gang, flat.leaves
    if gang.world > 1:
        leaves = owned(leaves, {leaf.name: tuple(range(gang.world)) for leaf in leaves}, gang.rank)
    size = sum(leaf.tensor.numel() * leaf.tensor.element_size() + 64 for leaf in leaves)
    size += sum(moments_bytes(each) for _, each in flat.objects if isinstance(each, torch.optim.Optimizer))
    return up(size, PAGE_BYTES) + (1 << 20) + 1024 * len(leaves)


def moments_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer without a state yet will most likely add: two moments per parameter, none for plain SGD."""
    if optimizer.state or isinstance(optimizer, torch.optim.SGD):
        return 0
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return sum(2 * p.numel() * p.element_size() + 256 for p in parameters)
