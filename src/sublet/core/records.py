"""The books as records that a store keeps, and back. Rule: what is restored decides exactly as what was stored."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from sublet.core import capacity, reserve, suspects
from sublet.core.lifecycle import lease_of, watch_time
from sublet.core.queue import age, enlist
from sublet.core.state import Cause, Claim, JobBook, State, TroubleSeen
from sublet.domain.changes import Snapshot
from sublet.domain.jobs import JobRecord, JobState, Outcome
from sublet.domain.leases import LeaseKind
from sublet.domain.quotas import Quota


def record_of(job: JobBook) -> JobRecord:
    state = job.final or (JobState.RUNNING if job.live else JobState.WAITING)
    return JobRecord(
        request=job.request,
        state=state,
        submitted_ms=job.submitted_ms,
        attempt=job.attempt,
        lease=lease_of(job) if job.kind is not None and job.final is None else None,
        live=job.live,
        begun_ms=job.begun_ms,
        checkpoint_ms=job.checkpoint_ms,
        checkpoint_step=job.checkpoint_step,
        notices=job.notices,
        stopping_since_ms=job.stopping_ms,
        stop_asked=job.stop_asked,
        failures=job.failures,
        failures_since_checkpoint=job.failures_since,
        preemptions=job.preemptions,
        eligible_ms=job.eligible_ms,
        retry_ms=job.retry_ms,
        reasons=job.reasons,
        history=job.history,
        end_why=job.end_why,
        restarts=job.restarts,
        ended_ms=job.ended_ms,
        core=_extra(job),
    )


def _extra(job: JobBook) -> str:
    extra: dict[str, Any] = {}
    if job.streak:
        extra["streak"] = job.streak
    if job.errors:
        extra["errors"] = job.errors
    if job.ran_ms:
        extra["ran_ms"] = job.ran_ms
    if job.faults:
        extra["faults"] = job.faults
    if job.was_claimed:
        extra["was_claimed"] = True
    if job.claim is not None:
        c = job.claim
        extra["claim"] = {"spec": c.spec, "nodes": c.nodes, "gpus": c.gpus, "since_ms": c.since_ms}
    if job.live:
        extra |= _extra_of_attempt(job)
    return json.dumps(extra, sort_keys=True) if extra else ""


def _extra_of_attempt(job: JobBook) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if job.begun_ms is None and job.began:
        extra["began"] = job.began
    if job.outcomes:
        extra["outcomes"] = [outcome.value for outcome in job.outcomes]
    if job.broken is not None:
        extra["broken"] = job.broken.value
    if job.fault != Cause():
        extra["fault"] = asdict(job.fault)
    if job.runs:
        extra["runs"] = sorted(job.runs.items())
    if job.troubles:
        extra["troubles"] = [asdict(one) for one in job.troubles]
    for name in ("was_withdrawn", "lost_gpu_ms"):
        if getattr(job, name):
            extra[name] = getattr(job, name)
    return extra


def core_text(state: State) -> str:
    """What the core must remember beside records."""
    heads = {q.name: [q.head, q.head_ms] for q in state.quotas.values() if q.head}
    blamed = {
        name: [node.suspected_until_ms, *map(list, node.blamed)]
        for pool in state.pools.values()
        for name, node in pool.blamed.items()
    }
    drained = sorted(node.name for pool in state.pools.values() for node in pool.away() if node.was_drained)
    asked = {q.name: q.asked_ms for q in state.quotas.values() if q.asked_ms >= 0}
    if not (heads or drained or asked or blamed):
        return ""
    kept: dict[str, Any] = {"asked": asked, "drained": drained, "heads": heads}
    if blamed:
        kept["blamed"] = blamed
    if state.memory_since_ms >= 0:
        lines = [[*key, amount] for key, amount in sorted(state.memory.items())]
        kept["reserve"] = {"since_ms": state.memory_since_ms, "step": state.memory_step, "memory": lines}
    return json.dumps(kept, sort_keys=True)


def restore(state: State, snapshot: Snapshot) -> None:
    """Fill empty books."""
    state.now_ms = snapshot.at_ms
    extra = json.loads(snapshot.core) if snapshot.core else {"asked": {}, "drained": [], "heads": {}}
    for record in snapshot.nodes:
        node = state.add_node(record.node, record.state)
        node.was_drained = record.node.name in extra["drained"]
        until_ms, *blamed = extra.get("blamed", {}).get(node.name, (0,))
        suspects.restore(state, node, tuple((at_ms, job, verdict) for at_ms, job, verdict in blamed), until_ms)
    for quota in sorted(snapshot.quotas, key=lambda one: one.name):
        book = state.quotas.get(quota.name)
        if book is None:
            state.add_quota(quota)
        else:
            book.quota, book.implicit = quota, False
            book.lend_max, book.borrow_max = quota.lend_max, quota.borrow_max
    for one in snapshot.jobs:
        if one.request.quota not in state.quotas:
            book = state.add_quota(Quota(name=one.request.quota, nominal={}, tenant=one.request.tenant), implicit=True)
            book.closed = True
    capacity.refresh(state)
    for one in snapshot.jobs:
        _restore_job(state, one)
    for name, (head, head_ms) in extra["heads"].items():
        if name in state.quotas:
            state.quotas[name].head, state.quotas[name].head_ms = head, head_ms
    for name, asked_ms in extra["asked"].items():
        if name in state.quotas:
            state.quotas[name].asked_ms = asked_ms
    if "reserve" in extra:
        reserve.restore(state, **extra["reserve"])
    state.core_text = snapshot.core
    state.dirty_jobs, state.dirty_nodes, state.dirty_quotas = {}, {}, {}
    state.is_unsettled = state.may_be_cut = True


def _restore_job(state: State, record: JobRecord) -> None:
    job = JobBook(record.request, state.quotas[record.request.quota], record.submitted_ms)
    extra = json.loads(record.core) if record.core else {}
    job.attempt, job.checkpoint_step, job.stop_asked = record.attempt, record.checkpoint_step, record.stop_asked
    job.failures, job.failures_since = record.failures, record.failures_since_checkpoint
    job.preemptions, job.eligible_ms, job.retry_ms = record.preemptions, record.eligible_ms, record.retry_ms
    job.reasons, job.history = record.reasons, record.history
    job.streak, job.errors = extra.get("streak", 0), tuple(extra.get("errors", ()))
    job.restarts, job.faults = record.restarts, tuple((node, fault) for node, fault in extra.get("faults", ()))
    job.was_claimed, job.ran_ms = extra.get("was_claimed", False), extra.get("ran_ms", 0)
    if "claim" in extra:
        c = extra["claim"]
        job.claim = Claim(spec=c["spec"], nodes=tuple(c["nodes"]), gpus=tuple(c["gpus"]), since_ms=c["since_ms"])
    if record.live and record.lease is not None:
        _restore_attempt(job, record, extra)
    age(state, job)
    state.jobs[job.id] = job
    state.count(job, 1, job.live)
    enlist(state, job)
    _remind(state, job)
    watch_time(state, job)
    if job.is_waiting and not job.reasons:
        state.fresh[job.id] = job


def _restore_attempt(job: JobBook, record: JobRecord, extra: dict[str, Any]) -> None:
    lease = record.lease
    assert lease is not None
    job.kind, job.spec, job.nodes, job.gpus = LeaseKind(lease.kind), lease.spec, lease.nodes, lease.gpus
    job.granted_ms, job.lenders, job.live = lease.granted_ms, dict(lease.lenders), record.live
    job.begun_ms, job.checkpoint_ms, job.notices = record.begun_ms, record.checkpoint_ms, record.notices
    job.began = tuple(extra.get("began", ())) if record.begun_ms is None else record.live
    job.stopping_ms = record.stopping_since_ms
    job.outcomes = tuple(Outcome(one) for one in extra.get("outcomes", ()))
    job.broken = Outcome(extra["broken"]) if "broken" in extra else None
    job.fault, job.runs = Cause(**extra.get("fault", {})), dict(extra.get("runs", ()))
    job.troubles = tuple(TroubleSeen(**one) for one in extra.get("troubles", ()))
    job.was_withdrawn = extra.get("was_withdrawn", False)
    job.lost_gpu_ms = extra.get("lost_gpu_ms", 0)
    leaving = {i for notice in job.notices for i in notice.instances} & set(job.live)
    job.leaving = job.live if job.stopping_ms is not None else tuple(sorted(leaving))


def _remind(state: State, job: JobBook) -> None:
    """Deadlines follow from the record."""
    patience = state.rules.kill_timeout_ms
    if job.live:
        for notice in job.notices:
            state.remind(notice.deadline_ms + patience, "kill", job.id, job.attempt)
        if job.stopping_ms is not None:
            state.remind(job.stopping_ms + patience, "kill", job.id, job.attempt)
        return
    if job.retry_ms > state.now_ms:
        state.remind(job.retry_ms, "backoff", job.id)
    if job.eligible_ms > state.now_ms:
        state.remind(job.eligible_ms, "cooldown", job.id)
    delayed_ms = job.submitted_ms + state.rules.reclaim_delay_ms
    if delayed_ms > state.now_ms:
        state.remind(delayed_ms, "delay", job.id)
