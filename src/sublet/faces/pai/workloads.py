"""What waits and what runs in a quota, in the order of its queue, with the diagnosis of each wait.

One rule: the diagnosis is that of `sublet why`, from the same books, in PAI's fields.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sublet.domain.errors import Refused
from sublet.domain.jobs import IdlePolicy, JobRecord
from sublet.domain.reasons import ReasonCode
from sublet.faces.pai import history, jobs, names, quotas
from sublet.faces.pai.call import Call, given, page, time_of
from sublet.faces.pai.shares import live
from sublet.service import queries
from sublet.service.views import WhyView

SELF = {ReasonCode.OWN_QUOTA_FULL, ReasonCode.TOO_LARGE_FOR_QUOTA, ReasonCode.BORROW_LIMIT}
ORDER = {ReasonCode.BEHIND, ReasonCode.COOLDOWN, ReasonCode.BACKOFF, ReasonCode.RECLAIM_DELAY, ReasonCode.RECLAIMING}
CODES = {
    ReasonCode.OWN_QUOTA_FULL: "NotEnoughGPU",
    ReasonCode.IDLE_TOO_SMALL: "NotEnoughGPU",
    ReasonCode.SHAPE: "NotEnoughGPU",
    ReasonCode.EARMARKED: "NotEnoughGPU",
    ReasonCode.NODE_LOST: "NodeUnschedulable",
    ReasonCode.DRAINING: "NodeUnschedulable",
    ReasonCode.TOO_LARGE_FOR_SPEC: "roleMaximumResource",
}


def list_quota_workloads(call: Call) -> dict[str, Any]:
    """Waiting ones in the order of the queue, then those that run."""
    name = quotas.name_in(call, call.path["QuotaId"])
    wanted = {name} | {quotas.name_in(call, one) for one in call.words("SubQuotaIds")}
    found = [_queue_entry(call, one.record) for one in live(call, wanted)]
    found.sort(key=lambda one: (one["Status"] != "Enqueued", one["Position"], one["GmtCreatedTime"], one["WorkloadId"]))
    return page(call, "Workloads", [one for one in found if _is_meant(call, one)])


def _is_meant(call: Call, one: Mapping[str, Any]) -> bool:
    ids, called = call.words("WorkloadIds"), call.words("WorkloadNames")
    statuses, rooms, users = call.words("WorkloadStatuses"), call.words("WorkspaceIds"), call.words("UserIds")
    oversold = call.query.get("UseOversoldResource")
    return (
        (not ids or one["WorkloadId"] in ids)
        and (not called or one["WorkloadName"] in called)
        and (not statuses or one["WorkloadStatus"] in statuses)
        and call.text("Status") in ("", one["Status"])
        and call.text("WorkloadType").lower() in ("", "dlc")
        and (not rooms or one["WorkspaceId"] in rooms)
        and (not users or one["UserId"] in users)
        and (not call.flag("ShowOwn") or one["UserId"] == call.who.user)
        and (not oversold or one["UseOversoldResource"] is call.flag("UseOversoldResource"))
        and (not call.text("Priority") or one["Priority"] == call.whole("Priority", 0, 1, 9))
        and all(_is_in(call, one, name, key) for name, key in RANGES.items())
    )


RANGES = {
    "GmtEnqueuedTimeRange": "GmtEnqueuedTime",
    "GmtDequeuedTimeRange": "GmtDequeuedTime",
    "GmtPositionModifiedTimeRange": "GmtPositionModifiedTime",
    "WorkloadCreatedTimeRange": "GmtCreatedTime",
}


def _is_in(call: Call, one: Mapping[str, Any], name: str, key: str) -> bool:
    """Times are compared as PAI writes them: texts in UTC of one length."""
    start, end = time_of(call.time_ms(f"{name}.StartTime")), time_of(call.time_ms(f"{name}.EndTime"))
    at = str(one.get(key) or "")
    return (not start or bool(at and at >= start)) and (not end or bool(at and at <= end))


def _queue_entry(call: Call, record: JobRecord) -> dict[str, Any]:
    request, waits = record.request, record.lease is None
    why = queries.why(call.desk, request.id) if waits else None
    found = next(iter(why.reasons), None) if why else None
    granted_ms = record.lease.granted_ms if record.lease else None
    enqueued_ms = record.history[-1].ended_ms if record.history else record.submitted_ms
    uses_idle = jobs.uses_idle(record) if not waits else request.idle is not IdlePolicy.NEVER
    return given(
        {
            "WorkloadId": names.dlc_id(request.id),
            "WorkloadName": request.name,
            "Name": request.name,
            "WorkloadType": "DLC",
            "WorkloadStatus": history.status_of(record),
            "Status": "Enqueued" if waits else "Dequeued",
            "Position": _ahead(call, record) + 1 if waits else 0,
            "Priority": request.priority,
            "QueueStrategy": quotas.STRATEGY_NAMES[call.desk.feed.quotas[request.quota].strategy],
            "QuotaId": names.quota_id(request.quota),
            "QuotaName": request.quota,
            "Resource": {"GPU": str(request.gpus), "GPUType": request.specs[0] if request.specs else None},
            "UseOversoldResource": uses_idle,
            "Code": CODES.get(ReasonCode(found.code), found.code) if found else "",
            "CodeType": _kind(ReasonCode(found.code)) if found else "",
            "Reason": " ".join(one.sentence for one in why.reasons) if why else "",
            "UserId": request.user,
            "UserName": request.user,
            "WorkspaceId": request.workspace,
            "WorkspaceName": request.workspace,
            "GmtCreatedTime": time_of(record.submitted_ms),
            "GmtEnqueuedTime": time_of(enqueued_ms),
            "GmtDequeuedTime": time_of(granted_ms),
            "GmtPositionModifiedTime": time_of(granted_ms or enqueued_ms),
        }
    )


def _ahead(call: Call, record: JobRecord) -> int:
    found = call.desk.books.read(lambda core: core.why(record.request.id))
    return found.ahead_count if found else 0


def _kind(code: ReasonCode) -> str:
    if code in ORDER:
        return "QueueStrategy"
    return "QuotaLimit" if code in SELF else "Scheduling"


def diagnosis(call: Call) -> dict[str, Any]:
    """Why one workload waits."""
    name, text = quotas.name_in(call, call.path["QuotaId"]), call.path["WorkloadId"]
    job = names.job_of(text)
    record = call.desk.feed.job(job) if job else None
    if record is None or record.request.quota != name:
        raise Refused(what=f"There is no workload {text} in {name}.", code="JobNotFound", field="WorkloadId")
    why = queries.why(call.desk, record.request.id)
    views = [view for view in queries.quotas(call.desk).items if view.name == name]
    used, limit = sum(view.own for view in views), sum(view.guaranteed for view in views)
    over = used + record.request.gpus - limit
    return {
        "Diagnosis": {
            "WorkloadId": text,
            "QuotaId": call.path["QuotaId"],
            "QueueStrategy": quotas.STRATEGY_NAMES[call.desk.feed.quotas[name].strategy],
            "ResourceDiagnosis": {
                "SelfQuotaLimit": {
                    **_limit(why, SELF),
                    "ExceedResources": {"GPU": str(max(0, over))},
                    "Used": {"GPU": str(used)},
                    "Limit": {"GPU": str(limit)},
                },
                "QueueStrategyLimit": _limit(why, ORDER),
            },
            "SchedulingDiagnosis": {
                **_limit(why, set(ReasonCode) - SELF - ORDER),
                "TaskNum": len(record.request.sizes),
                "TotalNodes": len(call.desk.feed.nodes),
            },
            "Reasons": [one.sentence for one in why.reasons],
            "WouldChange": list(why.would_change),
        }
    }


def _limit(why: WhyView, codes: Iterable[ReasonCode]) -> dict[str, Any]:
    known = set(codes)
    found = [one for one in why.reasons if ReasonCode(one.code) in known]
    return {
        "Status": "Exceeded" if found else "Normal",
        "Code": CODES.get(ReasonCode(found[0].code), found[0].code) if found else "",
        "Reason": " ".join(one.sentence for one in found),
    }


def list_user_usages(call: Call) -> dict[str, Any]:
    """By user: GPUs asked for and held, and how many workloads."""
    name = quotas.name_in(call, call.path["QuotaId"])
    below = {one for one in call.desk.feed.quotas if one.startswith(f"{name}/")}
    shares = live(call, {name} if call.flag("SelfOnly") else {name} | below)
    found = []
    for user in sorted({one.record.request.user for one in shares}):
        own = [one for one in shares if one.record.request.user == user]
        room = call.text("WorkspaceId")
        own = [one for one in own if not room or one.record.request.workspace == room]
        if not own or call.text("UserId") not in ("", user) or call.text("Username").lower() not in user.lower():
            continue
        held = sum(one.gpus for one in own if one.record.lease is not None)
        found.append(
            {
                "UserId": user,
                "Username": user,
                "WorkspaceId": own[0].record.request.workspace,
                "WorkloadCount": len(own),
                "Resources": {
                    "Submitted": {"GPU": str(sum(one.gpus for one in own))},
                    "Used": {"GPU": str(held)},
                },
            }
        )
    answer = page(call, "QuotaUserUsages", found)
    return {**answer, "QuotaUserUsage": answer["QuotaUserUsages"]}  # the SDK knows both spellings
