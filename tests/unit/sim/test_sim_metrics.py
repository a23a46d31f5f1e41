"""What is measured, on runs small enough to count by hand."""

from sublet.sim.compare import compare, table
from sublet.sim.metrics import Replayed, Run, entitled_waits_ms, measure, percentile
from sublet.sim.report import NAMES, report
from sublet.sim.series import lending, losses_by_day, use_over_time, waits_by_quota
from sublet.sim.traces import TraceJob

H = 3_600_000
KEYS = [
    "jobs",
    "runs",
    "queue_mean_s",
    "queue_p50_s",
    "queue_p95_s",
    "jct_mean_s",
    "quota_wait_mean_s",
    "quota_wait_p99_s",
    "evictions",
    "evictions_per_run",
    "evictions_per_borrowed_run",
    "lost_gpu_h",
    "lost_share",
    "allocation",
    "borrowed_share",
    "wall_s",
    "events",
]


def job(name: str, submit_h: float, hours: float, gpus: int, quota: str) -> TraceJob:
    return TraceJob(id=name, submit_ms=int(submit_h * H), duration_ms=int(hours * H), gpus=gpus, quota=quota)


def evicted_once() -> Replayed:
    """b borrows at 0 and is evicted at 1 h, half an hour lost, for a, which runs from 1 h to 3 h; b runs again from 3 h
    to 4.5 h in its own quota from 4 h on."""
    jobs = [job("b", 0, 2, 4, "B"), job("a", 1, 2, 4, "A"), job("c", 4, 1, 2, "A")]
    runs = [
        Run(job=0, start_ms=0, end_ms=H, preempted=True, lost_ms=H // 2, lenders={"A": 4}),
        Run(job=1, start_ms=H, end_ms=3 * H, guaranteed_ms=H),
        Run(job=0, start_ms=3 * H, end_ms=int(4.5 * H), guaranteed_ms=4 * H, lenders={"A": 4}),
        Run(job=2, start_ms=4 * H, end_ms=5 * H, guaranteed_ms=4 * H),
    ]
    nominal = {("A", "gpu"): 4, ("B", "gpu"): 4}
    return Replayed(jobs=jobs, runs=runs, nominal=nominal, capacity=8, warm_up_ms=0, events=12, wall_s=0.5)


def test_the_keys_are_the_published_ones() -> None:
    assert list(measure(evicted_once())) == KEYS == list(NAMES)


def test_figures_of_one_eviction() -> None:
    found = measure(evicted_once())
    assert (found["jobs"], found["runs"], found["evictions"]) == (3, 4, 1)
    assert found["queue_mean_s"] == 2 * 3600 / 3  # b waits from 1 h to 3 h
    assert found["queue_p95_s"] == 2 * 3600
    assert found["jct_mean_s"] == round((4.5 + 2 + 1) * 3600 / 3, 6)
    assert found["evictions_per_run"] == 0.25
    assert found["evictions_per_borrowed_run"] == 0.5
    assert found["lost_gpu_h"] == 2
    assert found["lost_share"] == round(2 / (4 + 8 + 6 + 2), 6)
    assert found["allocation"] == (4 + 8 + 4) / (4 * 8)  # until the last arrival, at 4 h
    assert found["borrowed_share"] == (4 + 4) / 16
    assert (found["wall_s"], found["events"]) == (0.5, 12)


def test_b_was_entitled_while_it_waited() -> None:
    assert entitled_waits_ms(evicted_once()) == {0: 2 * H}


def test_only_what_fits_beside_those_ahead_is_entitled() -> None:
    jobs = [job("r", 0, 4, 3, "A"), job("x", 0, 1, 2, "A"), job("y", 0, 1, 1, "A"), job("z", 0, 1, 1, "A")]
    runs = [
        Run(job=0, start_ms=0, end_ms=4 * H, guaranteed_ms=0),
        Run(job=2, start_ms=2 * H, end_ms=3 * H, guaranteed_ms=2 * H),
        Run(job=3, start_ms=3 * H, end_ms=4 * H, guaranteed_ms=3 * H),
        Run(job=1, start_ms=4 * H, end_ms=5 * H, guaranteed_ms=4 * H),
    ]
    found = Replayed(jobs=jobs, runs=runs, nominal={("A", "gpu"): 4}, capacity=4, warm_up_ms=0)
    assert entitled_waits_ms(found) == {2: 2 * H}  # x is too large for what is left, z comes after y


def test_a_parent_limits_its_children() -> None:
    jobs = [job("r", 0, 2, 4, "P/a"), job("x", 0, 1, 2, "P/b")]
    runs = [
        Run(job=0, start_ms=0, end_ms=2 * H, guaranteed_ms=0),
        Run(job=1, start_ms=3 * H, end_ms=4 * H, guaranteed_ms=3 * H),
    ]
    nominal = {("P", "gpu"): 4, ("P/a", "gpu"): 4, ("P/b", "gpu"): 4}
    found = Replayed(jobs=jobs, runs=runs, nominal=nominal, capacity=4, warm_up_ms=0)
    assert entitled_waits_ms(found) == {1: H}


def test_what_is_submitted_during_the_warm_up_is_not_counted() -> None:
    found = evicted_once()
    late = Replayed(jobs=found.jobs, runs=found.runs, nominal=found.nominal, capacity=8, warm_up_ms=H)
    assert measure(late)["jobs"] == 2
    assert measure(late)["evictions"] == 0
    assert measure(late)["allocation"] == measure(found)["allocation"]


def test_percentiles_are_by_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert (percentile([], 50), percentile([7.0], 1)) == (0, 7)


def test_the_series_add_up_to_the_figures() -> None:
    found = evicted_once()
    use = use_over_time(found, slots=8)
    assert use.slot_ms * len(use.own) == 4 * H
    assert use.borrowed == [4, 4, 0, 0, 0, 0, 4, 4]
    assert use.own == [0, 0, 4, 4, 4, 4, 0, 0]
    assert use.free == [4] * 8
    assert losses_by_day(found) == ([1], [2])
    assert lending(found) == (["A", "B"], [[0, 8], [0, 0]])
    assert waits_by_quota(found)["B"] == (1, [7200, 7200, 7200, 7200])


def test_the_report_is_one_page_that_needs_nothing_else() -> None:
    found = evicted_once()
    page = report("A <replay>", "lend", found, measure(found))
    assert page.startswith("<!doctype html>")
    assert "A &lt;replay&gt;" in page
    assert page.count('role="img"') == 5
    assert not any(word in page for word in ("<script", "src=", "href=", "@import", "url("))


def test_a_comparison_tells_the_difference_and_its_share() -> None:
    left = measure(evicted_once())
    right = {**left, "queue_mean_s": left["queue_mean_s"] * 1.5, "evictions": 0}
    rows = {row["metric"]: row for row in compare(left, right)}
    assert rows["queue_mean_s"]["difference"] == 1200
    assert rows["queue_mean_s"]["share"] == 0.5
    assert rows["runs"]["share"] == 0
    assert compare(right, left)[8]["share"] is None
    text = table(("one", "two"), compare(left, right))
    assert "+50.0 %" in text
    assert "-100.0 %" in text
