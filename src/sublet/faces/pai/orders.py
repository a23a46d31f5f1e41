"""A CreateJob body becomes a job as our job files describe it, and is kept so that it can be shown again.

One rule: what has a meaning here is carried out or refused; what has none is kept and shown as it came.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sublet.domain.jobs import JobRequest
from sublet.faces.pai import names
from sublet.faces.pai.call import invalid, is_true, missing
from sublet.service.desk import Desk
from sublet.service.jobfile import Draft, Origin, draft
from sublet.service.reading import Section, nearest

LABEL = "pai"  # under which a job keeps the body it came with
JOB_TYPES = ("PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "OneFlowJob", "ElasticBatchJob")
POLICIES = {"forbiddenquotaoversold": "never", "acceptquotaoversold": "acceptable", "forcequotaoversold": "only"}
OVERSOLD = {
    "never": "ForbiddenQuotaOverSold",
    "acceptable": "AcceptQuotaOverSold",
    "only": "ForceQuotaOverSold",
}
MOVED = ("Envs", "UserCommand", "DisplayName", "Priority", "ResourceId", "CustomEnvs")  # that the request itself holds
ROLE_ORDER = ("Chief", "Master")  # these come first: instance 0 is where the others meet


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Instances of one kind, `first` to `first + count - 1`. `name` is in lower case, as in pod ids."""

    name: str
    count: int
    first: int


def roles_of(specs: Sequence[Mapping[str, Any]], job_type: str) -> tuple[Role, ...]:
    """In the order of our instances. Without a master the first worker of a PyTorchJob is the master."""
    counts = [(str(one.get("Type") or "Worker").lower(), int(one.get("PodCount") or 1)) for one in _ordered(specs)]
    if job_type == "PyTorchJob" and counts and all(name != "master" for name, _ in counts):
        name, count = counts[0]
        counts = [("master", 1), *([(name, count - 1)] if count > 1 else []), *counts[1:]]
    found, first = [], 0
    for name, count in counts:
        found.append(Role(name=name, count=count, first=first))
        first += count
    return tuple(found)


def _ordered(specs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    last = len(ROLE_ORDER)
    places = {name: place for place, name in enumerate(ROLE_ORDER)}
    return sorted(specs, key=lambda one: places.get(str(one.get("Type")), last))


def draft_of(desk: Desk, body: Mapping[str, Any], job_id: str, user: str) -> Draft:
    """The job that this body asks for; Refused when it cannot be as it is written."""
    specs = _specs(body)
    settings = _mapping(body, "Settings")
    quota = _quota(desk, body)
    size = _resources(desk, specs, quota)
    values: dict[str, Any] = {
        "name": _required(body, "DisplayName"),
        "quota": quota,
        "idle": _idle(specs, settings),
        "priority": body.get("Priority") or 1,
        "instances": sum(one["count"] for one in size),
        "resources": {"gpu": max(one["gpu"] for one in size), "cpu": size[0]["cpu"], "memory": size[0]["memory"]},
        "command": _command(body, specs),
        "env": _environment(body, job_id),
        "compat": "dlc",
        "max_time": _minutes(body.get("JobMaxRunningTimeMinutes")),
        "fault_tolerance": _tolerance(settings),
        "labels": _labels(body, settings),
    }
    values |= {"spec": list(size[0]["specs"])} if size[0]["specs"] else {}
    values = {key: value for key, value in values.items() if value not in (None, {})}
    found = draft(Section(values=values), Origin(job_id=job_id, user=user))
    return replace(found, request=_placed(found.request, specs, size, body))


def _placed(
    request: JobRequest, specs: Sequence[Mapping[str, Any]], size: Sequence[Mapping[str, Any]], body: Mapping[str, Any]
) -> JobRequest:
    """What job files cannot say: instances of several sizes, nodes that are named."""
    assigned = [_mapping(one, "AssignNodeSpec") for one in specs]
    wanted = [name for one in assigned if is_true(one.get("EnableAssignNode")) for name in _names(one, "NodeNames")]
    avoided = [name for one in assigned for name in _names(one, "AntiAffinityNodeNames")]
    return replace(
        request,
        sizes=tuple(one["gpu"] for one in size for _ in range(one["count"])),
        nodes=tuple(wanted) or None,
        avoid=tuple(avoided),
        workspace=str(body.get("WorkspaceId") or request.workspace),
    )


def _names(values: Mapping[str, Any], key: str) -> list[str]:
    return [name for part in str(values.get(key) or "").split(",") if (name := part.strip())]


def kept_body(request: JobRequest) -> dict[str, Any]:
    """The body that it came with, less what the request itself holds; empty for a job that came another way."""
    text = request.labels.get(LABEL, "")
    return dict(json.loads(text)) if text else {}


def _labels(body: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    kept = {key: value for key, value in body.items() if key not in MOVED}
    kept |= {"CustomEnvs": [_without_value(one) for one in body.get("CustomEnvs") or []]}
    tags = {str(key): str(value) for key, value in _mapping(settings, "Tags").items()}
    return {**tags, LABEL: json.dumps(kept, ensure_ascii=False, sort_keys=True, separators=(",", ":"))}


def _without_value(one: Any) -> Any:
    return {key: value for key, value in one.items() if key != "Value"} if isinstance(one, Mapping) else one


def _specs(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    job_type = _required(body, "JobType")
    if job_type not in JOB_TYPES:
        near = nearest(job_type, JOB_TYPES)
        hint = f"Did you mean {near}?" if near else ""
        raise invalid("JobType", job_type, f"Here it may be {', '.join(JOB_TYPES)}.", hint)
    specs = body.get("JobSpecs")
    if not isinstance(specs, list) or not specs or not all(isinstance(one, Mapping) for one in specs):
        raise missing("JobSpecs", "It says how many instances there are, and what each needs.")
    for one in specs:
        count = one.get("PodCount", 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 10_000:
            raise invalid("JobSpecs.PodCount", count, "It must be 1 to 10,000.")
        if is_true(one.get("UseSpotInstance")):
            raise invalid("JobSpecs.UseSpotInstance", True, "There are no spot instances here.", "See OversoldType.")
    return _ordered(specs)


def _quota(desk: Desk, body: Mapping[str, Any]) -> str:
    ids = {str(one["QuotaId"]) for one in body["JobSpecs"] if one.get("QuotaId")}
    asked = str(body.get("ResourceId") or "") or next(iter(ids), "")
    if len(ids | {asked}) > 1 or not asked:
        why = "There is no public pool here." if not asked else "All instances of a job belong to one quota."
        raise missing("ResourceId", why) if not asked else invalid("ResourceId", asked, why)
    return quota_named(desk, asked)


def quota_named(desk: Desk, text: str) -> str:
    """Our name of the quota with this id, or of this name; what is neither is left to be refused by name."""
    if text in desk.feed.quotas:
        return text
    return next((name for name in desk.feed.quotas if names.quota_id(name) == text), text)


def _resources(desk: Desk, specs: Sequence[Mapping[str, Any]], quota: str) -> list[dict[str, Any]]:
    """For each role: count, GPUs, cores and memory of one instance, and the kinds of node it may stand on."""
    found = [_one_resource(desk, one) for one in specs]
    if len({(one["cpu"], one["memory"], one["specs"]) for one in found}) > 1:
        why = "Roles may differ in their GPUs, not in their cores, memory or kind of node."
        raise invalid("JobSpecs", "unequal", why)
    return found


def _one_resource(desk: Desk, spec: Mapping[str, Any]) -> dict[str, Any]:
    asked = _mapping(spec, "ResourceConfig")
    named = str(spec.get("EcsSpec") or "")
    if bool(named) == bool(asked):
        why = "One of both says what each instance gets." if named else ""
        raise invalid("JobSpecs.EcsSpec", named, why) if named else missing("JobSpecs.ResourceConfig")
    count = int(spec.get("PodCount") or 1)
    if named:
        kind, gpu = ecs_spec(desk, named)
        return {"count": count, "gpu": gpu, "cpu": None, "memory": None, "specs": (kind,)}
    text = str(asked.get("GPU") or "0")
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1_024:
        why = "Capacity is counted in GPUs here: each instance takes at least one, and whole ones."
        raise invalid("JobSpecs.ResourceConfig.GPU", text, why)
    kind = str(asked.get("GPUType") or "")
    memory, cpu = str(asked.get("Memory") or "") or None, str(asked.get("CPU") or "") or None
    return {"count": count, "gpu": int(text), "cpu": cpu, "memory": memory, "specs": (kind,) if kind else ()}


def ecs_specs(desk: Desk) -> dict[str, tuple[str, int]]:
    """The instance types that are offered: `SPEC` is a whole node, `SPEC.2` two of its GPUs. Kind of node and GPUs."""
    largest: dict[str, int] = {}
    for record in desk.feed.nodes.values():
        largest[record.node.spec] = max(record.node.gpu, largest.get(record.node.spec, 0))
    found: dict[str, tuple[str, int]] = {}
    for spec, most in sorted(largest.items()):
        sizes = [1 << place for place in range(most.bit_length()) if 1 << place < most]
        found |= {f"{spec}.{size}": (spec, size) for size in sizes} | ({spec: (spec, most)} if most else {})
    return found


def ecs_spec(desk: Desk, named: str) -> tuple[str, int]:
    known = ecs_specs(desk)
    if named not in known:
        near = nearest(named, known)
        hint = f"Did you mean {near}?" if near else "See ListEcsSpecs."
        raise invalid("EcsSpec", named, "No node here is of that kind.", hint)
    return known[named]


def _idle(specs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """`Settings.OversoldType`, else that of the roles; a tag of that name for clients whose models drop the field."""
    tags = _mapping(settings, "Tags")
    said = [settings.get("OversoldType") or tags.get("OversoldType")]
    said += [one.get("OversoldType") for one in specs]
    found = {str(one) for one in said if one}
    if len({one.lower() for one in found}) > 1:
        raise invalid("OversoldType", ", ".join(sorted(found)), "All instances of a job have one.")
    return idle_policy(next(iter(found), ""))


def idle_policy(text: str) -> str:
    """never, acceptable or only; capital letters do not matter, real clients differ in them."""
    if not text:
        return "never"
    if text.lower() not in POLICIES:
        raise invalid("OversoldType", text, f"It may be {', '.join(OVERSOLD.values())}.")
    return POLICIES[text.lower()]


def _command(body: Mapping[str, Any], specs: Sequence[Mapping[str, Any]]) -> str:
    said = {str(one["UserCommand"]) for one in specs if one.get("UserCommand")} or {str(body.get("UserCommand") or "")}
    if len(said) > 1:
        raise invalid("JobSpecs.UserCommand", "unequal", "All instances run one command; it finds its place in RANK.")
    command = next(iter(said))
    if not command.strip():
        raise missing("UserCommand", "It says what runs in each instance.")
    return command


def _environment(body: Mapping[str, Any], job_id: str) -> dict[str, str]:
    envs = {str(key): str(value) for key, value in _mapping(body, "Envs").items()}
    custom = {str(one["Key"]): str(one.get("Value", "")) for one in body.get("CustomEnvs") or [] if one.get("Key")}
    ours = {"DLC_JOB_ID": names.dlc_id(job_id), "REGION": "local"}
    ours |= {"PAI_WORKSPACE_ID": str(body["WorkspaceId"])} if body.get("WorkspaceId") else {}
    return {**ours, **envs, **custom}


def _tolerance(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without AIMaster a job that loses its resources or fails has ended."""
    is_on = is_true(settings.get("EnableErrorMonitoringInAIMaster"))
    found: dict[str, Any] = {"on_preempt": "stop", "policy": "never"}
    if is_on:
        found = {"aimaster": str(settings.get("ErrorMonitoringArgs") or "")}
    grace = settings.get("TerminationGracePeriodSeconds")
    if grace is not None:
        if not isinstance(grace, int) or isinstance(grace, bool) or not 0 <= grace <= 86_400:
            raise invalid("Settings.TerminationGracePeriodSeconds", grace, "It must be 0 to 86,400.")
        found["grace"] = f"{grace}s"
    return found


def _minutes(value: Any) -> str | None:
    if value in (None, 0, ""):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 5_256_000:
        raise invalid("JobMaxRunningTimeMinutes", value, "It must be a whole number of minutes.")
    return f"{value}m"


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise invalid(key, found, "It is no object.")
    return found


def _required(body: Mapping[str, Any], key: str) -> str:
    found = body.get(key)
    if not isinstance(found, str) or not found.strip():
        raise missing(key)
    return found
