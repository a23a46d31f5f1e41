"""PaiStudio's training jobs, as far as `alipai`'s estimators need them: a DLC job under another name.

One rule: it is one and the same job; `train…` and `dlc…` name it alike.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from sublet.domain.errors import Refused
from sublet.domain.jobs import JobRecord
from sublet.faces.pai import dlc, history, jobs, names, orders, pods
from sublet.faces.pai.book import DELETED
from sublet.faces.pai.call import Call, given, invalid, is_true, missing, page, time_of
from sublet.service import commands

KEPT = "TrainingJob"  # under which the request is kept in the body of its job
STATUSES = {
    "Queuing": "Submitted",
    "EnvPreparing": "Initializing",
    "Restarting": "Submitted",
    "Stopping": "Running",
    "Succeeded": "Succeed",
    "Stopped": "Terminated",
}


def create(call: Call) -> dict[str, Any]:
    body = call.body
    job_id = call.desk.new_id()
    draft = orders.draft_of(call.desk, _as_job(body), job_id, call.who.user)
    record = commands.submit(call.desk, draft)
    return {"TrainingJobId": names.train_id(record.request.id)}


def _as_job(body: Mapping[str, Any]) -> dict[str, Any]:
    """The DLC job that it stands for."""
    spec = body.get("AlgorithmSpec") or {}
    if not spec:
        raise missing("AlgorithmSpec", "Registered algorithms are not done here: send the command itself.")
    if _channels(body, "InputChannels"):
        why = "Nothing is mounted here: give the program a path that it can read."
        raise Refused(what="InputChannels are not done.", why=why, code="UnsupportedParameter", field="InputChannels")
    name, resource = body.get("TrainingJobName"), body.get("ComputeResource") or {}
    labels = {str(one.get("Key")): str(one.get("Value", "")) for one in body.get("Labels") or []}
    settings = dict(body.get("Settings") or {})
    seconds = (body.get("Scheduler") or {}).get("MaxRunningTimeInSeconds")
    settings["Tags"] = {**labels, **(settings.get("Tags") or {})}
    return {
        "DisplayName": name,
        "JobType": spec.get("JobType") or "PyTorchJob",
        "JobSpecs": [_role(resource, str(spec.get("Image") or ""))],
        "ResourceId": resource.get("ResourceId") or resource.get("QuotaId"),
        "UserCommand": _command(spec.get("Command")),
        "Envs": {**_parameters(body), **(body.get("Environments") or {})},
        "Settings": settings,
        "Priority": body.get("Priority"),
        "WorkspaceId": body.get("WorkspaceId"),
        "JobMaxRunningTimeMinutes": -(-int(seconds) // 60) if seconds else None,
        KEPT: {key: value for key, value in body.items() if key != "Environments"},
    }


def _channels(body: Mapping[str, Any], key: str) -> list[Any]:
    return [one for one in body.get(key) or [] if one]


def _role(resource: Mapping[str, Any], image: str) -> dict[str, Any]:
    found: dict[str, Any] = {"Type": "Worker", "Image": image}
    if resource.get("EcsSpec"):
        return {**found, "PodCount": int(resource.get("EcsCount") or 1), "EcsSpec": resource["EcsSpec"]}
    if is_true(resource.get("UseSpotInstance")):
        raise invalid("ComputeResource.UseSpotInstance", True, "There are no spot instances here.")
    count = int(resource.get("InstanceCount") or 1)
    size = {key: str(value) for key, value in (resource.get("InstanceSpec") or {}).items() if value}
    if size.get("Memory", "").isdigit():
        size["Memory"] += "Gi"  # the unit that training jobs leave out
    return {**found, "PodCount": count, "ResourceConfig": size}


def _command(value: Any) -> str:
    words = [str(one) for one in value] if isinstance(value, list) else [str(value or "")]
    return words[2] if len(words) == 3 and words[0].endswith("sh") and words[1] == "-c" else shlex.join(words)


def _parameters(body: Mapping[str, Any]) -> dict[str, str]:
    """Hyperparameters as PAI hands them to a program: `PAI_HPS`, `PAI_USER_ARGS`, `PAI_HPS_NAME`."""
    said = {str(one.get("Name")): str(one.get("Value", "")) for one in body.get("HyperParameters") or []}
    if not said:
        return {}
    arguments = " ".join(f"--{name} {shlex.quote(value)}" for name, value in said.items())
    each = {f"PAI_HPS_{name.upper().replace('-', '_')}": value for name, value in said.items()}
    return {"PAI_HPS": json.dumps(said), "PAI_USER_ARGS": arguments, **each}


def record_of(call: Call) -> JobRecord:
    text = call.path["TrainingJobId"]
    job = names.job_of(text)
    record = call.desk.feed.job(job) if job else None
    if record is None or KEPT not in orders.kept_body(record.request) or call.book.note(DELETED, record.request.id):
        raise Refused(what=f"There is no training job {text}.", code="NotFound", field="TrainingJobId")
    return record


def get(call: Call) -> dict[str, Any]:
    return _shown(call, record_of(call))


def _shown(call: Call, record: JobRecord) -> dict[str, Any]:
    kept = dict(orders.kept_body(record.request)[KEPT])
    found = history.stages(call.desk, record)
    _, code, message = jobs.reason_of(call.desk, record)
    changes = [
        {
            "Status": _status(one.status),
            "StartTime": time_of(one.start_ms),
            "EndTime": time_of(one.end_ms),
            "ReasonCode": one.code,
            "ReasonMessage": one.message,
        }
        for one in found
    ]
    shown_id = names.dlc_id(record.request.id)
    all_pods = pods.pods(record, shown_id, call.desk.clock.now_ms())
    return given(
        {
            **kept,
            "TrainingJobId": names.train_id(record.request.id),
            "TrainingJobName": record.request.name,
            "Status": _status(history.status_of(record)),
            "ReasonCode": code,
            "ReasonMessage": message,
            "StatusTransitions": [given(one) for one in changes],
            "Instances": [{"Name": one["PodId"], "Role": one["Type"], "Status": one["Status"]} for one in all_pods],
            "Settings": jobs.settings_of(record),
            "UseOversoldResource": jobs.uses_idle(record),
            "UserId": record.request.user,
            "WorkspaceId": record.request.workspace,
            "IsTempAlgo": True,
            "Environments": jobs.visible_envs(record),
            "GmtCreateTime": time_of(record.submitted_ms),
            "GmtModifiedTime": time_of(record.ended_ms or (found[-1].start_ms if found else record.submitted_ms)),
            "TrainingJobUrl": "",
        }
    )


def _status(name: str) -> str:
    return STATUSES.get(name, name)


def list_all(call: Call) -> dict[str, Any]:
    deleted = call.book.notes(DELETED)
    found, before = [], None
    while True:
        batch = call.desk.feed.jobs(limit=1_000, before=before)
        found += [one for one in batch if KEPT in orders.kept_body(one.request) and one.request.id not in deleted]
        if len(batch) < 1_000:
            break
        before = batch[-1].request.id
    wanted, called = call.text("Status"), call.text("TrainingJobName").lower()
    found = [one for one in found if wanted in ("", _status(history.status_of(one)))]
    found = [one for one in found if called in one.request.name.lower()]
    found = [one for one in found if call.text("WorkspaceId") in ("", one.request.workspace)]
    found.sort(key=lambda one: (one.submitted_ms, one.request.id), reverse=call.text("Order", "desc") == "desc")
    answer = page(call, "TrainingJobs", found)
    return {**answer, "TrainingJobs": [_shown(call, one) for one in answer["TrainingJobs"]]}


def stop(call: Call) -> dict[str, Any]:
    commands.stop(call.desk, record_of(call).request.id, call.who.user)
    return {}


def delete(call: Call) -> dict[str, Any]:
    record = record_of(call)
    if not record.state.is_final:
        why = f"It is {_status(history.status_of(record))}."
        raise Refused(what="The training job cannot be deleted.", why=why, hint="Stop it first.", code="InvalidStatus")
    call.book.put(DELETED, record.request.id, {"user": call.who.user, "at_ms": call.desk.clock.now_ms()})
    return {}


def list_logs(call: Call) -> dict[str, Any]:
    """All lines of one instance, of all attempts: what is on a page stays there."""
    record, worker = record_of(call), call.text("WorkerId")
    if not record.attempt:
        raise Refused(what="No instance has started yet.", code="TRAINING_JOB_INSTANCE_NOT_FOUND")
    instance = pods.instance_of(record, names.dlc_id(record.request.id), worker) if worker else 0
    lines: list[str] = []
    for attempt in range(1, record.attempt + 1):
        lines += dlc.log_lines(call, record, attempt, instance)
    answer = page(call, "Logs", lines)
    return {**answer, "TotalCount": str(answer["TotalCount"])}


def list_events(call: Call) -> dict[str, Any]:
    return page(call, "Events", dlc.events_of(call, record_of(call), None), usual=100)
