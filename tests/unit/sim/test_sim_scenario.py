"""Scenario files: what is read, what is refused and with which line, and what is left for the scheduler to refuse."""

from pathlib import Path

import pytest

from sublet.domain.effects import QueueJob, RefuseJob
from sublet.domain.errors import Refused
from sublet.domain.reasons import ReasonCode
from sublet.sim.scenario import Scenario, load, milliseconds, read_jobs
from sublet.sim.world import World

GOOD = """\
id: X1
title: one
source: here
defaults: {grace: 10s, stop_takes: 2s, node_timeout: 40s}
nodes:
  - {name: n1, gpu: 8}
  - {name: m, count: 2, gpu: 4, spec: l40, rack: r1}
quotas:
  - {name: A, gpu: 8}
  - {name: P/c, gpu: {gpu: 4, l40: 2}, lend: false, borrow: {max: 3}, type: general}
jobs:
  - {id: a, quota: A, count: 2, gpu: 2, work: 1m}
  - id: b
    quota: A
    sizes: [1, 3]
    idle: only
    running: {lease: idle, on: [n1, n1]}
    on_notice: {exit: 85, after: never}
  - {id: c, quota: P/c, at: event, stop_takes: never}
events:
  - {at: 2m, stop: a}
  - {at: 10s, submit: c}
  - {at: 1.5h, repeat: released, job: b, after: 90}
until: 2h
expect: {runs: [a]}
"""


def read_text(tmp_path: Path, text: str) -> Scenario:
    path = tmp_path / "x.yaml"
    path.write_text(text, "utf-8")
    return load(path)


def test_a_scenario_is_read_whole(tmp_path: Path) -> None:
    read = read_text(tmp_path, GOOD)
    assert [(node.name, node.spec, node.rack) for node in read.nodes] == [
        ("n1", "gpu", ""), ("m1", "l40", "r1"), ("m2", "l40", "r1"),
    ]  # fmt: skip
    assert read.quotas[1].nominal == {"gpu": 4, "l40": 2}
    assert (read.quotas[1].lend_max, read.quotas[1].borrow_max, str(read.quotas[1].scope)) == (0, 3, "general")
    assert (read.rules.grace_ms, read.node_timeout_ms, read.until_ms) == (10_000, 40_000, 7_200_000)
    assert list(read.jobs) == ["a-1", "a-2", "b", "c"]
    assert [(event.at_ms, event.kind, event.jobs, event.after_ms) for event in read.events] == [
        (10_000, "submit", ("c",), 0), (120_000, "stop", ("a-1", "a-2"), 0), (5_400_000, "repeat", ("b",), 90_000),
    ]  # fmt: skip


def test_what_a_program_does_follows_the_defaults_where_the_job_is_silent(tmp_path: Path) -> None:
    jobs = read_text(tmp_path, GOOD).jobs
    assert (jobs["a-1"].behaviour.stop_takes_ms, jobs["a-1"].behaviour.leaves_after_ms) == (2_000, 2_000)
    assert (jobs["b"].behaviour.leaves_after_ms, jobs["b"].behaviour.leaves_with) == (None, 85)
    assert (jobs["c"].behaviour.stop_takes_ms, jobs["c"].behaviour.leaves_after_ms) == (None, None)
    assert jobs["b"].running == ("idle", ("n1", "n1")) and jobs["c"].at_ms is None


def swapped(line: str, by: str) -> str:
    assert GOOD.count(line) == 1
    return GOOD.replace(line, by)


@pytest.mark.parametrize(
    ("line", "by", "place", "says"),
    [
        ("title: one", "titel: one", "x.yaml:2", "titel is not a known key"),
        ("grace: 10s", "grce: 10s", "x.yaml:4", "defaults.grce is not a known key"),
        ("grace: 10s", "grace: ten", "x.yaml:4", "no time"),
        ("{name: n1, gpu: 8}", "{name: n1, gpus: 8}", "x.yaml:6", "nodes.0.gpus is not a known key"),
        ("{name: n1, gpu: 8}", "{name: n1}", "x.yaml:6", "nodes.0.gpu is missing"),
        ("{name: n1, gpu: 8}", "{name: n1, gpu: many}", "x.yaml:6", "not a whole number"),
        ("{name: n1, gpu: 8}", "{name: m1, gpu: 8}", "x.yaml:7", "m1 is there twice"),
        ("count: 2, gpu: 4", "count: 99999999999, gpu: 4", "x.yaml:7", "nodes.1.count"),
        ("{name: A, gpu: 8}", "{name: A}", "x.yaml:9", "gpu is missing"),
        ("{name: A, gpu: 8}", "{name: A, gpu: -1}", "x.yaml:9", "quotas.0.gpu"),
        ("lend: false", "lend: sometimes", "x.yaml:10", "not a mapping"),
        ("type: general", "type: genral", "x.yaml:10", "Did you mean general"),
        ("id: a, quota", "quota", "x.yaml:12", "jobs.0.id is missing"),
        ("work: 1m", "wrk: 1m", "x.yaml:12", "jobs.0.wrk is not a known key"),
        ("- id: b", "- id: a-1", "x.yaml:13", "a-1 is there twice"),
        ("idle: only", "idle: onyl", "x.yaml:16", "Did you mean only"),
        ("on: [n1, n1]", "on: [n1, n7]", "x.yaml:17", "There is no node n7"),
        ("on: [n1, n1]", "on: [n1]", "x.yaml:17", "1 nodes for 2 instances"),
        ("exit: 85", "exti: 85", "x.yaml:18", "jobs.1.on_notice.exti"),
        ("{at: 2m, stop: a}", "{at: 2m, stop: z}", "x.yaml:21", "There is no job z"),
        ("{at: 2m, stop: a}", "{at: 2m, stop: a, exit: 1}", "x.yaml:21", "events.0.exit is not a known key"),
        ("{at: 2m, stop: a}", "{at: 2m, stop: a, drain: n1}", "x.yaml:21", "2 things"),
        ("{at: 2m, stop: a}", "{at: 2m, drain: n9}", "x.yaml:21", "There is no node n9"),
        ("{at: 2m, stop: a}", "{stop: a}", "x.yaml:21", "no time"),
        ("{at: 2m, stop: a}", "{at: 2m, quota: {nam: A}}", "x.yaml:21", "quota"),
        ("{at: 10s, submit: c}", "{at: 10s, submit: b}", "x.yaml:22", "at: event"),
        ("repeat: released", "repeat: noticed", "x.yaml:23", "repeat"),
        ("nodes:\n", "nodes: 3\nquotas: [", "x.yaml", "YAML"),
        ("until: 2h", "until: [2h]", "x.yaml:24", "no time"),
    ],
)  # fmt: skip
def test_what_no_scenario_can_say_is_refused_with_its_line(
    tmp_path: Path, line: str, by: str, place: str, says: str
) -> None:
    with pytest.raises(Refused) as refused:
        read_text(tmp_path, swapped(line, by))
    assert refused.value.where.startswith(place), refused.value.where
    assert says in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"id: \xff\xfe")
    with pytest.raises(Refused, match="UTF-8"):
        load(tmp_path / "x.yaml")
    with pytest.raises(Refused, match="cannot be read"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "numbers",
    [
        {"gpu": 0}, {"gpu": -1}, {"gpu": 0.5}, {"gpu": "eight"}, {"gpu": True}, {"gpu": 10**30}, {"instances": 0},
        {"instances": 1.5}, {"sizes": []}, {"sizes": [1, 0]}, {"sizes": "12"}, {"priority": 0}, {"priority": 10},
        {"priority": "high"}, {"priority": 5.5}, {"min_instances": 0}, {"min_instances": 2}, {"min_instances": "x"},
        {"instances": 1_000_000, "gpu": 1_000_000},
    ],
)  # fmt: skip
def test_absurd_numbers_of_a_job_reach_the_scheduler_and_are_refused_there(
    tmp_path: Path, numbers: dict[str, object]
) -> None:
    text = swapped("{id: a, quota: A, count: 2, gpu: 2, work: 1m}", f"{{id: a, quota: A, work: 1m, {'%s'}}}")
    flow = ", ".join(f"{key}: {str(value).lower() if value is True else value!r}" for key, value in numbers.items())
    world = World(read_text(tmp_path, text % flow))
    told = [effect for entry in world.run() for effect in entry.effects if getattr(effect, "job", "") == "a"]
    assert [type(effect) for effect in told] == [RefuseJob]
    assert told[0].reason.code is ReasonCode.MALFORMED  # type: ignore[union-attr]
    assert any(isinstance(e, QueueJob) and e.job == "b" for entry in world.store.entries() for e in entry.effects)


@pytest.mark.parametrize(
    ("written", "expected"), [("30s", 30_000), ("5m", 300_000), (90, 90_000), ("1.5h", 5_400_000), ("20ms", 20), (0, 0)]
)
def test_times(written: object, expected: int) -> None:
    assert milliseconds(written, "x") == expected


@pytest.mark.parametrize("written", ["", "s", "-1s", "1h30m", -1, True, None, [1], "1e3"])
def test_what_is_no_time(written: object) -> None:
    with pytest.raises(Refused, match="no time"):
        milliseconds(written, "x")


def test_jobs_that_stand_in_no_file() -> None:
    assert [job.request.id for job in read_jobs({"id": "a", "quota": "A", "count": 2})] == ["a-1", "a-2"]
    with pytest.raises(Refused, match=r"job\.qouta"):
        read_jobs({"id": "a", "qouta": "A"})
