"""Replays of small streams through the production core, counted by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from sublet.domain.errors import Refused
from sublet.domain.jobs import IdlePolicy
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota, Strategy
from sublet.sim.generate import Plan, generate
from sublet.sim.metrics import Replayed, Run, measure
from sublet.sim.replay import Policy, Settings, replay
from sublet.sim.traces import Cluster, TraceJob, read_cluster, read_stream

MINUTE = 60_000
TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"


def cluster(nodes: int = 1, **quotas: int) -> Cluster:
    return Cluster(
        nodes=tuple(Node(name=f"n{at}", spec="gpu", gpu=8) for at in range(nodes)),
        quotas=tuple(
            Quota(name=name, nominal={"gpu": gpus}, strategy=Strategy.ROUND_ROBIN) for name, gpus in quotas.items()
        ),
    )


def job(name: str, submit: int, minutes: int, gpus: int, quota: str) -> TraceJob:
    return TraceJob(id=name, submit_ms=submit * MINUTE, duration_ms=minutes * MINUTE, gpus=gpus, quota=quota)


def of_job(found: Replayed, place: int) -> list[Run]:
    return [run for run in found.runs if run.job == place]


BORROWED = [job("b", 0, 120, 8, "B"), job("a", 70, 30, 4, "A")]


def test_a_borrower_is_evicted_and_goes_on_from_its_last_checkpoint() -> None:
    found = replay(BORROWED, cluster(A=4, B=4), Settings())
    first, second = of_job(found, 0)
    assert (first.start_ms, first.end_ms, first.preempted, first.guaranteed_ms) == (0, 70 * MINUTE, True, None)
    assert first.lenders == {"A": 4, "B": 4}
    assert first.lost_ms == 10 * MINUTE  # checkpoints at 30 and 60 minutes
    assert second.start_ms == 100 * MINUTE
    assert second.end_ms == (100 + 60 + 1) * MINUTE  # an hour was left, and the restart costs a minute
    assert second.lost_ms == MINUTE
    (owner,) = of_job(found, 1)
    assert (owner.start_ms, owner.guaranteed_ms) == (70 * MINUTE, 70 * MINUTE)


def test_the_checkpoint_interval_and_the_restart_cost_are_settings() -> None:
    found = replay(BORROWED, cluster(A=4, B=4), Settings(checkpoint_every_ms=0, restart_cost_ms=0))
    first, second = of_job(found, 0)
    assert first.lost_ms == 70 * MINUTE
    assert second.end_ms - second.start_ms == 120 * MINUTE


def test_without_reclaim_the_owner_waits_for_the_borrower_to_end() -> None:
    found = replay(BORROWED, cluster(A=4, B=4), Settings(policy=Policy.NO_RECLAIM))
    assert [run.preempted for run in found.runs] == [False, False]
    assert of_job(found, 1)[0].start_ms == 120 * MINUTE
    assert measure(found)["quota_wait_p99_s"] == 50 * 60


def test_isolated_quotas_lend_nothing() -> None:
    jobs = [job("b", 0, 60, 4, "B"), job("c", 0, 60, 4, "B"), job("a", 70, 30, 4, "A")]
    found = replay(jobs, cluster(A=4, B=4), Settings(policy=Policy.ISOLATED))
    assert all(run.guaranteed_ms == run.start_ms for run in found.runs)
    assert of_job(found, 1)[0].start_ms == 60 * MINUTE


def test_a_borrower_is_upgraded_when_its_quota_has_room() -> None:
    jobs = [job("b", 0, 60, 4, "B"), job("c", 0, 120, 4, "B")]
    found = replay(jobs, cluster(A=4, B=4), Settings())
    (run,) = of_job(found, 1)
    assert (run.start_ms, run.guaranteed_ms, run.end_ms) == (0, 60 * MINUTE, 120 * MINUTE)
    assert run.is_borrowed
    assert run.borrowed_ms == 60 * MINUTE


def test_a_gang_stands_on_whole_nodes_or_waits() -> None:
    jobs = [job("small", 0, 60, 1, "A"), job("large", 1, 30, 16, "A")]
    found = replay(jobs, cluster(2, A=16, B=0), Settings())
    assert of_job(found, 1)[0].start_ms == 60 * MINUTE


def test_a_notice_lasts_as_long_as_the_rules_say() -> None:
    usual = Settings()
    found = replay(BORROWED, cluster(A=4, B=4), replace(usual, rules=replace(usual.rules, grace_ms=5 * MINUTE)))
    assert of_job(found, 0)[0].end_ms == 75 * MINUTE
    assert of_job(found, 1)[0].start_ms == 75 * MINUTE


def test_every_job_ends_and_nothing_is_lost_twice() -> None:
    jobs = generate(Plan(quotas={"a": 16, "b": 8}, days=3, load=0.9, seed=4))
    found = replay(jobs, cluster(3, a=16, b=8), Settings())
    ran = dict.fromkeys(range(len(jobs)), 0)
    for run in found.runs:
        ran[run.job] += run.end_ms - run.start_ms - run.lost_ms
    assert [ran[place] for place in range(len(jobs))] == [job.duration_ms for job in jobs]
    assert sum(run.preempted for run in found.runs) > 0


def test_no_instant_holds_more_than_there_is() -> None:
    jobs = generate(Plan(quotas={"a": 16, "b": 8}, days=2, load=0.9, seed=9))
    found = replay(jobs, cluster(3, a=16, b=8), Settings())
    changes = [(run.start_ms, 1, jobs[run.job].gpus) for run in found.runs]
    changes += [(run.end_ms, 0, -jobs[run.job].gpus) for run in found.runs]
    held = 0
    for _, _, gpus in sorted(changes):
        held += gpus
        assert held <= 24


def test_progress_counts_every_arrival() -> None:
    told: list[int] = []
    jobs = generate(Plan(quotas={"a": 8}, days=2, seed=1))
    replay(jobs, cluster(A=8, a=8), Settings(), told.append)
    assert sum(told) == len(jobs)


@pytest.mark.parametrize(
    ("unfit", "policy", "said"),
    [
        (job("x", 0, 1, 16, "A"), Policy.LEND, "16 GPUs of gpu, and 8 exist"),
        (job("x", 0, 1, 1, "C"), Policy.LEND, "no quota C"),
        (job("x", 0, 1, 8, "A"), Policy.ISOLATED, "may not borrow"),
        (replace(job("x", 0, 1, 8, "A"), idle=IdlePolicy.NEVER), Policy.LEND, "may not borrow"),
    ],
)
def test_a_job_that_would_wait_for_ever_is_refused(unfit: TraceJob, policy: Policy, said: str) -> None:
    with pytest.raises(Refused, match=said):
        replay([unfit], cluster(A=4, B=4), Settings(policy=policy))


def test_a_parent_promises_what_its_children_do() -> None:
    plain = cluster(A=8)
    tree = Cluster(
        nodes=plain.nodes,
        quotas=(
            Quota(name="P", nominal=None),
            Quota(name="P/a", nominal={"gpu": 6}),
            Quota(name="P/b", nominal={"gpu": 2}),
        ),
    )
    found = replay([job("x", 0, 60, 6, "P/a"), job("y", 0, 60, 2, "P/b")], tree, Settings())
    assert found.nominal == {("P", "gpu"): 8, ("P/a", "gpu"): 6, ("P/b", "gpu"): 2}
    assert [run.guaranteed_ms for run in found.runs] == [0, 0]
    assert measure(found)["queue_mean_s"] == 0


def test_lend_and_reclaim_serve_the_owner_on_a_real_stream() -> None:
    if not TRACES.exists():
        pytest.skip("the published streams are not here")
    jobs, nodes = read_stream(TRACES / "morphling_mt.csv"), read_cluster(TRACES / "morphling.yaml")
    lend = measure(replay(jobs, nodes, Settings()))
    waits = measure(replay(jobs, nodes, Settings(policy=Policy.NO_RECLAIM)))
    assert lend["jobs"] == waits["jobs"] > 0
    assert lend["quota_wait_mean_s"] < waits["quota_wait_mean_s"]
    assert waits["evictions"] == 0
