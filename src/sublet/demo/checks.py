"""What the demo claims, checked from files and the server's log. Rule: a claim that is not seen is false."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    text: str
    holds: bool
    evidence: str


def both_succeeded(ben: Mapping[str, Any], ana: Mapping[str, Any]) -> Claim:
    ended = [ben["job"]["state"], ana["job"]["state"]]
    text = "both trainings came to their end"
    return Claim(text=text, holds=ended == ["succeeded"] * 2, evidence=", ".join(ended))


def lent_twice(ben: Mapping[str, Any]) -> Claim:
    attempts = [(one["outcome"], one["idle_resources"]) for one in ben["attempts"]]
    said = [f"attempt {n} {outcome}, {kind.replace('_', ' ')}" for n, (outcome, kind) in enumerate(attempts, 1)]
    return Claim(
        text="ben's job ran Not in Quota, was preempted once and resumed as attempt 2",
        holds=attempts == [("preempted", "not_in_quota"), ("succeeded", "not_in_quota")],
        evidence="; ".join(said),
    )


def same_result(interrupted: Path, uninterrupted: Path) -> list[Claim]:
    """Loss and parameters of two runs, bit for bit. The loss is kept as a hexadecimal float, so nothing is rounded."""
    first, second = _result(interrupted), _result(uninterrupted)
    loss = f"{float.fromhex(first['loss']):.6f} ({first['loss']})" if first else "none"
    return [
        Claim(
            text="its final loss equals that of a run without interruption, bit for bit",
            holds=bool(first) and first.get("loss") == second.get("loss"),
            evidence=f"{loss} and {second.get('loss', 'none')}",
        ),
        Claim(
            text="so do all its parameters",
            holds=bool(first) and first.get("parameters") == second.get("parameters"),
            evidence=f"sha256 {first.get('parameters', 'none')[:16]}… and {second.get('parameters', 'none')[:16]}…",
        ),
    ]


def _result(directory: Path) -> dict[str, str]:
    """Nothing when the run did not come to its end."""
    path = directory / "result.json"
    found: dict[str, str] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def budget_untouched(job: Mapping[str, Any]) -> Claim:
    return Claim(
        text="the preemption spent nothing of the restart budget",
        holds=job["restarts"] == 0 and job["preemptions"] == 1,
        evidence=f"restarts {job['restarts']}/{job['max_restarts']}, preemptions {job['preemptions']}",
    )


def submit_time_kept(events: Sequence[Mapping[str, Any]], submitted: str) -> Claim:
    """`events`: of the one job. It is queued once; all later waiting is told as `requeued`, with that time."""
    queued = [event["time"] for event in events if event["type"] == "queued"]
    again = [event for event in events if event["type"] == "requeued"]
    return Claim(
        text="it kept its place in the queue: its first submit time",
        holds=queued == [submitted] and len(again) == 1 and submitted[11:19] in again[0]["text"],
        evidence=f"submitted {submitted[11:23]}, requeued {len(again)} time(s)",
    )


def never_more_than_there_is(events: Sequence[Mapping[str, Any]], gpus: Mapping[str, int], total: int) -> Claim:
    """From the server's log alone: what was granted and not yet released, in the order of the log."""
    held: dict[str, int] = {}
    most, twice = 0, False
    for event in events:
        job = event["job"]
        if event["type"] == "granted":
            twice = twice or job in held
            held[job] = gpus[job]
            most = max(most, sum(held.values()))
        elif event["type"] in ("preempted", "released"):
            held.pop(job, None)
    return Claim(
        text="the server's log never grants a GPU that is not released",
        holds=0 < most <= total and not held and not twice,
        evidence=f"at most {most} of {total} GPUs at once",
    )


def one_owner_a_device(instances: Path) -> Claim:
    """From the engine's own files: when each instance held which devices, from its start until it was seen gone."""
    held: dict[tuple[str, int], list[tuple[float, float, str]]] = defaultdict(list)
    for directory in sorted(path.parent for path in instances.glob("*/*/*/start.json")):
        told = json.loads((directory / "start.json").read_text("utf-8"))
        for device in told["devices"]:
            held[told["node"], device].append((*_times_ms(directory), told["mark"]))
    shared = [
        f"{node} device {device}: {first[2]} and {second[2]}"
        for (node, device), times in sorted(held.items())
        for first, second in zip(sorted(times), sorted(times)[1:], strict=False)
        if second[0] < first[1]
    ]
    owners = sum(map(len, held.values()))
    return Claim(
        text="no GPU ever had two owners",
        holds=not shared and owners > len(held) > 0,
        evidence="; ".join(shared) or f"{owners} ownerships of {len(held)} devices, none overlaps another",
    )


def _times_ms(directory: Path) -> tuple[float, float]:
    """What never began held nothing; what has not ended holds on."""
    starting, end = directory / "starting", directory / "end.json"
    until = json.loads(end.read_text("utf-8"))["ended_ms"] if end.exists() else math.inf
    return (starting.stat().st_mtime_ns / 1e6 if starting.exists() else until), until
