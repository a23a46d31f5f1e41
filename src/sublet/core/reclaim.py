"""Whom to ask to leave. Rule: the whole placement is proven first, from free capacity, what is on its way out, and
victims together; the victims are those who lose least, and none that could be spared.

Cost: GPU-time since the last checkpoint, plus what a restart costs, plus a price for each eviction; then fewest
victims, lower priority, newest grant, id. While owners come in bursts, GPUs that a victim frees beside what is needed
now are worth the evictions that they will save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge, nsmallest
from itertools import combinations

from sublet.core import reserve
from sublet.core.capacity import level_claimable, victims_inside
from sublet.core.placement import Slot, fit, groups, is_even, is_plain, slot_of
from sublet.core.state import JobBook, NodeBook, Pool, State
from sublet.domain.leases import LeaseKind

EXACT_UNITS = 8  # up to here all sets of victims are tried
SWAP_UNITS = 64  # up to here two victims are tried against one other
LOOK_AT_NODES = 192  # nodes with borrowers that are looked at closely, beyond four for each instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What can be told to leave as one: a whole lease, or one instance of an elastic job above its minimum."""

    job: JobBook
    instances: tuple[int, ...]
    cost: int  # lost GPU-ms, the restart counted in
    lost_gpu_ms: int
    is_part: bool = False  # the job goes on with the rest

    @property
    def order(self) -> tuple[int, int, int, str, tuple[int, ...]]:
        return (self.cost, self.job.request.priority, -self.job.granted_ms, self.job.id, self.instances)

    @property
    def gpus(self) -> int:
        gpus = self.job.gpus
        return gpus[0] if len(gpus) == 1 else sum(gpus[i] for i in self.instances)

    def frees(self) -> Iterator[tuple[str, int]]:
        for instance in self.instances:
            yield self.job.nodes[instance], self.job.gpus[instance]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Proven: with these gone the job stands on these nodes."""

    spec: str
    gpus: tuple[int, ...]
    nodes: tuple[str, ...]
    victims: tuple[Unit, ...]

    @property
    def order(self) -> tuple[int, int, tuple[tuple[int, int, str], ...]]:
        return order_of(self.victims)


def _frees_on(unit: Unit, node: str) -> int:
    if len(unit.instances) == 1:
        return unit.gpus if unit.job.nodes[unit.instances[0]] == node else 0
    return sum(gpus for name, gpus in unit.frees() if name == node)


def order_of(units: Sequence[Unit]) -> tuple[int, int, tuple[tuple[int, int, str], ...]]:
    """Of two sets of victims the lesser is asked."""
    last = tuple(sorted((u.job.request.priority, -u.job.granted_ms, u.job.id) for u in units))
    return (sum(unit.cost for unit in units), len({unit.job.id for unit in units}), last)


# ---- what a victim costs


def lost_ms(state: State, job: JobBook) -> int:
    """Running time that is lost if the job is told to leave now: since its last checkpoint."""
    if job.begun_ms is None:
        return 0
    hint, ran = job.request.checkpoint, state.now_ms - job.begun_ms
    if job.checkpoint_ms is not None:
        ran = state.now_ms - job.checkpoint_ms
    elif hint.every_ms:
        ran %= hint.every_ms
    if hint.on_notice_ms is not None:
        grace = state.rules.grace_ms if job.request.grace_ms is None else job.request.grace_ms
        if hint.on_notice_ms <= min(grace, state.rules.max_grace_ms):
            ran = min(ran, hint.on_notice_ms)
    return ran


def whole(state: State, job: JobBook) -> Unit:
    """The job with all instances that nobody told to leave yet."""
    lost = lost_ms(state, job) * job.held
    rules, has_begun = state.rules, job.begun_ms is not None or bool(job.began)
    restart = rules.restart_cost_ms * job.held + rules.eviction_cost_gpu_ms if has_begun else 0
    staying = tuple(i for i in job.live if i not in job.leaving) if job.leaving else job.live
    return Unit(job=job, instances=staying, cost=lost + restart, lost_gpu_ms=lost)


def spare(job: JobBook) -> int:
    """Instances that an elastic job can give up and go on."""
    least = job.request.min_instances
    return max(0, len(job.live) - len(job.leaving) - least) if least else 0


def parts(job: JobBook, nodes: Iterable[str] | None = None) -> list[Unit]:
    """Single instances of an elastic job, the last first; they lose nothing that counts."""
    if not spare(job):
        return []
    staying = [i for i in reversed(job.live) if i not in job.leaving and (nodes is None or job.nodes[i] in nodes)]
    return [Unit(job=job, instances=(i,), cost=0, lost_gpu_ms=0, is_part=True) for i in staying]


# ---- the search


class Search:
    """One claimant on one group of nodes: how much each would have, and who was chosen so far."""

    __slots__ = ("chosen", "job", "limits", "parts_left", "pool", "room", "sizes", "state", "units", "wanted")

    def __init__(self, state: State, pool: Pool, job: JobBook, sizes: tuple[int, ...], nodes: Iterable[NodeBook],
                 units: dict[str, Unit]) -> None:  # fmt: skip
        self.state, self.pool, self.job, self.sizes = state, pool, job, sizes
        self.room = {node.name: node.future for node in nodes}
        single, _ = reserve.kept(state, pool)
        self.wanted = max(0, single - pool.available)  # what else is freed saves so many evictions to come
        self.units = units  # whole leases by job, for costs are asked for often
        self.chosen: list[Unit] = []
        self.parts_left: dict[str, int] = {}

    def unit(self, job_id: str) -> Unit:
        found = self.units.get(job_id)
        if found is None:
            found = self.units[job_id] = whole(self.state, self.state.jobs[job_id])
        return found

    def victims_on(self, name: str) -> list[tuple[Unit, int]]:
        """Who could leave this node and what that frees there: revocable, not chosen yet, the cheapest GPU first."""
        taken_whole = {unit.job.id for unit in self.chosen if not unit.is_part}
        found: list[Unit] = []
        for job_id in self.pool.nodes[name].jobs:
            job = self.pool.revocable.get(job_id)
            if job is None or job_id in taken_whole or job_id == self.job.id:
                continue
            if job.request.min_instances is not None:
                taken = {i for unit in self.chosen if unit.job is job for i in unit.instances}
                some = [unit for unit in parts(job, (name,)) if unit.instances[0] not in taken]
                found += some[: self.parts_left.get(job_id, spare(job))]
            found.append(self.unit(job_id))
        ranked = sorted((unit.cost / unit.gpus, unit.order, at) for at, unit in enumerate(found))
        return [(found[at], _frees_on(found[at], name)) for _, _, at in ranked]

    def option(self, name: str, size: int) -> tuple[tuple[int, int, tuple[object, ...], str], list[Unit]] | None:
        """The cheapest way found to make `size` GPUs free on the node."""
        short = size - self.room[name]
        if short <= 0:
            return (0, 0, (), name), []
        gains: list[tuple[Unit, int]] = []
        total = 0
        for unit, gain in self.victims_on(name):
            if not unit.is_part and unit.job.request.min_instances is not None:
                total -= sum(less for one, less in gains if one.job is unit.job)
                gains = [(one, less) for one, less in gains if one.job is not unit.job]
            gains.append((unit, gain))
            total += gain
            if total >= short:
                break
        else:
            return None
        for one in sorted(gains, key=lambda pair: pair[0].order, reverse=True):
            if total - one[1] >= short:
                gains.remove(one)
                total -= one[1]
        units = [unit for unit, _ in gains]
        cost, count, last = order_of(units)
        beside = min(sum(unit.job.held for unit in units) - short, self.wanted)
        cost -= max(0, beside) * self.state.rules.eviction_cost_gpu_ms
        return (cost, count, last, name), units

    def take(self, unit: Unit) -> None:
        """Choose it: what it holds counts as free, on all its nodes."""
        for other in [one for one in self.chosen if one.job is unit.job and not unit.is_part]:
            self.give_back(other)
        self.chosen.append(unit)
        if unit.is_part:
            self.parts_left[unit.job.id] = self.parts_left.get(unit.job.id, spare(unit.job)) - 1
        for name, gpus in unit.frees():
            if name in self.room:
                self.room[name] += gpus

    def give_back(self, unit: Unit) -> None:
        self.chosen.remove(unit)
        if unit.is_part:
            self.parts_left[unit.job.id] += 1
        for name, gpus in unit.frees():
            if name in self.room:
                self.room[name] -= gpus

    def slots(self) -> list[Slot]:
        request, nodes = self.job.request, self.pool.nodes
        return [slot for name, gpus in self.room.items() if (slot := slot_of(nodes[name], request, gpus))]

    def fits(self) -> tuple[str, ...] | None:
        if is_even(self.sizes) and is_plain(self.job.request):
            size = self.sizes[0]
            if sum(gpus // size for gpus in self.room.values() if gpus > 0) < len(self.sizes):
                return None
        return fit(self.sizes, self.slots())

    def grow(self) -> bool:
        """Choose victims, instance by instance, the largest first, where it costs least. False: it cannot be."""
        left = dict.fromkeys(self.room, 0)
        options: dict[str, tuple[tuple[int, int, tuple[object, ...], str], list[Unit]] | None] = {}
        size_of_options = 0
        for size in sorted(self.sizes, reverse=True):
            if size != size_of_options:
                options = {name: self.option(name, size) for name in self.room}
                size_of_options = size
            possible = [(found[0], self.room[name], name) for name, found in options.items() if found is not None]
            if not possible:
                return False
            name = min(possible, key=lambda one: (one[0][:3], one[1], one[2]))[2]
            found = options[name]
            assert found is not None
            touched = {name}
            for unit in found[1]:
                self.take(unit)
                touched.update(unit.job.nodes)
            self.room[name] -= size
            left[name] += size
            for one in sorted(touched):
                if one in self.room:
                    options[one] = self.option(one, size)
        for name, size in left.items():
            self.room[name] += size
        return True

    def shrink(self) -> None:
        """Give back, the dearest first, what is not needed."""
        for unit in sorted(self.chosen, key=lambda u: u.order, reverse=True):
            self.give_back(unit)
            if self.fits() is None:
                self.take(unit)

    def swap(self) -> None:
        """One for two: a victim that was not chosen, in place of two that were, when that is less."""
        others = self._others()
        if len(self.chosen) < 2 or len(others) > SWAP_UNITS or len(self.chosen) > EXACT_UNITS:
            return
        for first, second in combinations(sorted(self.chosen, key=lambda u: u.order), 2):
            for other in others:
                if first not in self.chosen or second not in self.chosen or other in self.chosen:
                    continue
                rest = [unit for unit in self.chosen if unit is not first and unit is not second]
                if any(unit.job is other.job for unit in rest) or order_of([*rest, other]) >= order_of(self.chosen):
                    continue
                self._exchange((first, second), other)

    def _exchange(self, two: tuple[Unit, Unit], other: Unit) -> None:
        for unit in two:
            self.give_back(unit)
        self.take(other)
        if self.fits() is None:
            self.give_back(other)
            for unit in two:
                self.take(unit)

    def _others(self) -> list[Unit]:
        ids = {job_id for name in self.room for job_id in self.pool.nodes[name].jobs if job_id in self.pool.revocable}
        ids -= {unit.job.id for unit in self.chosen} | {self.job.id}
        return sorted((self.unit(one) for one in ids), key=lambda u: u.order)

    def exact(self) -> None:
        """When the victims to choose from are few, the best of all sets."""
        ids = {job_id for name in self.room for job_id in self.pool.nodes[name].jobs if job_id in self.pool.revocable}
        units = [self.unit(one) for one in sorted(ids - {self.job.id})]
        units += [part for unit in units for part in parts(unit.job, self.room)]
        if len(units) > EXACT_UNITS or not self.chosen:
            return
        best, best_order = list(self.chosen), order_of(self.chosen)
        for count in range(1, len(units) + 1):
            for some in combinations(units, count):
                order = order_of(some)
                if order < best_order and _is_possible(some) and self._would_fit(some):
                    best, best_order = list(some), order
        self._replace(best)

    def _would_fit(self, units: Sequence[Unit]) -> bool:
        self._replace(units)
        return self.fits() is not None

    def _replace(self, units: Sequence[Unit]) -> None:
        for unit in list(self.chosen):
            self.give_back(unit)
        for unit in units:
            self.take(unit)


def _is_possible(units: Sequence[Unit]) -> bool:
    """No job both whole and in part, no elastic job below its minimum."""
    for unit in units:
        same = [one for one in units if one.job is unit.job]
        if (not unit.is_part and len(same) > 1) or (unit.is_part and len(same) > spare(unit.job)):
            return False
    return True


# ---- the plan


def may_fit(pool: Pool, job: JobBook, sizes: Sequence[int]) -> bool:
    """Quick: could it fit if all borrowers left? True may be wrong for odd shapes, False never is."""
    wanted, smallest, largest = sum(sizes), min(sizes), max(sizes)
    total = slots = 0
    has_large = False
    for potential, count in pool.potentials.items():
        if potential >= smallest:
            total += potential * count
            slots += potential // smallest * count
            has_large = has_large or (count > 0 and potential >= largest)
    return has_large and total >= wanted and slots >= len(sizes)


def plan(state: State, pool: Pool, job: JobBook) -> Proof | None:
    """The best proven way to make room for the job in this pool, or None. Changes nothing."""
    sizes = job.request.least_sizes
    if not may_fit(pool, job, sizes):
        return None
    units: dict[str, Unit] = {}
    if is_plain(job.request):
        return _plan_on(state, pool, job, sizes, _worth_a_look(state, pool, job, sizes, units), units)
    plans = [_plan_on(state, pool, job, sizes, group, units) for group in groups(pool, job.request)]
    found = [one for one in plans if one is not None]
    return min(found, key=lambda one: one.order) if found else None


def _plan_on(state: State, pool: Pool, job: JobBook, sizes: tuple[int, ...], nodes: Iterable[NodeBook],
             units: dict[str, Unit]) -> Proof | None:  # fmt: skip
    search = Search(state, pool, job, sizes, nodes, units)
    placed = search.fits()
    if placed is None:
        if not search.grow():
            return None
        search.shrink()
        search.exact()
        search.swap()
        placed = search.fits()
        if placed is None:
            return None
    return Proof(spec=pool.spec, gpus=sizes, nodes=placed, victims=tuple(sorted(search.chosen, key=lambda u: u.order)))


def _worth_a_look(state: State, pool: Pool, job: JobBook, sizes: tuple[int, ...],
                  units: dict[str, Unit]) -> list[NodeBook]:  # fmt: skip
    """Enough nodes with room, all that are in motion, and those of the cheapest borrowers."""
    smallest, largest, wanted = min(sizes), max(sizes), len(sizes)
    found = dict(pool.unsettled)
    for level in pool.index.levels:
        found.update((node.name, node) for node in pool.index.some(level, wanted))
    enough = LOOK_AT_NODES + 4 * wanted
    if len(pool.revocable) <= 4 * enough:
        names = {name for one in pool.revocable.values() for name in one.nodes}
        found.update((name, pool.nodes[name]) for name in names)
    else:
        seen = 0
        for unit in _cheapest_first(state, pool, enough):
            units[unit.job.id] = unit
            for name in unit.job.nodes:
                node = pool.nodes[name]
                if node.potential >= smallest and name not in found:
                    found[name] = node
                    seen += node.potential // largest
            if len(found) >= enough and seen >= wanted:
                break
    return [found[name] for name in sorted(found) if found[name].is_up]


def _cheapest_first(state: State, pool: Pool, most_varying: int) -> Iterator[Unit]:
    """Possible victims, the cheapest GPU first. Those who lose more as time goes by are kept sorted; the rest, as they
    save every so often or when told to, are gone through, and `most_varying` of them may be looked at."""

    def by_gpu(unit: Unit) -> tuple[float, object]:
        return (unit.cost / max(1, unit.job.held), unit.order)

    def steady(ids: list[tuple[int, str]]) -> Iterator[Unit]:
        for _, job_id in ids:
            yield whole(state, state.jobs[job_id])

    cheap = nsmallest(
        2 * most_varying, ((lost_ms(state, job), job_id) for job_id, job in pool.varying.items() if job.live)
    )
    varying = sorted((whole(state, state.jobs[job_id]) for _, job_id in cheap), key=by_gpu)
    return merge(varying, *(steady(ids) for _, ids in sorted(pool.steady.items())), key=by_gpu)


# ---- in-quota preemption


def plan_inside(state: State, pool: Pool, job: JobBook) -> Proof | None:
    """Room by guaranteed jobs of lower priority of the same quota tree; changes nothing."""
    candidates = [
        one
        for one in state.jobs.values()
        if one.kind is LeaseKind.GUARANTEED and one.spec == pool.spec and one.live and not one.leaving
        and one.quota.root is job.quota.root and victims_inside(job, one)
    ]  # fmt: skip
    if not candidates:
        return None
    found = [_inside_on(state, pool, job, group, candidates) for group in groups(pool, job.request)]
    plans = [one for one in found if one is not None]
    return min(plans, key=lambda one: one.order) if plans else None


def _inside_on(state: State, pool: Pool, job: JobBook, nodes: Iterable[NodeBook],
               candidates: Sequence[JobBook]) -> Proof | None:  # fmt: skip
    search = Search(state, pool, job, job.request.least_sizes, nodes, {})
    units = sorted((whole(state, one) for one in candidates), key=_inside_order)
    for unit in units:
        if _is_room_inside(search):
            break
        search.take(unit)
    if not _is_room_inside(search):
        return None
    for unit in sorted(search.chosen, key=_inside_order, reverse=True):
        search.give_back(unit)
        if not _is_room_inside(search):
            search.take(unit)
    placed = search.fits()
    assert placed is not None
    return Proof(spec=pool.spec, gpus=search.sizes, nodes=placed, victims=tuple(search.chosen))


def _inside_order(unit: Unit) -> tuple[object, ...]:
    return (unit.job.request.priority, *unit.order)


def _is_room_inside(search: Search) -> bool:
    """In every quota on the path, and on the nodes."""
    need, spec = sum(search.sizes), search.pool.spec
    for level in search.job.quota.path:
        freed = sum(unit.job.held for unit in search.chosen if level in unit.job.quota.path)
        if level_claimable(level, spec) + freed < need:
            return False
    return search.fits() is not None
