"""The statuses that a job went through, as PAI names them, read from the log.

One rule: what is shown of the past is what was recorded. A notice begins `Restarting` (or `Stopping`, when the job will
not come back): what PAI shows between the warning and the queue is not public.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sublet.domain import effects as eff
from sublet.domain import events as ev
from sublet.domain.changes import Entry
from sublet.domain.jobs import JobRecord, JobState, Outcome
from sublet.faces.pai import names
from sublet.faces.pai.orders import kept_body
from sublet.service.desk import Desk
from sublet.service.views import shown_state

FINAL = {JobState.SUCCEEDED: "Succeeded", JobState.FAILED: "Failed", JobState.STOPPED: "Stopped"}
BATCH = 2_000
MOST = 20_000  # entries of one job that are read


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`end_ms`: None while it lasts."""

    status: str
    start_ms: int
    end_ms: int | None = None
    code: str = ""
    message: str = ""


def status_of(record: JobRecord) -> str:
    """The status of the moment."""
    shown = shown_state(record)
    if shown == "leaving":
        return "Restarting" if record.request.fault_tolerance.enabled else "Stopping"
    known = {"waiting": "Queuing", "starting": "EnvPreparing", "running": "Running", "stopping": "Stopping"}
    return known.get(shown) or FINAL[record.state]


def entries_of(desk: Desk, job: str) -> list[Entry]:
    found: list[Entry] = []
    while len(found) < MOST:
        more = desk.feed.entries(after=found[-1].sequence if found else 0, limit=BATCH, job=job)
        found += more
        if len(more) < BATCH:
            break
    return found


def stages(desk: Desk, record: JobRecord) -> list[Stage]:
    """In order; a status that is said again is one stage, and one that no time was spent in is left out."""
    found: list[Stage] = []
    for at_ms, status, code, message in _turns(entries_of(desk, record.request.id), record):
        if found and found[-1].status == status:
            continue
        if found:
            found[-1] = _ended(found[-1], at_ms)
        found.append(Stage(status=status, start_ms=at_ms, code=code, message=message))
    return found


def _ended(stage: Stage, at_ms: int) -> Stage:
    return Stage(status=stage.status, start_ms=stage.start_ms, end_ms=at_ms, code=stage.code, message=stage.message)


def _turns(entries: Sequence[Entry], record: JobRecord) -> Iterator[tuple[int, str, str, str]]:
    """When, the status, and why."""
    job, began, needed = record.request.id, set[int](), set[int]()
    returns = record.request.fault_tolerance.enabled
    for entry in entries:
        at_ms = entry.event.at_ms
        if isinstance(entry.event, ev.JobSubmitted) and entry.event.request.id == job:
            yield at_ms, "Creating", "JobCreated", "The job was accepted."
        if isinstance(entry.event, ev.JobStopAsked) and entry.event.job == job:
            yield at_ms, "Stopping", "JobStoppedByUser", "Job is stopped by user."
        if isinstance(entry.event, ev.InstanceBegan) and entry.event.job == job:
            began.add(entry.event.instance)
            if needed and began >= needed:
                yield at_ms, "Running", "JobRunning", "All instances run."
        for effect in entry.effects:
            if getattr(effect, "job", "") != job:
                continue
            if isinstance(effect, eff.StartGang):
                began, needed = set(), set(effect.instances)
            found = _turn(effect, record, returns)
            if found is not None:
                yield (at_ms, *found)


def _turn(effect: eff.Effect, record: JobRecord, returns: bool) -> tuple[str, str, str] | None:
    match effect:
        case eff.QueueJob():
            return "Queuing", "JobEnqueued", "The job waits for its resources."
        case eff.StartGang():
            return "EnvPreparing", "JobDequeued", "The job has its resources."
        case eff.GiveNotice():
            what = "Restarting" if returns else "Stopping"
            return what, "ResourcePreempted", "Resource Preempted: the owner of the resources takes them back."
        case eff.WithdrawNotice():
            return "Running", "JobRunning", "The resources were not needed after all."
        case eff.RequeueJob():
            return "Queuing", "JobEnqueued", "Rollback to queue"
        case eff.StopInstances() if effect.reason == "gang":
            return ("Restarting" if returns else "Stopping"), "JobRestarting", "An instance ended; so do the others."
        case eff.EndJob():
            return final_reason(record, effect.outcome)
        case _:
            return None


def final_reason(record: JobRecord, outcome: Outcome) -> tuple[str, str, str]:
    """Status, code and message of a job that is over."""
    status = outcome.value.capitalize()
    if outcome is Outcome.SUCCEEDED:
        kind = kept_body(record.request).get("JobType") or "Job"
        return status, "JobSucceeded", f"{kind} {names.dlc_id(record.request.id)} is successfully completed."
    if outcome is Outcome.STOPPED and record.stop_asked:
        return status, "JobStoppedByUser", "Job is stopped by user."
    end = record.history[-1] if record.history else None
    if outcome is Outcome.STOPPED and end is not None and end.outcome is Outcome.PREEMPTED:
        return status, "ResourcePreempted", "Resource Preempted, and automatic fault tolerance is off."
    evidence = f" {end.evidence}" if end and end.evidence else ""
    return status, "JobFailed" if outcome is Outcome.FAILED else "JobStopped", f"{record.end_why}{evidence}".strip()


def times(found: Sequence[Stage]) -> Mapping[str, int]:
    """When each status was entered first."""
    known: dict[str, int] = {}
    for stage in found:
        known.setdefault(stage.status, stage.start_ms)
    return known
