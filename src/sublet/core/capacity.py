"""The arithmetic of the tree: what a quota may still promise, borrow and lend.

Rule: guaranteed leases are charged to the quota and all above it; idle ones to nobody's promise. Who lends to whom is
derived: capacity promised to nobody first, then the quota least likely to ask; only the sums decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sublet.core.queue import delist, enlist
from sublet.core.state import JobBook, Pool, QuotaBook, State
from sublet.domain.quotas import Scope

UNLIMITED = 1 << 60


def headroom(quota: QuotaBook, spec: str) -> int:
    """GPUs that may become guaranteed now: not used, not claimed, not reserved within this pass; may be negative."""
    room = UNLIMITED
    for level in quota.path:
        free = level.nominal.get(spec, 0) - level.used.get(spec, 0)
        if level.claimed or level.reserved:
            owed = level.claimed.get(spec, 0) - level.leaving.get(spec, 0)
            free -= (owed if owed > 0 else 0) + level.reserved.get(spec, 0)
        if free < room:
            room = free
    return room


def claimable(quota: QuotaBook, spec: str) -> int:
    """GPUs that a claim may rest on: what leaves by in-quota preemption counts as free already."""
    return min(level_claimable(level, spec) for level in quota.path)


def level_claimable(level: QuotaBook, spec: str) -> int:
    free = level.nominal.get(spec, 0) - level.used.get(spec, 0)
    return free + level.leaving.get(spec, 0) - level.claimed.get(spec, 0)


def unused(quota: QuotaBook, spec: str) -> int:
    """The promise less what guaranteed leases hold, claims aside: what idle leases count as the quota's own."""
    return min(level.nominal.get(spec, 0) - level.used.get(spec, 0) for level in quota.path)


def lending(quota: QuotaBook, pool: Pool) -> int:
    """GPUs that idle jobs of this quota may take beside what they have, wherever the nodes are."""
    room, spec = UNLIMITED, pool.spec
    if pool.limited:
        kept = sum(kept_of(one, spec) for one in pool.limited)
        if kept:
            room = pool.capacity - pool.guaranteed - pool.idle - kept
    for level in quota.path:
        if level.borrow_max is not None:
            room = min(room, level.borrow_max - level.idle.get(spec, 0) + max(0, unused(level, spec)))
    if quota.is_general:
        own = quota.own_idle.get(spec, 0)
        room = min(room, max(0, unused(quota, spec)) - own)
        if quota.lend_max is not None:
            room = min(room, quota.lend_max - own)
    return room


def is_borrow_limited(quota: QuotaBook, pool: Pool, need: int) -> bool:
    """Is it the borrow limit that keeps `need` GPUs from it?"""
    spec = pool.spec
    return any(
        level.borrow_max is not None and level.borrow_max - level.idle.get(spec, 0) + max(0, unused(level, spec)) < need
        for level in quota.path
    )


def own_free(quota: QuotaBook, spec: str) -> int:
    """The free part of the quota's own share: its promise less its children's and what its own jobs hold."""
    return max(0, quota.own.get(spec, 0) - quota.own_used.get(spec, 0))


def kept_of(quota: QuotaBook, spec: str) -> int:
    """The part of its free share that a quota does not lend."""
    if quota.lend_max is None:
        return 0
    return max(0, own_free(quota, spec) - quota.lend_max)


def lenders_line(state: State, pool: Pool) -> Iterator[tuple[str, int]]:
    """Who lends before whom and at most how much, beside what general-scoped jobs hold of their own: '' is nobody's."""
    spec = pool.spec
    yield "", max(0, pool.capacity - pool.promised)
    for _, name, quota in sorted((q.asked_ms, q.name, q) for q in pool.lenders):
        room = quota.own.get(spec, 0) - quota.own_used.get(spec, 0)
        if quota.lend_max is not None and room > quota.lend_max:
            room = quota.lend_max
        if quota.is_general:
            room -= quota.own_idle.get(spec, 0)
        if room > 0:
            yield name, room


def floating(pool: Pool) -> int:
    """GPUs under idle leases that do not stand on their own quota's share alone."""
    return pool.idle - sum(q.own_idle.get(pool.spec, 0) for q in pool.lenders if q.is_general)


def lenders_for(state: State, quota: QuotaBook, pool: Pool, gpus: int) -> dict[str, int]:
    """Who lends the next `gpus` GPUs to a job of this quota."""
    if quota.is_general:
        return {quota.name: gpus}
    return spread(lenders_line(state, pool), floating(pool), gpus)


def spread(line: Iterable[tuple[str, int]], start: int, gpus: int) -> dict[str, int]:
    """Which quotas the stretch from `start` on falls on; what nobody promised is left out."""
    lenders: dict[str, int] = {}
    for name, room in line:
        passed = min(start, room)
        start -= passed
        part = min(gpus, room - passed)
        gpus -= part
        if part and name:
            lenders[name] = part
        if not gpus:
            break
    return lenders


def lent_by_quota(state: State, pool: Pool) -> dict[str, int]:
    """GPUs of its own share that each quota lends now."""
    lent = spread(lenders_line(state, pool), 0, floating(pool))
    for quota in state.quotas.values():
        if quota.is_general and quota.quota.tenant == pool.tenant:
            own = quota.own_idle.get(pool.spec, 0)
            if own:
                lent[quota.name] = lent.get(quota.name, 0) + own
    return lent


def refresh(state: State) -> None:
    """After quotas were created, changed or deleted: promises of parents, limits, who may preempt whom."""
    for quota in sorted(state.quotas.values(), key=lambda q: -len(q.path)):
        nominal = quota.quota.nominal
        if nominal is not None:
            quota.nominal = {} if quota.closed else dict(nominal)
            continue
        quota.nominal = {}
        for child in quota.children:
            for spec, gpus in child.nominal.items():
                quota.nominal[spec] = quota.nominal.get(spec, 0) + gpus
    for quota in state.quotas.values():
        quota.is_general = quota.quota.scope is Scope.GENERAL
        quota.own = dict(quota.nominal)
        for child in quota.children:
            for spec, gpus in child.nominal.items():
                quota.own[spec] = quota.own.get(spec, 0) - gpus
    for pool in state.pools.values():
        state.know_quotas(pool)
    moved = [q for q in state.quotas.values() if q.may_preempt != _may_preempt(q)]
    for quota in moved:
        jobs = [job for cls in quota.classes.values() for _, job in cls.jobs]
        for job in jobs:
            delist(state, job)
        quota.may_preempt = _may_preempt(quota)
        for job in jobs:
            enlist(state, job)
    state.epoch += 1


def _may_preempt(quota: QuotaBook) -> bool:
    return any(level.quota.self_preemption or level.quota.sub_quota_preemption for level in quota.path)


def victims_inside(claimant: JobBook, victim: JobBook) -> bool:
    """May the claimant preempt this guaranteed job of its own quota tree by priority?"""
    if victim.request.priority >= claimant.request.priority:
        return False
    theirs = victim.quota.path
    for level in claimant.quota.path:
        if level in theirs:
            if level.quota.self_preemption:
                return True
            if level is claimant.quota and level.quota.sub_quota_preemption:
                return True
    return False
