"""The demo's story as a table: time, who, sentence. Rule: every row comes from the server's log or its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Row = tuple[str, str, str]

SAID = {  # type of event: how its sentence begins
    "queued": "submits {name} ",
    "granted": "",
    "began": "",
    "notice": "NOTICE: ",
    "preempted": "",
    "requeued": "waits again, ",
    "upgraded": "",
    "succeeded": "succeeded: ",
    "failed": "FAILED: ",
    "stopped": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the borrower's own log tells: the steps at which it left and went on, and how many it did twice."""

    left_at: int
    resumed_at: int
    done_twice: int


def rows(
    events: Sequence[Mapping[str, Any]],
    people: Mapping[str, str],
    ben: Mapping[str, Any],
    ana: Mapping[str, Any],
    work: Work,
) -> list[Row]:
    """`people`: who submitted which job; `ben`, `ana`: the details of the borrower's and the owner's job."""
    told = [event for event in events if event["job"] in people and _is_told(event, events)]
    start = told[0]["time"] if told else ""
    table = [(f"{seconds(start, one['time']):.1f} s", people[one["job"]], _sentence(one)) for one in told]
    return [*table, *_figures(events, ben, ana, work)]


def _is_told(event: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> bool:
    """Of checkpoints only those that were saved because of a notice."""
    if event["type"] != "checkpoint":
        return event["type"] in SAID
    own = [one["type"] for one in events if one["job"] == event["job"] and one["sequence"] < event["sequence"]]
    return "notice" in own and "preempted" not in own


def _sentence(event: Mapping[str, Any]) -> str:
    text = str(event["text"])
    if event["type"] == "granted":
        text = text.replace(": ", " is granted ", 1)
    return SAID.get(event["type"], "").format(name=event["name"]) + text


def _figures(
    events: Sequence[Mapping[str, Any]], ben: Mapping[str, Any], ana: Mapping[str, Any], work: Work
) -> list[Row]:
    used = ben["attempts"][0]["notice_used_ms"]
    found = [] if used is None else [f"notice given: {ben['grace_seconds']} s, used: {used / 1000:.1f} s"]
    found.append(f"left at step {work.left_at}, resumed from step {work.resumed_at}: {work.done_twice} steps lost")
    began = next((e["time"] for e in events if e["job"] == ana["job"]["id"] and e["type"] == "began"), None)
    table = [("", "ben", text) for text in found]
    if began is not None:
        table.append(("", "ana", f"from her submit to her start: {seconds(ana['job']['submitted'], began):.1f} s"))
    return table


def seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
