"""What can be refused by looking at the nodes and quotas of the moment, in words that name the key to change.

One rule: only what cannot run however long it waits is refused; what has to wait is no error.
"""

from collections.abc import Iterable, Mapping

from sublet.core.explain import words
from sublet.domain.changes import NodeRecord
from sublet.domain.errors import Refused
from sublet.domain.jobs import IdlePolicy, JobRequest
from sublet.domain.quotas import Quota, path_of
from sublet.domain.reasons import Reason, ReasonCode
from sublet.service.reading import nearest

Quotas = Mapping[str, Quota]
Nodes = Mapping[str, NodeRecord]

_FIELDS = {
    ReasonCode.TOO_LARGE_FOR_SPEC: "resources.gpu",
    ReasonCode.TOO_LARGE_FOR_TENANT: "instances",
    ReasonCode.TOO_LARGE_FOR_QUOTA: "idle",
    ReasonCode.SPEC_UNKNOWN: "spec",
    ReasonCode.QUOTA_UNKNOWN: "quota",
    ReasonCode.QUOTA_CLOSED: "quota",
    ReasonCode.NOT_PERMITTED: "quota",
}


def refused(request: JobRequest, reason: Reason) -> Refused:
    """The core's refusal as an error, with the key of the request that it is about."""
    what = words(reason, request, 0)
    what = what[:1].upper() + what[1:].rstrip(".") + "."
    return Refused(what=what, code=reason.code.value, field=_FIELDS.get(reason.code, ""))


def impossible(request: JobRequest, quotas: Quotas, nodes: Nodes) -> Refused | None:
    """Why these nodes and promises can never hold this request; None when they can."""
    sizes: dict[str, list[int]] = {}
    for record in nodes.values():
        if record.node.tenant == request.tenant:
            sizes.setdefault(record.node.spec, []).append(record.node.gpu)
    for spec in request.specs:
        if spec not in sizes:
            return unknown_spec(spec, sizes)
    return _too_large(request, sizes) or _too_many(request, sizes) or _promised_too_little(request, quotas)


def _too_large(request: JobRequest, sizes: Mapping[str, list[int]]) -> Refused | None:
    largest = max((max(sizes[spec]) for spec in request.specs), default=0)
    asked = max(request.sizes)
    if asked <= largest:
        return None
    what = f"resources.gpu is {asked}, but no node of spec {' or '.join(request.specs)} has more than {largest}."
    even = largest and asked * len(request.sizes) % largest == 0
    split = (
        f"Ask for instances: {asked * len(request.sizes) // largest} with gpu: {largest}, or choose"
        if even
        else "Choose"
    )
    hint = f"{split} another spec: sublet node ls."
    return Refused(what=what, hint=hint, code=ReasonCode.TOO_LARGE_FOR_SPEC, field="resources.gpu")


def _too_many(request: JobRequest, sizes: Mapping[str, list[int]]) -> Refused | None:
    most = max((sum(sizes[spec]) for spec in request.specs), default=0)
    if request.least_gpus <= most:
        return None
    what = f"The job needs {request.least_gpus} GPUs of {' or '.join(request.specs)}, but there are {most}."
    return Refused(what=what, hint="Ask for fewer instances.", code=ReasonCode.TOO_LARGE_FOR_TENANT, field="instances")


def _promised_too_little(request: JobRequest, quotas: Quotas) -> Refused | None:
    if request.idle is not IdlePolicy.NEVER:
        return None
    for name in path_of(request.quota):
        quota = quotas.get(name)
        if quota is None or quota.nominal is None:
            continue
        promised = max((quota.nominal.get(spec, 0) for spec in request.specs), default=0)
        if promised < request.least_gpus:
            what = f"idle is never and {name} is promised {promised}, but the job needs {request.least_gpus} GPUs."
            hint = "Allow idle: acceptable, ask for less, or have the quota raised."
            return Refused(what=what, hint=hint, code=ReasonCode.TOO_LARGE_FOR_QUOTA, field="idle")
    return None


def check_tree(quotas: Quotas, nodes: Nodes) -> None:
    """Refused when a child has no parent, children are promised more than their parent, or a spec has no node."""
    specs = {record.node.spec for record in nodes.values()}
    for name, quota in quotas.items():
        parent = path_of(name)[1] if "/" in name else ""
        if parent and parent not in quotas:
            hint = f"Describe {parent} as well."
            raise Refused(what=f"The quota {name} has no parent {parent}.", hint=hint, code="quota_unknown", field=name)
        for spec in quota.nominal or {}:
            if specs and spec not in specs:
                raise unknown_spec(spec, specs, f"quotas.{name}.nominal")
    for name in sorted(quotas):
        _check_sum(name, quotas)


def _check_sum(name: str, quotas: Quotas) -> None:
    own = quotas[name].nominal
    if own is None:
        return
    children = [quota.nominal or {} for key, quota in quotas.items() if path_of(key)[1:2] == (name,)]
    for spec in sorted({spec for child in children for spec in child}):
        below = sum(child.get(spec, 0) for child in children)
        if below > own.get(spec, 0):
            what = f"The quotas below {name} are promised {below} {spec}, {name} itself {own.get(spec, 0)}."
            hint = "Lower theirs, or raise it."
            raise Refused(
                what=what, why="Children share what their parent has.", hint=hint, code="quota_sum", field=name
            )


def unknown_quota(name: str, known: Iterable[str]) -> Refused:
    near = nearest(name, known)
    hint = f"Did you mean {near}?" if near else "See them with sublet quota ls."
    return Refused(what=f"There is no quota {name}.", hint=hint, code=ReasonCode.QUOTA_UNKNOWN, field="quota")


def unknown_spec(spec: str, known: Iterable[str], field: str = "spec") -> Refused:
    near = nearest(spec, known)
    there = f"There is {', '.join(sorted(known))}." if known else "There are no nodes yet."
    hint = f"Did you mean {near}?" if near else there
    return Refused(what=f"No node is of spec {spec}.", hint=hint, code=ReasonCode.SPEC_UNKNOWN, field=field)
