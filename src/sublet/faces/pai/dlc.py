"""DLC's operations: jobs, their pods, logs, events and metrics.

One rule: a command is the service's command, and its answer the state behind it.
"""

from typing import Any

from sublet.domain.errors import Refused
from sublet.domain.jobs import JobRecord
from sublet.faces.pai import finding, jobs, names, orders, pods
from sublet.faces.pai.book import DELETED, JOB
from sublet.faces.pai.call import Call, event_time_of, invalid, page
from sublet.faces.pai.history import entries_of, status_of
from sublet.service import commands, logs, queries

LOGS_AT_MOST = 16 * 1024 * 1024  # bytes of one answer
ACCESS = ("PRIVATE", "PUBLIC")


def record_of(call: Call) -> JobRecord:
    """The job of the path; Refused with JobNotFound when there is none, or it was deleted."""
    text = call.path["JobId"]
    job = names.job_of(text)
    record = call.desk.feed.job(job) if job else None
    if record is None or call.book.note(DELETED, record.request.id):
        raise Refused(what=f"There is no job {text}.", hint="See ListJobs.", code="JobNotFound", field="JobId")
    return record


def create_job(call: Call) -> dict[str, Any]:
    draft = orders.draft_of(call.desk, call.body, call.desk.new_id(), call.who.user)
    record = commands.submit(call.desk, draft)
    return {"JobId": names.dlc_id(record.request.id)}


def get_job(call: Call) -> dict[str, Any]:
    return jobs.detail(call.desk, call.book, record_of(call))


def list_jobs(call: Call) -> dict[str, Any]:
    return finding.list_jobs(call)


def stop_job(call: Call) -> dict[str, Any]:
    record = record_of(call)
    commands.stop(call.desk, record.request.id, call.who.user)
    return {"JobId": names.dlc_id(record.request.id)}


def delete_job(call: Call) -> dict[str, Any]:
    """Of a job that has ended; its record stays in the log, for reports."""
    record = record_of(call)
    shown_id = names.dlc_id(record.request.id)
    if not record.state.is_final:
        hint = "Stop it first."
        what, why = f"{shown_id} cannot be deleted.", f"It is {status_of(record)}."
        raise Refused(what=what, why=why, hint=hint, code="InvalidJobStatus", field="JobId")
    call.book.put(DELETED, record.request.id, {"user": call.who.user, "at_ms": call.desk.clock.now_ms()})
    return {"JobId": shown_id}


def update_job(call: Call) -> dict[str, Any]:
    """Priority counts while the job waits; later it is passed over, as PAI does."""
    record = record_of(call)
    changed = {key: value for key, value in call.body.items() if value not in (None, [], "")}
    for key in changed:
        if key not in ("Priority", "Accessibility", "Description"):
            raise Refused(what=f"{key} of a job cannot be changed.", code="UnsupportedParameter", field=key)
    priority = changed.get("Priority")
    if priority is not None and (type(priority) is not int or not 1 <= priority <= 9):
        raise invalid("Priority", priority, "It must be 1 to 9.")
    note = call.book.note(JOB, record.request.id)
    if "Accessibility" in changed:
        _widened(note, changed["Accessibility"], record)
    note |= {key: changed[key] for key in ("Accessibility", "Description") if key in changed}
    if note:
        call.book.put(JOB, record.request.id, note)
    if priority is not None and status_of(record) == "Queuing":
        commands.set_priority(call.desk, record.request.id, priority, call.who.user)
    return {"JobId": names.dlc_id(record.request.id)}


def _widened(note: dict[str, Any], asked: Any, record: JobRecord) -> None:
    present = note.get("Accessibility") or orders.kept_body(record.request).get("Accessibility") or "PRIVATE"
    if asked not in ACCESS or ACCESS.index(asked) < ACCESS.index(present):
        raise invalid("Accessibility", asked, f"It is {present}, and can only become PUBLIC.")


def get_job_events(call: Call) -> dict[str, Any]:
    record = record_of(call)
    return {"JobId": names.dlc_id(record.request.id), "Events": events_of(call, record, None)}


def get_pod_events(call: Call) -> dict[str, Any]:
    """Those of the job that are about this instance or about the whole gang."""
    record = record_of(call)
    shown_id, pod = names.dlc_id(record.request.id), call.path["PodId"]
    instance = pods.instance_of(record, shown_id, pod)
    attempt = pods.attempt_of(record, instance, call.text("PodUid"))
    events = events_of(call, record, instance)
    return {"JobId": shown_id, "PodId": pod, "PodUid": pods.uid(record, attempt, instance), "Events": events}


def events_of(call: Call, record: JobRecord, instance: int | None) -> list[str]:
    """As `2021-01-28 14:07:45 text`, oldest first; of too many the newest."""
    most = call.whole("MaxEventsNum", 2_000, 1, 10_000)
    start_ms, end_ms = call.time_ms("StartTime"), call.time_ms("EndTime")
    lines = []
    for entry in entries_of(call.desk, record.request.id):
        at_ms = entry.event.at_ms
        if (start_ms is not None and at_ms < start_ms) or (end_ms is not None and at_ms > end_ms):
            continue
        about = [getattr(one, "instance", None) for one in (entry.event, *entry.effects)]
        others = [one for one in about if one is not None and one != instance]
        if instance is not None and others and instance not in about:
            continue
        views = [view for view in queries.story_of(call.desk, entry) if view.job == record.request.id]
        lines += [f"{event_time_of(at_ms)} {view.type}: {view.text}" for view in views]
    return lines[-most:]


def get_pod_logs(call: Call) -> dict[str, Any]:
    """The last lines of one attempt. Lines carry no time here, so StartTime and EndTime choose nothing."""
    record = record_of(call)
    shown_id, pod = names.dlc_id(record.request.id), call.path["PodId"]
    instance = pods.instance_of(record, shown_id, pod)
    attempt = pods.attempt_of(record, instance, call.text("PodUid"))
    most = call.whole("MaxLines", 2_000, 1, 1_000_000)
    lines = log_lines(call, record, attempt, instance)[-most:] if attempt else []
    return {"JobId": shown_id, "PodId": pod, "PodUid": pods.uid(record, attempt, instance), "Logs": lines}


def log_lines(call: Call, record: JobRecord, attempt: int, instance: int) -> list[str]:
    """All lines that one attempt of an instance has printed so far; of very many the newest."""
    place, text = logs.Place(job=record.request.id, instance=instance, attempt=attempt, only=True), bytearray()
    while True:
        piece, behind = logs.read(call.desk, place)
        text += piece
        del text[:-LOGS_AT_MOST]
        if behind is None or not piece:
            return text.decode("utf-8", "replace").splitlines()
        place = behind


def list_ecs_specs(call: Call) -> dict[str, Any]:
    """The kinds of node, whole and in parts."""
    kind, wanted = call.text("AcceleratorType").upper(), set(call.words("InstanceTypes"))
    found: list[dict[str, Any]] = []
    for name, (spec, gpu) in orders.ecs_specs(call.desk).items():
        nodes = [record.node for record in call.desk.feed.nodes.values() if record.node.spec == spec]
        share = gpu / max(node.gpu for node in nodes)
        found.append(
            {
                "InstanceType": name,
                "AcceleratorType": "GPU",
                "Gpu": gpu,
                "GpuType": spec,
                "Cpu": int(max(node.cpu_milli for node in nodes) * share / 1000),
                "Memory": int(max(node.memory_bytes for node in nodes) * share / 2**30),
                "IsAvailable": True,
                "PaymentTypes": ["PrePaid"],
                "ResourceType": call.text("ResourceType", "ECS"),
            }
        )
    found = [one for one in found if (not wanted or one["InstanceType"] in wanted) and kind in ("", "GPU")]
    keys = {"cpu": "Cpu", "gpu": "Gpu", "memory": "Memory"}
    key = keys.get(call.text("SortBy").lower(), "InstanceType")
    found.sort(key=lambda one: one[key], reverse=call.text("Order", "asc").lower() == "desc")
    return page(call, "EcsSpecs", found)
