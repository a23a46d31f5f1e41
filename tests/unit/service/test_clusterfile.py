"""The file that describes a cluster: everything in it is heard, and nothing else is let in."""

from dataclasses import fields

import pytest

from sublet.domain.errors import Refused
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota, Scope, Strategy
from sublet.domain.rules import Rules
from sublet.service.clusterfile import parse
from sublet.service.settings import Cluster, Settings, Webhook

WHOLE = """\
tenant: lab
rules: {grace: 30s, max_grace: 5m, reclaim_delay: 0s, cooldown: 10s}
nodes:
- {name: n1, spec: h100x8, gpu: 8, rack: r1, cpu: 96, memory: 1Ti, address: 10.0.0.1}
- {name: n2, spec: h100x8, gpu: 8}
quotas:
  nlp:
    nominal: {h100x8: 8}
    scope: general
    strategy: balance
    balance_timeout: 1m
    lend_max: 4
    borrow_max: 0
    self_preemption: true
    sub_quota_preemption: true
    owner: mei
  nlp/chat: {}
"""


def test_everything_in_it_is_heard() -> None:
    assert parse(WHOLE) == Cluster(
        rules=Rules(grace_ms=30_000, max_grace_ms=300_000, reclaim_delay_ms=0, cooldown_ms=10_000),
        nodes=(
            Node(
                name="n1", spec="h100x8", gpu=8, tenant="lab", rack="r1", cpu_milli=96_000,
                memory_bytes=1024**4, address="10.0.0.1",
            ),
            Node(name="n2", spec="h100x8", gpu=8, tenant="lab"),
        ),
        quotas=(
            Quota(
                name="nlp", tenant="lab", nominal={"h100x8": 8}, scope=Scope.GENERAL, strategy=Strategy.BALANCE,
                balance_timeout_ms=60_000, lend_max=4, borrow_max=0, self_preemption=True,
                sub_quota_preemption=True, owner="mei",
            ),
            Quota(name="nlp/chat", tenant="lab", nominal=None),
        ),
    )  # fmt: skip


def test_webhooks_and_where_their_secrets_stand() -> None:
    text = (
        "webhooks:\n  ops: {url: 'https://x/', on: [failed, hang], quota: nlp, secret_file: ops.secret}\n"
        "  nlp: {url: 'https://y/', on: failed}\n"
    )
    assert parse(text, "etc/c.yaml").webhooks == (
        Webhook(name="ops", url="https://x/", on=("failed", "hang"), quota="nlp", secret_file="etc/ops.secret"),
        Webhook(name="nlp", url="https://y/", on=("failed",)),
    )


@pytest.mark.parametrize("name", [item.name for item in fields(Rules)])
def test_every_rule_can_be_set(name: str) -> None:
    kind = type(getattr(Rules(), name))
    text, value = ("7s", 7_000) if name.endswith("_ms") else ("false", False) if kind is bool else ("7", 7)
    assert parse(f"rules: {{{name.removesuffix('_ms')}: {text}}}\n").rules == Rules(**{name: value})  # type: ignore[arg-type]


def test_what_it_does_not_speak_of_stays_open() -> None:
    assert parse("tenant: lab\n") == Cluster()


REFUSALS = [
    ("nodez: []\n", "nodez is not a known key. The nearest known key is nodes.", "c.yaml:1"),
    ("webhooks:\n  ops: {on: failed}\n", "webhooks.ops.url is missing.", "c.yaml:2"),
    ("webhooks:\n  ops: {url: x, secret: y}\n", "webhooks.ops.secret is not a known key.", "c.yaml:2"),
    ("nodes:\n- {name: a, spec: b, gpus: 1}\n", "The nearest known key is nodes.0.gpu.", "c.yaml:2"),
    ("nodes:\n- {name: a, spec: b, gpu: 1}\n- {name: a, spec: b, gpu: 1}\n", "Two nodes are called a.", "c.yaml:3"),
    ("nodes:\n- {name: a, gpu: 1}\n", "nodes.0.spec is missing.", "c.yaml:2"),
    ("nodes:\n- {name: a, spec: b, gpu: -1}\n", "nodes.0.gpu is -1. It must be 0 to 1,024.", "c.yaml:2"),
    ("nodes: {a: b}\n", "nodes is a mapping, not a list. Begin each item with `- `.", "c.yaml:1"),
    ("nodes: [a]\n", "nodes.0 is a, not a mapping.", "c.yaml:1"),
    ("quotas:\n  p:\n    nominal: {x: many}\n", "quotas.p.nominal.x is many, not a whole number.", "c.yaml:3"),
    ("quotas:\n  p:\n    nominl: {x: 1}\n", "The nearest known key is quotas.p.nominal.", "c.yaml:3"),
    ("quotas:\n  p//c: {}\n", "'p//c' is no name of a quota. Write team, or parent/team.", "c.yaml:2"),
    ("quotas:\n  /p: {}\n", "'/p' is no name of a quota.", "c.yaml:2"),
    ("quotas:\n  5: {}\n", "5 in quotas is no name.", "c.yaml:2"),
    ("quotas:\n  p: {scope: both}\n", "quotas.p.scope is both. It may be lingjun or general.", "c.yaml:2"),
    ("quotas:\n  p: {self_preemption: 1}\n", "quotas.p.self_preemption is 1. It may be true or false.", "c.yaml:2"),
    ("rules: {grace: 30}\n", "rules.grace is 30, not a time with its unit. Write 30s or 30m.", "c.yaml:1"),
    ("rules: {grase: 30s}\n", "rules.grase is not a known key. The nearest known key is rules.grace.", "c.yaml:1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "where"), REFUSALS, ids=range(len(REFUSALS)))
def test_refused_with_the_line(text: str, said: str, where: str) -> None:
    with pytest.raises(Refused) as raised:
        parse(text, "c.yaml")
    assert said in str(raised.value)
    assert raised.value.where == where


@pytest.mark.parametrize("more", [{"port": -1}, {"port": 65_536}, {"host": "0.0.0.0"}])
def test_settings_are_checked_whole(more: dict[str, object], tmp_path: object) -> None:
    with pytest.raises(Refused):
        Settings(data=tmp_path, **more)  # type: ignore[arg-type]
