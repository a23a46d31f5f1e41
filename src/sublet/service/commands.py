"""What people may ask to be done.

One rule: a command is checked before anything is stored, and answered only after it is durable.
"""

import hashlib
from dataclasses import replace

from sublet.domain.changes import Entry
from sublet.domain.effects import RefuseJob
from sublet.domain.errors import Refused
from sublet.domain.events import (
    Event,
    JobStopAsked,
    JobSubmitted,
    NodeDrained,
    NodeReturned,
    PrioritySet,
    QuotaDeleted,
    QuotaSet,
    RulesSet,
)
from sublet.domain.ids import job_id_from_bytes
from sublet.domain.jobs import JobRecord, JobRequest, JobState
from sublet.domain.nodes import NodeState
from sublet.domain.quotas import Quota, path_of
from sublet.service import checks
from sublet.service.desk import Desk
from sublet.service.jobfile import Draft, refused_at
from sublet.service.reading import nearest
from sublet.service.settings import Cluster


def id_for(desk: Desk, key: str, user: str) -> str:
    """A new job id; with an idempotency key the same one each time that this user brings it."""
    if not key:
        return desk.new_id()
    return job_id_from_bytes(hashlib.sha256(f"{user}\0{key}".encode()).digest())


def submit(desk: Desk, draft: Draft) -> JobRecord:
    """The job as it was stored. The same request again under the same id is answered with the first one."""
    request = completed(desk, draft)
    known = desk.feed.job(request.id)
    if known is not None:
        return _same(known, request)
    accepted(desk, draft)
    entry = perform(desk, JobSubmitted(at_ms=desk.clock.now_ms(), request=request))
    reason = next((item.reason for item in entry.effects if isinstance(item, RefuseJob)), None)
    if reason is not None:
        raise refused_at(draft, checks.refused(request, reason))
    return desk.record(request.id)


def completed(desk: Desk, draft: Draft) -> JobRequest:
    """What the user left open is filled in from his quota and from what there is. Refused for an unknown quota."""
    quota = desk.feed.quotas.get(draft.request.quota)
    if quota is None:
        raise refused_at(draft, checks.unknown_quota(draft.request.quota, desk.feed.quotas))
    return replace(draft.request, tenant=quota.tenant, specs=draft.request.specs or _specs(desk, quota))


def accepted(desk: Desk, draft: Draft) -> JobRequest:
    """The completed request, when it may be stored; else Refused."""
    request = completed(desk, draft)
    error = checks.impossible(request, desk.feed.quotas, desk.feed.nodes)
    if error is not None:
        raise refused_at(draft, error)
    reason = desk.books.read(lambda core: core.may_accept(request))
    if reason is not None:
        raise refused_at(draft, checks.refused(request, reason))
    return request


def _specs(desk: Desk, quota: Quota) -> tuple[str, ...]:
    """Where a request names none: what its quota is promised, else what there is."""
    promised = (desk.feed.quotas.get(name) for name in path_of(quota.name))
    nominal = next((item.nominal for item in promised if item is not None and item.nominal), {})
    return tuple(sorted(nominal)) or tuple(sorted({record.node.spec for record in desk.feed.nodes.values()}))


def _same(known: JobRecord, request: JobRequest) -> JobRecord:
    if known.request == request:
        return known
    hint = "Use a new key for a new job."
    what = f"This idempotency key belongs to {request.id}."
    raise Refused(what=what, why="That job was another request.", hint=hint, code="idempotency_key_reused")


def stop(desk: Desk, text: str, user: str) -> JobRecord:
    record = desk.record(text)
    if record.state.is_final:
        what = f"{record.request.id} cannot be stopped."
        raise Refused(what=what, why=f"It has {record.state.value} already.", code="job_ended", field="job")
    perform(desk, JobStopAsked(at_ms=desk.clock.now_ms(), job=record.request.id, user=user))
    return desk.record(record.request.id)


def set_priority(desk: Desk, text: str, priority: int, user: str) -> JobRecord:
    """Of a job that waits; Refused for one that runs or has ended."""
    record = desk.record(text)
    if not 1 <= priority <= 9:
        what = f"priority is {priority}."
        raise Refused(what=what, why="It must be 1 to 9, 9 first.", code="malformed", field="priority")
    if record.state is not JobState.WAITING:
        what, why = f"The priority of {record.request.id} cannot be changed.", "It does not wait."
        raise Refused(what=what, why=why, code="job_not_waiting", field="job")
    perform(desk, PrioritySet(at_ms=desk.clock.now_ms(), job=record.request.id, priority=priority, user=user))
    return desk.record(record.request.id)


def apply(desk: Desk, cluster: Cluster) -> list[str]:
    """Sets the quotas and rules that differ from what is in force; the names of the quotas that were set."""
    at_start = {"nodes": cluster.nodes is not None, "verdicts": cluster.verdicts, "webhooks": cluster.webhooks}
    for field, is_there in at_start.items():
        if is_there:
            what = f"{field.capitalize()} are not applied to a running server."
            hint = "Start the server with that file: sublet up --config FILE."
            raise Refused(what=what, hint=hint, code="not_yet", field=field)
    present = desk.feed.quotas
    wanted = {quota.name: quota for quota in cluster.quotas or ()}
    checks.check_tree({**present, **wanted}, desk.feed.nodes)
    changed = [name for name in sorted(wanted) if present.get(name) != wanted[name]]
    for name in changed:
        perform(desk, QuotaSet(at_ms=desk.clock.now_ms(), quota=wanted[name]))
    if cluster.rules is not None:
        perform(desk, RulesSet(at_ms=desk.clock.now_ms(), rules=cluster.rules))
    return changed


def delete_quota(desk: Desk, name: str) -> None:
    if name not in desk.feed.quotas:
        raise checks.unknown_quota(name, desk.feed.quotas)
    below = [other for other in desk.feed.quotas if other.startswith(f"{name}/")]
    jobs = desk.books.read(lambda core: [job.request.id for job in core.jobs() if job.request.quota == name])
    if below or jobs:
        what, why = f"The quota {name} cannot be deleted.", f"It still has {', '.join((below or jobs)[:3])}."
        hint = "Delete the quotas below it first." if below else "Stop its jobs first."
        raise Refused(what=what, why=why, hint=hint, code="quota_in_use", field="name")
    perform(desk, QuotaDeleted(at_ms=desk.clock.now_ms(), name=name))


def drain(desk: Desk, name: str) -> None:
    """Takes nobody new; who is there stays."""
    _node_state(desk, name)
    perform(desk, NodeDrained(at_ms=desk.clock.now_ms(), node=name))


def resume(desk: Desk, name: str) -> None:
    state = _node_state(desk, name)
    if state is NodeState.LOST:
        hint = "It comes back by itself when its engine reaches it again."
        raise Refused(what=f"The node {name} cannot be resumed.", why="It is lost.", hint=hint, code="node_lost")
    perform(desk, NodeReturned(at_ms=desk.clock.now_ms(), node=name, is_open=True))


def perform(desk: Desk, event: Event) -> Entry:
    """Puts the event and waits until it is durable; its entry."""
    with desk.feed.expecting(event) as expected:
        desk.books.put(event)
        return expected.wait(desk.answer_within_ms)


def _node_state(desk: Desk, name: str) -> NodeState:
    record = desk.feed.nodes.get(name)
    if record is None:
        near = nearest(name, desk.feed.nodes)
        hint = f"Did you mean {near}?" if near else "See them with sublet node ls."
        raise Refused(what=f"There is no node {name}.", hint=hint, code="node_unknown", field="node")
    return record.state
