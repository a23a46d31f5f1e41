"""The decisions one by one: given a small cluster, when something happens, then this follows."""

from random import Random

from sublet.core.check import check
from sublet.core.core import impossible
from sublet.domain.effects import (
    EndJob,
    GiveNotice,
    ReleaseInstances,
    RequeueJob,
    StartGang,
    StopInstances,
    SuspectNode,
    WithdrawNotice,
)
from sublet.domain.events import (
    CheckpointSaved,
    InstanceBegan,
    JobStopAsked,
    JobSubmitted,
    NodeDrained,
    NodeLost,
    NodeReturned,
    QuotaSet,
)
from sublet.domain.jobs import FaultTolerance, IdlePolicy, JobRequest, Outcome
from sublet.domain.leases import LeaseKind
from sublet.domain.nodes import Node, NodeState
from sublet.domain.quotas import Quota, Strategy
from sublet.domain.reasons import ReasonCode
from sublet.domain.rules import Rules
from tests.property.world import World, build, fingerprint

ONLY, ACCEPTABLE = IdlePolicy.ONLY, IdlePolicy.ACCEPTABLE


def cluster(*quotas: Quota, nodes: int = 1, gpu: int = 8, rules: Rules | None = None) -> World:
    return build([Node(name=f"n{i}", spec="gpu", gpu=gpu) for i in range(nodes)], list(quotas), rules)


def quota(name: str, gpu: int, **more: object) -> Quota:
    return Quota(name=name, nominal={"gpu": gpu}, **more)  # type: ignore[arg-type]


def submit(world: World, job: str, quota: str, *sizes: int, **more: object) -> tuple[object, ...]:
    request = JobRequest(id=job, quota=quota, sizes=sizes or (1,), **more)  # type: ignore[arg-type]
    return world.do(JobSubmitted(at_ms=world.now_ms, request=request)) + world.close()


def run(world: World, job: str, quota: str, *sizes: int, **more: object) -> None:
    """Submitted, granted and begun."""
    effects = submit(world, job, quota, *sizes, **more)
    assert any(isinstance(effect, StartGang) and effect.job == job for effect in effects)
    world.begin_all()


def of(kind: type, effects: tuple[object, ...]) -> list[object]:
    return [effect for effect in effects if isinstance(effect, kind)]


def codes(world: World, job: str) -> list[ReasonCode]:
    told = world.core.why(job)
    assert told is not None
    return [line.reason.code for line in told.reasons]


def test_a_victim_leaves_and_its_claimant_starts_where_nobody_else_may() -> None:
    world = cluster(quota("A", 8), quota("B", 0))
    run(world, "b", "B", 8, idle=ONLY)
    world.close(60_000)
    (notice,) = of(GiveNotice, submit(world, "a", "A", 8))
    assert (notice.job, notice.claimant, notice.deadline_ms) == ("b", "a", 90_000)  # type: ignore[attr-defined]
    submit(world, "thief", "B", 8, idle=ONLY, priority=9)
    world.end(("b", 1, 0), 0)
    effects = world.close()
    assert [(e.job, e.lease.kind) for e in of(StartGang, effects)] == [("a", LeaseKind.GUARANTEED)]  # type: ignore[attr-defined]
    assert world.core.job("b").preemptions == 1  # type: ignore[union-attr]


def test_what_has_not_begun_gets_no_grace_and_loses_nothing() -> None:
    world = cluster(quota("A", 8), quota("B", 0))
    submit(world, "b", "B", 8, idle=ONLY)
    world.close(5_000)
    (notice,) = of(GiveNotice, submit(world, "a", "A", 8))
    assert (notice.deadline_ms, notice.lost_gpu_ms) == (5_000, 0)  # type: ignore[attr-defined]


def test_what_a_victim_saves_on_its_notice_is_not_lost() -> None:
    world = cluster(quota("A", 8), quota("B", 0))
    run(world, "b", "B", 8, idle=ONLY)
    world.close(60_000)
    (notice,) = of(GiveNotice, submit(world, "a", "A", 8))
    assert notice.lost_gpu_ms == 60_000 * 8  # type: ignore[attr-defined]
    world.close(2_000)
    world.do(CheckpointSaved(at_ms=world.now_ms, job="b", attempt=1, step=9))
    world.close(500)
    world.end(("b", 1, 0), 85)
    world.close()
    (end,) = world.core.job("b").history  # type: ignore[union-attr]
    assert (end.outcome, end.lost_gpu_ms) == (Outcome.PREEMPTED, 500 * 8)


def test_a_checkpoint_makes_a_victim_cheap() -> None:
    world = cluster(quota("A", 4), quota("B", 0))
    run(world, "old", "B", 4, idle=ONLY)
    world.close(600_000)
    run(world, "new", "B", 4, idle=ONLY)
    world.close(300_000)
    world.do(CheckpointSaved(at_ms=world.now_ms, job="old", attempt=1, step=9))
    world.close(1_000)
    assert [e.job for e in of(GiveNotice, submit(world, "a", "A", 4))] == ["old"]  # type: ignore[attr-defined]


def test_a_claim_that_is_stopped_gives_its_notices_back() -> None:
    world = cluster(quota("A", 8), quota("B", 0))
    run(world, "b", "B", 8, idle=ONLY)
    submit(world, "a", "A", 8)
    world.do(JobStopAsked(at_ms=world.now_ms, job="a"))
    assert [e.job for e in of(WithdrawNotice, world.close())] == ["b"]  # type: ignore[attr-defined]
    assert not world.core.state.noticed and not world.core.state.claims


def test_priorities_preempt_inside_a_quota_where_that_is_allowed_whatever_the_priority() -> None:
    world = cluster(quota("A", 4, self_preemption=True), quota("B", 4))
    run(world, "low", "A", 4, priority=1)
    run(world, "b", "B", 4)
    effects = submit(world, "high", "A", 4, priority=3)
    assert [(e.job, e.claimant) for e in of(GiveNotice, effects)] == [("low", "high")]  # type: ignore[attr-defined]
    assert not of(GiveNotice, submit(world, "equal", "A", 4, priority=1))


def test_sub_quota_preemption_reaches_down_and_never_up() -> None:
    world = cluster(quota("P", 8, sub_quota_preemption=True), quota("P/c", 8))
    run(world, "below", "P/c", 8, priority=1)
    assert [e.job for e in of(GiveNotice, submit(world, "above", "P", 8, priority=2))] == ["below"]  # type: ignore[attr-defined]
    other = cluster(quota("P", 8, sub_quota_preemption=True), quota("P/c", 8))
    run(other, "above", "P", 8, priority=1)
    assert not of(GiveNotice, submit(other, "below", "P/c", 8, priority=2))


def test_an_acceptable_job_borrows_before_it_preempts_its_own() -> None:
    world = cluster(quota("A", 4, self_preemption=True), quota("B", 4))
    run(world, "low", "A", 4, priority=1)
    (start,) = of(StartGang, submit(world, "high", "A", 4, priority=9, idle=ACCEPTABLE))
    assert start.lease.kind is LeaseKind.IDLE  # type: ignore[attr-defined]


def test_a_head_that_can_only_borrow_does_not_stand_before_the_promise() -> None:
    """Else it would be lent what the next one has to take back from it in the same instant."""
    world = cluster(quota("A", 6), quota("C", 2))
    for job, gpu, priority in (("small", 3, 5), ("big", 8, 9)):
        request = JobRequest(id=job, quota="A", sizes=(gpu,), priority=priority, idle=ACCEPTABLE)
        world.do(JobSubmitted(at_ms=0, request=request))
    effects = world.close()
    assert [(e.job, e.lease.kind) for e in of(StartGang, effects)] == [("small", LeaseKind.GUARANTEED)]  # type: ignore[attr-defined]
    assert not of(GiveNotice, effects)


def test_failures_spend_the_budget_retries_and_preemptions_do_not() -> None:
    world = cluster(quota("A", 8))
    run(world, "a", "A", 1, fault_tolerance=FaultTolerance(max_restarts=1))
    for attempt, exit_code in enumerate((75, 75, 1, 75), start=1):
        world.end(("a", attempt, 0), exit_code)
        world.close()
        world.begin_all()
    assert world.core.job("a").failures_since_checkpoint == 1  # type: ignore[union-attr]
    world.end(("a", 5, 0), 1)
    (end,) = of(EndJob, tuple(world.story))
    assert (end.outcome, end.failures) == (Outcome.FAILED, 5)  # type: ignore[attr-defined]


def test_a_new_checkpoint_refills_the_budget_an_old_one_does_not() -> None:
    world = cluster(quota("A", 8))
    run(world, "a", "A", 1, fault_tolerance=FaultTolerance(max_restarts=1))
    for attempt, step in enumerate((5, 6, 6), start=1):
        world.do(CheckpointSaved(at_ms=world.now_ms, job="a", attempt=attempt, step=step))
        world.end(("a", attempt, 0), 1)
        world.close()
    assert world.core.job("a") is None


def test_backoff_doubles_and_is_told() -> None:
    world = cluster(quota("A", 8))
    run(world, "a", "A", 1, fault_tolerance=FaultTolerance(backoff_first_ms=10_000))
    world.end(("a", 1, 0), 1)
    assert of(StartGang, world.close()), "the first failure costs no pause"
    world.end(("a", 2, 0), 1)
    world.close()
    assert codes(world, "a") == [ReasonCode.BACKOFF]
    assert world.core.next_deadline() == 10_000
    assert of(StartGang, world.close(10_000))
    world.end(("a", 3, 0), 1)
    world.close()
    assert world.core.job("a").retry_ms == 30_000  # type: ignore[union-attr]


def test_a_gang_that_loses_a_member_ends_as_it_did() -> None:
    world = cluster(quota("A", 8))
    run(world, "a", "A", 2, 2)
    world.end(("a", 1, 0), 1)
    world.end(("a", 1, 1), 143)
    outcomes = [e.outcome for e in of(ReleaseInstances, tuple(world.story))]  # type: ignore[attr-defined]
    assert outcomes == [Outcome.FAILED, Outcome.FAILED]
    assert len(of(RequeueJob, tuple(world.story))) == 1


def test_a_cut_quota_keeps_its_jobs_running_and_the_oldest_guaranteed() -> None:
    world = cluster(quota("A", 8))
    run(world, "old", "A", 4)
    world.close(1_000)
    run(world, "new", "A", 4)
    world.do(QuotaSet(at_ms=world.now_ms, quota=quota("A", 4)))
    world.close()
    kinds = {job.request.id: job.lease.kind for job in world.core.jobs() if job.lease}
    assert kinds == {"old": LeaseKind.GUARANTEED, "new": LeaseKind.IDLE}


def test_a_plan_is_what_then_happens_and_changes_nothing() -> None:
    world = cluster(quota("A", 8), quota("B", 0))
    run(world, "b", "B", 8, idle=ONLY)
    world.close(60_000)
    request = JobRequest(id="a", quota="A", sizes=(8,))
    before = fingerprint(world.core)
    plan = world.core.plan(request, world.now_ms)
    assert fingerprint(world.core) == before and not check(world.core.state)
    assert (plan.outcome, [notice.job for notice in plan.notices]) == ("reclaims", ["b"])
    assert plan.effects == submit(world, "a", "A", 8)


def test_nothing_is_set_aside_for_a_wish_that_cannot_be_had() -> None:
    """Whether that is known already, or only found out in the same look."""
    nodes = [Node(name="n0", spec="gpu", gpu=4), *(Node(name=f"c{i}", spec="cheap", gpu=4) for i in range(2))]
    world = build(nodes, [Quota(name="P", nominal={"cheap": 8}, strategy=Strategy.INTELLIGENT)])
    run(world, "first", "P", 4, specs=("cheap",))
    submit(world, "astray", "P", 4, specs=("cheap",), nodes=("n0",), priority=4)
    world.end(("first", 1, 0), 0)  # something may have become possible now
    elastic = JobRequest(id="elastic", quota="P", sizes=(2, 2, 2), specs=("cheap",), min_instances=1, priority=4)
    (start,) = of(StartGang, world.do(JobSubmitted(at_ms=world.now_ms, request=elastic)) + world.close())
    assert start.lease.gpus == (2, 2, 2)  # type: ignore[attr-defined]


def test_only_who_opens_a_drained_node_opens_it() -> None:
    """An engine says that a node is back as often as it likes: after a loss, late, and twice."""
    world = cluster(quota("A", 8))
    world.do(NodeDrained(at_ms=0, node="n0"))
    for event in (NodeReturned, NodeLost, NodeReturned, NodeReturned):
        world.do(event(at_ms=0, node="n0"))
        world.close()
    assert [node.state for node in world.core.nodes()] == [NodeState.DRAINING]
    submit(world, "a", "A", 8)
    assert [advice.text for advice in world.core.advice("a")] == ["node n0 is back"]
    world.do(NodeReturned(at_ms=0, node="n0", is_open=True))
    assert [effect.job for effect in of(StartGang, world.close())] == ["a"]  # type: ignore[attr-defined]


def test_time_that_runs_is_counted_over_attempts_and_then_it_is_over() -> None:
    world = cluster(quota("A", 8), quota("B", 0))
    run(world, "b", "B", 8, idle=ONLY, max_time_ms=100_000)
    world.close(60_000)
    submit(world, "a", "A", 8)
    world.end(("b", 1, 0), 0)
    world.close(500_000)  # it waits: that does not count
    world.begin_all()
    world.end(("a", 1, 0), 0)
    world.close()
    world.begin_all()
    assert world.core.next_deadline() == world.now_ms + 40_000
    (stop,) = of(StopInstances, world.close(40_000))
    assert (stop.job, stop.reason) == ("b", "max_time")  # type: ignore[attr-defined]
    world.restart()
    world.end(("b", 2, 0), 143)
    world.close()
    over = of(EndJob, tuple(world.story))[-1]
    assert (over.outcome, over.why) == (  # type: ignore[attr-defined]
        Outcome.FAILED,
        "it has run as long as its max_time allows, 100 s",
    )


def test_a_node_that_two_jobs_blame_is_left_alone_for_a_while_but_keeps_nobody_waiting() -> None:
    world = cluster(quota("A", 8), nodes=2, gpu=4)

    def fails(job: str) -> None:
        run(world, job, "A", 1, nodes=("n0",), fault_tolerance=FaultTolerance(enabled=False))
        world.end((job, 1, 0), 1, verdict="hardware")
        world.close()

    fails("a")
    fails("a2")
    assert [node.suspected_until_ms for node in world.core.nodes()] == [3_600_000, 0]
    world.restart()
    run(world, "b", "A", 4)
    run(world, "c", "A", 4)
    assert [world.core.job(job).lease.nodes for job in ("b", "c")] == [("n1",), ("n0",)]  # type: ignore[union-attr]
    world.close(3_600_000)
    trusted = of(SuspectNode, tuple(world.story))[-1]
    assert (trusted.node, trusted.until_ms) == ("n0", 0)  # type: ignore[attr-defined]


def test_advice_names_what_was_tried_and_worked() -> None:
    world = cluster(quota("A", 4), quota("B", 4))
    run(world, "a1", "A", 4)
    run(world, "b1", "B", 4)
    submit(world, "a2", "A", 4)
    told = world.core.why("a2")
    assert told is not None and told.reasons[0].sentence == "A: 4 promised, 4 in use by its own jobs, needs 4"
    assert "a1 (4 GPU) ends" in told.would_change
    assert not any(line.startswith("b1") for line in told.would_change)


def test_absurd_numbers_are_refused() -> None:
    for sizes in ((), (0,), (-1,), (1 << 62,), (1.5,), (True,)):
        assert impossible(JobRequest(id="x", quota="A", sizes=sizes)) is not None  # type: ignore[arg-type]
    assert impossible(JobRequest(id="x", quota="A", min_instances=2)) is not None
    assert impossible(JobRequest(id="x", quota="A")) is None


def test_messages_of_an_older_attempt_change_nothing() -> None:
    world = cluster(quota("A", 8))
    run(world, "a", "A", 1)
    world.end(("a", 1, 0), 1)
    world.close()
    before = fingerprint(world.core)
    world.end(("a", 1, 0), 1)
    world.do(InstanceBegan(at_ms=world.now_ms, job="a", attempt=1, instance=0))
    world.do(CheckpointSaved(at_ms=world.now_ms, job="a", attempt=1, step=3))
    assert fingerprint(world.core) == before


def test_a_look_in_vain_at_the_claims_of_others_makes_nothing_seem_possible() -> None:
    """Or two hopeless jobs would set each other going for ever."""
    world = cluster(quota("A", 8), quota("B", 8))
    run(world, "i", "B", 8, idle=ONLY)
    world.do(JobStopAsked(at_ms=world.now_ms, job="i"))
    submit(world, "a", "A", 8)
    assert "a" in world.core.state.claims and not world.core.state.noticed
    submit(world, "b", "B", 6)
    state = world.core.state
    pool, root = state.pools["t", "gpu"], state.quotas["A"]
    before = pool.version, root.version, state.changes
    state.epoch += 1  # so that all are looked at again
    world.close()
    assert (pool.version, root.version) == before[:2]
    assert state.claims.keys() == {"a"}


def test_a_crowd_comes_to_rest_and_everybody_runs() -> None:
    chance = Random(3)
    world = cluster(*(quota(f"q{i}", 20) for i in range(6)), nodes=15)
    for number in range(300):
        request = JobRequest(
            id=f"j{number:03}", quota=f"q{chance.randrange(6)}", sizes=(chance.choice((1, 5, 8)),), idle=ACCEPTABLE
        )
        world.do(JobSubmitted(at_ms=world.now_ms, request=request))
    for _ in range(2_000):
        world.close(200)
        for one in sorted(world.told)[:4] or chance.sample(sorted(world.running), min(4, len(world.running))):
            world.end(one, 143 if one in world.told else 0, finished=one not in world.told)
        if len(world.ended) == 300:
            break
    assert len(world.ended) == 300
