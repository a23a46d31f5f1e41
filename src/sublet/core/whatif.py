"""What would happen: events tried on the real state by the code that would decide, and taken back.

Rule: the answer equals what then happens, if it happens at that instant and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sublet.core.state import JobBook, State
from sublet.core.trial import trial
from sublet.domain.effects import Effect, GiveNotice, RefuseJob, ShowReasons, StartGang
from sublet.domain.events import Event, InstanceEnded, JobStopAsked, JobSubmitted, NodeReturned, QuotaSet, Tick
from sublet.domain.jobs import IdlePolicy, JobRequest
from sublet.domain.leases import Lease, LeaseKind
from sublet.domain.reasons import Reason, ReasonCode

MOST_TRIALS = 24  # for one job
MOST_LINES = 5

Handle = Callable[[Event], tuple[Effect, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a submission would do at this instant. `outcome`: starts | reclaims | waits | refused.

    `notices`: who would be told to leave, with the work each would lose. `effects`: all that would follow.
    """

    job: str
    at_ms: int
    outcome: str
    lease: Lease | None = None
    notices: tuple[GiveNotice, ...] = ()
    reasons: tuple[Reason, ...] = ()
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Something that would set a waiting job going, in words and as the events that were tried."""

    text: str
    events: tuple[Event, ...]


def effects_of(state: State, handle: Handle, events: Sequence[Event], at_ms: int) -> tuple[Effect, ...]:
    """All that would follow if these events happened at `at_ms`, and nothing else before."""
    with trial(state):
        effects: list[Effect] = []
        for event in (*events, Tick(at_ms=at_ms)):
            effects += handle(replace(event, at_ms=at_ms))
        return tuple(effects)


def plan(state: State, handle: Handle, request: JobRequest, at_ms: int) -> Plan:
    """The dry run of a submission."""
    effects = effects_of(state, handle, [JobSubmitted(at_ms=at_ms, request=request)], at_ms)
    mine = [effect for effect in effects if getattr(effect, "job", None) == request.id]
    lease = next((effect.lease for effect in mine if isinstance(effect, StartGang)), None)
    notices = tuple(e for e in effects if isinstance(e, GiveNotice) and e.claimant == request.id)
    reasons = next((effect.reasons for effect in reversed(mine) if isinstance(effect, ShowReasons)), ())
    outcome = "starts" if lease else "waits"
    if any(reason.code is ReasonCode.RECLAIMING for reason in reasons):
        outcome = "reclaims"
    refusal = next((effect.reason for effect in mine if isinstance(effect, RefuseJob)), None)
    if refusal is not None:
        outcome, reasons = "refused", (refusal,)
    return Plan(
        job=request.id, at_ms=at_ms, outcome=outcome, lease=lease, notices=notices, reasons=reasons, effects=effects
    )


# ---- advice


def advice(state: State, handle: Handle, job: JobBook) -> tuple[Advice, ...]:
    """What would set the waiting job going; each was tried, and all that did not work is left out."""
    found: list[Advice] = []
    for one in _ideas(state, job)[:MOST_TRIALS]:
        at_ms = max((event.at_ms for event in one.events), default=state.now_ms)
        if len(found) < MOST_LINES and sets_going(effects_of(state, handle, one.events, at_ms), job.id):
            found.append(one)
    return tuple(found)


def sets_going(effects: Sequence[Effect], job_id: str) -> bool:
    """Does the job start, or does somebody leave for it?"""
    for effect in effects:
        if not isinstance(effect, StartGang | ShowReasons) or effect.job.removesuffix(DRAFT) != job_id:
            continue
        if isinstance(effect, StartGang) or effect.reasons[0].code is ReasonCode.RECLAIMING:
            return True
    return False


DRAFT = "+"  # the id of a changed copy of the job ends in this


def _ideas(state: State, job: JobBook) -> list[Advice]:
    """What might help, the likeliest first."""
    if job.claim is not None:
        return _when_victims_left(state, job)
    return [*_when_time_passes(state, job), *_when_nodes_return(state, job), *_when_jobs_end(state, job),
            *_when_promised_more(state, job), *_when_asked_otherwise(state, job)]  # fmt: skip


def _ends(state: State, job: JobBook) -> tuple[Event, ...]:
    return tuple(
        InstanceEnded(
            at_ms=state.now_ms, job=job.id, attempt=job.attempt, instance=instance, exit_code=0, finished=True
        )
        for instance in job.live
    )


def _named(job: JobBook) -> str:
    name = f" {job.request.name}" if job.request.name else ""
    return f"{job.id}{name} ({job.held} GPU)"


def _when_victims_left(state: State, job: JobBook) -> list[Advice]:
    victims = [one for one in state.noticed.values() if any(n.claimant == job.id for n in one.notices)]
    victims.sort(key=lambda one: one.key)
    if not victims:
        leaving = [one for one in state.jobs.values() if one.leaving and one.spec in job.request.specs]
        victims = sorted(leaving, key=lambda one: one.key)
    events = tuple(event for one in victims for event in _ends(state, one))
    who = " and ".join(_named(one) for one in victims[:4])
    more = f" and {len(victims) - 4} more" if len(victims) > 4 else ""
    return [Advice(text=f"{who}{more} have left", events=events)] if victims else []


def _when_time_passes(state: State, job: JobBook) -> list[Advice]:
    times = [job.retry_ms, job.eligible_ms, job.submitted_ms + state.rules.reclaim_delay_ms]
    later = sorted({at_ms for at_ms in times if at_ms > state.now_ms})
    return [
        Advice(text=f"{(at_ms - state.now_ms + 999) // 1000} s pass", events=(Tick(at_ms=at_ms),)) for at_ms in later
    ]


def _when_nodes_return(state: State, job: JobBook) -> list[Advice]:
    away = [node for spec in job.request.specs for node in state.pool_of(job, spec).away()]
    if job.request.nodes is not None:
        away = [node for node in away if node.name in job.request.nodes]
    names = sorted(node.name for node in away)
    back = [NodeReturned(at_ms=state.now_ms, node=name, is_open=True) for name in names]
    found = [Advice(text=f"node {one.node} is back", events=(one,)) for one in back[:4]]
    if len(names) > 1:
        found.append(Advice(text=f"all {len(names)} nodes that are away are back", events=tuple(back)))
    return found


def _when_jobs_end(state: State, job: JobBook) -> list[Advice]:
    """One of its own quota's jobs, the smallest that is enough first; then several together."""
    pools = {(job.quota.quota.tenant, spec) for spec in job.request.specs}
    running = [
        one
        for one in state.jobs.values()
        if one.live and not one.leaving and (one.quota.quota.tenant, one.spec) in pools
    ]
    inside = [one for one in running if one.quota.root is job.quota.root and one.kind is LeaseKind.GUARANTEED]
    found: list[Advice] = []
    for group in (inside, [one for one in running if one not in inside]):
        group.sort(key=lambda one: (one.held, one.granted_ms, one.id))
        large = [one for one in group if one.held >= job.request.least_gpus][:3]
        found += [Advice(text=f"{_named(one)} ends", events=_ends(state, one)) for one in large]
        together: list[JobBook] = []
        for one in reversed(group):
            together.append(one)
            if len(together) > 1 and sum(some.held for some in together) >= job.request.least_gpus:
                events = tuple(event for some in together for event in _ends(state, some))
                who = " and ".join(_named(some) for some in together[:4])
                more = f" and {len(together) - 4} more" if len(together) > 4 else ""
                found.append(Advice(text=f"{who}{more} end", events=events))
                break
    ahead = [(key, one) for cls in job.quota.classes.values() if not cls.is_upgrade for key, one in cls.jobs[:2]]
    for key, one in sorted(ahead, key=lambda entry: entry[0])[:2]:
        if key < job.key:
            stop = JobStopAsked(at_ms=state.now_ms, job=one.id)
            found.append(Advice(text=f"{one.id} ahead of it is stopped", events=(stop,)))
    return found


def _when_promised_more(state: State, job: JobBook) -> list[Advice]:
    """Its quota, and those above it where they are tight, are promised what is missing."""
    spec, need = job.request.specs[0], job.request.least_gpus
    events: list[Event] = []
    text = ""
    for level in job.quota.path:
        short = need - (level.nominal.get(spec, 0) - level.used.get(spec, 0) - level.claimed.get(spec, 0))
        if short <= 0 or level.quota.nominal is None or level.closed:
            continue
        nominal = {**level.quota.nominal, spec: level.quota.nominal.get(spec, 0) + short}
        events.append(QuotaSet(at_ms=state.now_ms, quota=replace(level.quota, nominal=nominal)))
        text = f"{level.name} is promised {nominal[spec]} GPU of {spec} instead of {nominal[spec] - short}"
    return [Advice(text=text, events=tuple(events))] if events else []


def _when_asked_otherwise(state: State, job: JobBook) -> list[Advice]:
    """A smaller job, or one that also takes idle capacity; tried as a new job in the place of this one."""
    request = job.request
    drafts: list[tuple[str, JobRequest]] = []
    if request.idle is IdlePolicy.NEVER:
        drafts.append(("it is submitted with idle: acceptable", replace(request, idle=IdlePolicy.ACCEPTABLE)))
    each, count = max(request.sizes), len(request.sizes)
    for fewer in range(count - 1, 0, -1) if count <= 4 else (count // 2, 1):
        drafts.append(
            (f"it asks for {fewer} x {each} GPU", replace(request, sizes=(each,) * fewer, min_instances=None))
        )
    if each > 1:
        for smaller in sorted({each // 2, 1}, reverse=True):
            sizes = (smaller,) * count
            drafts.append((f"it asks for {count} x {smaller} GPU", replace(request, sizes=sizes, min_instances=None)))
    stop = JobStopAsked(at_ms=state.now_ms, job=job.id)
    return [
        Advice(
            text=text, events=(stop, JobSubmitted(at_ms=state.now_ms, request=replace(draft, id=request.id + DRAFT)))
        )
        for text, draft in drafts
    ]
