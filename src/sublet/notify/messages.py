"""What of the log is told to webhooks: an entry becomes CloudEvents.

One rule: the same entry gives the same messages with the same ids, so that whoever gets one twice can tell.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sublet.domain.changes import Entry, attempts_ended
from sublet.domain.effects import EndJob, GiveNotice, ReleaseInstances, SuspectNode
from sublet.domain.events import Diagnosed
from sublet.domain.faults import Trouble
from sublet.domain.jobs import AttemptEnd, JobRecord, Outcome

KINDS = {
    "failed": "a job has failed for good",
    "notice": "a job was told to leave",
    "preempted": "an instance has left: Resource Preempted",
    "hang": "a job makes no progress, or does not end",
    "lost_progress": "an attempt ended, and work since its last checkpoint is lost",
    "suspected": "faults of machines met several jobs on a node",
    "test": "somebody tries the webhook out",
}
TYPE = "dev.sublet."
Look = Callable[[str], JobRecord | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`quota`: whose it is, empty = the whole cluster's. `asked`: webhooks that the job itself names for this kind."""

    id: str
    kind: str
    subject: str
    at_ms: int
    quota: str = ""
    asked: tuple[str, ...] = ()
    data: dict[str, Any]

    def body(self, source: str) -> str:
        """A CloudEvent of version 1.0 in JSON."""
        told = {
            "specversion": "1.0",
            "id": self.id,
            "source": source,
            "type": TYPE + self.kind,
            "subject": self.subject,
            "time": _time(self.at_ms),
            "datacontenttype": "application/json",
            "data": self.data,
        }
        return json.dumps(told, ensure_ascii=False, separators=(",", ":"))


def messages_of(entry: Entry, look: Look) -> list[Message]:
    """In the order in which it happened."""
    found = list(_of_event(entry, look))
    for place, effect in enumerate(entry.effects, 1):
        found += _of_effect(entry, place, effect, look)
    return found


def _of_event(entry: Entry, look: Look) -> Iterable[Message]:
    event = entry.event
    if isinstance(event, Diagnosed) and event.trouble != Trouble.SLOW and not event.is_over:
        said = {"attempt": event.attempt, "instance": event.instance, "evidence": event.evidence}
        yield _about(entry, 0, "hang", event.job, look, {**said, "trouble": event.trouble})


def _of_effect(entry: Entry, place: int, effect: object, look: Look) -> Iterable[Message]:
    match effect:
        case EndJob(outcome=Outcome.FAILED):
            counts = {"why": effect.why, "failures": effect.failures, "preemptions": effect.preemptions}
            yield _about(entry, place, "failed", effect.job, look, counts)
        case GiveNotice():
            said = {"attempt": effect.attempt, "claimant": effect.claimant, "reason": effect.reason}
            yield _about(entry, place, "notice", effect.job, look, {**said, "deadline": _time(effect.deadline_ms)})
        case ReleaseInstances():
            said = {"attempt": effect.attempt, "instances": list(effect.instances)}
            if effect.outcome is Outcome.PREEMPTED:
                yield _about(entry, place, "preempted", effect.job, look, said)
            end = _end_of(look(effect.job), effect.attempt) if effect in attempts_ended(entry) else None
            if end is not None and end.lost_gpu_ms > 0:
                lost = {"attempt": effect.attempt, "outcome": end.outcome.value, "gpu_seconds": end.lost_gpu_ms // 1000}
                yield _about(entry, place, "lost_progress", effect.job, look, lost)
        case SuspectNode() if effect.until_ms:
            data = {"node": effect.node, "until": _time(effect.until_ms), "why": effect.why}
            yield Message(id=_id(entry, place, "suspected"), kind="suspected", subject=effect.node,
                          at_ms=entry.event.at_ms, data=data)  # fmt: skip


def _end_of(record: JobRecord | None, attempt: int) -> AttemptEnd | None:
    return next((end for end in record.history if end.attempt == attempt), None) if record else None


def _about(entry: Entry, place: int, kind: str, job: str, look: Look, more: dict[str, Any]) -> Message:
    record = look(job)
    data: dict[str, Any] = {"job": job}
    if record is not None:
        request = record.request
        data |= {"name": request.name, "quota": request.quota, "user": request.user}
    return Message(
        id=_id(entry, place, kind),
        kind=kind,
        subject=job,
        at_ms=entry.event.at_ms,
        quota=record.request.quota if record else "",
        asked=_asked(record, kind),
        data={**data, **more},
    )


def _asked(record: JobRecord | None, kind: str) -> tuple[str, ...]:
    settings = json.loads(record.request.program.settings or "{}") if record else {}
    return tuple(one["to"] for one in settings.get("notify", ()) if kind in one["on"])


def _id(entry: Entry, place: int, kind: str) -> str:
    return f"{entry.sequence}-{place}-{kind}"


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
