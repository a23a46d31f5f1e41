"""ListJobs: which jobs a query means.

One rule: a filter that has a meaning here is applied; one that has none is refused, unless it is empty.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sublet.domain.jobs import IdlePolicy, JobRecord
from sublet.faces.pai import history, jobs, names
from sublet.faces.pai.book import DELETED, JOB
from sublet.faces.pai.call import Call, invalid, page
from sublet.faces.pai.orders import LABEL, OVERSOLD, kept_body, quota_named

WINDOW_MS = 7 * 86_400_000  # without StartTime and EndTime only what was created since is listed
BATCH = 1_000
Test = Callable[[JobRecord], bool]
SORTS: Mapping[str, Callable[[JobRecord], Any]] = {
    "DisplayName": lambda one: one.request.name.lower(),
    "JobType": lambda one: str(kept_body(one.request).get("JobType") or ""),
    "Status": history.status_of,
    "GmtCreateTime": lambda one: one.submitted_ms,
    "GmtFinishTime": lambda one: one.ended_ms or 0,
}
NUMBERS: Mapping[str, Callable[[JobRecord], int]] = {
    "RequestGPU": lambda one: one.request.gpus,
    "RequestCPU": lambda one: one.request.cpu_milli * len(one.request.sizes) // 1000,
    "Priority": lambda one: one.request.priority,
    "RetryCount": lambda one: one.failures,
}


def list_jobs(call: Call) -> dict[str, Any]:
    found = [record for record in _candidates(call) if _fits(record, _tests(call))]
    sort_by, order = call.text("SortBy", "GmtCreateTime"), call.text("Order", "desc").lower()
    if sort_by not in SORTS:
        raise invalid("SortBy", sort_by, f"It may be {', '.join(SORTS)}.")
    if order not in ("asc", "desc"):
        raise invalid("Order", order, "It may be asc or desc.")
    found.sort(key=lambda one: (SORTS[sort_by](one), one.request.id), reverse=order == "desc")
    answer = page(call, "Jobs", found)
    shown = [jobs.item(call.desk, call.book, one, history.stages(call.desk, one)) for one in answer["Jobs"]]
    return {**answer, "Jobs": shown}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When a job was created; None = no limit."""

    start_ms: int | None
    end_ms: int | None


def _window(call: Call) -> Window:
    start_ms, end_ms = call.time_ms("StartTime"), call.time_ms("EndTime")
    if call.text("TimeRangeField", "GmtCreateTime") != "GmtCreateTime":
        return Window(start_ms=None, end_ms=None)  # tested one by one
    if start_ms is None and end_ms is None:
        return Window(start_ms=call.desk.clock.now_ms() - WINDOW_MS, end_ms=None)
    return Window(start_ms=start_ms, end_ms=end_ms)


def _candidates(call: Call) -> Iterator[JobRecord]:
    """Those of the window, newest first; those that are named, whenever they were created. Deleted ones are not."""
    deleted = call.book.notes(DELETED)
    named = [call.text("JobId")] if call.text("JobId") else list(call.words("JobIds"))
    if named:
        records = (call.desk.feed.job(job) for text in dict.fromkeys(named) if (job := names.job_of(text)))
        yield from (record for record in records if record is not None and record.request.id not in deleted)
        return
    window, before = _window(call), None
    while True:
        batch = call.desk.feed.jobs(limit=BATCH, before=before)
        for record in batch:
            before = record.request.id
            if window.start_ms is not None and record.submitted_ms < window.start_ms:
                return
            if (window.end_ms is None or record.submitted_ms <= window.end_ms) and before not in deleted:
                yield record
        if len(batch) < BATCH:
            return


def _fits(record: JobRecord, tests: Sequence[Test]) -> bool:
    return all(test(record) for test in tests)


def _tests(call: Call) -> list[Test]:
    return [test(call, value) for name, test in TESTS.items() if (value := call.text(name))]


def _quotas(call: Call, value: str) -> Test:
    meant = {quota_named(call.desk, one.strip()) for one in value.split(",")}
    return lambda one: one.request.quota in meant


def _oversold(call: Call, value: str) -> Test:
    kind, _, used = value.partition("-")
    policies = {name.lower(): policy for policy, name in OVERSOLD.items()}
    if kind.lower() not in policies or used.lower() not in ("", "true", "false"):
        raise invalid("OversoldInfo", value, f"It may be {', '.join(OVERSOLD.values())}, with -true or -false.")
    policy = IdlePolicy(policies[kind.lower()])
    return lambda one: one.request.idle is policy and (not used or jobs.uses_idle(one) is (used.lower() == "true"))


def _tags(call: Call, _: str) -> Test:
    wanted = call.tags("Tags")
    return lambda one: all(one.request.labels.get(key) == value for key, value in wanted.items() if key != LABEL)


def _times(call: Call, value: str) -> Test:
    """StartTime and EndTime are about this time."""
    start_ms, end_ms = call.time_ms("StartTime"), call.time_ms("EndTime")
    if value not in ("GmtCreateTime", "GmtFinishTime"):
        raise invalid("TimeRangeField", value, "It may be GmtCreateTime or GmtFinishTime.")

    def test(one: JobRecord) -> bool:
        at_ms = one.submitted_ms if value == "GmtCreateTime" else one.ended_ms
        known = at_ms is not None and (start_ms is None or at_ms >= start_ms) and (end_ms is None or at_ms <= end_ms)
        return known or (start_ms is None and end_ms is None)

    return test


def _numbers(call: Call, value: str) -> Test:
    if value not in NUMBERS:
        raise invalid("NumericRangeField", value, f"It may be {', '.join(NUMBERS)}.")
    low = call.whole("NumericRangeMin", 0, 0, 10**15)
    high = call.whole("NumericRangeMax", 10**15, 0, 10**15)
    return lambda one: low <= NUMBERS[value](one) <= high


def _own(call: Call, _: str) -> Test:
    own = call.flag("ShowOwn")
    return lambda one: not own or one.request.user == call.who.user


def _payment(_: Call, value: str) -> Test:
    return lambda one: value == "PrePaid"  # all jobs run on quotas


def _description(call: Call, value: str) -> Test:
    def test(one: JobRecord) -> bool:
        body = kept_body(one.request)
        said = call.book.note(JOB, one.request.id).get("Description", body.get("Description")) or ""
        return value.lower() in str(said).lower()

    return test


def _accessibility(call: Call, value: str) -> Test:
    def test(one: JobRecord) -> bool:
        kept = kept_body(one.request).get("Accessibility") or "PRIVATE"
        return str(call.book.note(JOB, one.request.id).get("Accessibility", kept)) == value

    return test


def _name(call: Call, value: str) -> Test:
    if call.text("DisplayNameSearchMode").lower() in ("exact", "exactmatch"):
        return lambda one: one.request.name == value
    return lambda one: value.lower() in one.request.name.lower()


def _image(_: Call, value: str) -> Test:
    def test(one: JobRecord) -> bool:
        specs = kept_body(one.request).get("JobSpecs") or []
        return any(value.lower() in str(spec.get("Image") or "").lower() for spec in specs)

    return test


def _reason(call: Call, value: str) -> Test:
    return lambda one: value.lower() in " ".join(jobs.reason_of(call.desk, one)[1:]).lower()


def _setting(name: str) -> Callable[[Call, str], Test]:
    return lambda _, value: lambda one: str((kept_body(one.request).get("Settings") or {}).get(name, "")) == value


def _assigned(call: Call, _: str) -> Test:
    wanted = call.flag("EnableAssignNode")
    return lambda one: (one.request.nodes is not None) is wanted


TESTS: Mapping[str, Callable[[Call, str], Test]] = {
    "Accessibility": _accessibility,
    "BusinessUserId": _setting("BusinessUserId"),
    "Caller": _setting("Caller"),
    "Description": _description,
    "DisplayName": _name,
    "EnableAssignNode": _assigned,
    "ImageSearch": _image,
    "JobType": lambda _, value: lambda one: str(kept_body(one.request).get("JobType") or "PyTorchJob") == value,
    "NumericRangeField": _numbers,
    "OversoldInfo": _oversold,
    "PaymentType": _payment,
    "PipelineId": _setting("PipelineId"),
    "ReasonSearch": _reason,
    "ResourceId": _quotas,
    "ResourceIds": _quotas,
    "ResourceQuotaName": lambda _, value: lambda one: value.lower() in one.request.quota.lower(),
    "ShowOwn": _own,
    "Status": lambda _, value: lambda one: history.status_of(one) in {word.strip() for word in value.split(",")},
    "Tags": _tags,
    "TemplateId": lambda _, value: lambda one: str(kept_body(one.request).get("TemplateId") or "") == value,
    "TimeRangeField": _times,
    "UserCommandSearch": lambda _, value: lambda one: value in " ".join(one.request.program.command),
    "UserIdForFilter": lambda _, value: lambda one: one.request.user == value,
    "Username": lambda _, value: lambda one: value.lower() in one.request.user.lower(),
    "WorkspaceId": lambda _, value: lambda one: one.request.workspace in {word.strip() for word in value.split(",")},
}
