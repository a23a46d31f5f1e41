"""A gang onto nodes. Rule: best fit, the fewest free GPUs that fit, so that small jobs pack and whole nodes stay whole.

An index keeps the nodes of a pool by what they can give now; nobody walks over all nodes for an ordinary request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from sublet.domain.jobs import JobRequest

if TYPE_CHECKING:
    from sublet.core.state import NodeBook, Pool

SEARCH_STEPS = 2_000  # for unequal instances on unequal nodes, after best fit has failed

Placement = tuple[tuple[int, ...], tuple[str, ...]]  # GPUs and node of each instance
Slot = list[Any]  # [available GPUs, node name, instances that cpu and memory allow]


class NodeIndex:
    """Nodes by available GPUs. Entries of the heaps go stale when a node moves on; they are dropped when met."""

    __slots__ = ("counts", "heaps", "known", "levels")

    def __init__(self) -> None:
        self.levels: list[int] = []  # that have a node now, ascending
        self.counts: dict[int, int] = {}
        self.heaps: dict[int, list[tuple[str, NodeBook]]] = {}
        self.known: dict[int, set[str]] = {}  # names in each heap; never iterated

    def move(self, node: NodeBook, old: int, new: int) -> None:
        """The node gave `old` and gives `new`; 0 is kept out of the index."""
        counts = self.counts
        if old > 0:
            left = counts[old] - 1
            if left:
                counts[old] = left
            else:
                del counts[old]
                del self.levels[bisect_left(self.levels, old)]
        if new > 0:
            if new in counts:
                counts[new] += 1
            else:
                counts[new] = 1
                insort(self.levels, new)
            known = self.known.get(new)
            if known is None:
                known = self.known[new] = set()
                self.heaps[new] = []
            if node.name not in known:
                known.add(node.name)
                heappush(self.heaps[new], (node.name, node))

    def first(self, level: int) -> NodeBook:
        """The first node by name that gives exactly `level`, which must be one of `levels`."""
        heap = self.heaps[level]
        while True:
            name, node = heap[0]
            if node.avail == level:
                return node
            heappop(heap)
            self.known[level].discard(name)

    def some(self, level: int, most: int) -> list[NodeBook]:
        """Up to `most` nodes of a level, by name."""
        heap, found = self.heaps[level], []
        for _ in range(min(most, self.counts[level])):
            self.first(level)
            found.append(heappop(heap))
        for entry in found:
            heappush(heap, entry)
        return [node for _, node in found]

    def slots(self, size: int) -> int:
        """How many instances of this size find room side by side."""
        start = bisect_left(self.levels, size)
        return sum(self.counts[level] * (level // size) for level in self.levels[start:])


def is_plain(request: JobRequest) -> bool:
    """May it stand on any node of the spec, with nothing counted but GPUs?"""
    is_anywhere = request.nodes is None and not request.avoid
    return is_anywhere and not (request.same_rack or request.cpu_milli or request.memory_bytes)


def is_even(sizes: Sequence[int]) -> bool:
    return sizes[0] == sizes[-1] and len(set(sizes)) == 1


def place(pool: Pool, request: JobRequest, limit: int) -> Placement | None:
    """Where the job may stand now with at most `limit` GPUs: whole, or as large as fits when it is elastic.

    Beside suspected nodes when that costs it nothing.
    """
    found = _place(pool, request, limit)
    if found is None or not any(name in pool.suspects for name in found[1]):
        return found
    beside = _place(pool, replace(request, avoid=(*request.avoid, *sorted(pool.suspects))), limit)
    return beside if beside is not None and sum(beside[0]) == sum(found[0]) else found


def _place(pool: Pool, request: JobRequest, limit: int) -> Placement | None:
    sizes = request.sizes
    if len(sizes) == 1 and is_plain(request):
        return _place_one(pool, sizes, limit)
    if request.min_instances is None:
        return _place_whole(pool, request, sizes) if request.gpus <= limit else None
    if is_even(sizes) and is_plain(request):
        count = min(len(sizes), limit // sizes[0], pool.index.slots(sizes[0]))
        return _place_whole(pool, request, sizes[:count]) if count >= request.min_instances else None
    for count in range(len(sizes), request.min_instances, -1):
        if sum(sizes[:count]) <= limit and (found := _place_whole(pool, request, sizes[:count])):
            return found
    least = request.least_sizes
    return _place_whole(pool, request, least) if sum(least) <= limit else None


def _place_one(pool: Pool, sizes: tuple[int, ...], limit: int) -> Placement | None:
    index, size = pool.index, sizes[0]
    at = bisect_left(index.levels, size)
    if size > limit or at == len(index.levels):
        return None
    return sizes, (index.first(index.levels[at]).name,)


def _place_whole(pool: Pool, request: JobRequest, sizes: tuple[int, ...]) -> Placement | None:
    if pool.available < sum(sizes):
        return None
    if is_plain(request):
        nodes = _fill(pool.index, sizes) if is_even(sizes) else fit(sizes, _plain_slots(pool.index, sizes))
        return (sizes, nodes) if nodes else None
    for nodes_of_group in groups(pool, request):
        found = fit(sizes, [slot for node in nodes_of_group if (slot := slot_of(node, request, node.avail))])
        if found:
            return sizes, found
    return None


def _fill(index: NodeIndex, sizes: tuple[int, ...]) -> tuple[str, ...] | None:
    size, wanted = sizes[0], len(sizes)
    if index.slots(size) < wanted:
        return None
    nodes: list[str] = []
    for level in index.levels[bisect_left(index.levels, size) :]:
        each = level // size
        for node in index.some(level, -(-(wanted - len(nodes)) // each)):
            nodes += [node.name] * min(each, wanted - len(nodes))
        if len(nodes) == wanted:
            break
    return tuple(nodes)


def _plain_slots(index: NodeIndex, sizes: tuple[int, ...]) -> list[Slot]:
    """Enough nodes of every level: nodes of a level are alike."""
    start = bisect_left(index.levels, min(sizes))
    some = [node for level in index.levels[start:] for node in index.some(level, len(sizes))]
    return [[node.avail, node.name, len(sizes)] for node in some]


def groups(pool: Pool, request: JobRequest) -> list[list[NodeBook]]:
    """The nodes the job may stand on, by name: one group, or one for each rack, the fullest rack first."""
    names: Iterable[str] = pool.nodes if request.nodes is None else request.nodes
    nodes = [pool.nodes[name] for name in sorted(names) if name in pool.nodes]
    nodes = [node for node in nodes if node.is_up and node.name not in request.avoid]
    if not request.same_rack:
        return [nodes]
    racks: dict[str, list[NodeBook]] = {}
    for node in nodes:
        racks.setdefault(node.node.rack, []).append(node)
    return [racks[rack] for rack in sorted(racks, key=lambda rack: (sum(n.avail for n in racks[rack]), rack))]


def slot_of(node: NodeBook, request: JobRequest, gpus: int) -> Slot | None:
    """What a node offers to the job's instances; None = nothing."""
    most = len(request.sizes)
    if request.cpu_milli and node.node.cpu_milli:
        most = min(most, node.cpu_free // request.cpu_milli)
    if request.memory_bytes and node.node.memory_bytes:
        most = min(most, node.memory_free // request.memory_bytes)
    return [gpus, node.name, most] if most > 0 and gpus > 0 else None


def fit(sizes: Sequence[int], slots: Sequence[Slot]) -> tuple[str, ...] | None:
    """A node for each instance, or None. Largest first, best fit; unequal sizes get a bounded exact search too."""
    order = sorted(range(len(sizes)), key=lambda at: (-sizes[at], at))
    chosen = _best_fit([sizes[at] for at in order], [list(slot) for slot in slots])
    if chosen is None and not is_even(sizes):
        steps = [SEARCH_STEPS]
        chosen = _search([sizes[at] for at in order], [list(slot) for slot in slots], steps)
    if chosen is None:
        return None
    nodes = [""] * len(sizes)
    for at, name in zip(order, chosen, strict=True):
        nodes[at] = name
    return tuple(nodes)


def _best_fit(sizes: Sequence[int], slots: list[Slot]) -> list[str] | None:
    chosen = []
    for size in sizes:
        best = None
        for slot in slots:
            if slot[0] >= size and slot[2] > 0 and (best is None or slot[0] < best[0]):
                best = slot
        if best is None:
            return None
        best[0] -= size
        best[2] -= 1
        chosen.append(best[1])
    return chosen


def _search(sizes: Sequence[int], slots: list[Slot], steps: list[int]) -> list[str] | None:
    if not sizes:
        return []
    tried: list[tuple[int, int]] = []
    for slot in sorted(slots, key=lambda slot: slot[0]):
        alike = (slot[0], slot[2])
        if slot[0] < sizes[0] or slot[2] <= 0 or alike in tried:
            continue
        tried.append(alike)
        steps[0] -= 1
        if steps[0] < 0:
            return None
        slot[0] -= sizes[0]
        slot[2] -= 1
        rest = _search(sizes[1:], slots, steps)
        slot[0] += sizes[0]
        slot[2] += 1
        if rest is not None:
            return [slot[1], *rest]
    return None
