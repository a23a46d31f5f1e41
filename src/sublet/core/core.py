"""The only door to the decisions: `handle(event) -> effects`.

Rule: an event changes the books, a Tick closes the instant.

No clock, no chance, no I/O: time is a number in the event, and the same events give the same effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from sublet.core import capacity, lifecycle, records, reserve, restarts, suspects, whatif
from sublet.core.explain import Explanation, explain, show_reasons
from sublet.core.queue import age, delist, enlist
from sublet.core.schedule import schedule
from sublet.core.state import JobBook, NodeBook, QuotaBook, State
from sublet.core.views import NodeView, QuotaView, node_views, quota_views
from sublet.domain.changes import Changes, NodeRecord, Snapshot
from sublet.domain.effects import (
    Effect,
    GiveNotice,
    MarkNode,
    MarkQuota,
    QueueJob,
    RefuseJob,
    RestartInstance,
    StartGang,
    StopInstances,
    WithdrawNotice,
)
from sublet.domain.events import (
    CheckpointSaved,
    Diagnosed,
    Event,
    InstanceBegan,
    InstanceEnded,
    JobAdopted,
    JobStopAsked,
    JobSubmitted,
    NodeDrained,
    NodeJoined,
    NodeLost,
    NodeRemoved,
    NodeReturned,
    PrioritySet,
    QuotaDeleted,
    QuotaSet,
    RulesSet,
    Tick,
)
from sublet.domain.jobs import JobRecord, JobRequest
from sublet.domain.leases import LeaseKind
from sublet.domain.nodes import NodeState
from sublet.domain.quotas import Quota
from sublet.domain.reasons import Reason, ReasonCode
from sublet.domain.rules import Rules

MOST_GPUS = 1_000_000  # of one instance, and of one job
MOST_INSTANCES = 100_000


class Core:
    """All decisions. Not thread-safe: the controller's lock is held by whoever calls."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.state = State(rules or Rules())
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Tick: self._tick,
            JobSubmitted: self._submitted,
            InstanceBegan: self._began,
            InstanceEnded: self._ended,
            CheckpointSaved: self._saved,
            Diagnosed: self._diagnosed,
            JobStopAsked: self._stop_asked,
            PrioritySet: self._priority_set,
            JobAdopted: self._adopted,
            QuotaSet: self._quota_set,
            QuotaDeleted: self._quota_deleted,
            NodeJoined: self._node_joined,
            NodeLost: self._node_lost,
            NodeReturned: self._node_returned,
            NodeDrained: self._node_drained,
            NodeRemoved: self._node_removed,
            RulesSet: self._rules_set,
        }

    # ---- the door

    def handle(self, event: Event) -> tuple[Effect, ...]:
        """What follows from the event. Time that runs backwards is taken as standing still."""
        state = self.state
        if event.at_ms > state.now_ms:
            state.now_ms = event.at_ms
        self._handlers[type(event)](event)
        effects = state.effects
        state.effects = []
        return tuple(effects)

    def next_deadline(self) -> int | None:
        """When a Tick is due without any event; ms."""
        deadlines = self.state.deadlines
        while deadlines and not self._is_due_ever(deadlines[0]):
            self.state.pop_first()
        return deadlines[0][0] if deadlines else None

    def take_changes(self) -> Changes:
        """The records that changed since the last call."""
        state = self.state
        jobs = {job_id: records.record_of(job) for job_id, job in state.dirty_jobs.items()}
        nodes: dict[str, NodeRecord | None] = {}
        for name in state.dirty_nodes:
            node = state.nodes.get(name)
            nodes[name] = NodeRecord(node=node.node, state=node.state) if node else None
        quotas: dict[str, Quota | None] = {}
        for name in state.dirty_quotas:
            book = state.quotas.get(name)
            quotas[name] = None if book is None or book.closed else book.quota
        rules = state.rules if state.dirty_rules else None
        core = records.core_text(state)
        changes = Changes(
            jobs=jobs, nodes=nodes, quotas=quotas, rules=rules, core=None if core == self._core_text() else core
        )
        state.core_text = core
        state.dirty_jobs, state.dirty_nodes, state.dirty_quotas, state.dirty_rules = {}, {}, {}, False
        return changes

    def _core_text(self) -> str:
        return self.state.core_text

    @classmethod
    def restore(cls, snapshot: Snapshot) -> Core:
        """As it was when the snapshot was taken."""
        core = cls(snapshot.rules)
        records.restore(core.state, snapshot)
        return core

    def standing_effects(self) -> tuple[Effect, ...]:
        """What the engine must have been told of all that runs; repeated after a restart, it changes nothing."""
        effects: list[Effect] = []
        for job in sorted((one for one in self.state.jobs.values() if one.live), key=lambda one: one.key):
            effects.append(lifecycle.start_of(self.state, job))
            effects += [
                RestartInstance(job=job.id, attempt=job.attempt, instance=instance, run=run, not_before_ms=0)
                for instance, run in sorted(job.runs.items())
                if instance in job.live
            ]
            for n in job.notices:
                effects.append(
                    GiveNotice(
                        job=job.id,
                        attempt=job.attempt,
                        instances=n.instances,
                        reason=n.reason,
                        claimant=n.claimant,
                        deadline_ms=n.deadline_ms,
                        lost_gpu_ms=n.lost_gpu_ms,
                    )
                )
            if job.stopping_ms is not None:
                reason = lifecycle.reason_of_end(job)
                effects.append(StopInstances(job=job.id, attempt=job.attempt, instances=job.live, reason=reason))
                continue
            spared = tuple(i for i in job.live if not any(i in n.instances for n in job.notices))
            if spared:  # the word that a notice was taken back may have been lost with the server
                effects.append(WithdrawNotice(job=job.id, attempt=job.attempt, instances=spared))
        for name in sorted(self.state.nodes):
            if self.state.nodes[name].state is NodeState.QUARANTINED:
                effects.append(MarkNode(node=name, state=NodeState.QUARANTINED))
        return tuple(effects)

    # ---- looking

    def job(self, job_id: str) -> JobRecord | None:
        book = self.state.jobs.get(job_id)
        return None if book is None else records.record_of(book)

    def jobs(self) -> Iterable[JobRecord]:
        for book in sorted(self.state.jobs.values(), key=lambda one: one.key):
            yield records.record_of(book)

    def nodes(self) -> list[NodeView]:
        return node_views(self.state)

    def quotas(self) -> list[QuotaView]:
        return quota_views(self.state)

    def why(self, job_id: str) -> Explanation | None:
        """Why it waits, or what may happen to it; None when no such job is in the books."""
        job = self.state.jobs.get(job_id)
        if job is None:
            return None
        told = explain(self.state, job)
        return told if job.live else replace(told, would_change=tuple(one.text for one in self.advice(job_id)))

    def advice(self, job_id: str) -> tuple[whatif.Advice, ...]:
        """What would set a waiting job going, each with the events that were tried."""
        return whatif.advice(self.state, self.handle, self.state.jobs[job_id])

    def plan(self, request: JobRequest, at_ms: int) -> whatif.Plan:
        """The dry run: what the submission would do at `at_ms`. Nothing changes."""
        return whatif.plan(self.state, self.handle, request, at_ms)

    def what_if(self, events: Iterable[Event], at_ms: int) -> tuple[Effect, ...]:
        """All that would follow from these events at `at_ms`: who starts, who is told to leave, what waits and why."""
        return whatif.effects_of(self.state, self.handle, tuple(events), at_ms)

    def may_accept(self, request: JobRequest) -> Reason | None:
        """Why the request must be refused at the door, or None. Stricter than an event: nodes may join later."""
        if request.id in self.state.jobs:
            return Reason(code=ReasonCode.MALFORMED, subjects=("id",))
        refusal = impossible(request)
        if refusal is not None:
            return refusal
        quota = self.state.quotas.get(request.quota)
        if quota is None or (quota.implicit and not quota.children):
            return Reason(code=ReasonCode.QUOTA_UNKNOWN, subjects=(request.quota,))
        if quota.closed:
            return Reason(code=ReasonCode.QUOTA_CLOSED, subjects=(request.quota,))
        if quota.quota.tenant != request.tenant:
            return Reason(code=ReasonCode.NOT_PERMITTED, subjects=(request.quota,))
        return self._unknown_spec(request) or self._too_large(request)

    def _unknown_spec(self, request: JobRequest) -> Reason | None:
        pools = self.state.pools
        named = {spec for quota in self.state.quotas.values() for spec in quota.nominal}
        for spec in request.specs:
            pool = pools.get((request.tenant, spec))
            if spec not in named and (pool is None or not pool.nodes):
                return Reason(code=ReasonCode.SPEC_UNKNOWN, subjects=(spec,))
        return None

    def _too_large(self, request: JobRequest) -> Reason | None:
        """No node of any spec it accepts could hold its largest instance, though there are nodes."""
        pools = [self.state.pools.get((request.tenant, spec)) for spec in request.specs]
        largest = max((pool.largest for pool in pools if pool is not None), default=0)
        if not largest or max(request.sizes) <= largest:
            return None
        numbers = {"each": max(request.sizes), "largest": largest}
        return Reason(code=ReasonCode.TOO_LARGE_FOR_SPEC, numbers=numbers, subjects=request.specs)

    # ---- events of jobs

    def _submitted(self, event: JobSubmitted) -> None:
        state, request = self.state, event.request
        if request.id in state.jobs:
            return
        refusal = impossible(request)
        if refusal is not None:
            state.emit(RefuseJob(job=request.id, reason=refusal))
            return
        job = self._new_job(request, event.at_ms)
        lifecycle.wait(state, job)

    def _new_job(self, request: JobRequest, at_ms: int) -> JobBook:
        state = self.state
        quota = state.quotas.get(request.quota)
        if quota is None:
            quota = state.add_quota(Quota(name=request.quota, nominal={}, tenant=request.tenant), implicit=True)
            capacity.refresh(state)
        job = JobBook(request, quota, at_ms)
        state.added(job)
        age(state, job)
        state.emit(QueueJob(job=job.id, quota=request.quota, idle=str(request.idle)))
        return job

    def _adopted(self, event: JobAdopted) -> None:
        """It holds its lease already, as attempt 0; an engine that knows it takes the command as a repetition."""
        state, request = self.state, event.request
        if request.id in state.jobs:
            return
        job = self._new_job(request, event.at_ms)
        kind = LeaseKind(event.lease_kind)
        gpus = request.sizes[: len(event.nodes)]
        lenders: dict[str, int] = {}
        if kind is LeaseKind.IDLE:
            lenders = capacity.lenders_for(state, job.quota, state.pool_of(job, event.spec), sum(gpus))
        lifecycle.hold(state, job, kind, event.spec, gpus, event.nodes, lenders)
        job.began = job.live
        lifecycle.relist(state, job, begun_ms=event.at_ms)
        state.emit(StartGang(job=job.id, attempt=0, lease=lifecycle.lease_of(job), instances=job.live, request=request))

    def _present(self, job_id: str, attempt: int) -> JobBook | None:
        """The job, if the message is about its present attempt."""
        job = self.state.jobs.get(job_id)
        return job if job is not None and job.live and job.attempt == attempt else None

    def _began(self, event: InstanceBegan) -> None:
        job = self._present(event.job, event.attempt)
        if job is not None:
            lifecycle.began(self.state, job, event.instance, event.run)

    def _ended(self, event: InstanceEnded) -> None:
        job = self._present(event.job, event.attempt)
        if job is not None and event.instance in job.live and event.run == job.runs.get(event.instance, 0):
            lifecycle.instance_ended(self.state, job, event)

    def _diagnosed(self, event: Diagnosed) -> None:
        job = self._present(event.job, event.attempt)
        if job is not None and event.run == job.runs.get(-1 if event.instance is None else event.instance, 0):
            lifecycle.diagnosed(self.state, job, event)

    def _saved(self, event: CheckpointSaved) -> None:
        job = self._present(event.job, event.attempt)
        if job is not None:
            lifecycle.saved(self.state, job, event.step)

    def _stop_asked(self, event: JobStopAsked) -> None:
        job = self.state.jobs.get(event.job)
        if job is not None:
            lifecycle.ask_stop(self.state, job)

    def _priority_set(self, event: PrioritySet) -> None:
        state, job = self.state, self.state.jobs.get(event.job)
        if job is None or not job.is_waiting or type(event.priority) is not int or not 1 <= event.priority <= 9:
            return
        state.touch(job)
        delist(state, job)
        job.request = replace(job.request, priority=event.priority)
        age(state, job)
        enlist(state, job)
        state.fresh[job.id] = job
        state.is_unsettled = True
        state.changes += 1
        state.epoch += 1

    # ---- events of quotas

    def _rules_set(self, event: RulesSet) -> None:
        state, before = self.state, self.state.rules
        if event.rules == before:
            return
        state.on_undo(lambda: setattr(state, "rules", before))
        state.rules, state.dirty_rules = event.rules, True
        state.epoch += 1

    def _quota_set(self, event: QuotaSet) -> None:
        state, quota = self.state, event.quota
        book = state.quotas.get(quota.name)
        if book is None:
            book = state.add_quota(quota)
        self._edit(book, quota, closed=False)
        state.emit(MarkQuota(quota=quota.name, nominal=dict(book.nominal)))

    def _quota_deleted(self, event: QuotaDeleted) -> None:
        book = self.state.quotas.get(event.name)
        if book is None or book.closed:
            return
        # What is left is what a restart finds: a name, for the jobs that still have it.
        self._edit(book, Quota(name=book.name, nominal={}, tenant=book.quota.tenant), closed=True)
        self.state.emit(MarkQuota(quota=event.name))

    def _edit(self, book: QuotaBook, quota: Quota, *, closed: bool) -> None:
        state, before, was_closed, was_implicit = self.state, book.quota, book.closed, book.implicit

        def restore() -> None:
            book.quota, book.closed, book.implicit = before, was_closed, was_implicit
            book.lend_max, book.borrow_max = before.lend_max, before.borrow_max

        state.on_undo(restore)
        book.quota, book.closed, book.implicit = quota, closed, False
        book.lend_max, book.borrow_max = quota.lend_max, quota.borrow_max
        state.dirty_quotas[book.name] = None
        state.may_be_cut = True
        capacity.refresh(state)
        if quota.strategy is not before.strategy:
            for job in [one for one in state.jobs.values() if one.quota is book]:
                self._age_anew(job)

    def _cut(self) -> None:
        """Where more is used than promised now, the newest leases are guaranteed no longer."""
        state = self.state
        if not state.may_be_cut:
            return
        state.may_be_cut, state.is_unsettled = False, True
        for book in sorted(state.quotas.values(), key=lambda one: (-len(one.path), one.name)):
            lifecycle.downgrade_to_fit(state, book)

    # ---- events of nodes

    def _node_joined(self, event: NodeJoined) -> None:
        state = self.state
        book = state.nodes.get(event.node.name)
        if book is not None and book.node == event.node:
            return
        if book is None:
            state.add_node(event.node)
            state.emit(MarkNode(node=event.node.name, state=NodeState.UP, why="joined"))
        elif (book.node.spec, book.node.tenant) == (event.node.spec, event.node.tenant):
            state.resize_node(book, event.node)
        else:
            self._node_removed(NodeRemoved(at_ms=event.at_ms, node=event.node.name))
            self._node_joined(event)

    def _mark(self, book: NodeBook, new: NodeState, why: str, *, was_drained: bool = False) -> None:
        self.state.set_node_state(book, new, was_drained=was_drained)
        self.state.emit(MarkNode(node=book.name, state=new, why=why))
        if new is not NodeState.UP:
            self._rather_there(book)

    def _rather_there(self, gone: NodeBook) -> None:
        """Whoever waits, and keeps away from the nodes that are left, may stand there again."""
        state = self.state
        shy = [job for job in state.jobs.values() if job.request.avoid and job.is_waiting and job.claim is None]
        for job in sorted(shy, key=lambda one: one.key):
            pools = [state.pool_of(job, spec) for spec in job.request.specs]
            if gone.pool not in pools:
                continue
            delist(state, job)
            state.touch(job)
            restarts.rather_there(job, pools)
            enlist(state, job)
            state.fresh.setdefault(job.id, job)

    def _node_lost(self, event: NodeLost) -> None:
        book = self.state.nodes.get(event.node)
        if book is None or book.state in (NodeState.LOST, NodeState.QUARANTINED):
            return
        self._mark(book, NodeState.LOST, "silent", was_drained=book.was_drained or book.state is NodeState.DRAINING)
        lifecycle.node_gone(self.state, book, NodeState.LOST)

    def _node_returned(self, event: NodeReturned) -> None:
        book = self.state.nodes.get(event.node)
        if book is None or book.state is NodeState.UP:
            return
        if event.is_open or not (book.state is NodeState.DRAINING or book.was_drained):
            self._mark(book, NodeState.UP, "returned")
        elif book.state is not NodeState.DRAINING:
            self._mark(book, NodeState.DRAINING, "drained before it was lost")

    def _node_drained(self, event: NodeDrained) -> None:
        book = self.state.nodes.get(event.node)
        if book is None or book.state is NodeState.DRAINING:
            return
        if book.state is NodeState.UP:
            self._mark(book, NodeState.DRAINING, "drained")
        else:
            self.state.set_node_state(book, book.state, was_drained=True)

    def _node_removed(self, event: NodeRemoved) -> None:
        state = self.state
        book = state.nodes.get(event.node)
        if book is None:
            return
        if book.state is not NodeState.LOST:
            self._mark(book, NodeState.LOST, "removed")
        lifecycle.node_gone(state, book, NodeState.LOST)
        for job in sorted(state.claims.values(), key=lambda one: one.key):
            if job.claim is not None and book.name in job.claim.nodes:
                lifecycle.drop_claim(state, job, is_firm=True)
        state.on_undo(lambda: state.put_back(book))
        state.drop_node(book)

    # ---- the instant is over

    def _tick(self, event: Tick) -> None:
        self._fall_due()
        self._cut()
        schedule(self.state)
        show_reasons(self.state)

    def _fall_due(self) -> None:
        state = self.state
        while (due := state.pop_due()) is not None:
            _, kind, name, attempt = due
            if kind == "balance":
                state.epoch += 1
                continue
            if kind == "explain":
                state.will_explain = False
                continue
            if kind == "fade":
                reserve.fall_due(state)
                continue
            if kind == "trust":
                suspects.fall_due(state, name)
                continue
            job = state.jobs.get(name)
            if job is None:
                continue
            if kind == "kill":
                self._kill_due(job, attempt)
            elif kind == "delay":
                state.epoch += 1
            elif kind == "time":
                if job.attempt == attempt and job.live and job.stopping_ms is None:
                    lifecycle.time_is_up(state, job)
            elif job.is_waiting and job.claim is None:
                delist(state, job)
                if kind == "age":
                    state.touch(job)
                    age(state, job)
                enlist(state, job)
                state.fresh.setdefault(job.id, job)
            elif kind == "age":
                self._age_anew(job)

    def _age_anew(self, job: JobBook) -> None:
        """Whether it waits or runs: the order of upgrades and claims is the same."""
        state = self.state
        state.touch(job)
        delist(state, job)
        age(state, job)
        enlist(state, job)

    def _kill_due(self, job: JobBook, attempt: int) -> None:
        """What outlived grace and kill costs its node: nobody can say that its GPUs are free."""
        state = self.state
        if job.attempt != attempt or not job.live:
            return
        for name in sorted({job.nodes[i] for i in _overdue(state, job)}):
            node = state.nodes[name]
            if node.state not in (NodeState.LOST, NodeState.QUARANTINED):
                self._mark(node, NodeState.QUARANTINED, f"{job.id} outlived its kill")
                lifecycle.node_gone(state, node, NodeState.QUARANTINED)

    def _is_due_ever(self, due: tuple[int, str, str, int]) -> bool:
        _, kind, name, attempt = due
        if kind == "fade":
            return bool(self.state.memory)
        if kind == "balance":
            quota = self.state.quotas.get(name)
            return quota is not None and bool(quota.head)
        if kind == "explain":
            return True
        if kind == "trust":
            return name in self.state.nodes
        job = self.state.jobs.get(name)
        if job is None:
            return False
        if kind == "kill":
            return job.attempt == attempt and bool(job.leaving)
        if kind == "time":
            return job.attempt == attempt and bool(job.live) and job.stopping_ms is None
        return kind == "age" or job.is_waiting


def _overdue(state: State, job: JobBook) -> list[int]:
    """Instances that should have been gone by now, the time for the kill counted in."""
    patience, now = state.rules.kill_timeout_ms, state.now_ms
    if job.stopping_ms is not None and job.stopping_ms + patience <= now:
        return list(job.live)
    return [i for n in job.notices if n.deadline_ms + patience <= now for i in n.instances if i in job.live]


def impossible(request: JobRequest) -> Reason | None:
    """What no change of nodes or quotas could make possible."""
    sizes, least = request.sizes, request.min_instances
    wrong = ""
    if (
        not sizes
        or len(sizes) > MOST_INSTANCES
        or not all(_is_count(size) for size in set(sizes))
        or sum(sizes) > MOST_GPUS
    ):
        wrong = "sizes"
    elif type(request.priority) is not int or not 1 <= request.priority <= 9:
        wrong = "priority"
    elif least is not None and not 1 <= least <= len(sizes):
        wrong = "min_instances"
    elif not request.specs or request.nodes == ():
        wrong = "specs" if not request.specs else "nodes"
    elif request.cpu_milli < 0 or request.memory_bytes < 0 or (request.grace_ms or 0) < 0:
        wrong = "resources"
    return Reason(code=ReasonCode.MALFORMED, subjects=(wrong,)) if wrong else None


def _is_count(size: object) -> bool:
    return type(size) is int and 1 <= size <= MOST_GPUS
