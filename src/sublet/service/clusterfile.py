"""The file that describes a cluster: its nodes, quotas, rules, signs of faults, webhooks. Any of them may be left out.

One rule: it says what shall be; a quota or a webhook that it does not name is left as it is.
"""

from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import PurePath
from typing import Any

from sublet.domain.nodes import DEFAULT_TENANT, Node
from sublet.domain.quotas import Quota, Scope, Strategy, path_of
from sublet.domain.rules import Rules
from sublet.service.reading import ANY, Section, Shape, check_keys, read
from sublet.service.settings import Cluster, Webhook
from sublet.service.signs import signs

MAX_GPU = 1_000_000
NODE: Shape = dict.fromkeys(["name", "spec", "gpu", "rack", "cpu", "memory", "address"])
QUOTA: Shape = {
    "nominal": ANY,
    "scope": None,
    "strategy": None,
    "balance_timeout": None,
    "lend_max": None,
    "borrow_max": None,
    "self_preemption": None,
    "sub_quota_preemption": None,
    "owner": None,
}
WEBHOOK: Shape = dict.fromkeys(["url", "on", "quota", "secret_file"])
RULES: Shape = {item.name.removesuffix("_ms"): None for item in fields(Rules)}
SHAPE: Shape = {"tenant": None, "nodes": ANY, "quotas": ANY, "rules": RULES, "verdicts": None, "webhooks": ANY}


def parse(text: str, file: str = "") -> Cluster:
    """Refused when any part of it is not understood."""
    source = read(text, file)
    check_keys(source, SHAPE, {**SHAPE, "quotas": QUOTA, "nodes": NODE, "webhooks": WEBHOOK})
    tenant = source.name("tenant", DEFAULT_TENANT)
    return Cluster(
        nodes=_nodes(source, tenant) if source.has("nodes") else None,
        quotas=_quotas(source, tenant) if source.has("quotas") else None,
        rules=_rules(source.section("rules")) if source.has("rules") else None,
        verdicts=tuple(signs(source)),
        webhooks=_webhooks(source.section("webhooks")),
    )


def _nodes(source: Section, tenant: str) -> tuple[Node, ...]:
    found: dict[str, Node] = {}
    for section in source.sections("nodes"):
        check_keys(section, NODE, NODE)
        node = _node(section, tenant)
        if node.name in found:
            raise section.refused("name", f"Two nodes are called {node.name}.", hint="Give each its own name.")
        found[node.name] = node
    return tuple(found.values())


def _node(section: Section, tenant: str) -> Node:
    for key in ("name", "spec", "gpu"):
        if not section.has(key):
            raise section.refused(key, f"{section.key(key)} is missing.", "A node has a name, a spec and GPUs.")
    return Node(
        name=section.name("name"),
        spec=section.name("spec"),
        gpu=section.whole("gpu", low=0, high=1_024) or 0,
        tenant=tenant,
        rack=section.name("rack"),
        cpu_milli=section.cpu_milli("cpu"),
        memory_bytes=section.size_bytes("memory"),
        address=section.name("address"),
    )


def _quotas(source: Section, tenant: str) -> tuple[Quota, ...]:
    inside = source.section("quotas")
    return tuple(quota(inside, inside.checked_name(name), tenant) for name in inside.values)


def quota(inside: Section, name: str, tenant: str) -> Quota:
    """The quota that stands under this name."""
    section = inside.section(name)
    check_keys(section, QUOTA, QUOTA)
    if not all(path_of(name)) or name != "/".join(part for part in name.split("/") if part):
        raise inside.refused(name, f"{name!r} is no name of a quota.", hint="Write team, or parent/team.")
    usual = Quota(name=name)
    timeout = section.duration_ms("balance_timeout")
    return Quota(
        name=name,
        tenant=tenant,
        nominal=_nominal(section),
        scope=Scope(section.choice("scope", list(Scope), usual.scope)),
        strategy=Strategy(section.choice("strategy", list(Strategy), usual.strategy)),
        balance_timeout_ms=usual.balance_timeout_ms if timeout is None else timeout,
        lend_max=section.whole("lend_max", low=0, high=MAX_GPU),
        borrow_max=section.whole("borrow_max", low=0, high=MAX_GPU),
        self_preemption=section.flag("self_preemption", usual.self_preemption),
        sub_quota_preemption=section.flag("sub_quota_preemption", usual.sub_quota_preemption),
        owner=section.name("owner"),
    )


def _nominal(section: Section) -> Mapping[str, int] | None:
    if not section.has("nominal"):
        return None
    inside = section.section("nominal")
    return {spec: inside.whole(spec, low=0, high=MAX_GPU) or 0 for spec in map(inside.checked_name, inside.values)}


def _webhooks(inside: Section) -> tuple[Webhook, ...]:
    return tuple(_webhook(name, inside.section(name)) for name in map(inside.checked_name, inside.values))


def _webhook(name: str, section: Section) -> Webhook:
    check_keys(section, WEBHOOK, WEBHOOK)
    if not section.has("url"):
        raise section.refused("url", f"{section.key('url')} is missing.", hint="Write url: https://host/path.")
    file = section.name("secret_file")
    return Webhook(
        name=name,
        url=section.text("url"),
        on=section.words("on"),
        quota=section.name("quota"),
        secret_file=str(PurePath(section.file).parent / file) if file else "",
    )


def _rules(section: Section) -> Rules:
    given = [item for item in fields(Rules) if section.has(item.name.removesuffix("_ms"))]
    return Rules(**{item.name: _rule(section, item) for item in given})


def _rule(section: Section, item: Field[Any]) -> Any:
    if item.name.endswith("_ms"):
        return section.duration_ms(item.name.removesuffix("_ms"))
    if item.type is bool:
        return section.flag(item.name, bool(item.default))
    return section.whole(item.name, low=0, high=MAX_GPU)
