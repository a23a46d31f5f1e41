"""What follows from a failure: the cause among several, policies, budgets, one instance alone, troubles, bad nodes."""

from dataclasses import replace

import pytest

from sublet.domain.effects import EndJob, RequeueJob, RestartInstance, StartGang, StopInstances
from sublet.domain.events import (
    CheckpointSaved,
    Diagnosed,
    InstanceBegan,
    InstanceEnded,
    JobSubmitted,
    NodeDrained,
    NodeLost,
)
from sublet.domain.jobs import FaultTolerance, IdlePolicy, JobRequest, JobState
from tests.property.world import World
from tests.unit.core.test_core import cluster, of, quota, run

USER, NETWORK, KILLED = "user_error", "network", "infrastructure"


def fail(
    world: World, job: str, code: int, verdict: str = "", error: str = "", instance: int = 0, run: int = 0
) -> list:  # type: ignore[type-arg]
    """The present attempt's instance fails; all that follows at this instant."""
    record = world.core.job(job)
    assert record is not None
    ended = InstanceEnded(
        at_ms=world.now_ms, job=job, attempt=record.attempt, instance=instance, exit_code=code, verdict=verdict,
        evidence=f"line of {verdict}", error=error or verdict, run=run,
    )  # fmt: skip
    world.running.pop((job, record.attempt, instance), None)
    effects = [*world.do(ended), *world.close()]
    world.begin_all()
    return effects


def ended(effects: list[object]) -> list[str]:
    return [effect.why for effect in effects if isinstance(effect, EndJob)]


def one_job(sizes: tuple[int, ...] = (1,), **tolerance: object) -> World:
    world = cluster(quota("A", 8))
    run(world, "a", "A", *sizes, fault_tolerance=replace(FaultTolerance(), **tolerance))  # type: ignore[arg-type]
    return world


@pytest.mark.parametrize("policy", ["exit_code", "exit_code_and_error_msg"])
def test_a_user_error_is_not_retried_under_the_exit_code_policies(policy: str) -> None:
    (why,) = ended(fail(one_job(policy=policy), "a", 1, USER))
    assert why == "a restart would not help: line of user_error"


def test_on_failure_retries_whatever_it_was() -> None:
    world = one_job(policy="on_failure", max_restarts=3)
    assert [len(ended(fail(world, "a", 1, USER))) for _ in range(4)] == [0, 0, 0, 1]


def test_on_failure_ends_at_the_same_error_only_where_that_was_written() -> None:
    world = one_job(policy="on_failure", max_restarts=9, same_error=3)
    assert [len(ended(fail(world, "a", 1, USER))) for _ in range(3)] == [0, 0, 1]


def test_the_cap_on_all_failures_holds_whatever_is_saved_in_between() -> None:
    world = one_job(max_restarts=9, max_restarts_total=3)
    for step in range(3):
        assert not ended(fail(world, "a", 1, "unknown", f"error {step}"))
        world.do(CheckpointSaved(at_ms=world.now_ms, job="a", attempt=step + 2, step=step))
    assert ended(fail(world, "a", 1, "unknown", "another")) == ["failed 4 times in all"]


@pytest.mark.parametrize(("code", "is_retried"), [(1, False), (2, False), (137, True), (139, True), (75, True)])
def test_exit_code_retries_signals_and_what_asks_for_it(code: int, is_retried: bool) -> None:
    assert bool(ended(fail(one_job(policy="exit_code"), "a", code, "unknown"))) is not is_retried


def test_never_retries_nothing() -> None:
    assert ended(fail(one_job(policy="never"), "a", 137, KILLED))


def test_the_same_error_twice_without_a_new_checkpoint_ends_the_job() -> None:
    world = one_job()
    assert not ended(fail(world, "a", 1, "unknown", "x"))
    (why,) = ended(fail(world, "a", 1, "unknown", "x"))
    assert why == "failed 2 times in the same way without a new checkpoint in between: x"


def test_another_error_or_a_new_checkpoint_in_between_is_not_the_same() -> None:
    world = one_job(max_restarts=9)
    for step, error in enumerate(("x", "y", "x", "y")):
        assert not ended(fail(world, "a", 1, "unknown", error)), step
    world.do(CheckpointSaved(at_ms=world.now_ms, job="a", attempt=5, step=10))
    assert not ended(fail(world, "a", 1, "unknown", "y"))
    assert world.core.job("a").failures_since_checkpoint == 1  # type: ignore[union-attr]


def test_what_a_machine_or_a_network_does_twice_is_not_the_programs_fault() -> None:
    world = one_job(max_restarts=5)
    assert [len(ended(fail(world, "a", 1, NETWORK))) for _ in range(5)] == [0] * 5


@pytest.mark.parametrize("code", [75, 85])
def test_a_program_that_asks_for_it_spends_no_budget(code: int) -> None:
    world = one_job(max_restarts=0)
    for _ in range(3):
        assert not ended(fail(world, "a", code))
    assert world.core.job("a").failures_since_checkpoint == 0  # type: ignore[union-attr]


def test_the_cause_is_the_strongest_verdict_whoever_is_heard_first() -> None:
    world = one_job((1, 1, 1))
    world.do(_end(1, 1, NETWORK))
    world.do(_end(0, 1, USER))
    world.do(_end(2, 143))
    end = next(effect for effect in world.story if isinstance(effect, EndJob))
    assert end.why == "a restart would not help: line of user_error"


def _end(instance: int, code: int, verdict: str = "") -> InstanceEnded:
    return InstanceEnded(
        at_ms=0, job="a", attempt=1, instance=instance, exit_code=code, verdict=verdict, evidence=f"line of {verdict}"
    )


def test_a_restart_is_remembered_with_its_cause_and_how_long_it_took() -> None:
    world = one_job((1, 1))
    world.close(5_000)
    world.do(replace(_end(1, 137, KILLED), phase="step"))
    world.do(_end(0, 143))
    world.close(2_000)
    world.begin_all()
    (restart,) = world.core.job("a").restarts  # type: ignore[union-attr]
    assert (restart.number, restart.attempt, restart.instance, restart.node) == (1, 1, 1, "n0")
    assert (restart.verdict, restart.phase, restart.exit_code, restart.is_single) == (KILLED, "step", 137, False)
    assert (restart.failed_ms, restart.began_ms) == (5_000, 7_000)


def test_an_asynchronous_job_restarts_the_failed_instance_alone() -> None:
    world = one_job((1, 1), mode="async", max_restarts=2, backoff_first_ms=1_000)
    effects = world.do(_end(1, 137, KILLED))
    (restart,) = of(RestartInstance, effects)
    assert (restart.instance, restart.run, restart.not_before_ms) == (1, 1, 0)  # type: ignore[attr-defined]
    assert not of(StopInstances, effects) and not of(RequeueJob, effects)
    assert not world.do(_end(1, 137, KILLED)), "the end of an earlier run changes nothing"
    world.close(3_000)
    world.do(InstanceBegan(at_ms=world.now_ms, job="a", attempt=1, instance=1, run=1))
    record = world.core.job("a")
    assert record is not None and record.live == (0, 1) and record.failures == 1
    assert [(one.is_single, one.instance, one.began_ms) for one in record.restarts] == [(True, 1, 3_000)]


def test_an_asynchronous_job_that_fails_too_often_ends_whole() -> None:
    world = one_job((1, 1), mode="async", max_restarts=1)
    world.do(_end(1, 137, KILLED))
    effects = world.do(replace(_end(1, 137, KILLED), run=1))
    assert [stop.instances for stop in of(StopInstances, effects)] == [(0,)]  # type: ignore[attr-defined]
    world.do(_end(0, 143))
    assert of(EndJob, tuple(world.story))[-1].failures == 2  # type: ignore[attr-defined]


def test_a_server_that_comes_back_repeats_the_restart_of_an_instance() -> None:
    world = one_job((1, 1), mode="async")
    world.do(_end(1, 137, KILLED))
    world.restart()
    (again,) = of(RestartInstance, world.core.standing_effects())
    assert (again.instance, again.run) == (1, 1)  # type: ignore[attr-defined]


def hang(**more: object) -> Diagnosed:
    return Diagnosed(at_ms=0, job="a", attempt=1, trouble="hang", evidence="instance 1 stands in f.py:3", **more)  # type: ignore[arg-type]


def test_a_hang_is_shown_while_it_lasts() -> None:
    world = one_job((1, 1))
    for _ in range(2):
        assert not world.do(hang(instance=1))
    (line,) = world.core.why("a").reasons  # type: ignore[union-attr]
    assert line.reason.code == "hanging" and "f.py:3" in line.sentence
    world.restart()
    assert len(world.core.why("a").reasons) == 1  # type: ignore[union-attr]
    world.do(hang(instance=1, is_over=True))
    assert not world.core.why("a").reasons  # type: ignore[union-attr]


def test_a_hang_that_is_not_sat_out_restarts_the_gang_and_spends_budget() -> None:
    world = one_job((1, 1))
    effects = world.do(hang(instance=1, restart=True))
    assert [(one.reason, one.instances) for one in of(StopInstances, effects)] == [("hang", (0, 1))]  # type: ignore[attr-defined]
    assert not world.do(hang(instance=1, restart=True)), "it is told again and again"
    world.do(_end(0, 137))
    world.do(_end(1, 137))
    world.close()
    record = world.core.job("a")
    assert record is not None and (record.failures, record.state, record.attempt) == (1, JobState.RUNNING, 2)
    assert record.history[0].verdict == "hang" and "f.py:3" in record.history[0].evidence


def test_a_hang_of_an_asynchronous_instance_ends_that_one() -> None:
    world = one_job((1, 1), mode="async")
    effects = world.do(hang(instance=1, restart=True))
    assert [one.instances for one in of(StopInstances, effects)] == [(1,)]  # type: ignore[attr-defined]
    effects = world.do(_end(1, 137, "hang"))
    assert len(of(RestartInstance, effects)) == 1
    assert "f.py:3" in world.core.job("a").restarts[0].evidence  # type: ignore[union-attr]


def test_a_hang_under_notice_is_left_to_the_notice() -> None:
    world = cluster(quota("A", 8), quota("B", 0))
    run(world, "a", "B", 1, 1, idle=IdlePolicy.ONLY)
    world.do(JobSubmitted(at_ms=0, request=JobRequest(id="owner", quota="A", sizes=(8,))))
    world.close()
    assert not of(StopInstances, world.do(hang(instance=1, restart=True)))


def test_the_same_fault_on_one_node_twice_and_the_job_keeps_away_from_it() -> None:
    world = cluster(quota("A", 16), nodes=2)
    run(world, "a", "A", 4, fault_tolerance=FaultTolerance(max_restarts=9))
    fail(world, "a", 137, KILLED)
    assert world.core.job("a").request.avoid == ()  # type: ignore[union-attr]
    fail(world, "a", 137, KILLED)
    record = world.core.job("a")
    assert record is not None and record.request.avoid == ("n0",) and record.restarts[-1].avoided
    assert record.lease is not None and record.lease.nodes == ("n1",)
    world.restart()
    assert world.core.job("a").request.avoid == ("n0",)  # type: ignore[union-attr]


def test_a_job_that_fits_nowhere_else_stays_where_it_is() -> None:
    world = cluster(quota("A", 8))
    run(world, "a", "A", 4, fault_tolerance=FaultTolerance(max_restarts=9))
    for _ in range(3):
        assert of(StartGang, tuple(fail(world, "a", 137, KILLED)))
    assert world.core.job("a").request.avoid == ()  # type: ignore[union-attr]


def test_a_job_comes_back_to_a_node_that_it_avoids_when_no_other_is_left() -> None:
    world = cluster(quota("A", 16), nodes=2)
    run(world, "a", "A", 4, fault_tolerance=FaultTolerance(max_restarts=9))
    for _ in range(2):
        fail(world, "a", 137, KILLED)
    assert world.core.job("a").lease.nodes == ("n1",)  # type: ignore[union-attr]
    world.do(NodeLost(at_ms=world.now_ms, node="n1"))
    world.close()
    record = world.core.job("a")
    assert record is not None and record.lease is not None and record.lease.nodes == ("n0",)
    assert record.request.avoid == ()


def test_who_waits_already_comes_back_too() -> None:
    world = cluster(quota("A", 16), nodes=2)
    run(world, "b", "A", 8, nodes=("n1",))
    run(world, "a", "A", 4, fault_tolerance=FaultTolerance(max_restarts=9))
    for _ in range(2):
        fail(world, "a", 137, KILLED)
    record = world.core.job("a")
    assert record is not None and record.state is JobState.WAITING and record.request.avoid == ("n0",)
    world.do(NodeDrained(at_ms=world.now_ms, node="n1"))
    world.close()
    record = world.core.job("a")
    assert record is not None and record.lease is not None and record.lease.nodes == ("n0",)


def test_an_asynchronous_job_leaves_a_node_whose_machine_failed_an_instance_twice() -> None:
    world = cluster(quota("A", 16), nodes=2)
    run(world, "a", "A", 1, 1, fault_tolerance=FaultTolerance(mode="async", max_restarts=9))
    assert len(of(RestartInstance, world.do(_end(1, 137, KILLED)))) == 1
    effects = world.do(replace(_end(1, 137, KILLED), run=1))
    assert not of(RestartInstance, effects) and of(StopInstances, effects)
    world.do(_end(0, 143))
    world.close()
    record = world.core.job("a")
    assert record is not None and record.lease is not None and set(record.lease.nodes) == {"n1"}
    assert (record.failures, [one.is_single for one in record.restarts]) == (2, [True, False])
    assert record.restarts[-1].avoided and record.restarts[-1].node == "n0"


def test_the_books_are_as_before_after_a_restart_of_the_server() -> None:
    world = one_job((1, 1), mode="async", max_restarts=5)
    world.do(_end(1, 137, KILLED))
    world.do(hang(instance=0))
    before = world.core.job("a")
    world.restart()
    assert world.core.job("a") == before
