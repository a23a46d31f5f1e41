"""The scheduler looks: claims first, then the promise, then reclaim, then lending, then in-quota preemption, until
nothing more can be done. Rule: nobody is granted what a claim is waiting for, and nobody is told to leave for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from sublet.core import capacity, placement, reclaim, reserve
from sublet.core.lifecycle import drop_claim, give_notice, grant, make_claim, readdress, upgrade, withdraw
from sublet.core.queue import STRICT_FROM, following, is_strict, keep_head
from sublet.core.spare import spare_victims
from sublet.core.state import Claim, JobBook, JobClass, Key, Pool, QuotaBook, State
from sublet.domain.errors import Broken
from sublet.domain.jobs import IdlePolicy, NoticeGiven
from sublet.domain.leases import LeaseKind
from sublet.domain.quotas import Strategy

MOST_PASSES = 10_000  # each decides something; more can only be a defect, and a server that hangs is worse
Look = Callable[[State, JobBook], bool]  # True: done with, look at the next of its class
Worth = Callable[[State, JobClass, JobBook, dict[str, int]], bool]  # quick; False: a look would be for nothing


def schedule(state: State) -> None:
    """All that can be done at this instant."""
    for quota in state.quotas.values():
        if quota.quota.strategy is Strategy.BALANCE:
            keep_head(state, quota)
    _serve_claims(state)
    for _ in range(MOST_PASSES):
        before = state.changes
        wanting = _promise_pass(state)
        _reclaim_pass(state, wanting)
        if state.changes == before:
            _idle_pass(state)
        if state.changes == before:
            _inside_pass(state)
        if state.changes == before:
            break
    else:
        raise Broken(what="The scheduler does not come to rest.", hint="Report this with the log.", code="restless")
    if state.is_unsettled:
        state.is_unsettled = False
        if _settle(state):
            schedule(state)


# ---- claims under way


def _serve_claims(state: State) -> None:
    """Start what has its room now. What a node or quota took its claim from looks for another before all others."""
    for job in sorted([*state.claims.values(), *state.firm.values()], key=lambda one: one.key):
        if job.claim is not None:
            if _start_claimed(state, job) or _still_holds(state, job):
                continue
            drop_claim(state, job, is_firm=True)
        if job.is_waiting and job.cls is not None and not _start(state, job):
            _reclaim(state, job)


def _still_holds(state: State, job: JobBook) -> bool:
    claim = job.claim
    assert claim is not None
    if any(name not in state.nodes or not state.nodes[name].is_up for name in claim.nodes):
        return False
    if any(state.nodes[name].future < 0 for name in claim.nodes):
        return False
    return capacity.claimable(job.quota, claim.spec) >= 0


def _start_claimed(state: State, job: JobBook) -> bool:
    """On the nodes of its claim or wherever there is room now."""
    claim = job.claim
    assert claim is not None
    pool, root, found = state.pool_of(job, claim.spec), job.quota.root, None
    versions = pool.version, root.version
    state.count_claim(job, -1)
    room = capacity.headroom(job.quota, claim.spec)
    if room >= sum(claim.gpus):
        found = _place_claimed(state, job, claim)
        if found is None or job.request.min_instances is not None:
            found = placement.place(pool, job.request, room) or found
    state.count_claim(job, 1)
    if found is None:
        pool.version, root.version = versions
        return False
    state.is_unsettled = True
    grant(state, job, LeaseKind.GUARANTEED, claim.spec, *found, {})
    return True


def _place_claimed(state: State, job: JobBook, claim: Claim) -> placement.Placement | None:
    wanted: dict[str, int] = {}
    for name, gpus in zip(claim.nodes, claim.gpus, strict=True):
        wanted[name] = wanted.get(name, 0) + gpus
    for name, gpus in wanted.items():
        node = state.nodes.get(name)
        if node is None or not node.is_up or node.free < gpus:
            return None
    return claim.gpus, claim.nodes


# ---- one walk over the queues


def _walk(state: State, look: Look, worth: Worth, *, for_promise: bool) -> None:
    """Show the jobs of all queues in order; behind a blocked job a quota is looked through as its strategy says."""
    heads: list[tuple[Key, JobClass, JobBook]] = []
    for quota in state.quotas.values():
        if quota.classes:
            barrier = min((job.key for job in quota.claims.values() if is_strict(state, job)), default=None)
            _set_barrier(quota, barrier, for_promise)
            heads += _heads(state, quota, worth, for_promise)
    heapify(heads)
    while heads:
        key, cls, job = heappop(heads)
        quota = cls.quota
        barrier = quota.barrier if for_promise else quota.idle_barrier
        if barrier is not None and key > barrier:
            continue
        if look(state, job):
            after = following(cls, key)
            if after is not None:
                heappush(heads, (after.key, cls, after))
        elif not cls.is_upgrade and _blocks(state, job, for_promise):
            _set_barrier(quota, key, for_promise)


def _heads(state: State, quota: QuotaBook, worth: Worth, for_promise: bool) -> list[tuple[Key, JobClass, JobBook]]:
    """The first job of each class that is worth a look: it might start, or it blocks others if it does not."""
    strategy = quota.quota.strategy
    all_block = strategy is Strategy.FIFO or strategy is Strategy.BALANCE
    rooms: dict[str, int] = {}
    found = []
    for cls in quota.classes.values():
        key, job = cls.jobs[0]
        if cls.is_upgrade:
            is_worth = for_promise
        elif all_block or (strategy is Strategy.INTELLIGENT and job.request.priority >= STRICT_FROM):
            is_worth = True
        else:
            is_worth = worth(state, cls, job, rooms)
        if is_worth:
            found.append((key, cls, job))
    return found


def _may_be_promised(state: State, cls: JobClass, job: JobBook, rooms: dict[str, int]) -> bool:
    """Quick, from the headroom before the walk, which only shrinks. `rooms` holds it by spec."""
    stamp = stamp_of(state, cls)
    if job.idle_policy is IdlePolicy.ONLY or cls.hopeless == stamp:
        return False
    for pool in cls.pools:
        room = rooms.get(pool.spec)
        if room is None:
            room = rooms[pool.spec] = capacity.headroom(cls.quota, pool.spec)
        if room >= cls.least and pool.most_at_once >= cls.largest:
            return True
    if state.claims:
        return True
    cls.hopeless = stamp
    return False


def _may_preempt(state: State, cls: JobClass, job: JobBook, rooms: dict[str, int]) -> bool:
    return cls.quota.may_preempt


def _may_borrow(state: State, cls: JobClass, job: JobBook, rooms: dict[str, int]) -> bool:
    """Quick, from what is free before the walk, which only shrinks."""
    stamp = stamp_of(state, cls)
    if job.idle_policy is IdlePolicy.NEVER or job.eligible_ms > state.now_ms or cls.no_loan == stamp:
        return False
    for pool in cls.pools:
        if pool.available >= cls.least and pool.index.levels[-1] >= cls.largest:
            return True
    cls.no_loan = stamp
    return False


def _set_barrier(quota: QuotaBook, key: Key | None, for_promise: bool) -> None:
    if for_promise:
        quota.barrier = key
    else:
        quota.idle_barrier = key


def _blocks(state: State, job: JobBook, for_promise: bool) -> bool:
    """A job that can only borrow never blocks the promise: those behind it would have to take back at once what it is
    lent. And it blocks borrowing only when it could borrow itself."""
    if job.idle_policy is IdlePolicy.ONLY and (for_promise or job.eligible_ms > state.now_ms):
        return False
    if not is_strict(state, job):
        return False
    return not (for_promise and _could_borrow(state, job))


def _could_borrow(state: State, job: JobBook) -> bool:
    if job.idle_policy is IdlePolicy.NEVER or job.eligible_ms > state.now_ms:
        return False
    if any(capacity.headroom(job.quota, spec) >= job.request.least_gpus for spec in job.request.specs):
        return False
    return any(loan(state, job, state.pool_of(job, spec)) is not None for spec in job.request.specs)


def stamp_of(state: State, cls: JobClass) -> int:
    """Grows whenever something may have become possible for the class."""
    stamp = state.epoch + cls.quota.root.version
    for pool in cls.pools:
        stamp += pool.version
    return stamp


# ---- the promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """An entitled job that lacks only room on the nodes. `plan`: how to make it, proven when `changes` were made."""

    job: JobBook
    changes: int
    plan: reclaim.Proof | None


def _promise_pass(state: State) -> list[Wish]:
    """Guaranteed starts and upgrades. Returns, in order, the wishes that a reclaim can fulfil."""
    wanting: list[Wish] = []

    def look(state: State, job: JobBook) -> bool:
        if job.live:
            return _try_upgrade(state, job)
        return _try_promise(state, job, wanting)

    _walk(state, look, _may_be_promised, for_promise=True)
    for wish in wanting:
        for level in wish.job.quota.path:
            level.reserved.clear()
    return wanting


def _try_upgrade(state: State, job: JobBook) -> bool:
    if capacity.headroom(job.quota, job.spec) < job.held:
        return False
    upgrade(state, job)
    return True


def _try_promise(state: State, job: JobBook, wanting: list[Wish]) -> bool:
    cls = job.cls
    if job.idle_policy is IdlePolicy.ONLY or cls is None:
        return False
    stamp = stamp_of(state, cls)
    if cls.hopeless == stamp:
        return False
    least = job.request.least_gpus
    entitled = ""
    for spec in job.request.specs:
        room = capacity.headroom(job.quota, spec)
        if room < least:
            continue
        entitled = entitled or spec
        found = placement.place(state.pool_of(job, spec), job.request, room)
        if found is not None:
            grant(state, job, LeaseKind.GUARANTEED, spec, *found, {})
            return True
    if entitled and cls.no_plan != stamp and _wish(state, job, cls, wanting):
        for level in job.quota.path:
            level.reserved[entitled] = level.reserved.get(entitled, 0) + least
        return not is_strict(state, job)
    if state.claims and _overtake(state, job):
        return True
    if not any(level.reserved for level in job.quota.path):
        cls.hopeless = stamp
    return False


def _wish(state: State, job: JobBook, cls: JobClass, wanting: list[Wish]) -> bool:
    """Nothing is set aside for what cannot be had: what those behind get must not hang on whether that is known yet."""
    plan = None
    if not wanting or wanting[-1].job.cls is not cls:  # else its like has one; whether there are two shows in its turn
        plan = None if is_delayed(state, job) else _best_plan(state, job)
        if plan is None:
            cls.no_plan = stamp_of(state, cls)
            return False
    wanting.append(Wish(job=job, changes=state.changes, plan=plan))
    return True


def _overtake(state: State, job: JobBook) -> bool:
    """Take the place of claims that may not stand in its way, if that helps it: those of its own tree that come after
    it, and, where it could start at once, those of others that nobody was told to leave for."""
    pools = [state.pool_of(job, spec) for spec in job.request.specs]
    rivals = [one for one in state.claims.values() if one.claim and state.pool_of(one, one.claim.spec) in pools]
    rivals.sort(key=lambda one: one.key, reverse=True)
    root = job.quota.root
    mine = [one for one in rivals if one.quota.root is root and one.key > job.key]
    if _clear(state, job, mine, lambda: _can_start(state, job) or _best_plan(state, job) is not None):
        return _start(state, job) or _reclaim(state, job)
    with_notices = {notice.claimant for one in state.noticed.values() for notice in one.notices}
    soft = [one for one in rivals if one.id not in with_notices and one.quota.root is not root]
    return _clear(state, job, soft, lambda: _can_start(state, job)) and _start(state, job)


def _clear(state: State, job: JobBook, claims: list[JobBook], helps: Callable[[], bool]) -> bool:
    """Drop these claims one by one until it helps; if it does not, all stay as they were."""
    if not claims or is_delayed(state, job):
        return False
    books: list[Pool | QuotaBook] = [*dict.fromkeys(one.quota.root for one in claims)]
    books += [state.pool_of(job, spec) for spec in job.request.specs]
    versions = [book.version for book in books]
    lifted: list[JobBook] = []
    helped = False
    for one in claims:
        state.count_claim(one, -1)
        lifted.append(one)
        if helps():
            helped = True
            break
    for one in lifted:
        state.count_claim(one, 1)
        if helped:
            drop_claim(state, one)
    if not helped:  # nothing has become possible for anybody
        for book, version in zip(books, versions, strict=True):
            book.version = version
    return helped


def _can_start(state: State, job: JobBook) -> bool:
    least = job.request.least_gpus
    return any(
        (room := capacity.headroom(job.quota, spec)) >= least
        and placement.place(state.pool_of(job, spec), job.request, room) is not None
        for spec in job.request.specs
    )


def _start(state: State, job: JobBook) -> bool:
    for spec in job.request.specs:
        room = capacity.headroom(job.quota, spec)
        if room >= job.request.least_gpus:
            found = placement.place(state.pool_of(job, spec), job.request, room)
            if found is not None:
                grant(state, job, LeaseKind.GUARANTEED, spec, *found, {})
                return True
    return False


# ---- reclaim


def _reclaim_pass(state: State, wanting: list[Wish]) -> None:
    for wish in wanting:
        job = wish.job
        if job.claim is not None or not job.is_waiting or job.cls is None:
            continue
        cls, stamp = job.cls, stamp_of(state, job.cls)
        if cls.no_plan == stamp:
            continue
        plan = wish.plan if wish.changes == state.changes else None
        if not _reclaim(state, job, plan):
            cls.no_plan = stamp_of(state, cls)
            state.changes += 1
    spare_victims(state, [wish.job for wish in wanting if wish.job.claim is not None])


def is_delayed(state: State, job: JobBook) -> bool:
    """It still waits for natural churn."""
    return state.now_ms < job.submitted_ms + state.rules.reclaim_delay_ms


def _reclaim(state: State, job: JobBook, plan: reclaim.Proof | None = None) -> bool:
    """Make a claim, with notices to its victims; False when nothing can be proven. `plan`: proven at this state."""
    if is_delayed(state, job):
        return False
    plan = plan or _best_plan(state, job)
    if plan is None:
        return False
    carry_out_plan(state, job, plan)
    return True


def _best_plan(state: State, job: JobBook) -> reclaim.Proof | None:
    """Over its specs, best first: one that needs no victim, or else the first that works."""
    if job.idle_policy is IdlePolicy.ONLY or not state.rules.reclaim:
        return None
    found = None
    for spec in job.request.specs:
        if capacity.claimable(job.quota, spec) < job.request.least_gpus:
            continue
        plan = reclaim.plan(state, state.pool_of(job, spec), job)
        if plan is not None and not plan.victims:
            return plan
        found = found or plan
    return found


def carry_out_plan(state: State, job: JobBook, plan: reclaim.Proof) -> None:
    """Notices and earmark in one step."""
    if any(unit.job.kind is LeaseKind.IDLE for unit in plan.victims):
        reserve.remember(state, job, plan.spec, plan.gpus)
    for unit in plan.victims:
        give_notice(state, unit.job, unit.instances, job, unit.lost_gpu_ms)
    make_claim(state, job, Claim(spec=plan.spec, nodes=plan.nodes, gpus=plan.gpus, since_ms=state.now_ms))


# ---- lending


def _idle_pass(state: State) -> None:
    _walk(state, _try_idle, _may_borrow, for_promise=False)


def _try_idle(state: State, job: JobBook) -> bool:
    cls = job.cls
    if job.idle_policy is IdlePolicy.NEVER or job.eligible_ms > state.now_ms or cls is None:
        return False
    stamp = stamp_of(state, cls)
    if cls.no_loan == stamp:
        return False
    for spec in job.request.specs:
        pool = state.pool_of(job, spec)
        found = loan(state, job, pool)
        if found is not None:
            lenders = capacity.lenders_for(state, job.quota, pool, sum(found[0]))
            grant(state, job, LeaseKind.IDLE, spec, *found, lenders)
            return True
    cls.no_loan = stamp
    return False


def loan(state: State, job: JobBook, pool: Pool) -> placement.Placement | None:
    """Where the job may borrow now: beside what is kept for owners."""
    least = job.request.least_gpus
    if pool.available < least:
        return None
    with reserve.held_back(state, pool) as lendable:
        room = min(lendable, capacity.lending(job.quota, pool))
        return placement.place(pool, job.request, room) if room >= least else None


# ---- in-quota preemption


def _inside_pass(state: State) -> None:
    """Last of all: who is not entitled may take from lower priorities of its own quota tree, where that is allowed."""
    if not any(quota.may_preempt and quota.classes for quota in state.quotas.values()):
        return

    def look(state: State, job: JobBook) -> bool:
        if job.live or not job.quota.may_preempt or job.idle_policy is IdlePolicy.ONLY or is_delayed(state, job):
            return False
        for spec in job.request.specs:
            plan = reclaim.plan_inside(state, state.pool_of(job, spec), job)
            if plan is not None:
                carry_out_plan(state, job, plan)
                return True
        return False

    _walk(state, look, _may_preempt, for_promise=True)


# ---- notices that are no longer needed


def _settle(state: State) -> bool:
    """Withdraw what no claim needs, the dearest first; the rest is addressed to who needs it. True: some was freed."""
    changed = False
    standing = [(job, notice) for job in state.noticed.values() for notice in job.notices]
    standing.sort(key=lambda pair: (-pair[1].lost_gpu_ms, pair[0].id, pair[1].given_ms))
    for job, notice in standing:
        if job.stop_asked or job.broken is not None or job.stopping_ms is not None:
            continue
        if _is_needless(state, job, notice):
            withdraw(state, job, notice)
            changed = True
        elif notice.claimant not in state.claims:
            _readdress(state, job, notice)
    return changed


def _is_needless(state: State, job: JobBook, notice: NoticeGiven) -> bool:
    """Would every claim still find its room without it?"""
    frees: dict[str, int] = {}
    for instance in notice.instances:
        frees[job.nodes[instance]] = frees.get(job.nodes[instance], 0) + job.gpus[instance]
    for name, gpus in frees.items():
        node = state.nodes[name]
        if node.earmarked and node.future < gpus:
            return False
    if job.kind is LeaseKind.GUARANTEED:
        total = sum(frees.values())
        for level in job.quota.path:
            if level.claimed.get(job.spec, 0) and capacity.level_claimable(level, job.spec) < total:
                return False
    return True


def _readdress(state: State, job: JobBook, notice: NoticeGiven) -> None:
    nodes = {job.nodes[instance] for instance in notice.instances}
    using = [one for one in state.claims.values() if one.claim is not None and nodes & set(one.claim.nodes)]
    using = using or [one for one in state.claims.values() if one.quota.root is job.quota.root]
    if using:
        readdress(state, job, notice, min(using, key=lambda one: one.key))
