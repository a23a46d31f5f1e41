"""Why a job waits. Rule: the codes come from the same arithmetic and the same state that made it wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sublet.core import capacity, placement, reserve
from sublet.core.queue import ahead_of
from sublet.core.schedule import is_delayed, loan
from sublet.core.state import JobBook, JobClass, Key, Pool, State, TroubleSeen
from sublet.domain.effects import ShowReasons
from sublet.domain.faults import Trouble
from sublet.domain.jobs import IdlePolicy, JobRequest
from sublet.domain.leases import LeaseKind
from sublet.domain.nodes import NodeState
from sublet.domain.reasons import Reason, ReasonCode

MANY_CLASSES = 32
EXPLAIN_EVERY_MS = 1_000
SHOWN_AT_ONCE = 16  # of a class of like jobs, the first so many are told at once when their reasons change


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonLine:
    """A reason with its sentence."""

    reason: Reason
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """`kind`: never | waiting | starting | running | ended. `ahead`: jobs of its quota that come first.

    `would_change`: each was tried on a copy of the state. `mirror`: for a borrower, who could take its GPUs, how soon.
    """

    job: str
    kind: str
    at_ms: int
    reasons: tuple[ReasonLine, ...] = ()
    ahead: tuple[str, ...] = ()
    ahead_count: int = 0
    would_change: tuple[str, ...] = ()
    mirror: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)


# ---- codes


def codes(state: State, job: JobBook) -> tuple[ReasonCode, ...]:
    """All that holds, the strongest first; never empty for a job that waits."""
    return _with_order(job, codes_of_class(state, job))


def _with_order(job: JobBook, found: tuple[ReasonCode, ...]) -> tuple[ReasonCode, ...]:
    if job.claim is None and job.cls is not None and _is_behind(job):
        return (*found, ReasonCode.BEHIND)
    return found or (ReasonCode.SHAPE,)


def codes_of_class(state: State, job: JobBook) -> tuple[ReasonCode, ...]:
    """What holds for it and for all that are alike."""
    if job.claim is not None:
        return (ReasonCode.RECLAIMING,)
    found: list[ReasonCode] = []
    if job.quota.closed or (job.quota.quota.nominal == {} and job.quota.implicit):
        found.append(ReasonCode.QUOTA_CLOSED if job.quota.closed else ReasonCode.QUOTA_UNKNOWN)
    if job.retry_ms > state.now_ms:
        return (*found, ReasonCode.BACKOFF)
    pools = [state.pool_of(job, spec) for spec in job.request.specs]
    found += _never(state, job, pools)
    if job.idle_policy is not IdlePolicy.ONLY:
        found += _promise(state, job, pools)
    if job.idle_policy is not IdlePolicy.NEVER:
        found += _idle(state, job, pools)
    found += _nodes(state, job, pools)
    return tuple(dict.fromkeys(found))


def _never(state: State, job: JobBook, pools: list[Pool]) -> list[ReasonCode]:
    """What holds as long as nodes and quotas stay as they are."""
    if not any(pool.nodes for pool in pools):
        return [ReasonCode.SPEC_UNKNOWN]
    found = []
    if max(job.request.sizes) > max(pool.largest for pool in pools):
        found.append(ReasonCode.TOO_LARGE_FOR_SPEC)
    elif job.request.least_gpus > max(pool.total for pool in pools):
        found.append(ReasonCode.TOO_LARGE_FOR_TENANT)
    return found


def _promise(state: State, job: JobBook, pools: list[Pool]) -> list[ReasonCode]:
    least = job.request.least_gpus
    entitled = [pool for pool in pools if capacity.claimable(job.quota, pool.spec) >= least]
    if not entitled:
        most = max(min(level.nominal.get(pool.spec, 0) for level in job.quota.path) for pool in pools)
        too_large = job.idle_policy is IdlePolicy.NEVER and least > most and not job.quota.implicit
        return [ReasonCode.TOO_LARGE_FOR_QUOTA, ReasonCode.OWN_QUOTA_FULL] if too_large else [ReasonCode.OWN_QUOTA_FULL]
    found = [ReasonCode.RECLAIM_DELAY] if is_delayed(state, job) else []
    if any(capacity.headroom(job.quota, pool.spec) >= least and _fits_now(pool, job) for pool in entitled):
        return found  # only the order of the queue keeps it
    if all(_potential(pool) < least for pool in entitled):
        found.append(ReasonCode.RECLAIM_NOT_ENOUGH)
    elif not found:
        found.append(ReasonCode.SHAPE)
    return found


def _fits_now(pool: Pool, job: JobBook) -> bool:
    return placement.place(pool, job.request, capacity.UNLIMITED) is not None


def _potential(pool: Pool) -> int:
    return sum(level * count for level, count in pool.potentials.items())


def _idle(state: State, job: JobBook, pools: list[Pool]) -> list[ReasonCode]:
    least, found = job.request.least_gpus, []
    if job.eligible_ms > state.now_ms:
        found.append(ReasonCode.COOLDOWN)
    open_pools = [pool for pool in pools if capacity.lending(job.quota, pool) >= least]
    if not open_pools:
        limited = any(capacity.is_borrow_limited(job.quota, pool, least) for pool in pools)
        return [*found, ReasonCode.BORROW_LIMIT if limited else ReasonCode.IDLE_TOO_SMALL]
    if any(loan(state, job, pool) is not None for pool in open_pools):
        return found  # the cooldown or the order of the queue keeps it
    if any(_fits_now(pool, job) for pool in open_pools):
        return [*found, ReasonCode.EARMARKED]  # for owners who lately took capacity back
    if all(pool.available < least for pool in open_pools):
        kept = any(pool.free >= least for pool in open_pools)
        return [*found, ReasonCode.EARMARKED] if kept else [*found, ReasonCode.IDLE_TOO_SMALL]
    return [*found, ReasonCode.SHAPE]


def _nodes(state: State, job: JobBook, pools: list[Pool]) -> list[ReasonCode]:
    """Nodes that are away and would have helped."""
    smallest, found = min(job.request.sizes), []
    allowed = job.request.nodes
    away = [node for pool in pools for node in pool.away() if allowed is None or node.name in allowed]
    if any(n.state in (NodeState.LOST, NodeState.QUARANTINED) and n.node.gpu >= smallest for n in away):
        found.append(ReasonCode.NODE_LOST)
    if any(n.state is NodeState.DRAINING and n.free >= smallest for n in away):
        found.append(ReasonCode.DRAINING)
    return found


def _is_behind(job: JobBook) -> bool:
    quota = job.quota
    if job.idle_policy is not IdlePolicy.ONLY and quota.barrier is not None and job.key > quota.barrier:
        return True
    return job.idle_policy is not IdlePolicy.NEVER and quota.idle_barrier is not None and job.key > quota.idle_barrier


# ---- numbers


def reason(state: State, job: JobBook, code: ReasonCode) -> Reason:
    """The code with its numbers and subjects, from the ledger."""
    spec = job.request.specs[0]
    pool, quota = state.pool_of(job, spec), job.quota
    need = job.request.least_gpus
    numbers: dict[str, int] = {"need": need}
    subjects: tuple[str, ...] = (quota.name, spec)
    if code in (ReasonCode.OWN_QUOTA_FULL, ReasonCode.TOO_LARGE_FOR_QUOTA):
        tight = min(quota.path, key=lambda q: q.nominal.get(spec, 0) - q.used.get(spec, 0) - q.claimed.get(spec, 0))
        numbers |= {"promised": tight.nominal.get(spec, 0), "used": tight.used.get(spec, 0)}
        numbers["claimed"] = tight.claimed.get(spec, 0)
        subjects = (tight.name, spec)
    elif code in (ReasonCode.IDLE_TOO_SMALL, ReasonCode.EARMARKED, ReasonCode.SHAPE, ReasonCode.BORROW_LIMIT):
        numbers |= {"idle": pool.available, "total": pool.total}
        numbers["largest"] = pool.index.levels[-1] if pool.index.levels else 0
        numbers["each"] = max(job.request.sizes)
        numbers["instances"] = len(job.request.least_sizes)
        if code is ReasonCode.BORROW_LIMIT:
            numbers["limit"] = min(q.borrow_max for q in quota.path if q.borrow_max is not None)
        if code is ReasonCode.EARMARKED:
            single, whole = reserve.kept(state, pool)
            kept = sum(node.avail for node in reserve.emptiest(pool, whole)) + single
            numbers["kept"] = sum(node.earmarked for node in pool.unsettled.values()) + kept
            subjects = tuple(one.id for one in sorted(state.claims.values(), key=lambda one: one.key))[:3]
            subjects += reserve.owners(state, pool) if kept else ()
    elif code is ReasonCode.RECLAIM_NOT_ENOUGH:
        numbers["could"] = sum(level * count for level, count in pool.potentials.items())
    elif code is ReasonCode.RECLAIMING:
        numbers |= _reclaiming_numbers(state, job)
        subjects = victims_of(state, job)
    elif code is ReasonCode.BEHIND:
        numbers["ahead"] = ahead_of(job)
        subjects = (quota.name, *ahead(job, 1))
    else:
        numbers |= _other_numbers(state, job, code, pool)
    return Reason(code=code, numbers=numbers, subjects=subjects)


def _reclaiming_numbers(state: State, job: JobBook) -> dict[str, int]:
    notices = [(one, n) for one in state.noticed.values() for n in one.notices if n.claimant == job.id]
    coming = sum(one.gpus[i] for one, n in notices for i in n.instances if i in one.live)
    latest = max((n.deadline_ms for _, n in notices), default=state.now_ms)
    return {"coming": coming, "by_ms": latest}


def victims_of(state: State, job: JobBook) -> tuple[str, ...]:
    return tuple(sorted(one.id for one in state.noticed.values() if any(n.claimant == job.id for n in one.notices)))


def _other_numbers(state: State, job: JobBook, code: ReasonCode, pool: Pool) -> dict[str, int]:
    if code is ReasonCode.COOLDOWN:
        return {"until_ms": job.eligible_ms, "preemptions": job.preemptions}
    if code is ReasonCode.BACKOFF:
        return {"until_ms": job.retry_ms, "failures": job.failures}
    if code is ReasonCode.RECLAIM_DELAY:
        return {"until_ms": job.submitted_ms + state.rules.reclaim_delay_ms}
    if code is ReasonCode.TOO_LARGE_FOR_SPEC:
        return {"each": max(job.request.sizes), "largest": pool.largest}
    if code is ReasonCode.TOO_LARGE_FOR_TENANT:
        return {"total": pool.total}
    if code in (ReasonCode.NODE_LOST, ReasonCode.DRAINING):
        return {"nodes": len(pool.away())}
    return {}


# ---- telling


def show_reasons(state: State) -> None:
    """At the end of an instant: tell those whose codes changed, and those who were told nothing yet."""
    for job in sorted(state.fresh.values(), key=lambda one: one.key):
        if job.is_waiting:
            tell(state, job, codes(state, job))
    state.fresh.clear()
    if _is_busy(state):
        return
    state.explained_ms = state.now_ms
    changed: list[tuple[Key, JobBook, tuple[ReasonCode, ...]]] = []
    for quota in state.quotas.values():
        for cls in quota.classes.values():
            stamp = _explained_by(state, cls)
            if cls.is_upgrade or stamp == cls.explained:
                continue
            cls.explained = stamp
            base = codes_of_class(state, cls.jobs[0][1])
            told = (base, quota.barrier, quota.idle_barrier, cls.jobs[0][0], len(cls.jobs), state.epoch)
            if told == cls.told:
                continue
            cls.told = told
            changed += [(key, job, _with_order(job, base)) for key, job in cls.jobs[:SHOWN_AT_ONCE]]
    changed += [(job.key, job, (ReasonCode.RECLAIMING,)) for job in state.claims.values()]
    for _, job, now in sorted(changed, key=lambda one: one[0]):
        tell(state, job, now)


def _is_busy(state: State) -> bool:
    """With many kinds of waiting jobs all reasons are gone through once a second, not at every instant."""
    if sum(len(quota.classes) for quota in state.quotas.values()) <= MANY_CLASSES:
        return False
    next_ms = state.explained_ms + EXPLAIN_EVERY_MS
    if state.explained_ms < 0 or next_ms <= state.now_ms:
        return False
    if not state.will_explain:
        state.will_explain = True
        state.remind(next_ms, "explain", "")
    return True


def _explained_by(state: State, cls: JobClass) -> tuple[object, ...]:
    """Differs whenever the codes of the class might."""
    quota = cls.quota
    moves = sum(pool.moves for pool in cls.pools)
    return (moves, quota.root.moves, state.epoch, quota.barrier, quota.idle_barrier, len(cls.jobs) > 1)


def tell(state: State, job: JobBook, now: tuple[ReasonCode, ...]) -> None:
    if now == tuple(one.code for one in job.reasons):
        return
    state.touch(job)
    job.reasons = tuple(reason(state, job, code) for code in now)
    state.emit(ShowReasons(job=job.id, reasons=job.reasons))


# ---- the whole explanation


def explain(state: State, job: JobBook) -> Explanation:
    """Fresh numbers and sentences, for a job that has not ended."""
    if job.live:
        kind = "running" if job.begun_ms is not None else "starting"
        wrong = [_trouble(state, one) for one in job.troubles]
        told = tuple(ReasonLine(reason=one, sentence=sentence(state, job, one)) for one in wrong)
        return Explanation(job=job.id, kind=kind, at_ms=state.now_ms, reasons=told, mirror=mirror(state, job))
    lines = [reason(state, job, code) for code in codes(state, job)]
    first = lines[0].code
    return Explanation(
        job=job.id,
        kind="never" if first in NEVER else "waiting",
        at_ms=state.now_ms,
        reasons=tuple(ReasonLine(reason=one, sentence=sentence(state, job, one)) for one in lines),
        ahead=ahead(job),
        ahead_count=ahead_of(job),
    )


def _trouble(state: State, seen: TroubleSeen) -> Reason:
    code = {
        Trouble.HANG: ReasonCode.HANGING,
        Trouble.EXIT_HANG: ReasonCode.EXIT_HANGING,
        Trouble.SLOW: ReasonCode.SLOW_INSTANCE,
    }[Trouble(seen.trouble)]
    numbers = {"lasting": max(0, state.now_ms - seen.since_ms) // 1000}
    return Reason(code=code, numbers=numbers, subjects=(seen.evidence,))


NEVER = frozenset(
    {
        ReasonCode.TOO_LARGE_FOR_SPEC,
        ReasonCode.TOO_LARGE_FOR_TENANT,
        ReasonCode.TOO_LARGE_FOR_QUOTA,
        ReasonCode.SPEC_UNKNOWN,
        ReasonCode.QUOTA_UNKNOWN,
        ReasonCode.QUOTA_CLOSED,
        ReasonCode.NOT_PERMITTED,
        ReasonCode.MALFORMED,
    }
)


def ahead(job: JobBook, most: int = 3) -> tuple[str, ...]:
    """The first jobs of its quota that come before it."""
    quota = job.quota
    before = [entry for cls in quota.classes.values() if not cls.is_upgrade for entry in cls.jobs[:most]]
    before += [(one.key, one) for one in quota.claims.values()]
    return tuple(one.id for key, one in sorted(before, key=lambda e: e[0]) if key < job.key)[:most]


def mirror(state: State, job: JobBook) -> str:
    """Of a borrower: who could take its GPUs back, and how soon."""
    if job.kind is not LeaseKind.IDLE:
        return "In its own quota: nobody can take its GPUs." if not job.notices else ""
    grace = state.rules.grace_ms if job.request.grace_ms is None else job.request.grace_ms
    seconds = min(grace, state.rules.max_grace_ms) // 1000
    pool = state.pool_of(job, job.spec)
    owners = sorted(
        q.name
        for q in state.quotas.values()
        if q.quota.tenant == pool.tenant and not q.children and capacity.unused(q, job.spec) > 0
    )
    who = ", ".join(owners[:3]) + (f" and {len(owners) - 3} more" if len(owners) > 3 else "")
    if not owners:
        return "On idle capacity: no quota has unused promise now, so nobody can take it back."
    return f"On idle capacity: a guaranteed job of {who} could take it back, with {seconds} s of notice."


def sentence(state: State, job: JobBook, one: Reason) -> str:
    """The reason in words, its numbers filled in."""
    return words(one, job.request, state.now_ms)


def words(one: Reason, request: JobRequest, at_ms: int) -> str:
    """As `sentence`, for those who have no books: the log, the lists, a refusal."""
    n, subjects, spec = one.numbers, one.subjects, request.specs[0] if request.specs else ""
    until_ms = n.get("by_ms", n.get("until_ms", at_ms))
    values = {
        "first": subjects[0] if subjects else "",
        "second": subjects[1] if len(subjects) > 1 else "another job",
        "names": ", ".join(subjects[:3]),
        "spec": spec,
        "kind": "GPU" if spec == "gpu" else f"{spec} GPU",
        "seconds": max(0, until_ms - at_ms + 999) // 1000,
        "idle_policy": request.idle.value,
        "claims": f" and {n['claimed']} claimed" if n.get("claimed") else "",
    }
    return SENTENCES[one.code].format_map({**n, **values})


SENTENCES: Mapping[ReasonCode, str] = {
    ReasonCode.TOO_LARGE_FOR_SPEC: "asks {each} GPU per instance; the largest {spec} node has {largest}",
    ReasonCode.TOO_LARGE_FOR_TENANT: "needs {need} GPU of {spec}; {total} exist",
    ReasonCode.TOO_LARGE_FOR_QUOTA: "idle is `{idle_policy}` and {first} is promised {promised}, the job needs {need}",
    ReasonCode.SPEC_UNKNOWN: "there is no node of {spec}",
    ReasonCode.QUOTA_UNKNOWN: "there is no quota {first}",
    ReasonCode.QUOTA_CLOSED: "the quota {first} was deleted",
    ReasonCode.NOT_PERMITTED: "its owner may not submit to {first}",
    ReasonCode.MALFORMED: "the request is malformed: {first}",
    ReasonCode.OWN_QUOTA_FULL: "{first}: {promised} promised, {used} in use by its own jobs{claims}, needs {need}",
    ReasonCode.IDLE_TOO_SMALL: "{idle} of {total} {kind} idle, needs {need}",
    ReasonCode.BORROW_LIMIT: "{first} may borrow at most {limit} GPU of {spec}, the job needs {need}",
    ReasonCode.SHAPE: "{idle} idle, the largest block on one node is {largest}; needs {instances} x {each}",
    ReasonCode.BEHIND: "{ahead} ahead in {first}: {second}",
    ReasonCode.RECLAIMING: "{coming} GPU come back from {names} within {seconds} s",
    ReasonCode.RECLAIM_DELAY: "takes lent GPU back in {seconds} s, if none come free before",
    ReasonCode.RECLAIM_NOT_ENOUGH: "{could} GPU could come back, needs {need}: nobody is stopped for nothing",
    ReasonCode.EARMARKED: "{kept} free GPU are kept for {names}",
    ReasonCode.COOLDOWN: "preempted {preemptions} times; borrows again in {seconds} s",
    ReasonCode.BACKOFF: "failed {failures} times; next try in {seconds} s",
    ReasonCode.HELD: "held by its owner",
    ReasonCode.NODE_LOST: "{nodes} nodes of {spec} are lost or drained",
    ReasonCode.DRAINING: "{nodes} nodes of {spec} are lost or drained",
    ReasonCode.HANGING: "hangs, seen {lasting} s ago: {first}",
    ReasonCode.EXIT_HANGING: "does not end, seen {lasting} s ago: {first}",
    ReasonCode.SLOW_INSTANCE: "is held up, seen {lasting} s ago: {first}",
}
