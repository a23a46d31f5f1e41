"""Who comes next. Rule: one sort key orders waiting jobs, upgrades and re-grants; the strategy of a quota says only how
far past a blocked head it looks.

Jobs that are alike share a class, and only the first of a class is ever looked at.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from sublet.core.state import JobBook, JobClass, Key, Pool, QuotaBook, State
from sublet.domain.jobs import IdlePolicy
from sublet.domain.leases import LeaseKind
from sublet.domain.quotas import Strategy

STRICT_FROM = 7  # intelligent: from this priority on a blocked head is waited for
AGES_TO = 6  # intelligent: waiting raises a lower priority up to this
AGES_EVERY_MS = 3_600_000  # by one


def enlist(state: State, job: JobBook) -> None:
    """Put the job where it is looked for, as its fields say."""
    if job.final is not None:
        return
    if job.live:
        _enlist_running(state, job)
    elif job.claim is not None:
        state.count_claim(job, 1)
    elif job.retry_ms <= state.now_ms:
        is_cooling = job.eligible_ms > state.now_ms and job.idle_policy is not IdlePolicy.NEVER
        _insert(state, job, _class_key(job, is_cooling), is_upgrade=False)
        if job.was_claimed:
            state.firm[job.id] = job


def delist(state: State, job: JobBook) -> None:
    """The opposite, before the fields change."""
    if job.cls is not None:
        _remove(job)
        state.firm.pop(job.id, None)
    if job.live:
        if job.notices:
            state.noticed.pop(job.id, None)
        if job.kind is LeaseKind.IDLE:
            unlist_revocable(state.pool_of(job, job.spec), job)
    elif job.claim is not None and job.id in state.claims:
        state.count_claim(job, -1)


def _enlist_running(state: State, job: JobBook) -> None:
    if job.notices:
        state.noticed[job.id] = job
    if job.kind is not LeaseKind.IDLE:
        return
    if not job.is_leaving_whole:
        list_revocable(state.pool_of(job, job.spec), job)
    if job.idle_policy is not IdlePolicy.ONLY and not job.leaving:
        _insert(state, job, ("upgrade", job.spec, job.held), is_upgrade=True)


def list_revocable(pool: Pool, job: JobBook) -> None:
    """Among those who may be told to leave, in the order of what they lose where that does not change with time."""
    pool.revocable[job.id] = job
    hint = job.request.checkpoint
    since_ms = job.begun_ms if job.checkpoint_ms is None else job.checkpoint_ms
    if since_ms is None or hint.on_notice_ms is not None or (hint.every_ms and job.checkpoint_ms is None):
        pool.varying[job.id] = job
        return
    job.steady_at = (job.held, -since_ms)
    insort(pool.steady.setdefault(job.held, []), (-since_ms, job.id))


def unlist_revocable(pool: Pool, job: JobBook) -> None:
    if pool.revocable.pop(job.id, None) is None:
        return
    pool.varying.pop(job.id, None)
    if job.steady_at is not None:
        held, since = job.steady_at
        alike = pool.steady[held]
        del alike[bisect_left(alike, (since, job.id))]
        if not alike:
            del pool.steady[held]
        job.steady_at = None


def _class_key(job: JobBook, is_cooling: bool) -> object:
    r = job.request
    priority = r.priority if job.quota.may_preempt else 0
    shape = (r.sizes, r.min_instances, r.cpu_milli, r.memory_bytes, r.same_rack, r.nodes, r.avoid)
    return (r.specs, r.idle, is_cooling, priority, shape)


def _insert(state: State, job: JobBook, key: object, *, is_upgrade: bool) -> None:
    quota = job.quota
    cls = quota.classes.get(key)
    if cls is None:
        pools = tuple(state.pool_of(job, spec) for spec in job.request.specs)
        cls = quota.classes[key] = JobClass(quota, key, job, pools, is_upgrade=is_upgrade)
    job.cls = cls
    if cls.jobs and job.key < cls.jobs[-1][0]:
        insort(cls.jobs, (job.key, job))
        cls.hopeless = cls.no_plan = cls.no_loan = None
    else:
        cls.jobs.append((job.key, job))


def _remove(job: JobBook) -> None:
    cls = job.cls
    assert cls is not None
    job.cls = None
    if cls.jobs[0][1] is job:
        del cls.jobs[0]
        cls.no_plan = None
    else:
        del cls.jobs[bisect_left(cls.jobs, (job.key,))]
    if not cls.jobs:
        del cls.quota.classes[cls.key]


def following(cls: JobClass, key: Key) -> JobBook | None:
    """The first job of the class behind this key."""
    at = bisect_left(cls.jobs, (key,))
    if at < len(cls.jobs) and cls.jobs[at][0] == key:
        at += 1
    return cls.jobs[at][1] if at < len(cls.jobs) else None


def is_strict(state: State, job: JobBook) -> bool:
    """Does this job, blocked, keep those behind it from being tried?"""
    strategy = job.quota.quota.strategy
    if strategy is Strategy.FIFO:
        return True
    if strategy is Strategy.INTELLIGENT:
        return job.request.priority >= STRICT_FROM
    if strategy is Strategy.BALANCE:
        return ahead_of(job) + 1 >= window(state, job.quota)
    return False


def ahead_of(job: JobBook) -> int:
    """Waiting jobs of its quota before this one; those in backoff do not count."""
    quota, key = job.quota, job.key
    waiting = sum(bisect_left(cls.jobs, (key,)) for cls in quota.classes.values() if not cls.is_upgrade)
    return waiting + sum(1 for claim in quota.claims.values() if claim.key < key)


def window(state: State, quota: QuotaBook) -> int:
    """Balance: how many jobs from the head on may be tried."""
    return 1 + (state.now_ms - quota.head_ms) // max(1, quota.quota.balance_timeout_ms)


def first_waiting(quota: QuotaBook) -> JobBook | None:
    """The head: the first that waits, with a claim or without."""
    heads = [cls.jobs[0] for cls in quota.classes.values() if not cls.is_upgrade]
    heads += [(job.key, job) for job in quota.claims.values()]
    return min(heads)[1] if heads else None


def keep_head(state: State, quota: QuotaBook) -> None:
    """Balance: note since when the present head waits, and when the window widens."""
    head = first_waiting(quota)
    if head is None:
        quota.head = ""
        return
    if head.id != quota.head:
        quota.head, quota.head_ms = head.id, state.now_ms
    timeout = max(1, quota.quota.balance_timeout_ms)
    widens_ms = quota.head_ms + window(state, quota) * timeout
    if widens_ms != quota.widens_ms:
        quota.widens_ms = widens_ms
        state.remind(widens_ms, "balance", quota.name)


def age(state: State, job: JobBook) -> None:
    """Intelligent: raise what waits, and say when to look again. Under the other strategies nobody ages."""
    job.rank = job.request.priority
    if job.quota.quota.strategy is Strategy.INTELLIGENT and job.rank < AGES_TO:
        steps = (state.now_ms - job.submitted_ms) // AGES_EVERY_MS
        job.rank = min(AGES_TO, job.rank + steps)
        if job.rank < AGES_TO:
            state.remind(job.submitted_ms + (steps + 1) * AGES_EVERY_MS, "age", job.id)
    job.key = (-job.rank, job.submitted_ms, job.id)
