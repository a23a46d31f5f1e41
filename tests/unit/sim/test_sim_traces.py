"""Job streams: reading, writing, importing and generating them."""

import io
import json
from pathlib import Path

import pytest

from sublet.domain.errors import Refused
from sublet.domain.jobs import IdlePolicy
from sublet.sim.generate import Plan, generate, nodes_needed, quotas_for
from sublet.sim.importers import import_trace
from sublet.sim.traces import TraceJob, read_cluster, read_stream, sizes_of, write_cluster, write_stream

DAY_MS = 86_400_000


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("gpus", "node", "sizes"),
    [(1, 8, (1,)), (8, 8, (8,)), (12, 8, (8, 4)), (16, 8, (8, 8)), (24, 8, (8, 8, 8)), (3, 2, (2, 1))],
)
def test_a_job_larger_than_a_node_is_a_gang_of_whole_nodes(gpus: int, node: int, sizes: tuple[int, ...]) -> None:
    assert sizes_of(gpus, node) == sizes


def test_a_stream_is_read_in_order_of_submission(tmp_path: Path) -> None:
    text = "job,submit_s,duration_s,gpus,quota\nb,20,5.5,2,q\na,10,60,1,p\n"
    jobs = read_stream(written(tmp_path / "s.csv", text))
    assert [job.id for job in jobs] == ["a", "b"]
    assert jobs[1] == TraceJob(id="b", submit_ms=20_000, duration_ms=5_500, gpus=2, quota="q")


@pytest.mark.parametrize("line", ["x,1,1,0,q", "x,1,-1,1,q", "x,soon,1,1,q", "x,1,1,1,", "x,1,1"])
def test_a_line_that_makes_no_sense_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "s.csv", f"job,submit_s,duration_s,gpus,quota\na,1,1,1,q\n{line}\n")
    with pytest.raises(Refused, match=r"Line 3 of s\.csv"):
        read_stream(path)


def test_a_file_without_the_columns_is_no_stream(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="gpus, quota"):
        read_stream(written(tmp_path / "s.csv", "job,submit_s,duration_s\n"))


def test_a_stream_without_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="holds no jobs"):
        read_stream(written(tmp_path / "s.csv", "job,submit_s,duration_s,gpus,quota\n"))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    jobs = [
        TraceJob(id="a", submit_ms=0, duration_ms=1_500, gpus=1, quota="q"),
        TraceJob(id="b", submit_ms=250, duration_ms=2_000, gpus=8, quota="q", idle=IdlePolicy.ONLY, spec="h100"),
    ]
    for some in (jobs[:1], jobs):
        with (tmp_path / "s.csv").open("w", encoding="utf-8", newline="") as file:
            write_stream(some, file)
        assert read_stream(tmp_path / "s.csv") == some
    assert (tmp_path / "s.csv").read_text().startswith("job,submit_s,duration_s,gpus,quota,idle,spec\n")


def test_a_cluster_is_what_a_scenario_says(tmp_path: Path) -> None:
    with (tmp_path / "c.yaml").open("w", encoding="utf-8") as file:
        write_cluster([{"name": "n", "count": 3, "gpu": 8}], {"a": {"gpu": 16}, "b": {"gpu": 8}}, file)
    cluster = read_cluster(tmp_path / "c.yaml")
    assert (cluster.gpus, len(cluster.nodes), cluster.node_gpus("gpu"), cluster.node_gpus("x")) == (24, 3, 8, 0)
    assert {quota.name: dict(quota.nominal or {}) for quota in cluster.quotas} == {"a": {"gpu": 16}, "b": {"gpu": 8}}


def test_a_cluster_without_quotas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="needs `nodes` and `quotas`"):
        read_cluster(written(tmp_path / "c.yaml", "nodes: [{name: n, gpu: 8}]\n"))


# ---- importers


def attempt(start: str | None, end: str | None, *hosts: int) -> dict[str, object]:
    detail = [{"ip": f"m{at}", "gpus": [f"gpu{g}" for g in range(count)]} for at, count in enumerate(hosts)]
    return {"start_time": start, "end_time": end, "detail": detail}


def test_philly(tmp_path: Path) -> None:
    two = [
        attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23", 8),
        attempt("2017-10-07 01:13:30", "2017-10-07 02:13:30", 8, 8),
    ]
    unended = [attempt("2017-10-07 01:01:00", "2017-10-07 01:02:00", 1), attempt("2017-10-07 01:03:00", None, 1)]
    log = [
        {"vc": "ee9e8c", "jobid": "application_2", "submitted_time": "2017-10-07 01:11:39", "attempts": two},
        {"vc": "x", "jobid": "application_3", "submitted_time": "2017-10-07 01:00:00", "attempts": []},
        {"vc": "x", "jobid": "application_1", "submitted_time": "2017-10-07 01:00:39", "attempts": unended},
    ]
    found = import_trace("philly", [written(tmp_path / "cluster_job_log", json.dumps(log))])
    assert found.jobs == (
        TraceJob(id="application_1", submit_ms=0, duration_ms=60_000, gpus=1, quota="x"),
        TraceJob(id="application_2", submit_ms=660_000, duration_ms=3_674_000, gpus=16, quota="ee9e8c"),
    )
    assert found.left_out == {"never ran": 1}


def test_itp_has_a_quota_for_each_file(tmp_path: Path) -> None:
    head = "job_id,submission_time,duration,num_gpu\n"
    one = written(tmp_path / "c01.csv", head + "6b2d9ccc,16566,3890,4\nzero,16567,0,1\n")
    two = written(tmp_path / "c02.csv", head + "7c3e,16560,10,1\n")
    found = import_trace("itp", [one, two], max_duration_ms=60_000)
    assert [(job.id, job.submit_ms, job.duration_ms, job.gpus, job.quota) for job in found.jobs] == [
        ("7c3e", 0, 10_000, 1, "c02"),
        ("6b2d9ccc", 6_000, 60_000, 4, "c01"),
    ]
    assert found.left_out == {"never ran": 1}


def test_openb_counts_a_share_of_a_gpu_as_one_and_reads_the_machines(tmp_path: Path) -> None:
    head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,"
    head += "creation_time,deletion_time,scheduled_time\n"
    rows = (
        "p0,12000,16384,1,460,,LS,Running,100,500,200\n"
        "p1,1,1,0,,,BE,Running,0,9,0\n"
        "p2,1,1,8,1000,,BE,Pending,5,,\n"
        "p3,1,1,2,1000,,BE,Succeeded,110,210,110\n"
    )
    pods = written(tmp_path / "pods.csv", head + rows)
    nodes = written(tmp_path / "nodes.csv", "sn,cpu_milli,memory_mib,gpu,model\nn0,64000,1,2,P100\nn1,96000,1,0,\n")
    found = import_trace("openb", [pods, nodes])
    assert [(job.id, job.submit_ms, job.duration_ms, job.gpus, job.quota) for job in found.jobs] == [
        ("p0", 0, 300_000, 1, "LS"),
        ("p3", 10_000, 100_000, 2, "BE"),
    ]
    assert found.left_out == {"asks for no GPU": 1, "never ran": 1}
    assert found.nodes == (("gpu", 2),)


def test_gfs_keeps_what_is_promised_and_what_is_spot(tmp_path: Path) -> None:
    head = "job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type\n"
    jobs = written(
        tmp_path / "job_info_df.csv",
        head + "239255,13,A10,20,1,1,0,2764799,HP\n437260,57,A100-SXM4-80GB,15,1,16,9589663,41060,Spot\n",
    )
    nodes = written(
        tmp_path / "node_info_df.csv", "node_name,gpu_model,gpu_capacity_num,cpu_num\n3,A100-SXM4-80GB,8,128\n"
    )
    found = import_trace("gfs", [jobs, nodes])
    assert [(job.gpus, job.quota, job.idle, job.spec) for job in found.jobs] == [
        (1, "org13", IdlePolicy.NEVER, "A10"),
        (16, "org57", IdlePolicy.ONLY, "A100-SXM4-80GB"),
    ]
    assert found.nodes == (("A100-SXM4-80GB", 8),)
    assert len(import_trace("gfs", [jobs], from_s=1000, days=365).jobs) == 1


@pytest.mark.parametrize("kind", ["philly", "itp", "openb", "gfs"])
def test_another_format_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(Refused, match=r"other\.csv"):
        import_trace(kind, [written(tmp_path / "other.csv", "a,b\n1,2\n")])


def test_a_row_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "c.csv", "job_id,submission_time,duration,num_gpu\na,1,long,1\n")
    with pytest.raises(Refused, match="cannot be understood"):
        import_trace("itp", [path])


# ---- generated


def test_the_same_seed_gives_the_same_stream() -> None:
    plan = Plan(quotas={"a": 16, "b": 8}, days=3, seed=5)
    assert generate(plan) == generate(plan)
    assert generate(plan) != generate(Plan(quotas={"a": 16, "b": 8}, days=3, seed=6))


def test_a_stream_asks_for_its_load_and_keeps_to_its_days_and_quotas() -> None:
    jobs = generate(Plan(quotas={"a": 32, "b": 8}, days=7, load=0.5, seed=2))
    assert all(0 <= job.submit_ms < 7 * DAY_MS for job in jobs)
    assert jobs == sorted(jobs, key=lambda job: job.submit_ms)
    assert max(job.gpus for job in jobs if job.quota == "b") <= 8
    asked = sum(job.gpus * job.duration_ms for job in jobs if job.quota == "a")
    assert 0.5 <= asked / (32 * 7 * DAY_MS) < 0.75


def test_teams_have_a_daily_rhythm() -> None:
    jobs = generate(Plan(quotas={"a": 64}, days=28, seed=1))
    by_hour = [0] * 24
    for job in jobs:
        by_hour[job.submit_ms // 3_600_000 % 24] += 1
    assert max(by_hour) > 2 * min(by_hour)


def test_quotas_share_the_gpus_by_what_their_jobs_ask_for() -> None:
    jobs = [
        TraceJob(id="1", submit_ms=0, duration_ms=300, gpus=1, quota="a"),
        TraceJob(id="2", submit_ms=1000, duration_ms=100, gpus=2, quota="b"),
    ]
    assert quotas_for(jobs, {"gpu": 10}) == {"a": {"gpu": 6}, "b": {"gpu": 4}}
    assert nodes_needed(jobs, 0.5, 8) == {"gpu": 1}


def test_a_generated_stream_is_a_stream(tmp_path: Path) -> None:
    out = io.StringIO()
    jobs = generate(Plan(quotas={"a": 8}, days=1, seed=1))
    assert write_stream(jobs, out) == len(jobs)
    assert read_stream(written(tmp_path / "s.csv", out.getvalue())) == jobs
