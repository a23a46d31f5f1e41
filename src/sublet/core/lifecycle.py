"""The life of a job: waiting, running, leaving, over. Rule: every change of a job is one of the functions here.

submitted -> waiting -> running -> (noticed | stopping | broken) -> released -> waiting again, or ended
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from sublet.core import restarts, suspects
from sublet.core.queue import age, delist, enlist, list_revocable, unlist_revocable
from sublet.core.state import Cause, Claim, JobBook, NodeBook, QuotaBook, State, TroubleSeen
from sublet.domain.effects import (
    DowngradeLease,
    EndJob,
    GiveNotice,
    ReleaseInstances,
    RequeueJob,
    RestartInstance,
    StartGang,
    StopInstances,
    UpgradeLease,
    WithdrawNotice,
)
from sublet.domain.events import Diagnosed, InstanceEnded
from sublet.domain.faults import Fault, Trouble
from sublet.domain.jobs import AttemptEnd, JobState, NoticeGiven, Outcome
from sublet.domain.leases import Lease, LeaseKind
from sublet.domain.nodes import NodeState

TIME_IS_UP = "its max_time is over"

# ---- starting


def grant(state: State, job: JobBook, kind: LeaseKind, spec: str, gpus: tuple[int, ...], nodes: tuple[str, ...],
          lenders: Mapping[str, int]) -> None:  # fmt: skip
    """Waiting -> running, with a new attempt. The caller has proven that it fits."""
    state.touch(job)
    delist(state, job)
    state.fresh.pop(job.id, None)
    job.claim, job.was_claimed = None, False
    job.clear_lease()
    job.attempt += 1
    job.reasons = ()
    hold(state, job, kind, spec, gpus, nodes, lenders)
    state.emit(start_of(state, job))


def start_of(state: State, job: JobBook) -> StartGang:
    return StartGang(
        job=job.id,
        attempt=job.attempt,
        lease=lease_of(job),
        instances=job.live,
        request=job.request,
        grace_ms=grace_ms(state, job),
    )


def grace_ms(state: State, job: JobBook) -> int:
    """No grace is above the cluster's."""
    asked = job.request.grace_ms
    return min(state.rules.grace_ms if asked is None else asked, state.rules.max_grace_ms)


def hold(state: State, job: JobBook, kind: LeaseKind, spec: str, gpus: tuple[int, ...], nodes: tuple[str, ...],
         lenders: Mapping[str, int]) -> None:  # fmt: skip
    """Write the lease down; the job is in no list."""
    job.kind, job.spec, job.gpus, job.nodes = kind, spec, gpus, nodes
    job.lenders = dict(lenders)
    job.granted_ms = state.now_ms
    job.live = tuple(range(len(nodes)))
    state.count(job, 1, job.live)
    enlist(state, job)
    if kind is LeaseKind.GUARANTEED:
        for level in job.quota.path:
            level.asked_ms = state.now_ms
        if state.memory:  # less may be asked for, so less is kept
            state.pool_of(job, spec).version += 1
    state.changes += 1


def lease_of(job: JobBook) -> Lease:
    assert job.kind is not None
    return Lease(
        kind=job.kind, spec=job.spec, nodes=job.nodes, gpus=job.gpus, granted_ms=job.granted_ms, lenders=job.lenders
    )


def began(state: State, job: JobBook, instance: int, run: int) -> None:
    if instance not in job.live or run != job.runs.get(instance, 0):
        return
    if run:
        state.touch(job)
        restarts.began_again(job, state.now_ms, instance)
    if instance in job.began:
        return
    state.touch(job)
    job.began = (*job.began, instance)
    if job.begun_ms is None and len(job.began) >= len(job.live) and all(i in job.began for i in job.live):
        relist(state, job, begun_ms=state.now_ms)
        restarts.began_again(job, state.now_ms, None)
        watch_time(state, job)


def watch_time(state: State, job: JobBook) -> None:
    """Its max_time counts what it runs, over all attempts."""
    if job.request.max_time_ms is not None and job.begun_ms is not None:
        state.remind(job.begun_ms + max(0, job.request.max_time_ms - job.ran_ms), "time", job.id, job.attempt)


def time_is_up(state: State, job: JobBook) -> None:
    state.touch(job)
    job.broken = Outcome.FAILED
    job.fault = Cause(evidence=TIME_IS_UP)
    stop_all(state, job, "max_time")


def relist(state: State, job: JobBook, *, begun_ms: int | None = None, checkpoint_ms: int | None = None) -> None:
    """What it would lose is another thing from now on, and so is its place among possible victims."""
    pool = state.pool_of(job, job.spec)
    is_listed = job.id in pool.revocable
    unlist_revocable(pool, job)
    job.begun_ms = job.begun_ms if begun_ms is None else begun_ms
    job.checkpoint_ms = job.checkpoint_ms if checkpoint_ms is None else checkpoint_ms
    if is_listed:
        list_revocable(pool, job)


def saved(state: State, job: JobBook, step: int | None) -> None:
    """A checkpoint is durable; only a new one resets the budget."""
    state.touch(job)
    relist(state, job, checkpoint_ms=state.now_ms)
    if step is None or job.checkpoint_step is None or step > job.checkpoint_step:
        job.failures_since, job.errors = 0, ()
        if step is not None:
            job.checkpoint_step = step


# ---- the kind of the lease


def change_kind(state: State, job: JobBook, kind: LeaseKind) -> None:
    state.touch(job)
    delist(state, job)
    state.count(job, -1, job.live)
    job.kind = kind
    job.lenders = {}
    state.count(job, 1, job.live)
    enlist(state, job)
    state.changes += 1


def upgrade(state: State, job: JobBook) -> None:
    change_kind(state, job, LeaseKind.GUARANTEED)
    for level in job.quota.path:
        level.asked_ms = state.now_ms
    state.emit(UpgradeLease(job=job.id, attempt=job.attempt))


def downgrade_to_fit(state: State, quota: QuotaBook) -> None:
    """A cut quota: its newest guaranteed leases become idle until the rest fits; nothing is stopped."""
    for spec in sorted(quota.used):
        while quota.used[spec] > quota.nominal.get(spec, 0):
            inside = [
                job
                for job in state.jobs.values()
                if job.kind is LeaseKind.GUARANTEED and job.live and job.spec == spec and quota in job.quota.path
            ]
            newest = max(inside, key=lambda job: (job.granted_ms, job.id))
            change_kind(state, newest, LeaseKind.IDLE)
            state.emit(DowngradeLease(job=newest.id, attempt=newest.attempt, reason="quota_cut"))


# ---- leaving


def set_leaving(state: State, job: JobBook, instances: Iterable[int]) -> None:
    """From now on exactly these live instances count as on their way out. The caller has touched the job."""
    delist(state, job)
    state.count(job, -1, job.live)
    job.leaving = tuple(sorted(set(instances) & set(job.live)))
    state.count(job, 1, job.live)
    enlist(state, job)


def noticed(job: JobBook) -> set[int]:
    return {i for notice in job.notices for i in notice.instances} & set(job.live)


def give_notice(state: State, job: JobBook, instances: tuple[int, ...], claimant: JobBook, lost_gpu_ms: int) -> None:
    """Tell instances to leave for the claimant. What has not begun needs no grace."""
    rules, grace = state.rules, grace_ms(state, job)
    if not any(i in job.began for i in instances) and job.begun_ms is None:
        grace = 0
    deadline = state.now_ms + grace
    notice = NoticeGiven(
        instances=instances,
        claimant=claimant.id,
        reason="reclaim" if job.kind is LeaseKind.IDLE else "priority",
        given_ms=state.now_ms,
        deadline_ms=deadline,
        lost_gpu_ms=lost_gpu_ms,
    )
    set_notices(state, job, (*job.notices, notice))
    job.lost_gpu_ms += lost_gpu_ms
    state.remind(deadline + rules.kill_timeout_ms, "kill", job.id, job.attempt)
    state.emit(
        GiveNotice(
            job=job.id,
            attempt=job.attempt,
            instances=instances,
            reason=notice.reason,
            claimant=claimant.id,
            deadline_ms=deadline,
            lost_gpu_ms=lost_gpu_ms,
        )
    )


def withdraw(state: State, job: JobBook, notice: NoticeGiven) -> None:
    """The notice is no longer needed, and nobody has left because of it."""
    set_notices(state, job, tuple(one for one in job.notices if one is not notice))
    job.was_withdrawn = True
    job.lost_gpu_ms -= notice.lost_gpu_ms
    state.changes += 1
    state.epoch += 1
    state.emit(WithdrawNotice(job=job.id, attempt=job.attempt, instances=notice.instances))


def set_notices(state: State, job: JobBook, notices: tuple[NoticeGiven, ...]) -> None:
    """From now on exactly these stand; what leaves is who is under one of them."""
    state.touch(job)
    delist(state, job)
    state.count(job, -1, job.live)
    job.notices = notices
    job.leaving = tuple(sorted(noticed(job)))
    state.count(job, 1, job.live)
    enlist(state, job)


def readdress(state: State, job: JobBook, notice: NoticeGiven, claimant: JobBook) -> None:
    """Another claim rests on what this notice frees; the job's deadline stays."""
    state.touch(job)
    moved = NoticeGiven(
        instances=notice.instances,
        claimant=claimant.id,
        reason=notice.reason,
        given_ms=notice.given_ms,
        deadline_ms=notice.deadline_ms,
        lost_gpu_ms=notice.lost_gpu_ms,
    )
    job.notices = tuple(moved if one is notice else one for one in job.notices)


def stop_all(state: State, job: JobBook, reason: str) -> None:
    """Tell all live instances to end at once."""
    if job.stopping_ms is None:
        job.stopping_ms = state.now_ms
        state.remind(state.now_ms + state.rules.kill_timeout_ms, "kill", job.id, job.attempt)
    set_leaving(state, job, job.live)
    state.is_unsettled = True
    state.emit(StopInstances(job=job.id, attempt=job.attempt, instances=job.live, reason=reason))


def reason_of_end(job: JobBook) -> str:
    """Why all that is left of a gang is ended."""
    if job.stop_asked:
        return "stopped"
    if job.fault.evidence == TIME_IS_UP:
        return "max_time"
    return "hang" if job.fault.verdict == Fault.HANG else "gang"


def ask_stop(state: State, job: JobBook) -> None:
    """The user stops it: at once when it waits, when its processes are gone when it runs."""
    if job.stop_asked:
        return
    state.touch(job)
    job.stop_asked = True
    if job.is_waiting:
        drop_claim(state, job)
        end(state, job, restarts.Verdict(end=JobState.STOPPED, why="stopped by its user"))
    else:
        stop_all(state, job, "stopped")


# ---- being gone


def instance_ended(state: State, job: JobBook, event: InstanceEnded) -> None:
    """Its processes are confirmed gone."""
    state.touch(job)
    outcome = _outcome_of(job, event)
    job.fault = restarts.with_cause(job, event, outcome)
    job.troubles = tuple(one for one in job.troubles if one.instance != event.instance)
    if outcome is not Outcome.FAILED or not _starts_again_alone(state, job, event.instance):
        release(state, job, (event.instance,), outcome, event.exit_code)


def _starts_again_alone(state: State, job: JobBook, instance: int) -> bool:
    """Of an asynchronous job one instance may start again in its place; the others never hear of it."""
    if job.request.fault_tolerance.mode != "async" or job.broken is not None or instance in job.leaving:
        return False
    before = job.failures, job.failures_since, job.errors
    restarts.count_failure(job)
    verdict = restarts.after(job, Outcome.FAILED)
    if verdict.end is not None or restarts.next_to_avoid(job, state.pool_of(job, job.spec)):
        job.failures, job.failures_since, job.errors = before  # the attempt ends, and counts it
        return False
    run = job.runs.get(instance, 0) + 1
    job.runs = {**job.runs, instance: run}
    job.fault = replace(job.fault, instance=instance)
    restarts.record(job, Outcome.FAILED, state.now_ms, is_single=True, avoided=False)
    restarts.blame(job)
    suspects.note(state, job)
    job.fault = Cause()
    not_before_ms = state.now_ms + verdict.wait_ms
    state.emit(
        RestartInstance(job=job.id, attempt=job.attempt, instance=instance, run=run, not_before_ms=not_before_ms)
    )
    return True


# ---- what is wrong while it runs


def diagnosed(state: State, job: JobBook, event: Diagnosed) -> None:
    """It is shown while it lasts; a hang that the job does not want to sit out ends the attempt, or the instance."""
    others = tuple(one for one in job.troubles if (one.trouble, one.instance) != (event.trouble, event.instance))
    if event.is_over:
        if len(others) != len(job.troubles):
            state.touch(job)
            job.troubles = others
        return
    if len(others) == len(job.troubles):
        state.touch(job)
        seen = TroubleSeen(
            trouble=event.trouble, instance=event.instance, evidence=event.evidence, since_ms=state.now_ms
        )
        job.troubles = (*others, seen)
    if not event.restart or event.trouble == Trouble.SLOW or job.leaving or job.broken is not None:
        return
    if job.request.fault_tolerance.mode == "async" and event.instance in job.live:
        state.emit(StopInstances(job=job.id, attempt=job.attempt, instances=(event.instance,), reason="hang"))
    else:
        state.touch(job)
        job.broken = Outcome.FAILED
        phase = "exit" if event.trouble == Trouble.EXIT_HANG else "step" if job.begun_ms is not None else "start"
        job.fault = Cause(
            verdict=Fault.HANG,
            evidence=event.evidence,
            error=f"{Fault.HANG}: {event.trouble}",
            phase=phase,
            instance=event.instance,
        )
        stop_all(state, job, "hang")


def _outcome_of(job: JobBook, event: InstanceEnded) -> Outcome:
    """A standing notice outweighs the exit code; work that is done outweighs both."""
    if event.finished:
        return Outcome.SUCCEEDED
    if job.stop_asked:
        return Outcome.STOPPED
    if job.broken is not None:
        return job.broken
    if any(event.instance in notice.instances for notice in job.notices):
        return Outcome.PREEMPTED
    return Outcome.SUCCEEDED if event.exit_code == 0 and not job.was_withdrawn else Outcome.FAILED


def release(state: State, job: JobBook, instances: tuple[int, ...], outcome: Outcome, exit_code: int | None) -> None:
    """Their capacity is free. A gang that lost a member gives up the rest; an elastic one goes on above its minimum."""
    state.touch(job)
    state.count(job, -1, instances)
    delist(state, job)
    job.live = tuple(i for i in job.live if i not in instances)
    job.leaving = tuple(i for i in job.leaving if i not in instances)
    job.outcomes = job.outcomes + (outcome,) * len(instances)
    state.changes += 1
    state.is_unsettled = True
    state.emit(
        ReleaseInstances(job=job.id, attempt=job.attempt, instances=instances, outcome=outcome, exit_code=exit_code)
    )
    if not job.live:
        close(state, job)
        return
    _forget_notices_of(state, job, instances)
    enlist(state, job)
    least = job.request.min_instances
    if outcome is not Outcome.SUCCEEDED and not (least and len(job.live) >= least) and job.broken is None:
        job.broken = outcome
        if outcome is not Outcome.PREEMPTED and not job.stop_asked:
            stop_all(state, job, reason_of_end(job))


def _forget_notices_of(state: State, job: JobBook, gone: tuple[int, ...]) -> None:
    """Who goes on is under notice no more for what is gone, so that the rest of the notice may be taken back."""
    if not any(i in gone for notice in job.notices for i in notice.instances):
        return
    left = [replace(n, instances=tuple(i for i in n.instances if i in job.live)) for n in job.notices]
    state.count(job, -1, job.live)
    job.notices = tuple(notice for notice in left if notice.instances)
    state.count(job, 1, job.live)


def close(state: State, job: JobBook) -> None:
    """The last instance is gone: the attempt is over."""
    outcome = restarts.outcome_of_attempt(job)
    notice = job.notices[0] if job.notices else None
    job.history = (
        *job.history,
        AttemptEnd(
            attempt=job.attempt,
            lease_kind=str(job.kind),
            nodes=job.nodes,
            granted_ms=job.granted_ms,
            ended_ms=state.now_ms,
            outcome=outcome,
            exit_code=job.fault.exit_code,
            claimant=notice.claimant if notice else "",
            noticed_ms=notice.given_ms if notice else None,
            lost_gpu_ms=_lost_gpu_ms(job, outcome, state.now_ms),
            evidence=job.fault.evidence,
            verdict=job.fault.verdict,
            instance=job.fault.instance,
        ),
    )
    _count_end(state, job, outcome)
    if outcome is Outcome.FAILED:
        suspects.note(state, job)
    verdict = restarts.after(job, outcome)
    if verdict.end is not None:
        end(state, job, verdict)
        return
    avoided = restarts.keep_away(job, state.pool_of(job, job.spec)) if outcome is Outcome.FAILED else ""
    restarts.record(job, outcome, state.now_ms, is_single=False, avoided=bool(avoided))
    requeue(state, job, outcome, verdict.wait_ms)


def _lost_gpu_ms(job: JobBook, outcome: Outcome, now_ms: int) -> int:
    """What was expected to be lost when it was told to leave; what it saved since then is not lost. Where nobody told
    it, all since its last checkpoint in this attempt."""
    if outcome in (Outcome.FAILED, Outcome.NODE_LOST) and job.begun_ms is not None:
        return (now_ms - (job.begun_ms if job.checkpoint_ms is None else job.checkpoint_ms)) * sum(job.gpus)
    if job.checkpoint_ms is None:
        return job.lost_gpu_ms
    return min(job.lost_gpu_ms, (now_ms - job.checkpoint_ms) * sum(job.gpus))


def _count_end(state: State, job: JobBook, outcome: Outcome) -> None:
    rules, ran = state.rules, state.now_ms - (job.granted_ms if job.begun_ms is None else job.begun_ms)
    job.ran_ms += 0 if job.begun_ms is None else ran
    every = job.request.checkpoint.every_ms
    if every and job.checkpoint_ms is None and job.begun_ms is not None and ran >= every:
        job.failures_since, job.errors = 0, ()
    if outcome is Outcome.PREEMPTED:
        job.preemptions += 1
        job.streak = 1 if ran > rules.max_cooldown_ms else job.streak + 1
        job.eligible_ms = state.now_ms + restarts.cooldown_ms(rules, job.streak)
    elif outcome is Outcome.FAILED:
        restarts.count_failure(job)


def requeue(state: State, job: JobBook, outcome: Outcome, wait_ms: int) -> None:
    job.clear_lease()
    restarts.rather_there(job, [state.pool_of(job, spec) for spec in job.request.specs])
    job.retry_ms = state.now_ms + wait_ms if wait_ms else 0
    if wait_ms:
        state.remind(job.retry_ms, "backoff", job.id)
    if job.eligible_ms > state.now_ms:
        state.remind(job.eligible_ms, "cooldown", job.id)
    age(state, job)
    state.emit(RequeueJob(job=job.id, submitted_ms=job.submitted_ms, cause=outcome))
    wait(state, job)


def wait(state: State, job: JobBook) -> None:
    """Into the queue, without reasons yet."""
    job.reasons = ()
    state.fresh[job.id] = job
    enlist(state, job)
    delayed_ms = job.submitted_ms + state.rules.reclaim_delay_ms
    if delayed_ms > state.now_ms:
        state.remind(delayed_ms, "delay", job.id)
    state.changes += 1


def end(state: State, job: JobBook, verdict: restarts.Verdict) -> None:
    """Final: the job leaves the books."""
    assert verdict.end is not None
    delist(state, job)
    job.final, job.ended_ms, job.end_why = verdict.end, state.now_ms, verdict.why
    job.notices, job.leaving, job.reasons = (), (), ()
    state.jobs.pop(job.id, None)
    state.fresh.pop(job.id, None)
    state.changes += 1
    outcome = Outcome(verdict.end.value)
    state.emit(EndJob(job=job.id, outcome=outcome, failures=job.failures, preemptions=job.preemptions, why=verdict.why))


# ---- claims


def make_claim(state: State, job: JobBook, claim: Claim) -> None:
    state.touch(job)
    delist(state, job)
    job.claim = claim
    enlist(state, job)
    for level in job.quota.path:
        level.asked_ms = state.now_ms
    state.changes += 1


def drop_claim(state: State, job: JobBook, *, is_firm: bool = False) -> None:
    """Back among those who wait; its notices are settled when the instant closes. `is_firm`: it still comes first."""
    if job.claim is None:
        return
    state.touch(job)
    delist(state, job)
    job.claim, job.was_claimed = None, is_firm
    enlist(state, job)
    state.fresh[job.id] = job
    state.is_unsettled = True
    state.changes += 1
    state.epoch += 1


# ---- nodes


def node_gone(state: State, node: NodeBook, new: NodeState) -> None:
    """Lost, quarantined or removed: all that stood there counts as gone."""
    for job_id in sorted(node.jobs, key=lambda one: state.jobs[one].key):
        job = state.jobs[job_id]
        here = tuple(i for i in job.live if job.nodes[i] == node.name)
        under_notice = new is NodeState.QUARANTINED and any(
            i in notice.instances for notice in job.notices for i in here
        )
        outcome = Outcome.STOPPED if job.stop_asked else Outcome.PREEMPTED if under_notice else Outcome.NODE_LOST
        release(state, job, here, outcome, None)
