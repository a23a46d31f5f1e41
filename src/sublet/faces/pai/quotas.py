"""PaiStudio's quotas: the same promises as ours, with PAI's names and fields.

One rule: what decides anything is in our quota; labels, descriptions and fields without a meaning here are only kept.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sublet.domain.errors import Refused
from sublet.domain.quotas import Quota, Scope, Strategy
from sublet.faces.pai import names
from sublet.faces.pai.book import QUOTA, WORKSPACE
from sublet.faces.pai.call import Call, given, invalid, is_true, missing, page, time_of
from sublet.faces.pai.orders import quota_named
from sublet.faces.pai.shares import live
from sublet.service import checks, commands, queries
from sublet.service.settings import Cluster

SCOPES = {"ECS": Scope.GENERAL, "Lingjun": Scope.LINGJUN}
TYPES = {scope: name for name, scope in SCOPES.items()}
STRATEGIES = {
    "PaiStrategyIntelligent": Strategy.INTELLIGENT,
    "PaiStrategyBalance": Strategy.BALANCE,
    "PaiStrategyRoundRobin": Strategy.ROUND_ROBIN,
    "PaiStrategyStrictFIFO": Strategy.FIFO,
}
STRATEGY_NAMES = {strategy: name for name, strategy in STRATEGIES.items()}
KEPT = ("Description", "Labels", "QuotaConfig", "AllocateStrategy", "ResourceGroupIds", "ClusterSpec")
SORTS = ("QuotaName", "Status", "GPU", "CPU", "Memory", "GmtCreatedTime", "GmtModifiedTime")


def name_in(call: Call, text: str) -> str:
    """Our name of the quota with this id; Refused with QuotaNotFound."""
    name = quota_named(call.desk, text)
    if name not in call.desk.feed.quotas:
        raise Refused(what=f"There is no quota {text}.", hint="See ListQuotas.", code="QuotaNotFound", field="QuotaId")
    return name


def create_quota(call: Call) -> dict[str, Any]:
    body = call.body
    short = body.get("QuotaName")
    if not isinstance(short, str) or not short.strip():
        raise missing("QuotaName")
    if "/" in short or not short.isprintable() or len(short) > 200:
        raise invalid("QuotaName", short, "A name is one line without a slash.")
    parent = name_in(call, str(body["ParentQuotaId"])) if body.get("ParentQuotaId") else ""
    name = f"{parent}/{short}" if parent else short
    if name in call.desk.feed.quotas:
        raise invalid("QuotaName", short, "There is a quota of this name already.")
    above = call.desk.feed.quotas.get(parent)
    quota = Quota(name=name, tenant=above.tenant if above else _tenant(call), nominal=nominal_of(call, body.get("Min")))
    quota = _configured(replace(quota, scope=above.scope if above else Scope.GENERAL), body)
    commands.apply(call.desk, Cluster(quotas=(quota,)))
    now_ms = call.desk.clock.now_ms()
    kept = {key: body[key] for key in KEPT if body.get(key)}
    call.book.put(QUOTA, name, {**kept, "created_ms": now_ms, "modified_ms": now_ms, "creator": call.who.user})
    return {"QuotaId": names.quota_id(name)}


def _tenant(call: Call) -> str:
    """Of the nodes: capacity of several tenants is not told apart by PAI's API."""
    tenants = sorted({record.node.tenant for record in call.desk.feed.nodes.values()})
    return tenants[0] if tenants else Quota(name="").tenant


def nominal_of(call: Call, value: Any) -> dict[str, int]:
    """GPUs by kind of node, from `NodeSpecs` (whole nodes; `NodeSpec` is read alike) or `ResourceAmount`."""
    if value in (None, {}):
        return {}
    if not isinstance(value, Mapping):
        raise invalid("Min", value, "It is no object.")
    nodes = value.get("NodeSpecs") or value.get("NodeSpec")
    if nodes:
        found: dict[str, int] = {}
        for one in nodes if isinstance(nodes, list) else [nodes]:
            spec = str(one.get("Type") or "") if isinstance(one, Mapping) else ""
            found[spec] = found.get(spec, 0) + _count(one.get("Count") if spec else None) * _gpus_of(call, spec)
        return found
    amount = value.get("ResourceAmount") or value
    if not isinstance(amount, Mapping) or amount.get("GPU") in (None, ""):
        return {}
    spec = str(amount.get("GPUType") or "") or _only_spec(call)
    return {_known(call, spec): _count(amount["GPU"])}


def _count(value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > 7:
        raise invalid("Min", value, "It must be a whole number.")
    return int(text)


def _gpus_of(call: Call, spec: str) -> int:
    """Of the largest node of this kind."""
    nodes = [one.node for one in call.desk.feed.nodes.values() if one.node.spec == _known(call, spec)]
    return max(node.gpu for node in nodes)


def _known(call: Call, spec: str) -> str:
    known = {record.node.spec for record in call.desk.feed.nodes.values()}
    if spec not in known:
        raise checks.unknown_spec(spec, known, "Min")
    return spec


def _only_spec(call: Call) -> str:
    known = sorted({record.node.spec for record in call.desk.feed.nodes.values()})
    if len(known) != 1:
        raise missing("Min.ResourceAmount.GPUType", f"There are several kinds of node: {', '.join(known)}.")
    return known[0]


def _configured(quota: Quota, body: Mapping[str, Any]) -> Quota:
    """With the strategy, the kind of lending and the preemption that the body asks for."""
    kind, strategy = body.get("ResourceType"), body.get("QueueStrategy")
    if kind:
        if kind not in SCOPES:
            raise invalid("ResourceType", kind, "It may be ECS or Lingjun.")
        quota = replace(quota, scope=SCOPES[kind])
    if strategy:
        if strategy not in STRATEGIES:
            raise invalid("QueueStrategy", strategy, f"It may be {', '.join(STRATEGIES)}.")
        quota = replace(quota, strategy=STRATEGIES[strategy])
    config = body.get("QuotaConfig") or {}
    if not isinstance(config, Mapping):
        raise invalid("QuotaConfig", config, "It is no object.")
    return _preempting(_lending(quota, config), config)


def _lending(quota: Quota, config: Mapping[str, Any]) -> Quota:
    """Disabled: it neither lends nor borrows. PAI does not say which of both is meant."""
    usage = config.get("OversoldUsageConfig")
    if not isinstance(usage, Mapping) or usage.get("Disabled") is None:
        return quota
    if is_true(usage["Disabled"]):
        return replace(quota, lend_max=0, borrow_max=0)
    is_off = quota.lend_max == 0 and quota.borrow_max == 0
    return replace(quota, lend_max=None, borrow_max=None) if is_off else quota


def _preempting(quota: Quota, config: Mapping[str, Any]) -> Quota:
    if config.get("EnableSelfQuotaPreemption") is not None:
        quota = replace(quota, self_preemption=is_true(config["EnableSelfQuotaPreemption"]))
    said = [config.get(key) for key in ("EnableSubQuotaPreemption", "EnablePreemptSubquotaWorkloads")]
    if any(one is not None for one in said):
        quota = replace(quota, sub_quota_preemption=any(is_true(one) for one in said))
    return quota


def update_quota(call: Call) -> dict[str, Any]:
    """Of QuotaConfig what is sent is changed, the rest stays; labels are replaced whole."""
    name = name_in(call, call.path["QuotaId"])
    body, note = call.body, call.book.note(QUOTA, name)
    asked = body.get("QuotaName")
    if asked and asked != name.rpartition("/")[2]:
        raise invalid("QuotaName", asked, "A quota keeps its name here: it is what people submit to.")
    commands.apply(call.desk, Cluster(quotas=(_configured(call.desk.feed.quotas[name], body),)))
    config = {**note.get("QuotaConfig", {}), **(body.get("QuotaConfig") or {})}
    kept = {key: body[key] for key in ("Description", "Labels") if body.get(key) is not None}
    note |= {**kept, **({"QuotaConfig": config} if config else {}), "modified_ms": call.desk.clock.now_ms()}
    call.book.put(QUOTA, name, note)
    return {"QuotaId": names.quota_id(name)}


def scale_quota(call: Call) -> dict[str, Any]:
    """Sizes are absolute. What is cut below its use loses its newest guarantees, not its jobs."""
    name = name_in(call, call.path["QuotaId"])
    if not call.body.get("Min"):
        raise missing("Min", "It says how much the quota is promised from now on.")
    quota = replace(call.desk.feed.quotas[name], nominal=nominal_of(call, call.body["Min"]))
    commands.apply(call.desk, Cluster(quotas=(quota,)))
    call.book.put(QUOTA, name, {**call.book.note(QUOTA, name), "modified_ms": call.desk.clock.now_ms()})
    return {"QuotaId": names.quota_id(name)}


def delete_quota(call: Call) -> dict[str, Any]:
    name = name_in(call, call.path["QuotaId"])
    bound = [one for one, note in call.book.notes(WORKSPACE).items() if name in note.get("quotas", ())]
    if bound:
        what, why = f"The quota {name} cannot be deleted.", f"It is bound to the workspace {bound[0]}."
        raise Refused(what=what, why=why, hint="Detach it first: DeleteWorkspaceResource.", code="QuotaInUse")
    commands.delete_quota(call.desk, name)
    call.book.remove(QUOTA, name)
    return {"QuotaId": names.quota_id(name)}


def get_quota(call: Call) -> dict[str, Any]:
    return shown(call, name_in(call, call.path["QuotaId"]))


def list_quotas(call: Call) -> dict[str, Any]:
    """Of both resource types, unless one is asked for: PAI lists ECS alone when none is, which would hide quotas."""
    found = [shown(call, name) for name in call.desk.feed.quotas]
    found = [one for one in found if _is_meant(call, one)]
    sort_by, order = call.text("SortBy", "QuotaName"), call.text("Order", "asc").lower()
    if sort_by not in SORTS:
        raise invalid("SortBy", sort_by, f"It may be {', '.join(SORTS)}.")
    found.sort(key=lambda one: (_sorted_by(one, sort_by), one["QuotaId"]), reverse=order == "desc")
    return page(call, "Quotas", found)


def _sorted_by(one: Mapping[str, Any], key: str) -> Any:
    amount = one["Min"]["ResourceAmount"]
    return float(amount.get(key) or 0) if key in ("GPU", "CPU", "Memory") else str(one.get(key) or "")


def _is_meant(call: Call, one: Mapping[str, Any]) -> bool:
    ids, statuses = call.words("QuotaIds"), call.words("Statuses")
    parent, workspaces = call.query.get("ParentQuotaId"), call.words("WorkspaceIds")
    labels = {label.get("Key"): label.get("Value") for label in one["Labels"]}
    wanted = dict(part.partition("=")[::2] for part in call.words("Labels"))
    bound = {room["WorkspaceId"] for room in one["Workspaces"]}
    return (
        (not ids or one["QuotaId"] in ids or one["QuotaName"] in ids)
        and call.text("QuotaName").lower() in one["QuotaName"].lower()
        and call.text("ResourceType") in ("", one["ResourceType"])
        and (parent is None or quota_parent(call, parent) == quota_parent(call, one.get("ParentQuotaId", "")))
        and (not statuses or one["Status"] in statuses)
        and (not workspaces or bool(bound & set(workspaces)))
        and all(labels.get(key) == value for key, value in wanted.items())
        and (not call.flag("HasResource") or float(one["Min"]["ResourceAmount"].get("GPU") or 0) > 0)
    )


def quota_parent(call: Call, text: str) -> str:
    return quota_named(call.desk, text) if text else ""


def shown(call: Call, name: str) -> dict[str, Any]:
    """A quota as PAI shows it."""
    quota, note = call.desk.feed.quotas[name], call.book.note(QUOTA, name)
    parent, _, short = name.rpartition("/")
    below = [one for one in call.desk.feed.quotas if one.rpartition("/")[0] == name]
    rooms = [one for one, its in call.book.notes(WORKSPACE).items() if name in its.get("quotas", ())]
    nominal = _promised(call, quota)
    return given(
        {
            "QuotaId": names.quota_id(name),
            "QuotaName": short,
            "ParentQuotaId": names.quota_id(parent) if parent else None,
            "RootQuotaId": names.quota_id(name.partition("/")[0]),
            "Status": "Ready",
            "ReasonCode": "",
            "ReasonMessage": "",
            "ResourceType": TYPES[quota.scope],
            "Min": amount_and_nodes(call, nominal),
            "QueueStrategy": STRATEGY_NAMES[quota.strategy],
            "AllocateStrategy": note.get("AllocateStrategy", "ByNodeSpecs"),
            "QuotaConfig": _config(quota, note),
            "QuotaDetails": _details(call, name),
            "SubQuotas": [{"QuotaId": names.quota_id(one), "QuotaName": one.rpartition("/")[2]} for one in below],
            "Workspaces": [{"WorkspaceId": one, "WorkspaceName": one} for one in rooms],
            "ResourceGroupIds": note.get("ResourceGroupIds", []),
            "Labels": note.get("Labels", []),
            "Description": note.get("Description", ""),
            "GPUType": next(iter(nominal), None) if len(nominal) == 1 else None,
            "CreatorId": note.get("creator", quota.owner or None),
            "GmtCreatedTime": time_of(note.get("created_ms")),
            "GmtModifiedTime": time_of(note.get("modified_ms")),
        }
    )


def _promised(call: Call, quota: Quota) -> dict[str, int]:
    if quota.nominal is not None:
        return dict(quota.nominal)
    views = [view for view in queries.quotas(call.desk).items if view.name == quota.name]
    return {view.spec: view.guaranteed for view in views}


def _config(quota: Quota, note: Mapping[str, Any]) -> dict[str, Any]:
    """What was sent, with what holds laid over it."""
    is_off = quota.lend_max == 0 and quota.borrow_max == 0
    kept = dict(note.get("QuotaConfig") or {})
    return kept | {
        "OversoldUsageConfig": {**(kept.get("OversoldUsageConfig") or {}), "Disabled": is_off},
        "EnableSelfQuotaPreemption": quota.self_preemption,
        "EnableSubQuotaPreemption": quota.sub_quota_preemption,
    }


def amount_and_nodes(call: Call, nominal: Mapping[str, int]) -> dict[str, Any]:
    """As GPUs, and as nodes where they are whole ones."""
    nodes = []
    for spec, gpus in nominal.items():
        each = max((one.node.gpu for one in call.desk.feed.nodes.values() if one.node.spec == spec), default=0)
        if each and gpus % each == 0:
            nodes.append({"Type": spec, "Count": gpus // each})
    return {"NodeSpecs": nodes if len(nodes) == len(nominal) else [], "ResourceAmount": amount(nominal)}


def amount(gpus: Mapping[str, int]) -> dict[str, Any]:
    """GPUs are what is promised; cores and memory follow from the nodes."""
    found: dict[str, Any] = {"GPU": str(sum(gpus.values()))}
    return found | ({"GPUType": next(iter(gpus))} if len(gpus) == 1 else {})


def _details(call: Call, name: str) -> dict[str, Any]:
    views = [view for view in queries.quotas(call.desk).items if view.name == name]
    promised = {view.spec: view.guaranteed for view in views}
    used = {view.spec: view.own for view in views}
    own = sum(one.gpus for one in live(call, {name}) if one.is_guaranteed)
    asked = sum(one.gpus for one in live(call, {name}))
    return {
        "ActualMinQuota": amount(promised),
        "DesiredMinQuota": amount(promised),
        "AllocatableQuota": amount(promised),
        "AllocatedQuota": amount(used),
        "UsedQuota": amount(used),
        "RequestedQuota": amount(used),
        "SelfAllocatedQuota": amount({"": own}) if len(promised) != 1 else amount({next(iter(promised)): own}),
        "DescendantsAllocatedQuota": {"GPU": str(sum(used.values()) - own)},
        "SelfSubmittedQuota": {"GPU": str(asked)},
        "LentQuota": {"GPU": str(sum(view.lent for view in views))},
        "BorrowedQuota": {"GPU": str(sum(view.borrowed for view in views))},
        "FreeQuota": {"GPU": str(sum(view.free for view in views))},
    }
