"""What Prometheus reads adds up with what the commands show; the shipped dashboard and alerts speak its names."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sublet.domain.jobs import Outcome
from sublet.service import queries
from sublet.service.metrics import Metrics
from tests.unit.service.world import World, two_teams

DEPLOY = Path(__file__).parents[3] / "deploy"
SUFFIX = re.compile(r"_(bucket|sum|count|created|total)$")
NAMED = re.compile(r"\bsublet_[a-z_]+")


def read(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.scrape().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def metrics_of(world: World) -> Metrics:
    return Metrics(desk=world.desk, version="1", lag_seconds=lambda: 0.0)


@pytest.fixture
def world() -> World:
    return two_teams()


def a_story(world: World) -> Metrics:
    """A borrower runs on what nobody uses, an owner comes, the borrower leaves, the owner starts."""
    metrics = metrics_of(world)
    world.submit("quota: team-b\nname: borrower\nidle: only\ngpu: 2\ninstances: 2\ncommand: x\n", "ben")
    world.pass_ms(600_000)
    world.submit("quota: team-a\nname: owner\ngpu: 2\ncommand: x\n")
    world.pass_ms(120_000)
    return metrics


def test_what_was_lent_taken_back_and_lost(world: World) -> None:
    metrics = a_story(world)
    now = read(metrics)
    (end,) = world.desk.record("borrower").history
    owner = world.desk.record("owner")
    assert owner.lease is not None and end.outcome is Outcome.PREEMPTED and end.noticed_ms is not None
    assert now["sublet_preemptions_total"] == {("team-b", "team-a", "reclaim"): 1}
    lent = sum(now["sublet_lent_gpu_seconds_total"].values())
    assert lent == 4 * (end.ended_ms - end.granted_ms) / 1000
    assert now["sublet_lost_work_gpu_seconds_total"] == {("preempted",): end.lost_gpu_ms / 1000} and end.lost_gpu_ms
    told = now["sublet_reclaim_seconds_sum"]
    assert told == {("team-a",): (owner.lease.granted_ms - end.noticed_ms) / 1000}
    assert read(metrics)["sublet_preemptions_total"] == now["sublet_preemptions_total"], "nothing is counted twice"


def test_it_says_of_quotas_what_the_commands_say(world: World) -> None:
    now = read(a_story(world))
    for view in queries.quotas(world.desk).items:
        for name in ("guaranteed", "own", "lent", "free", "borrowed"):
            assert now[f"sublet_quota_{name}_gpus"][view.name, view.spec] == getattr(view, name)
    waiting = [
        view for view in queries.jobs(world.desk, queries.JobFilter(), 100, None).items if view.state == "waiting"
    ]
    assert sum(now["sublet_jobs_waiting"].values()) == len(waiting)


def test_no_label_names_a_job_a_user_or_a_node(world: World) -> None:
    text = a_story(world).scrape().decode()
    secret = [view.id for view in queries.jobs(world.desk, queries.JobFilter(), 100, None).items]
    secret += [node.name for node in queries.nodes(world.desk).items] + ["borrower", "owner", "ben"]
    assert not [word for word in secret if f'"{word}"' in text]


def told_names(world: World) -> set[str]:
    metrics = metrics_of(world)
    text = metrics.scrape().decode()
    names = set(re.findall(r"# TYPE (sublet_[a-z_]+)", text))
    return names | {f"{name}{end}" for name in names for end in ("_bucket", "_sum", "_count")}


def test_the_dashboard_and_the_alerts_speak_of_what_there_is(world: World) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "sublet.json").read_text())
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(rules) == 10 and len(asked) > 15
    assert all({"alert", "expr", "labels", "annotations"} <= set(rule) for rule in rules)
    known = told_names(world)
    used = {name for text in [*asked, *(rule["expr"] for rule in rules)] for name in NAMED.findall(text)}
    assert used <= known, used - known
    shown = {SUFFIX.sub("", name) for name in used}
    assert not {SUFFIX.sub("", SUFFIX.sub("", name)) for name in known} - shown, "every one is shown somewhere"
