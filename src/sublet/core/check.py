"""The invariants. Rule: every sum is recounted here from the leases and claims alone, and must be what the books say.

For tests and simulations; it walks over everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sublet.core.state import JobBook, NodeBook, Pool, QuotaBook, State
from sublet.domain.jobs import IdlePolicy
from sublet.domain.leases import LeaseKind
from sublet.domain.nodes import NodeState

Counts = Counter[tuple[str, str]]


def check(state: State, *, is_closed: bool = True) -> list[str]:
    """What does not hold, as sentences. `is_closed`: a Tick has just closed the instant, so more must hold."""
    found = [*_jobs(state), *_nodes(state), *_quotas(state), *_pools(state), *_lists(state)]
    return [*found, *_closed(state)] if is_closed else found


def _jobs(state: State) -> Iterator[str]:
    for job in state.jobs.values():
        if job.final is not None:
            yield f"{job.id} has ended and is still in the books"
        if not job.live:
            continue
        least = job.request.min_instances or len(job.request.sizes)
        if len(job.nodes) < least or len(job.nodes) != len(job.gpus):
            yield f"{job.id} holds {len(job.nodes)} instances, it needs {least}"
        if job.kind is LeaseKind.GUARANTEED and job.idle_policy is IdlePolicy.ONLY:
            yield f"{job.id} is idle only and holds a guaranteed lease"
        if not set(job.leaving) <= set(job.live):
            yield f"{job.id} counts instances as leaving that are gone"
        if job.claim is not None:
            yield f"{job.id} runs and has a claim"
        for instance in job.live:
            node = state.nodes.get(job.nodes[instance])
            if node is None or node.state in (NodeState.LOST, NodeState.QUARANTINED):
                yield f"{job.id} holds a share of {job.nodes[instance]}, which is gone"
            elif node.node.tenant != job.quota.quota.tenant or node.node.spec != job.spec:
                yield f"{job.id} stands on {node.name}, a node of another tenant or spec"


def _nodes(state: State) -> Iterator[str]:
    held, leaving, idle, earmarked = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for job in state.jobs.values():
        for instance in job.live:
            name, gpus = job.nodes[instance], job.gpus[instance]
            held[name] += gpus
            if instance in job.leaving:
                leaving[name] += gpus
            elif job.kind is LeaseKind.IDLE:
                idle[name] += gpus
        if job.claim is not None:
            for name, gpus in zip(job.claim.nodes, job.claim.gpus, strict=True):
                earmarked[name] += gpus
    for node in state.nodes.values():
        name = node.name
        books = (node.node.gpu - node.free, node.leaving, node.idle, node.earmarked)
        recount = (held[name], leaving[name], idle[name], earmarked[name])
        if books != recount:
            yield f"node {name} has (held, leaving, idle, earmarked) {books}, a recount gives {recount}"
        if node.free < 0:
            yield f"node {name} holds {-node.free} GPU more than it has"
        if node.avail > max(0, node.free):
            yield f"node {name} would give {node.avail} GPU and has {node.free} free"


def _quotas(state: State) -> Iterator[str]:
    used, idle, leaving, claimed = Counts(), Counts(), Counts(), Counts()
    for job in state.jobs.values():
        _count_job(job, used, idle, leaving, claimed)
    for quota in state.quotas.values():
        for spec in sorted({*quota.nominal, *quota.used, *quota.idle, *quota.claimed}):
            at = (quota.name, spec)
            books = tuple(c.get(spec, 0) for c in (quota.used, quota.idle, quota.leaving, quota.claimed))
            recount = (used[at], idle[at], leaving[at], claimed[at])
            if books != recount:
                yield f"quota {quota.name} has (used, idle, leaving, claimed) {books} of {spec}, a recount {recount}"
        if any(quota.reserved.values()):
            yield f"quota {quota.name} keeps a reservation from a pass that is over"


def _count_job(job: JobBook, used: Counts, idle: Counts, leaving: Counts, claimed: Counts) -> None:
    for level in job.quota.path:
        if job.live:
            at = (level.name, job.spec)
            (used if job.kind is LeaseKind.GUARANTEED else idle)[at] += job.held
            if job.kind is LeaseKind.GUARANTEED and job.notices:
                leaving[at] += sum(job.gpus[i] for i in job.leaving)
        if job.claim is not None:
            claimed[level.name, job.claim.spec] += sum(job.claim.gpus)


def _pools(state: State) -> Iterator[str]:
    for pool in state.pools.values():
        nodes = list(pool.nodes.values())
        if pool.available != sum(max(0, node.avail) for node in nodes):
            yield f"pool {pool.spec} thinks {pool.available} GPU are available"
        capacity = sum(n.node.gpu if n.is_up else n.node.gpu - n.free for n in nodes if _counts(n))
        if pool.capacity != capacity:
            yield f"pool {pool.spec} has a capacity of {pool.capacity}, a recount gives {capacity}"
        levels = Counter(node.avail for node in nodes if node.avail > 0)
        if levels != Counter(pool.index.counts) or sorted(levels) != pool.index.levels:
            yield f"the index of {pool.spec} counts {pool.index.counts}, a recount gives {dict(levels)}"
        potentials = Counter(node.potential for node in nodes if node.potential > 0)
        if potentials != +Counter(pool.potentials):
            yield f"pool {pool.spec} has potentials {pool.potentials}, a recount gives {dict(potentials)}"
        yield from _leases_of(state, pool)


def _counts(node: NodeBook) -> bool:
    return node.state in (NodeState.UP, NodeState.DRAINING)


def _leases_of(state: State, pool: Pool) -> Iterator[str]:
    here = [job for job in state.jobs.values() if job.live and job.quota.quota.tenant == pool.tenant]
    here = [job for job in here if job.spec == pool.spec]
    sums = tuple(sum(job.held for job in here if job.kind is kind) for kind in (LeaseKind.GUARANTEED, LeaseKind.IDLE))
    if sums != (pool.guaranteed, pool.idle):
        yield f"pool {pool.spec} has {pool.guaranteed} guaranteed and {pool.idle} idle, a recount gives {sums}"
    revocable = {job.id for job in here if job.kind is LeaseKind.IDLE and not job.is_leaving_whole}
    steady = [job_id for ids in pool.steady.values() for _, job_id in ids]
    if sorted([*steady, *pool.varying]) != sorted(revocable) or any(ids != sorted(ids) for ids in pool.steady.values()):
        yield f"pool {pool.spec} lists {sorted([*steady, *pool.varying])}, a recount gives {sorted(revocable)}"
    if revocable != pool.revocable.keys():
        yield f"pool {pool.spec} would take back {sorted(pool.revocable)}, a recount gives {sorted(revocable)}"


def _lists(state: State) -> Iterator[str]:
    listed = Counter(job.id for q in state.quotas.values() for cls in q.classes.values() for _, job in cls.jobs)
    for job in state.jobs.values():
        is_upgradable = job.kind is LeaseKind.IDLE and job.idle_policy is not IdlePolicy.ONLY and not job.leaving
        due = is_upgradable if job.live else job.claim is None and job.retry_ms <= state.now_ms
        if listed[job.id] != due and not (not job.live and job.claim is None):
            yield f"{job.id} is listed {listed[job.id]} times and should be {int(due)} times"
        if (job.claim is not None) != (job.id in state.claims):
            yield f"{job.id} has a claim and is not among the claims, or the other way round"
    for quota in state.quotas.values():
        for cls in quota.classes.values():
            if [key for key, _ in cls.jobs] != sorted(job.key for _, job in cls.jobs):
                yield f"a class of {quota.name} is out of order"
    yield from (f"{one} is listed and not in the books" for one in listed if one not in state.jobs)


def _closed(state: State) -> Iterator[str]:
    """After a Tick."""
    for job in state.jobs.values():
        if job.is_waiting and not job.reasons:
            yield f"{job.id} waits without a reason"
        for notice in job.notices:
            if notice.claimant not in state.jobs and not job.stop_asked and job.broken is None:
                yield f"{job.id} is under notice for {notice.claimant}, which is gone"
    for job in state.claims.values():
        claim = job.claim
        assert claim is not None
        for name in set(claim.nodes):
            node = state.nodes[name]
            if not node.is_up or node.future < 0:
                yield f"the claim of {job.id} on {name} can never be met"
    yield from (line for quota in state.quotas.values() for line in _overclaimed(quota))


def _overclaimed(quota: QuotaBook) -> Iterator[str]:
    for spec in quota.used:
        if quota.used[spec] > quota.nominal.get(spec, 0):
            yield f"quota {quota.name} uses {quota.used[spec]} GPU of {spec}, promised {quota.nominal.get(spec, 0)}"
    for spec in quota.claimed:
        free = quota.nominal.get(spec, 0) - quota.used.get(spec, 0) + quota.leaving.get(spec, 0)
        if quota.claimed[spec] > max(0, free):
            yield f"the claims in {quota.name} ask for {quota.claimed[spec]} GPU of {spec}, {free} can be had"
