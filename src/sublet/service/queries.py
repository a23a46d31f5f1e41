"""What people may ask to see.

One rule: numbers come from the books, and each answer is of one moment.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sublet.core import views as books
from sublet.core.explain import Explanation, words
from sublet.domain.changes import Entry
from sublet.domain.errors import Refused
from sublet.domain.jobs import JobRecord, JobState
from sublet.domain.leases import LeaseKind
from sublet.domain.quotas import Quota
from sublet.domain.times import span
from sublet.service import story
from sublet.service.desk import Desk
from sublet.service.reading import nearest
from sublet.service.story import gpus, named
from sublet.service.views import (
    IDLE_RESOURCES,
    EventView,
    JobDetail,
    JobView,
    NodeFault,
    NodeView,
    Page,
    QuotaView,
    ReasonView,
    WhyView,
    attempt_views,
    job_view,
    restart_views,
    shown_state,
    since_ms,
    time_of,
)

MAX_PAGE = 1_000
LIVE = tuple(state.value for state in JobState if not state.is_final)
HOLDING = ("starting", "running", "leaving", "stopping")  # the shown states of a job that holds a lease


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Empty = any. `idle_resources`: in_quota or not_in_quota."""

    quota: str = ""
    user: str = ""
    states: Sequence[str] = ()
    idle_resources: str = ""
    all_states: bool = False

    def fits(self, view: JobView) -> bool:
        return (
            self.quota in ("", view.quota)
            and self.user in ("", view.user)
            and (not self.states or view.state in self.states)
            and self.idle_resources in ("", view.idle_resources)
        )


def jobs(desk: Desk, wanted: JobFilter, limit: int, cursor: str | None) -> Page[JobView]:
    """Newest first. The cursor is the id of the last job looked at."""
    stored = sorted({"running" if state in HOLDING else state for state in wanted.states})
    states = stored or (() if wanted.all_states else LIVE)
    found: list[JobView] = []
    while len(found) < limit:
        records = desk.feed.jobs(states=states, limit=MAX_PAGE, before=cursor)
        for record in records:
            cursor = record.request.id
            view = job(desk, record)
            if wanted.fits(view):
                found.append(view)
            if len(found) == limit:
                return Page(kind="JobList", items=tuple(found), next=cursor)
        if len(records) < MAX_PAGE:
            break
    return Page(kind="JobList", items=tuple(found))


def job(desk: Desk, record: JobRecord) -> JobView:
    return job_view(record, desk.clock.now_ms(), note(desk, record))


def detail(desk: Desk, text: str) -> JobDetail:
    record = desk.record(text)
    request, now_ms = record.request, desk.clock.now_ms()
    grace_ms = request.grace_ms if request.grace_ms is not None else desk.feed.rules.grace_ms
    return JobDetail(
        job=job(desk, record),
        sizes=request.sizes,
        command=request.program.command,
        workdir=request.program.workdir,
        launcher=request.program.launcher,
        labels=request.labels,
        grace_seconds=min(grace_ms, desk.feed.rules.max_grace_ms) // 1000,
        max_time_seconds=None if request.max_time_ms is None else request.max_time_ms // 1000,
        checkpoint_dir=request.program.checkpoint_dir,
        checkpoint=None if record.checkpoint_ms is None else time_of(record.checkpoint_ms),
        checkpoint_step=record.checkpoint_step,
        failures=record.failures,
        attempts=attempt_views(record, now_ms),
        restarts=restart_views(record),
        avoids=request.avoid,
        warnings=tuple(json.loads(request.program.settings or "{}").get("warnings", ())),
    )


def note(desk: Desk, record: JobRecord) -> str:
    """The one thing to know of a job beside its state."""
    state, now_ms = shown_state(record), desk.clock.now_ms()
    if state == "waiting":
        return " · ".join(words(reason, record.request, now_ms) for reason in record.reasons[:2])
    if state == "leaving":
        first = min(record.notices, key=lambda notice: notice.deadline_ms)
        left = span(max(0, first.deadline_ms - now_ms) // 1000)
        return f"has {left} left" + (f", for {named(first.claimant, desk.feed.job)}" if first.claimant else "")
    if state in ("succeeded", "failed", "stopped"):
        end = record.history[-1] if record.history else None
        said = [record.end_why, f"exit code {end.exit_code}" if end and end.exit_code is not None else ""]
        said += [end.evidence] if end and end.evidence not in record.end_why else []
        return " · ".join(dict.fromkeys(part for part in said if part))
    step = "" if record.checkpoint_step is None else f"step {record.checkpoint_step:,}"
    saved_ms = record.checkpoint_ms
    saved = "" if saved_ms is None else f"checkpoint {span((now_ms - saved_ms) // 1000)} ago"
    return " · ".join(part for part in (step, saved) if part)


def why(desk: Desk, text: str) -> WhyView:
    """Why it waits, or what may happen to it where it runs, or how it ended."""
    record = desk.record(text)
    job_id = record.request.id
    found, sequence = desk.books.read(lambda core: (core.why(job_id), desk.feed.last_sequence))
    record = desk.record(job_id)
    if found is None:
        return _ended(desk, record, sequence)
    return WhyView(
        job=job_id,
        kind=found.kind,
        headline=_headline(desk, record, found.kind),
        reasons=tuple(
            ReasonView(
                code=line.reason.code.value,
                sentence=line.sentence,
                numbers=line.reason.numbers,
                subjects=line.reason.subjects,
            )
            for line in found.reasons
        ),
        order=_order(desk, record, found) + _avoids(record) if found.reasons else "",
        would_change=found.would_change,
        mirror=found.mirror,
        sequence=sequence,
    )


def _ended(desk: Desk, record: JobRecord, sequence: int) -> WhyView:
    return WhyView(
        job=record.request.id,
        kind="ended",
        headline=_headline(desk, record, "ended"),
        reasons=(),
        order="",
        would_change=(),
        mirror=note(desk, record),
        sequence=sequence,
    )


def _headline(desk: Desk, record: JobRecord, kind: str) -> str:
    request = record.request
    each = f"{len(request.sizes)} x {request.sizes[0]} GPU {' or '.join(request.specs)}"
    who = f"{request.name or request.id} ({request.quota}, {each}, idle: {request.idle.value})"
    ago = span(max(0, desk.clock.now_ms() - since_ms(record)) // 1000)
    where = {"in_quota": "In Quota", "not_in_quota": "Not in Quota"}
    place = f", {where[IDLE_RESOURCES[record.lease.kind]]}," if record.lease else ""
    told = {
        "never": f"{who} waits since {ago} and will not run as written.",
        "waiting": f"{who} waits since {ago}.",
        "ended": f"{who} has {record.state.value}, {ago} ago.",
    }
    return told.get(kind, f"{who} is {shown_state(record)}{place} since {ago}.")


def _order(desk: Desk, record: JobRecord, found: Explanation) -> str:
    quota = record.request.quota
    if not found.ahead_count:
        return f"first in {quota}, nobody is ahead"
    ahead = [desk.feed.job(job_id) for job_id in found.ahead]
    told = [f"{named(one.request.id, desk.feed.job)} {gpus(one.request.gpus)}" for one in ahead if one]
    count = f"{found.ahead_count} job{'s' if found.ahead_count > 1 else ''} ahead in {quota}"
    return f"{count}: {', '.join(told)}" if told else count


def _avoids(record: JobRecord) -> str:
    """A node may be free, and yet not be for this job."""
    avoid = record.request.avoid
    return f"; it keeps away from {', '.join(avoid)}, where machines failed it twice" if avoid else ""


def quotas(desk: Desk) -> Page[QuotaView]:
    """One line for each quota and spec."""
    found, present = desk.books.read(lambda core: (core.quotas(), desk.feed.quotas))
    return Page(kind="QuotaList", items=tuple(_quota(view, present) for view in found))


def _quota(view: books.QuotaView, present: Mapping[str, Quota]) -> QuotaView:
    quota = present.get(view.quota)
    return QuotaView(
        name=view.quota,
        spec=view.spec,
        owner=quota.owner if quota else "",
        scope=quota.scope.value if quota else "",
        guaranteed=view.nominal,
        own=view.used,
        lent=view.lent,
        free=view.free,
        borrowed=view.borrowed,
        waiting_jobs=view.waiting_jobs,
        waiting_gpus=view.waiting_gpus,
    )


def nodes(desk: Desk) -> Page[NodeView]:
    found, idle = desk.books.read(lambda core: (core.nodes(), _idle_jobs(core.jobs())))
    return Page(kind="NodeList", items=tuple(_node(view, idle) for view in found))


def node(desk: Desk, name: str) -> NodeView:
    found = next((view for view in nodes(desk).items if view.name == name), None)
    if found is None:
        near = nearest(name, desk.feed.nodes)
        hint = f"Did you mean {near}?" if near else "See them with sublet node ls."
        raise Refused(what=f"There is no node {name}.", hint=hint, code="node_unknown", field="node")
    return found


def _idle_jobs(records: Iterable[JobRecord]) -> set[str]:
    return {record.request.id for record in records if record.lease and record.lease.kind is LeaseKind.IDLE}


def _node(view: books.NodeView, idle: set[str]) -> NodeView:
    return NodeView(
        name=view.node.name,
        spec=view.node.spec,
        state=view.state.value,
        gpu=view.node.gpu,
        own=sum(count for job_id, count in view.leases.items() if job_id not in idle),
        lent=sum(count for job_id, count in view.leases.items() if job_id in idle),
        free=view.free_gpu,
        jobs=tuple(job_id for job_id in view.leases if job_id not in idle),
        suspected_until=time_of(view.suspected_until_ms) if view.suspected_until_ms else None,
        faults=tuple(NodeFault(time=time_of(at_ms), cause=verdict) for at_ms, _, verdict in view.blamed),
        faulted_jobs=len({job_id for _, job_id, _ in view.blamed}),
    )


def events(desk: Desk, after: int, limit: int, job_text: str = "") -> Page[EventView]:
    """The sentences behind this number; the cursor is the number of the last entry looked at."""
    job_id = desk.record(job_text).request.id if job_text else None
    entries = desk.feed.entries(after=after, limit=limit, job=job_id)
    items = tuple(view for entry in entries for view in story_of(desk, entry) if not job_id or _is_about(view, job_id))
    more = str(entries[-1].sequence) if len(entries) == limit else None
    return Page(kind="EventList", items=items, next=more)


def _is_about(view: EventView, job_id: str) -> bool:
    return view.job == job_id or job_id in view.text


def story_of(desk: Desk, entry: Entry) -> Iterable[EventView]:
    seen: dict[str, JobRecord | None] = {}

    def look(job_id: str) -> JobRecord | None:
        if job_id not in seen:
            seen[job_id] = desk.feed.job(job_id)
        return seen[job_id]

    return story.views(entry, look)
