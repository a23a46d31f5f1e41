"""Change, look, undo: how plans and advice are tried on the real state. Rule: afterwards nothing is different."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sublet.core.capacity import refresh
from sublet.core.queue import delist, enlist
from sublet.core.state import JobBook, State
from sublet.domain.errors import Broken


@contextmanager
def trial(state: State) -> Iterator[None]:
    """Whatever is done to the state inside is taken back at the end. Not to be nested."""
    if state.is_trial:
        raise Broken(what="A trial was begun within a trial.", hint="Report this.", code="nested_trial")
    kept = (
        state.now_ms,
        state.effects,
        state.is_unsettled,
        state.dirty_rules,
        state.rules,
        state.changes,
        state.may_be_cut,
        state.will_explain,
        state.explained_ms,
    )
    dirty = (dict(state.dirty_jobs), dict(state.dirty_nodes), dict(state.dirty_quotas))
    deadlines, fresh = list(state.deadlines), dict(state.fresh)
    heads = [(q, q.barrier, q.head, q.head_ms, q.asked_ms) for q in state.quotas.values()]
    state.before, state.undo, state.effects = {}, [], []
    try:
        yield
    finally:
        _take_back(state)
        state.now_ms, state.effects, state.is_unsettled, state.dirty_rules = kept[:4]
        state.rules, state.changes, state.may_be_cut = kept[4:7]
        state.will_explain, state.explained_ms = kept[7:]
        state.dirty_jobs, state.dirty_nodes, state.dirty_quotas = dirty
        state.deadlines, state.fresh = deadlines, fresh
        for quota, barrier, head, head_ms, asked_ms in heads:
            quota.barrier, quota.head, quota.head_ms, quota.asked_ms = barrier, head, head_ms, asked_ms


def _take_back(state: State) -> None:
    before, undo = state.before or {}, state.undo
    state.before, state.undo = None, []
    for job_id in before:
        job = state.jobs.pop(job_id, None)
        if job is not None:
            delist(state, job)
            state.count(job, -1, job.live)
    for restore in reversed(undo):
        restore()
    refresh(state)
    for entry in before.values():
        if entry is None:
            continue
        job, values = entry
        for name, value in zip(JobBook.__slots__, values, strict=True):
            setattr(job, name, value)
        job.cls = None
        state.jobs[job.id] = job
        state.count(job, 1, job.live)
        enlist(state, job)
