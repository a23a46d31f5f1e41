"""What would happen: the dry run and the what-if, against what then happens."""

import pytest

from sublet.domain.errors import Refused
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota
from sublet.service import commands, jobfile, preview
from tests.unit.service.world import World

NODES = [Node(name="n1", spec="gpu", gpu=4)]
QUOTAS = [Quota(name="A", nominal={"gpu": 2}), Quota(name="B", nominal={"gpu": 2})]


def draft(world: World, text: str) -> jobfile.Draft:
    origin = jobfile.Origin(job_id=world.desk.new_id(), user="ana", file="", base="")
    return jobfile.parse(text, origin, {})


def submitted(world: World, text: str) -> str:
    return commands.submit(world.desk, draft(world, text)).request.id


@pytest.fixture
def world() -> World:
    return World(NODES, QUOTAS)


def test_what_fits_would_start_in_quota_and_nothing_is_stored(world: World) -> None:
    plan = preview.submission(world.desk, draft(world, "{quota: A, gpu: 2, command: x}"))
    assert (plan.outcome, plan.idle_resources) == ("starts", "in_quota")
    assert plan.can_be_taken == "never, while it stays In Quota"
    assert world.feed.jobs() == []


def test_an_owner_sees_who_would_leave_for_him_and_so_it_then_happens(world: World) -> None:
    submitted(world, "{quota: B, gpu: 2, command: x}")
    borrower = submitted(world, "{quota: B, gpu: 2, idle: only, command: x, name: borrow}")
    own = draft(world, "{quota: A, gpu: 2, command: x}")
    plan = preview.submission(world.desk, own)
    assert plan.outcome == "reclaims" and [victim.job for victim in plan.victims] == [borrower]
    assert plan.victims[0].gpu == 2 and plan.victims[0].notice_seconds == 0  # it has not begun
    job = commands.submit(world.desk, own).request.id
    assert world.desk.record(borrower).notices[0].claimant == job


def test_a_refusal_is_the_one_that_a_submission_would_get(world: World) -> None:
    with pytest.raises(Refused) as told:
        preview.submission(world.desk, draft(world, "{quota: A, gpu: 9, command: x}"))
    with pytest.raises(Refused) as then:
        commands.submit(world.desk, draft(world, "{quota: A, gpu: 9, command: x}"))
    assert str(told.value) == str(then.value)


def test_a_lost_node_is_told_with_all_that_follows(world: World) -> None:
    job = submitted(world, "{quota: A, gpu: 2, command: x}")
    told = preview.supposed_of_desk(world.desk, preview.Supposed(lost=("n1",)))
    assert told.starts == () and len(told.evicted) == 1 and told.evicted[0].startswith(job)
    assert world.desk.record(job).state == "running"


def test_a_larger_promise_starts_what_waits(world: World) -> None:
    submitted(world, "{quota: A, gpu: 2, command: x}")
    waiting = submitted(world, "{quota: A, gpu: 2, command: x}")
    told = preview.supposed_of_desk(world.desk, preview.Supposed(quotas={"A": {"": 4}}))
    assert len(told.starts) == 1 and told.starts[0].startswith(waiting)


@pytest.mark.parametrize(
    "supposed",
    [preview.Supposed(lost=("n9",)), preview.Supposed(stopped=("job_no",)), preview.Supposed(quotas={"Z": {"": 1}})],
)
def test_an_unknown_name_is_refused(world: World, supposed: preview.Supposed) -> None:
    with pytest.raises(Refused):
        preview.supposed_of_desk(world.desk, supposed)
