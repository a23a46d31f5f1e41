"""Commands: checked before anything is stored, answered when durable, with words that say what to change."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sublet.domain.errors import Refused, Unavailable
from sublet.domain.jobs import JobState
from sublet.domain.nodes import Node, NodeState
from sublet.domain.quotas import Quota
from sublet.domain.rules import Rules
from sublet.service import clusterfile, commands, jobfile
from sublet.service.settings import Cluster
from tests.unit.service.world import World, two_teams

JOB = "quota: team-a\ngpu: 2\ncommand: train\n"


def test_a_job_is_durable_when_the_answer_comes() -> None:
    world = two_teams()
    record = world.submit(JOB)
    assert world.feed.job(record.request.id) == record
    assert (record.state, record.request.specs, record.request.tenant) == (JobState.RUNNING, ("demo",), "demo")


def test_without_a_spec_the_nearest_promise_up_the_tree_is_meant() -> None:
    nodes = [Node(name="n1", spec="a", gpu=1), Node(name="n2", spec="b", gpu=1)]
    quotas = [Quota(name="p", nominal={"b": 1}), Quota(name="p/c", nominal=None)]
    assert World(nodes, quotas).submit("quota: p/c\ngpu: 1\ncommand: x\n").request.specs == ("b",)
    assert World(nodes, [Quota(name="none")]).submit("quota: none\ngpu: 1\nidle: only\ncommand: x\n").request.specs == (
        "a",
        "b",
    )


IMPOSSIBLE = [
    (
        "quota: team-a\nspec: demo\nresources:\n  gpu: 4\ncommand: x\n",
        "resources.gpu is 4, but no node of spec demo has more than 2. "
        "Ask for instances: 2 with gpu: 2, or choose another spec: sublet node ls.",
        "job.yaml:4",
    ),
    (
        "quota: team-a\ngpu: 3\ncommand: x\n",
        "resources.gpu is 3, but no node of spec demo has more than 2. Choose another spec: sublet node ls.",
        "job.yaml:2",
    ),
    (
        "quota: team-a\ngpu: 2\nidle: only\ninstances: 3\ncommand: x\n",
        "The job needs 6 GPUs of demo, but there are 4. Ask for fewer instances.",
        "job.yaml:4",
    ),
    (
        "quota: team-a\ngpu: 2\ninstances: 2\nidle: never\ncommand: x\n",
        "idle is never and team-a is promised 2, but the job needs 4 GPUs. "
        "Allow idle: acceptable, ask for less, or have the quota raised.",
        "job.yaml:4",
    ),
    ("gpu: 2\nquota: team-c\ncommand: x\n", "There is no quota team-c. Did you mean team-b?", "job.yaml:2"),
    ("gpu: 2\nquota: zzz\ncommand: x\n", "There is no quota zzz. See them with sublet quota ls.", "job.yaml:2"),
    (JOB + "spec: demi\n", "No node is of spec demi. Did you mean demo?", "job.yaml:4"),
    (JOB + "spec: h100x8\n", "No node is of spec h100x8. There is demo.", "job.yaml:4"),
]


@pytest.mark.parametrize(("text", "said", "where"), IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_an_impossible_job_is_refused_and_nothing_is_stored(text: str, said: str, where: str) -> None:
    world = two_teams()
    before = world.feed.last_sequence
    with pytest.raises(Refused) as raised:
        world.submit(text)
    assert str(raised.value) in (said, said.replace("team-b?", "team-a?"))
    assert raised.value.where == where
    assert (world.feed.last_sequence, world.feed.jobs()) == (before, [])


def test_the_core_has_the_last_word() -> None:
    world = two_teams()
    draft = jobfile.parse(JOB, jobfile.Origin(job_id="job_x", user="mei", file="job.yaml", base="/"))
    wrong = replace(draft, request=replace(draft.request, nodes=()))
    with pytest.raises(Refused, match="The request is malformed: nodes"):
        commands.submit(world.desk, wrong)


def test_a_deleted_quota_takes_no_jobs() -> None:
    world = two_teams()
    commands.delete_quota(world.desk, "team-a")
    with pytest.raises(Refused, match="There is no quota team-a"):
        world.submit(JOB)


def test_the_same_key_gives_the_same_job() -> None:
    world = two_teams()
    first, again, other = (commands.id_for(world.desk, "k1", user) for user in ("mei", "mei", "lin"))
    assert first == again != other
    origin = jobfile.Origin(job_id=first, user="mei", base="/")
    one = commands.submit(world.desk, jobfile.parse(JOB, origin))
    two = commands.submit(world.desk, jobfile.parse(JOB, origin))
    assert one.request.id == two.request.id and len(world.feed.jobs()) == 1
    with pytest.raises(Refused, match="This idempotency key belongs to"):
        commands.submit(world.desk, jobfile.parse(JOB + "priority: 9\n", origin))


def test_stop_and_stop_again() -> None:
    world = two_teams()
    job = world.submit(JOB).request.id
    assert commands.stop(world.desk, job, "mei").stop_asked
    world.pass_ms(60_000)
    assert world.desk.record(job).state is JobState.STOPPED
    with pytest.raises(Refused, match=r"cannot be stopped. It has stopped already"):
        commands.stop(world.desk, job, "mei")


def test_a_job_is_found_by_id_beginning_and_name() -> None:
    world = two_teams()
    origin = jobfile.Origin(job_id="job_abcdef", user="mei", base="/")
    commands.submit(world.desk, jobfile.parse(JOB + "name: one\n", origin))
    commands.submit(world.desk, jobfile.parse(JOB + "name: two\n", replace(origin, job_id="job_abcdxy")))
    found = {text: world.desk.record(text).request.id for text in ("job_abcdef", "job_abcde", "one", "two")}
    assert list(found.values()) == ["job_abcdef", "job_abcdef", "job_abcdef", "job_abcdxy"]
    with pytest.raises(Refused, match=r"job_abcd stands for 2 jobs. They are job_abcdxy, job_abcdef"):
        world.desk.record("job_abcd")
    for text in ("", "job_", "job_abc", "nobody", "job_zzzz"):
        with pytest.raises(Refused, match="There is no job"):
            world.desk.record(text)


def test_of_several_jobs_with_a_name_the_live_one_is_meant() -> None:
    world = two_teams()
    first = world.submit(JOB + "name: same\n").request.id
    commands.stop(world.desk, first, "mei")
    world.pass_ms(60_000)
    second = world.submit(JOB + "name: same\n").request.id
    assert world.desk.record("same").request.id == second
    world.submit(JOB + "name: same\n")
    with pytest.raises(Refused, match="same stands for 2 jobs"):
        world.desk.record("same")


def test_apply_sets_only_what_differs() -> None:
    world = two_teams()
    same = world.feed.quotas["team-a"]
    more = Quota(name="team-c", tenant="demo", nominal={"demo": 1})
    assert commands.apply(world.desk, Cluster(quotas=(same, more), rules=Rules(grace_ms=5))) == ["team-c"]
    assert world.feed.quotas["team-c"] == more
    assert world.feed.load().rules.grace_ms == 5
    assert commands.apply(world.desk, Cluster(quotas=(same, more))) == []


BAD_TREES: list[tuple[str, str]] = [
    ("quotas: {p/c: {nominal: {demo: 1}}}", "The quota p/c has no parent p. Describe p as well."),
    (
        "quotas: {p: {nominal: {demo: 1}}, p/c: {nominal: {demo: 2}}}",
        "The quotas below p are promised 2 demo, p itself 1.",
    ),
    ("quotas: {p: {nominal: {demi: 1}}}", "No node is of spec demi. Did you mean demo?"),
    ("nodes: [{name: a, spec: b, gpu: 1}]", "Nodes are not applied to a running server."),
]


@pytest.mark.parametrize(("text", "said"), BAD_TREES)
def test_a_tree_that_does_not_add_up_is_refused_whole(text: str, said: str) -> None:
    world = two_teams()
    before = world.feed.last_sequence
    with pytest.raises(Refused) as raised:
        commands.apply(world.desk, clusterfile.parse(text))
    assert said in str(raised.value)
    assert world.feed.last_sequence == before


def test_a_quota_in_use_is_not_deleted() -> None:
    world = two_teams()
    job = world.submit(JOB).request.id
    with pytest.raises(Refused, match=rf"cannot be deleted. It still has {job}. Stop its jobs first."):
        commands.delete_quota(world.desk, "team-a")
    with pytest.raises(Refused, match=r"There is no quota team. Did you mean team-."):
        commands.delete_quota(world.desk, "team")


def test_drain_and_resume() -> None:
    world = two_teams()
    commands.drain(world.desk, "n1")
    assert world.feed.nodes["n1"].state is NodeState.DRAINING
    commands.resume(world.desk, "n1")
    assert world.feed.nodes["n1"].state is NodeState.UP


@pytest.mark.parametrize("command", [commands.drain, commands.resume])
def test_an_unknown_node_is_refused(command: Callable[..., None]) -> None:
    with pytest.raises(Refused, match=r"There is no node n11. Did you mean n1?"):
        command(two_teams().desk, "n11")


def test_a_lost_node_is_not_resumed() -> None:
    world = two_teams()
    world.engine.node_down("n1")
    world.pass_ms(120_000)
    with pytest.raises(Refused, match=r"cannot be resumed. It is lost"):
        commands.resume(world.desk, "n1")


def test_a_store_that_fails_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = two_teams()

    def full(*_: object) -> None:
        world.controller.stop()
        raise Unavailable(what="The disk is full.")

    monkeypatch.setattr(world.feed._store, "commit", full)
    with pytest.raises(Unavailable, match="The disk is full"):
        world.submit(JOB)


def test_a_controller_that_does_not_turn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    world = two_teams()
    monkeypatch.setattr(world.controller, "turn", lambda: [])
    with pytest.raises(Unavailable, match="The server has not written it down yet"):
        world.submit(JOB)
