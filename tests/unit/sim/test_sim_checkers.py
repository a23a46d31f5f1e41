"""The checker of the fault simulation sees each thing that it is there to see, and is silent when all holds."""

import pytest

from sublet.domain.changes import Entry
from sublet.domain.effects import (
    DowngradeLease,
    Effect,
    EndJob,
    GiveNotice,
    QueueJob,
    ReleaseInstances,
    RequeueJob,
    StartGang,
    UpgradeLease,
)
from sublet.domain.errors import Broken
from sublet.domain.events import QuotaSet, Tick
from sublet.domain.jobs import IdlePolicy, JobRequest, Outcome
from sublet.domain.leases import Lease, LeaseKind
from sublet.domain.quotas import Quota
from sublet.engines.simulated import SimulatedEngine
from sublet.sim import world as worlds
from sublet.sim.checkers import Checker
from sublet.sim.clock import SimulatedClock
from sublet.sim.invent import scenario_of

QUOTA = QuotaSet(at_ms=0, quota=Quota(name="q", nominal={"gpu": 4}))
INSIDE = QuotaSet(at_ms=0, quota=Quota(name="q", nominal={"gpu": 4}, self_preemption=True))


def queue(job: str) -> QueueJob:
    return QueueJob(job=job, quota="q", idle="acceptable")


def grant(
    job: str, attempt: int = 1, gpus: tuple[int, ...] = (4,), kind: str = "guaranteed", **more: object
) -> StartGang:
    wanted = {"sizes": gpus, "idle": IdlePolicy.ACCEPTABLE, **more}
    request = JobRequest(id=job, quota="q", **wanted)  # type: ignore[arg-type]
    lease = Lease(kind=LeaseKind(kind), spec="gpu", nodes=("n1",) * len(gpus), gpus=gpus, granted_ms=0)
    return StartGang(job=job, attempt=attempt, lease=lease, instances=tuple(range(len(gpus))), request=request)


def notice(job: str, instances: tuple[int, ...] = (0,)) -> GiveNotice:
    return GiveNotice(
        job=job, attempt=1, instances=instances, reason="reclaim", claimant="o", deadline_ms=1, lost_gpu_ms=0
    )


def release(job: str, instances: tuple[int, ...] = (0,), outcome: str = "succeeded", attempt: int = 1) -> Effect:
    return ReleaseInstances(job=job, attempt=attempt, instances=instances, outcome=Outcome(outcome))


def end(job: str) -> EndJob:
    return EndJob(job=job, outcome=Outcome.SUCCEEDED, failures=0, preemptions=0)


def requeue(job: str, submitted_ms: int = 7) -> RequeueJob:
    return RequeueJob(job=job, submitted_ms=submitted_ms, cause=Outcome.PREEMPTED)


def problems(effects: list[Effect], quota: QuotaSet = QUOTA) -> list[str]:
    checker = Checker({"n1": 8})
    checker.observe(Entry(sequence=1, event=quota, effects=()))
    checker.observe(Entry(sequence=2, event=Tick(at_ms=7), effects=tuple(effects)))
    return checker.problems


@pytest.mark.parametrize(
    ("effects", "quota"),
    [
        ([queue("a"), grant("a"), release("a"), end("a")], QUOTA),
        ([queue("a"), grant("a", kind="idle"), notice("a"), release("a", outcome="preempted"), requeue("a")], QUOTA),
        ([queue("a"), grant("a", kind="idle"), UpgradeLease(job="a", attempt=1)], QUOTA),
        ([grant("a"), DowngradeLease(job="a", attempt=1, reason="quota_cut"), notice("a")], QUOTA),
        ([grant("a"), notice("a")], INSIDE),
        ([grant("a"), grant("b", kind="idle")], QUOTA),
        ([grant("a", gpus=(2, 2)), release("a", (0,), "failed"), release("a", (1,), "failed"), grant("a", 2)], QUOTA),
        ([grant("a", gpus=(2, 2), kind="idle"), notice("a"), release("a", (1, 0), "preempted")], QUOTA),
    ],
)  # fmt: skip
def test_what_holds_is_no_problem(effects: list[Effect], quota: QuotaSet) -> None:
    assert problems(effects, quota) == []


@pytest.mark.parametrize(
    ("effects", "says"),
    [
        ([queue("a"), grant("a"), release("a"), end("a"), queue("a")], "queued twice"),
        ([grant("a"), grant("a", attempt=2)], "second lease"),
        ([grant("a", attempt=2)], "starts attempt 2 after 0"),
        ([grant("a", gpus=(1,), sizes=(1, 1))], "1 instances of its gang of 2"),
        ([grant("a", gpus=(1,), sizes=(1, 1, 1), min_instances=2)], "1 instances"),
        ([grant("a", idle=IdlePolicy.ONLY)], "guaranteed lease, its idle policy is only"),
        ([grant("a", kind="idle", idle=IdlePolicy.NEVER)], "idle lease, its idle policy is never"),
        ([grant("a"), grant("b", kind="idle"), grant("c", gpus=(1,), kind="idle")], "is granted 9 GPU, it has 8"),
        ([grant("a"), grant("b", gpus=(1,))], "holds 5 of gpu, it is promised 4"),
        ([grant("a"), grant("b", kind="idle"), UpgradeLease(job="b", attempt=1)], "holds 8 of gpu"),
        ([grant("a"), UpgradeLease(job="a", attempt=1)], "holds no idle lease"),
        ([grant("a", kind="idle"), DowngradeLease(job="a", attempt=1, reason="x")], "holds no guaranteed lease"),
        ([grant("a"), notice("a")], "guaranteed lease and is told to leave"),
        ([notice("a")], "told to leave what it does not hold"),
        ([grant("a"), release("a"), release("a")], "which it does not hold"),
        ([grant("a"), release("a", attempt=0)], "which it does not hold"),
        ([grant("a", kind="idle"), release("a", outcome="preempted")], "without a notice"),
        (
            [
                grant("a", gpus=(1, 1), kind="idle", min_instances=1),
                notice("a", (1,)),
                release("a", (0,), "preempted"),
            ],
            "without a notice",
        ),
        ([queue("a"), grant("a"), requeue("a")], "still holds a lease"),
        ([queue("a"), grant("a"), release("a"), requeue("a", 8)], "lost its submit time"),
        ([grant("a"), end("a")], "while it holds a lease"),
        ([grant("a"), release("a"), end("a"), end("a")], "ends twice"),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_told(effects: list[Effect], says: str) -> None:
    found = problems(effects)
    assert any(says in problem and problem.startswith("entry 2: ") for problem in found), found


def test_two_attempts_and_too_many_gpus_on_the_machines_are_told() -> None:
    scenario = scenario_of(0)
    job = next(iter(scenario.jobs))
    engine = SimulatedEngine(SimulatedClock(), {job: scenario.jobs[job].behaviour})
    engine.carry_out(grant(job))
    checker = Checker({"n1": 7})
    checker.look(engine)
    assert checker.problems == []
    engine.carry_out(grant(job, attempt=2))
    checker.look(engine)
    assert checker.problems == ["node n1 runs 8 GPU, it has 7", f"{job} runs 2 attempts at once"]


def test_a_world_that_does_not_come_to_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "MOST_TURNS", 1)
    with pytest.raises(Broken, match="does not get past"):
        list(worlds.World(scenario_of(0)).run())


def test_invented_scenarios_differ_by_seed_and_by_nothing_else() -> None:
    assert scenario_of(5) == scenario_of(5) != scenario_of(6)
