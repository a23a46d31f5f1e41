"""What the demo claims, checked from files and the server's log. Rule: a claim that is not seen is false."""

import json
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


def same_result(interrupted: Path, uninterrupted: Path) -> list[Claim]:
    """Loss and parameters of two runs, bit for bit. The loss is kept as a hexadecimal float, so nothing is rounded."""
    first, second = (json.loads((path / "result.json").read_text("utf-8")) for path in (interrupted, uninterrupted))
    loss = float.fromhex(first["loss"])
    return [
        Claim(
            text="the final loss equals that of a run without interruption, bit for bit",
            holds=first["loss"] == second["loss"],
            evidence=f"{loss:.6f} ({first['loss']}) and {second['loss']}",
        ),
        Claim(
            text="so do the parameters",
            holds=first["parameters"] == second["parameters"],
            evidence=f"sha256 {first['parameters'][:16]}… and {second['parameters'][:16]}…",
        ),
    ]


def budget_untouched(job: Mapping[str, Any]) -> Claim:
    return Claim(
        text="the preemption spent nothing of the restart budget",
        holds=job["restarts"] == 0 and job["preemptions"] >= 1,
        evidence=f"restarts {job['restarts']}/{job['max_restarts']}, preemptions {job['preemptions']}",
    )


def submit_time_kept(events: Sequence[Mapping[str, Any]], attempts: int) -> Claim:
    """One `queued` for the job; all later waiting is told as `requeued`."""
    queued = [event for event in events if event["type"] == "queued"]
    again = [event for event in events if event["type"] == "requeued"]
    return Claim(
        text="it kept its place in the queue: its first submit time",
        holds=len(queued) == 1 and len(again) == attempts - 1,
        evidence=f"queued once, requeued {len(again)} time(s)",
    )


def one_owner_a_device(instances: Path) -> Claim:
    """From the engine's own files: when each instance held which devices, from its start until it was seen gone."""
    held: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)
    for directory in sorted(instances.glob("*/*/*")):
        start, end = directory / "start.json", directory / "end.json"
        if start.exists() and end.exists():
            begun_ms = (directory / "starting").stat().st_mtime_ns // 1_000_000
            told = json.loads(start.read_text("utf-8"))
            until_ms = json.loads(end.read_text("utf-8"))["ended_ms"]
            for device in told["devices"]:
                held[told["node"], device].append((begun_ms, until_ms, told["mark"]))
    shared = [
        f"{node} device {device}: {first[2]} and {second[2]}"
        for (node, device), times in held.items()
        for first, second in zip(sorted(times), sorted(times)[1:], strict=False)
        if second[0] < first[1]
    ]
    owners = sum(map(len, held.values()))
    return Claim(
        text="no GPU ever had two owners",
        holds=not shared and owners > 0,
        evidence="; ".join(shared) or f"{owners} ownerships of {len(held)} devices, none overlaps another",
    )
