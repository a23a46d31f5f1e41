"""The log as sentences: what happened, to which job, in the words of people.

One rule: a sentence is made from what was recorded, never from what is so by now.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sublet.core.explain import words
from sublet.domain import effects as eff
from sublet.domain import events as ev
from sublet.domain.changes import Entry
from sublet.domain.jobs import AttemptEnd, JobRecord, Outcome
from sublet.domain.leases import Lease, LeaseKind
from sublet.domain.reasons import Reason
from sublet.domain.times import exact
from sublet.service.views import EventView, time_of

Look = Callable[[str], JobRecord | None]  # a job by its id
Said = tuple[str, str, str]  # kind of event, what it is about (a job's, node's or quota's name), text

OUTCOMES = {
    Outcome.SUCCEEDED: "succeeded",
    Outcome.FAILED: "failed",
    Outcome.STOPPED: "stopped",
    Outcome.PREEMPTED: "Resource Preempted",
    Outcome.NODE_LOST: "its node was lost",
}


def views(entry: Entry, look: Look) -> Iterator[EventView]:
    """The sentences of one entry, in order; an entry of which there is nothing to tell has none."""
    at_ms = entry.event.at_ms
    for item in (entry.event, *entry.effects):
        tell = _TELLERS.get(type(item))
        if tell is None:
            continue
        kind, subject, text = tell(item, look, at_ms)
        record = look(subject) if hasattr(item, "job") else None
        yield EventView(
            sequence=entry.sequence,
            time=time_of(at_ms),
            type=kind,
            job=subject if hasattr(item, "job") else "",
            name=record.request.name if record else "",
            user=record.request.user if record else "",
            subject=subject,
            text=text,
        )


def named(job: str, look: Look) -> str:
    """`job_k2pe tts-big (omar)`"""
    record = look(job)
    if record is None:
        return job
    request = record.request
    return " ".join(part for part in (job, request.name, f"({request.user})" if request.user else "") if part)


def gpus(count: int) -> str:
    return f"{count:,} GPU" if count == 1 else f"{count:,} GPUs"


def on_what(lease: Lease) -> str:
    if lease.kind is LeaseKind.GUARANTEED:
        return f"{gpus(sum(lease.gpus))}, In Quota, on {', '.join(dict.fromkeys(lease.nodes))}"
    lenders = ", ".join(f"{name} {count}" for name, count in sorted(lease.lenders.items()))
    return f"{gpus(sum(lease.gpus))}, Not in Quota{f', idle in {lenders}' if lenders else ''}"


def _stop_asked(event: ev.JobStopAsked, _look: Look, _at_ms: int) -> Said:
    return "stop-asked", event.job, f"{event.user or 'somebody'} asked it to stop"


def _priority(event: ev.PrioritySet, _look: Look, _at_ms: int) -> Said:
    return "priority", event.job, f"{event.user or 'somebody'} asked for priority {event.priority}"


def _began(event: ev.InstanceBegan, _look: Look, _at_ms: int) -> Said:
    return "began", event.job, f"attempt {event.attempt}: instance {event.instance} runs"


def _ended(event: ev.InstanceEnded, _look: Look, _at_ms: int) -> Said:
    code = "an unknown exit code" if event.exit_code is None else f"exit code {event.exit_code}"
    said = [f"attempt {event.attempt}: instance {event.instance} ended with {code}", event.verdict, event.evidence]
    return "ended", event.job, " · ".join(part for part in said if part)


def _diagnosed(event: ev.Diagnosed, _look: Look, _at_ms: int) -> Said:
    kind = {"hang": "hangs", "exit_hang": "does not end", "slow": "is held up"}.get(event.trouble, event.trouble)
    is_so = f"no longer: {kind}" if event.is_over else kind
    return "diagnosed", event.job, " · ".join(p for p in (f"attempt {event.attempt}: {is_so}", event.evidence) if p)


def _restarted(effect: eff.RestartInstance, _look: Look, _at_ms: int) -> Said:
    text = f"attempt {effect.attempt}: instance {effect.instance} starts again, run {effect.run}"
    return "restarted", effect.job, text


def _checkpoint(event: ev.CheckpointSaved, _look: Look, _at_ms: int) -> Said:
    step = "" if event.step is None else f" at step {event.step:,}"
    return "checkpoint", event.job, f"attempt {event.attempt}: checkpoint saved{step}"


def _rules(_event: ev.RulesSet, _look: Look, _at_ms: int) -> Said:
    return "rules", "", "the rules were set"


def _queued(effect: eff.QueueJob, look: Look, _at_ms: int) -> Said:
    record = look(effect.job)
    size = f"{gpus(record.request.gpus)}, " if record else ""
    return "queued", effect.job, f"in {effect.quota}: {size}idle: {effect.idle}"


def _refused(effect: eff.RefuseJob, look: Look, at_ms: int) -> Said:
    return "refused", effect.job, _reason(effect.job, effect.reason, look, at_ms)


def _granted(effect: eff.StartGang, _look: Look, _at_ms: int) -> Said:
    return "granted", effect.job, f"attempt {effect.attempt}: {on_what(effect.lease)}"


def _notice(effect: eff.GiveNotice, look: Look, at_ms: int) -> Said:
    whom = f" for {named(effect.claimant, look)}" if effect.claimant else ""
    return "notice", effect.job, f"leaves within {exact(effect.deadline_ms - at_ms)}{whom} · {effect.reason}"


def _withdrawn(effect: eff.WithdrawNotice, _look: Look, _at_ms: int) -> Said:
    return "withdrawn", effect.job, f"attempt {effect.attempt}: the notice no longer holds"


def _stopping(effect: eff.StopInstances, _look: Look, _at_ms: int) -> Said:
    which = ", ".join(map(str, effect.instances))
    return "stopping", effect.job, f"attempt {effect.attempt}: instance {which} is stopped · {effect.reason}"


def _released(effect: eff.ReleaseInstances, look: Look, _at_ms: int) -> Said:
    text = f"attempt {effect.attempt}: {OUTCOMES[effect.outcome]}"
    record = look(effect.job)
    end = next((item for item in record.history if item.attempt == effect.attempt), None) if record else None
    if effect.outcome is Outcome.PREEMPTED and end is not None:
        text += _price(end, look)
    return ("preempted" if effect.outcome is Outcome.PREEMPTED else "released"), effect.job, text


def _price(end: AttemptEnd, look: Look) -> str:
    whom = f" for {named(end.claimant, look)}" if end.claimant else ""
    used = f" · left {exact(end.ended_ms - end.noticed_ms)} after the notice" if end.noticed_ms is not None else ""
    return f"{whom}{used} · lost {exact(end.lost_gpu_ms)} of GPU time"


def _upgraded(effect: eff.UpgradeLease, _look: Look, _at_ms: int) -> Said:
    return "upgraded", effect.job, "is In Quota now, where it stands"


def _downgraded(effect: eff.DowngradeLease, _look: Look, _at_ms: int) -> Said:
    return "downgraded", effect.job, f"is Not in Quota now · {effect.reason}"


def _waits(effect: eff.ShowReasons, look: Look, at_ms: int) -> Said:
    told = [_reason(effect.job, reason, look, at_ms) for reason in effect.reasons]
    return "waits", effect.job, " · ".join(told) or "for the next look"


def _reason(job: str, reason: Reason, look: Look, at_ms: int) -> str:
    record = look(job)
    return words(reason, record.request, at_ms) if record else reason.code.value.replace("_", " ")


def _requeued(effect: eff.RequeueJob, _look: Look, _at_ms: int) -> Said:
    cause = OUTCOMES[effect.cause]
    return "requeued", effect.job, f"with its first submit time {time_of(effect.submitted_ms)[11:19]} UTC · {cause}"


def _finished(effect: eff.EndJob, _look: Look, _at_ms: int) -> Said:
    counts = f"{effect.failures} failures, {effect.preemptions} preemptions"
    return effect.outcome.value, effect.job, f"{effect.why} · {counts}" if effect.why else counts


def _node(effect: eff.MarkNode, _look: Look, _at_ms: int) -> Said:
    return "node", effect.node, f"is {effect.state.value}{f' · {effect.why}' if effect.why else ''}"


def _suspect(effect: eff.SuspectNode, _look: Look, _at_ms: int) -> Said:
    if not effect.until_ms:
        return "trusted", effect.node, effect.why
    return "suspected", effect.node, f"until {time_of(effect.until_ms)[11:19]} UTC · {effect.why}"


def _quota(effect: eff.MarkQuota, _look: Look, _at_ms: int) -> Said:
    nominal = ", ".join(f"{count} {spec}" for spec, count in sorted(effect.nominal.items()))
    return "quota", effect.quota, f"is promised {nominal}" if nominal else "is promised nothing"


_TELLERS: Mapping[type, Callable[[Any, Look, int], Said]] = {
    ev.JobStopAsked: _stop_asked,
    ev.PrioritySet: _priority,
    ev.InstanceBegan: _began,
    ev.InstanceEnded: _ended,
    ev.CheckpointSaved: _checkpoint,
    ev.Diagnosed: _diagnosed,
    eff.RestartInstance: _restarted,
    ev.RulesSet: _rules,
    eff.QueueJob: _queued,
    eff.RefuseJob: _refused,
    eff.StartGang: _granted,
    eff.GiveNotice: _notice,
    eff.WithdrawNotice: _withdrawn,
    eff.StopInstances: _stopping,
    eff.ReleaseInstances: _released,
    eff.UpgradeLease: _upgraded,
    eff.DowngradeLease: _downgraded,
    eff.ShowReasons: _waits,
    eff.RequeueJob: _requeued,
    eff.EndJob: _finished,
    eff.MarkNode: _node,
    eff.SuspectNode: _suspect,
    eff.MarkQuota: _quota,
}
