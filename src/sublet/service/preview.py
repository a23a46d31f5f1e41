"""What would happen: a submission or a change, tried on the books by the code that would decide, and taken back.

One rule: the answer comes from the core's own trial at one instant; nothing is stored and nothing leaves.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from sublet.core.core import Core
from sublet.core.explain import words
from sublet.domain.changes import Entry
from sublet.domain.effects import Effect, GiveNotice, ReleaseInstances, StartGang
from sublet.domain.errors import Refused
from sublet.domain.events import Event, JobStopAsked, JobSubmitted, NodeDrained, NodeLost, NodeReturned, QuotaSet, Tick
from sublet.domain.jobs import IdlePolicy, JobRecord, JobRequest, JobState, Outcome
from sublet.domain.leases import LeaseKind
from sublet.domain.quotas import Quota
from sublet.domain.times import exact
from sublet.service import commands, story
from sublet.service.desk import Desk
from sublet.service.jobfile import Draft
from sublet.service.views import EventView

Look = Callable[[str], JobRecord | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimView:
    """A job that would be told to leave, and what that costs it at the most."""

    job: str
    name: str
    user: str
    gpu: int
    notice_seconds: int
    lost_gpu_seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """`outcome`: starts | reclaims | waits. The texts are whole sentences without their full stop."""

    headline: str
    outcome: str
    would: str
    can_be_taken: str
    restarts: str
    idle_resources: str | None
    victims: tuple[VictimView, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesView:
    """`starts`, `evicted`: jobs; `lost_gpu_seconds`: at the most; `events`: all that would follow, as sentences."""

    starts: tuple[str, ...]
    evicted: tuple[str, ...]
    lost_gpu_seconds: int
    events: tuple[EventView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supposed:
    """What is supposed to happen at once. `quotas`: the new promise by name and spec."""

    submits: tuple[JobRequest, ...] = ()
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()


def submission(desk: Desk, draft: Draft) -> PlanView:
    """The dry run. Refused as the submission would be."""
    request = commands.accepted(desk, draft)
    at_ms = desk.clock.now_ms()
    plan = desk.books.read(lambda core: core.plan(request, at_ms))
    look = _look(desk, request)
    size = f"{len(request.sizes)} x {request.sizes[0]} GPU {' or '.join(request.specs)}"
    lease = plan.lease
    return PlanView(
        headline=f"{request.name or 'job'} ({request.quota}, {size}, idle: {request.idle.value})",
        outcome=plan.outcome,
        would=_would(plan.outcome, story.on_what(lease) if lease else "", plan.notices, at_ms),
        can_be_taken=_can_be_taken(request, lease.kind if lease else None, desk),
        restarts=_restarts(request),
        idle_resources=None if lease is None else _kind(lease.kind),
        victims=tuple(_victim(notice, look, at_ms) for notice in plan.notices),
        reasons=() if lease else tuple(words(reason, request, at_ms) for reason in plan.reasons),
    )


def changes(core: Core, supposed: Supposed, quotas: Mapping[str, Quota], look: Look, at_ms: int) -> ChangesView:
    """Refused when a name in it is unknown. `quotas`: as they are now."""
    effects = core.what_if(events_of(core, supposed, quotas, at_ms), at_ms)
    drafts = {request.id: _drafted(request) for request in supposed.submits}
    entry = Entry(sequence=0, event=Tick(at_ms=at_ms), effects=effects)
    known: Look = lambda job: look(job) or drafts.get(job)  # noqa: E731
    return ChangesView(
        starts=tuple(story.named(e.job, known) for e in effects if isinstance(e, StartGang)),
        evicted=tuple(dict.fromkeys(story.named(job, known) for job in _evicted(effects))),
        lost_gpu_seconds=sum(e.lost_gpu_ms for e in effects if isinstance(e, GiveNotice)) // 1000,
        events=tuple(story.views(entry, known)),
    )


def events_of(core: Core, supposed: Supposed, quotas: Mapping[str, Quota], at_ms: int) -> tuple[Event, ...]:
    """In this order: nodes, quotas, stops, submissions."""
    nodes, jobs = {view.node.name for view in core.nodes()}, {record.request.id for record in core.jobs()}
    _known("node", (*supposed.lost, *supposed.drained, *supposed.returned), nodes)
    _known("job", supposed.stopped, jobs)
    events: list[Event] = [NodeLost(at_ms=at_ms, node=name) for name in supposed.lost]
    events += [NodeDrained(at_ms=at_ms, node=name) for name in supposed.drained]
    events += [NodeReturned(at_ms=at_ms, node=name, is_open=True) for name in supposed.returned]
    for name, nominal in supposed.quotas.items():
        before = quotas.get(name)
        if before is None:
            raise Refused(what=f"There is no quota {name}.", code="quota_unknown", field="quota")
        only = next(iter(before.nominal)) if before.nominal and len(before.nominal) == 1 else ""
        named = {spec or only: gpus for spec, gpus in nominal.items()}
        if "" in named:
            hint = f"Write {name}=GPU:SPEC."
            raise Refused(what=f"{name} is promised no single spec.", hint=hint, code="malformed", field="quota")
        events.append(QuotaSet(at_ms=at_ms, quota=replace(before, nominal={**(before.nominal or {}), **named})))
    events += [JobStopAsked(at_ms=at_ms, job=job) for job in supposed.stopped]
    return (*events, *(JobSubmitted(at_ms=at_ms, request=request) for request in supposed.submits))


def supposed_of_desk(desk: Desk, supposed: Supposed) -> ChangesView:
    """On the live books."""
    at_ms = desk.clock.now_ms()
    return desk.books.read(lambda core: changes(core, supposed, desk.feed.quotas, desk.feed.job, at_ms))


def _known(kind: str, names: Iterable[str], there: Iterable[str]) -> None:
    for name in names:
        if name not in there:
            raise Refused(what=f"There is no {kind} {name}.", code=f"{kind}_unknown", field=kind)


def _look(desk: Desk, request: JobRequest) -> Look:
    return lambda job: _drafted(request) if job == request.id else desk.feed.job(job)


def _drafted(request: JobRequest) -> JobRecord:
    return JobRecord(request=request, state=JobState.WAITING, submitted_ms=0)


def _evicted(effects: Iterable[Effect]) -> list[str]:
    lost = (Outcome.NODE_LOST, Outcome.PREEMPTED)
    return [
        effect.job
        for effect in effects
        if isinstance(effect, GiveNotice) or (isinstance(effect, ReleaseInstances) and effect.outcome in lost)
    ]


def _kind(kind: LeaseKind) -> str:
    return "in_quota" if kind is LeaseKind.GUARANTEED else "not_in_quota"


def _would(outcome: str, where: str, notices: tuple[GiveNotice, ...], at_ms: int) -> str:
    if outcome == "starts":
        return f"start now: {where}"
    if outcome == "reclaims":
        latest = max((notice.deadline_ms for notice in notices), default=at_ms)
        return f"take GPUs back from {_plural(len(notices), 'job')} and start within {exact(latest - at_ms)}"
    return "wait"


def _can_be_taken(request: JobRequest, kind: LeaseKind | None, desk: Desk) -> str:
    rules, asked = desk.feed.rules, request.grace_ms
    grace_ms = min(rules.grace_ms if asked is None else asked, rules.max_grace_ms)
    if kind is LeaseKind.IDLE:
        return f"at any time by an owner, with {exact(grace_ms)} of notice; then it waits and resumes"
    if kind is None and request.idle is not IdlePolicy.NEVER:
        return f"never in its own quota; on idle resources at any time, with {exact(grace_ms)} of notice"
    return "never, while it stays In Quota"


def _restarts(request: JobRequest) -> str:
    tolerance = request.fault_tolerance
    if not tolerance.enabled:
        return "none: fault tolerance is off"
    return f"{_plural(tolerance.max_restarts, 'failure')} since its last checkpoint; preemptions do not count"


def _plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _victim(notice: GiveNotice, look: Look, at_ms: int) -> VictimView:
    record = look(notice.job)
    request, lease = (record.request, record.lease) if record else (None, None)
    return VictimView(
        job=notice.job,
        name=request.name if request else "",
        user=request.user if request else "",
        gpu=sum(lease.gpus[one] for one in notice.instances) if lease else 0,
        notice_seconds=(notice.deadline_ms - at_ms) // 1000,
        lost_gpu_seconds=notice.lost_gpu_ms // 1000,
    )
