"""A log as a story: one JSON object a line, in the words of the scenario format. Rule: nothing is added or left out."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from sublet.domain import effects
from sublet.domain.changes import Entry
from sublet.domain.events import NodeJoined
from sublet.domain.reasons import Reason


def lines(entries: Iterable[Entry]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry.event, NodeJoined):
            continue  # the nodes of a scenario are there, and up, from the start
        for effect in entry.effects:
            told = tell(effect)
            if told is not None:
                yield json.dumps({"at": entry.event.at_ms, **told}, separators=(",", ":"))


def tell(effect: effects.Effect) -> dict[str, Any] | None:
    """The fields of the line, without its time; None for a command that is no line of the story."""
    match effect:
        case effects.QueueJob():
            return {"event": "submitted", "job": effect.job, "quota": effect.quota, "idle": effect.idle}
        case effects.RefuseJob():
            return {"event": "refused", "job": effect.job, "reason": effect.reason.code}
        case effects.StartGang():
            return _granted(effect)
        case effects.GiveNotice():
            return _of_attempt("noticed", effect) | {
                "reason": effect.reason,
                "by": effect.claimant,
                "instances": list(effect.instances),
                "deadline": effect.deadline_ms,
                "lost_gpu_ms": effect.lost_gpu_ms,
            }
        case effects.WithdrawNotice():
            return _of_attempt("withdrawn", effect) | {"instances": list(effect.instances)}
        case effects.ReleaseInstances():
            return _of_attempt("released", effect) | {
                "instances": list(effect.instances),
                "outcome": effect.outcome,
            }
        case effects.UpgradeLease():
            return _of_attempt("upgraded", effect)
        case effects.DowngradeLease():
            return _of_attempt("downgraded", effect) | {"reason": effect.reason}
        case effects.ShowReasons():
            return {"event": "waiting", "job": effect.job, "reasons": [_reason(one) for one in effect.reasons]}
        case effects.RequeueJob():
            return {"event": "requeued", "job": effect.job, "submitted": effect.submitted_ms}
        case effects.EndJob():
            counts = {"failures": effect.failures, "preemptions": effect.preemptions}
            return {"event": "ended", "job": effect.job, "outcome": effect.outcome, **counts}
        case effects.MarkNode():
            return {"event": "node", "node": effect.node, "state": effect.state}
        case effects.MarkQuota():
            return {"event": "quota", "quota": effect.quota, "gpu": dict(sorted(effect.nominal.items()))}
        case effects.StopInstances() | effects.RestartInstance() | effects.SuspectNode():
            return None


def _of_attempt(event: str, effect: Any) -> dict[str, Any]:
    return {"event": event, "job": effect.job, "attempt": effect.attempt}


def _granted(effect: effects.StartGang) -> dict[str, Any]:
    lease = effect.lease
    told = _of_attempt("granted", effect) | {
        "lease": lease.kind,
        "spec": lease.spec,
        "nodes": list(lease.nodes),
        "gpus": list(lease.gpus),
    }
    return told | ({"lenders": dict(sorted(lease.lenders.items()))} if lease.kind == "idle" else {})


def _reason(reason: Reason) -> dict[str, Any]:
    subjects = {"subjects": list(reason.subjects)} if reason.subjects else {}
    return {"code": reason.code, **dict(sorted(reason.numbers.items())), **subjects}
