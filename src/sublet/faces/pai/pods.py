"""Instances as pods: the present ones, and what became of those of earlier attempts.

One rule: while a job stands on idle resources the node of its pods is not said.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from sublet.domain.errors import Refused
from sublet.domain.ids import InstanceRef
from sublet.domain.jobs import AttemptEnd, JobRecord, JobState, Outcome
from sublet.domain.leases import LeaseKind
from sublet.faces.pai import names
from sublet.faces.pai.call import given, time_of
from sublet.faces.pai.orders import Role, kept_body, roles_of

NORMAL, EVICTED, OVERSOLD = "Normal", "Evicted", "Oversold"  # the last is our choice: PAI's word is not public
SUB_STATUS = {Outcome.PREEMPTED: EVICTED}
STATUSES = {Outcome.SUCCEEDED: "Succeeded"}
REASONS = {Outcome.PREEMPTED: "Resource Preempted", Outcome.NODE_LOST: "Node Lost", Outcome.STOPPED: "Stopped"}


def roles(record: JobRecord) -> tuple[Role, ...]:
    body = kept_body(record.request)
    specs = body.get("JobSpecs") or [{"Type": "Worker", "PodCount": len(record.request.sizes)}]
    return roles_of(specs, str(body.get("JobType") or "PyTorchJob"))


def pods(record: JobRecord, shown_id: str, now_ms: int) -> list[dict[str, Any]]:
    """One for each instance, once the job has started for the first time."""
    if not record.attempt:
        return []
    return [
        _pod(record, names.pod_id(shown_id, role.name, number), role.name, role.first + number, now_ms)
        for role in roles(record)
        for number in range(role.count)
    ]


def instance_of(record: JobRecord, shown_id: str, pod: str) -> int:
    """Refused with PodNotFound. A job of one instance answers to `-master-0` and to `-worker-0`."""
    found = names.pod_of(pod)
    if found is not None and pod.startswith(f"{shown_id}-"):
        name, number = found
        for role in roles(record):
            if role.name == name and number < role.count:
                return role.first + number
        if len(record.request.sizes) == 1 and number == 0 and name in ("master", "worker"):
            return 0
    raise Refused(what=f"There is no pod {pod}.", why=f"It is none of {shown_id}.", code="PodNotFound", field="PodId")


def uid(record: JobRecord, attempt: int, instance: int) -> str:
    ref = InstanceRef(job=record.request.id, attempt=attempt, instance=instance)
    text = hashlib.blake2b(str(ref).encode(), digest_size=16).hexdigest()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def attempt_of(record: JobRecord, instance: int, pod_uid: str) -> int:
    """The attempt that this uid belongs to; without one the latest."""
    if not pod_uid:
        return record.attempt
    for attempt in range(record.attempt, -1, -1):
        if uid(record, attempt, instance) == pod_uid:
            return attempt
    raise Refused(what=f"There is no pod with the uid {pod_uid}.", code="PodNotFound", field="PodUid")


def _pod(record: JobRecord, pod: str, role: str, instance: int, now_ms: int) -> dict[str, Any]:
    over = [_past(record, end, pod, role, instance) for end in record.history if instance < len(end.nodes)]
    if record.lease is not None and instance < len(record.lease.nodes):
        return {**_present(record, pod, role, instance, now_ms), "HistoryPods": over}
    if record.state.is_final and over:
        return {**over[-1], "HistoryPods": over[:-1]}
    waiting = {"PodId": pod, "PodUid": "", "Type": role, "Status": "Pending", "SubStatus": NORMAL}
    return {**waiting, "HistoryPods": over}


def _present(record: JobRecord, pod: str, role: str, instance: int, now_ms: int) -> dict[str, Any]:
    lease = record.lease
    assert lease is not None
    is_idle = lease.kind is LeaseKind.IDLE
    is_told = any(instance in notice.instances for notice in record.notices)
    started_ms = record.begun_ms
    return given(
        {
            "PodId": pod,
            "PodUid": uid(record, record.attempt, instance),
            "Type": role,
            "Status": "Pending" if started_ms is None else "Running" if instance in record.live else "Failed",
            "SubStatus": EVICTED if is_told else NORMAL,
            "ResourceType": OVERSOLD if is_idle else NORMAL,
            "NodeName": None if is_idle else lease.nodes[instance],
            "GmtCreateTime": time_of(lease.granted_ms),
            "GmtStartTime": time_of(started_ms),
            "Duration": 0 if started_ms is None else max(0, now_ms - started_ms) // 1000,
        }
    )


def _past(record: JobRecord, end: AttemptEnd, pod: str, role: str, instance: int) -> dict[str, Any]:
    is_idle = end.lease_kind == LeaseKind.IDLE
    detail = {"Reason": REASONS.get(end.outcome, ""), "Message": end.evidence, "ExitCode": end.exit_code}
    return given(
        {
            "PodId": pod,
            "PodUid": uid(record, end.attempt, instance),
            "Type": role,
            "Status": STATUSES.get(end.outcome, "Failed"),
            "SubStatus": SUB_STATUS.get(end.outcome, NORMAL),
            "StatusDetail": {key: value for key, value in detail.items() if value not in (None, "")},
            "ResourceType": OVERSOLD if is_idle else NORMAL,
            "NodeName": None if is_idle else end.nodes[instance],
            "GmtCreateTime": time_of(end.granted_ms),
            "GmtStartTime": time_of(end.granted_ms),
            "GmtFinishTime": time_of(end.ended_ms),
            "Duration": (end.ended_ms - end.granted_ms) // 1000,
        }
    )


def replica_statuses(record: JobRecord) -> list[Mapping[str, Any]]:
    """By role: how many instances run, have ended well or badly."""
    found: list[Mapping[str, Any]] = []
    for role in roles(record):
        own = range(role.first, role.first + role.count)
        live = sum(1 for one in own if one in record.live) if record.begun_ms is not None else 0
        done = role.count if record.state is JobState.SUCCEEDED else 0
        bad = role.count if record.state is JobState.FAILED else 0
        found.append({"Type": role.name.capitalize(), "Active": live, "Succeeded": done, "Failed": bad})
    return found
