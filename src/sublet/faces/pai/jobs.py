"""Jobs as PAI's clients see them: GetJob's flat answer, and an item of ListJobs.

One rule: what the client sent and Sublet gives no meaning to comes back as it was sent.
"""

from collections.abc import Mapping
from typing import Any

from sublet.domain.jobs import JobRecord, JobState, Outcome
from sublet.domain.leases import LeaseKind
from sublet.domain.quotas import Scope
from sublet.faces.pai import history, names, pods
from sublet.faces.pai.book import JOB, Book
from sublet.faces.pai.call import given, time_of
from sublet.faces.pai.history import Stage
from sublet.faces.pai.orders import LABEL, OVERSOLD, kept_body
from sublet.service import queries
from sublet.service.desk import Desk
from sublet.service.views import restart_views

OURS = {"DLC_JOB_ID", "PAI_WORKSPACE_ID", "REGION"}  # variables that every job gets
RESOURCE_TYPES = {Scope.LINGJUN: "Lingjun", Scope.GENERAL: "ECS"}


def uses_idle(record: JobRecord) -> bool:
    """Whether it stands on idle resources now; of a job that holds none, whether its last attempt did."""
    if record.lease is not None:
        return record.lease.kind is LeaseKind.IDLE
    return bool(record.history) and record.history[-1].lease_kind == LeaseKind.IDLE


def settings_of(record: JobRecord) -> dict[str, Any]:
    """As they came, completed by what holds."""
    settings = dict(kept_body(record.request).get("Settings") or {})
    tags = {key: value for key, value in record.request.labels.items() if key != LABEL}
    settings |= {"Tags": tags} if tags else {}
    return {"OversoldType": OVERSOLD[record.request.idle], **_without_nothing(settings)}


def _without_nothing(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None and value != ""}


def detail(desk: Desk, book: Book, record: JobRecord) -> dict[str, Any]:
    """The body of GetJob."""
    now_ms, shown_id = desk.clock.now_ms(), names.dlc_id(record.request.id)
    found = history.stages(desk, record)
    return given(
        {
            **_common(desk, book, record, found),
            "CustomEnvs": kept_body(record.request).get("CustomEnvs"),
            "JobReplicaStatuses": pods.replica_statuses(record),
            "Pods": pods.pods(record, shown_id, now_ms),
            "RequestCPU": record.request.cpu_milli * len(record.request.sizes) // 1000,
            "RequestGPU": float(record.request.gpus),
            "RequestMemory": record.request.memory_bytes * len(record.request.sizes) / 2**30,
            "RestartRecord": restart_records(record, shown_id),
            "StatusHistory": [_stage(stage) for stage in found],
            "TenantId": record.request.tenant,
        }
    )


def item(desk: Desk, book: Book, record: JobRecord, found: list[Stage]) -> dict[str, Any]:
    """One of ListJobs. `found`: its stages, or none when they are not worth reading."""
    request = record.request
    nodes = () if record.lease is None or record.lease.kind is LeaseKind.IDLE else record.lease.nodes
    return given(
        {
            **_common(desk, book, record, found),
            "StatusHistory": [_stage(stage) for stage in found],
            "RequestCPU": str(request.cpu_milli * len(request.sizes) // 1000),
            "RequestGPU": str(request.gpus),
            "RequestMemory": f"{request.memory_bytes * len(request.sizes) // 2**30}Gi",
            "NodeCount": str(len(set(nodes))) if nodes else "0",
            "NodeNames": sorted(set(nodes)),
            "ResourceName": request.quota,
            "ResourceQuotaName": request.quota,
            "RetryCount": record.failures,
            "Username": request.user,
            "IsDeleted": False,
            "EnablePreemptibleJob": False,
        }
    )


def _common(desk: Desk, book: Book, record: JobRecord, found: list[Stage]) -> dict[str, Any]:
    request, body = record.request, kept_body(record.request)
    quota = desk.feed.quotas.get(request.quota)
    note = book.note(JOB, request.id)
    status, code, message = reason_of(desk, record)
    kept = {key: value for key, value in body.items() if key not in ("Settings", "TrainingJob")}
    budget = request.fault_tolerance.max_restarts if request.fault_tolerance.enabled else 0
    return {
        **kept,
        **_times(record, found),
        "JobId": names.dlc_id(request.id),
        "JobType": body.get("JobType") or "PyTorchJob",
        "JobSpecs": body.get("JobSpecs") or [_spec(record)],
        "DisplayName": request.name,
        "Description": note.get("Description", body.get("Description")),
        "Accessibility": note.get("Accessibility", body.get("Accessibility") or "PRIVATE"),
        "UserCommand": " ".join(request.program.command),
        "Envs": visible_envs(record),
        "Priority": request.priority,
        "ResourceId": names.quota_id(request.quota),
        "ResourceType": RESOURCE_TYPES[quota.scope] if quota else None,
        "ResourceLevel": f"L{request.quota.count('/') + 1}",
        "Settings": settings_of(record),
        "Status": status,
        "SubStatus": "Restarting" if status in ("Restarting", "Queuing") and record.attempt else "Normal",
        "ReasonCode": code,
        "ReasonMessage": message,
        "RestartTimes": f"{min(record.failures_since_checkpoint, budget)}/{budget}",
        "UseOversoldResource": uses_idle(record),
        "Preemptions": record.preemptions,
        "UserId": request.user,
        "WorkspaceId": request.workspace,
        "WorkspaceName": request.workspace,
        "Duration": _seconds(desk, record),
    }


def visible_envs(record: JobRecord) -> dict[str, str]:
    """As they were sent: those that are not to be seen, and those that we add, are left out."""
    body = kept_body(record.request)
    hidden = {str(one.get("Key")) for one in body.get("CustomEnvs") or []} | OURS
    return {key: value for key, value in record.request.program.environment.items() if key not in hidden}


def _spec(record: JobRecord) -> dict[str, Any]:
    request = record.request
    size = {"GPU": str(request.sizes[0])}
    size |= {"CPU": str(request.cpu_milli // 1000)} if request.cpu_milli else {}
    return {"Type": "Worker", "PodCount": len(request.sizes), "ResourceConfig": size}


def reason_of(desk: Desk, record: JobRecord) -> tuple[str, str, str]:
    """Status, ReasonCode, ReasonMessage of the moment. Of a job that waits the message says why, with numbers."""
    status = history.status_of(record)
    if record.state.is_final:
        return history.final_reason(record, Outcome(record.state.value))
    if status == "Queuing":
        back = "Rollback to queue" if record.attempt else ""
        said = [part for part in (back, queries.note(desk, record)) if part]
        return status, "JobEnqueued", ": ".join(said)
    if record.notices:
        return status, "ResourcePreempted", queries.note(desk, record)
    return status, f"Job{status}", ""


def _times(record: JobRecord, found: list[Stage]) -> dict[str, str | None]:
    entered = history.times(found)
    ended = time_of(record.ended_ms)
    return {
        "GmtCreateTime": time_of(record.submitted_ms),
        "GmtSubmittedTime": time_of(entered.get("EnvPreparing")),
        "GmtRunningTime": time_of(entered.get("Running", record.begun_ms)),
        "GmtFinishTime": ended,
        "GmtModifiedTime": ended or time_of(found[-1].start_ms if found else record.submitted_ms),
        "GmtSuccessedTime": ended if record.state is JobState.SUCCEEDED else None,
        "GmtFailedTime": ended if record.state is JobState.FAILED else None,
        "GmtStoppedTime": ended if record.state is JobState.STOPPED else None,
    }


def _seconds(desk: Desk, record: JobRecord) -> int:
    """Since it was created."""
    end_ms = record.ended_ms if record.ended_ms is not None else desk.clock.now_ms()
    return max(0, end_ms - record.submitted_ms) // 1000


def _stage(stage: Stage) -> dict[str, Any]:
    return given(
        {
            "Status": stage.status,
            "StartTime": time_of(stage.start_ms),
            "EndTime": time_of(stage.end_ms),
            "ReasonCode": stage.code,
            "ReasonMessage": stage.message,
        }
    )


def restart_records(record: JobRecord, shown_id: str) -> list[dict[str, Any]]:
    """Failures and the restarts after them. What PAI writes into the last three fields is not public."""
    found = []
    all_pods = [names.pod_id(shown_id, role.name, n) for role in pods.roles(record) for n in range(role.count)]
    for one, view in zip(record.restarts, restart_views(record), strict=True):
        pod = all_pods[one.instance] if one.instance is not None and one.instance < len(all_pods) else ""
        error = {
            "ErrorCode": one.exit_code,
            "ErrorMsg": one.verdict,
            "DetailErrorMsg": one.evidence,
            "ErrorSource": "Pod",
            "Node": view.node,
            "Pod": pod,
            "TriggerRestart": True,
            "AddJobLevelBlacklist": one.avoided,
            "AddNodeToBlacklist": one.avoided,
        }
        found.append(
            given(
                {
                    "JobRestartCount": one.number,
                    "OccurPhase": one.phase or "Running",
                    "OccurTime": time_of(one.failed_ms),
                    "Reason": one.verdict,
                    "RestartDurationInSec": view.seconds,
                    "RestartLevelType": "Pod" if one.is_single else "Job",
                    "RestartStatus": "Restarting" if one.began_ms is None else "Succeeded",
                    "TriggerID": f"{shown_id}-{one.number}",
                    "DetailErrorInfoList": [given(error)],
                }
            )
        )
    return found
