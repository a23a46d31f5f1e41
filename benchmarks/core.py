"""How fast the core decides, in one process: `make bench-core`.

Rule: each figure is of whole turns, the Tick counted in; times of one call are processor time, rates are by the clock.

    python benchmarks/core.py [--nodes 500,2000,5000,20000] [--seconds 4] [--profile]

Lifecycle: a job is submitted, granted and released, one at a time, on a cluster that is three quarters full, 30 quotas.
Reclaim: every GPU is lent, to single GPUs or to whole nodes; an owner comes. Infeasible: no set of victims makes room.
"""

import argparse
import cProfile
import pstats
import random
import resource
import time
from collections.abc import Callable

from sublet.core.core import Core
from sublet.domain.effects import StartGang
from sublet.domain.events import InstanceBegan, InstanceEnded, JobSubmitted, NodeJoined, QuotaSet, Tick
from sublet.domain.jobs import IdlePolicy, JobRequest
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota

QUOTAS, GPUS = 30, 8
Event = JobSubmitted | InstanceBegan | InstanceEnded | NodeJoined | QuotaSet | Tick


class Bench:
    """A core, and the times that its calls took, in ns."""

    def __init__(self, nodes: int, nominal: int) -> None:
        self.core, self.now_ms, self.times, self.serial = Core(), 0, list[int](), 0
        self.nodes = nodes
        for number in range(nodes):
            self.core.handle(NodeJoined(at_ms=0, node=Node(name=f"n{number:05}", spec="gpu", gpu=GPUS)))
        for number in range(QUOTAS):
            self.core.handle(QuotaSet(at_ms=0, quota=Quota(name=f"q{number:02}", nominal={"gpu": nominal})))
        self.tick()

    def do(self, event: Event) -> tuple[object, ...]:
        start = time.thread_time_ns()
        effects = self.core.handle(event)
        self.times.append(time.thread_time_ns() - start)
        return effects

    def tick(self) -> tuple[object, ...]:
        effects = self.do(Tick(at_ms=self.now_ms))
        self.core.state.dirty_jobs.clear()  # as take_changes does, its cost is the store's
        return effects

    def submit(self, quota: int, sizes: tuple[int, ...], idle: IdlePolicy, **more: object) -> str:
        self.serial += 1
        request = JobRequest(id=f"job_{self.serial:08}", quota=f"q{quota:02}", sizes=sizes, idle=idle, **more)  # type: ignore[arg-type]
        self.do(JobSubmitted(at_ms=self.now_ms, request=request))
        return request.id

    def end(self, job_id: str, attempt: int, instances: int = 1) -> None:
        for instance in range(instances):
            self.do(
                InstanceEnded(
                    at_ms=self.now_ms, job=job_id, attempt=attempt, instance=instance, exit_code=0, finished=True
                )
            )


def percentile(times: list[int], share: float) -> float:
    """ms"""
    return sorted(times)[min(len(times) - 1, int(len(times) * share))] / 1e6 if times else 0.0


def lifecycles(nodes: int, seconds: float, backlog: int = 0) -> dict[str, float]:
    """`backlog`: jobs that wait and cannot start, of some forty kinds."""
    chance = random.Random(7)
    bench = Bench(nodes, nodes * GPUS // QUOTAS)
    running: list[str] = []
    while len(running) < nodes * GPUS * 3 // 4 // 3:
        running.append(bench.submit(chance.randrange(QUOTAS), (chance.choice((1, 1, 2, 8)),), IdlePolicy.ACCEPTABLE))
    bench.tick()
    for number in range(backlog):
        sizes = (8,) * (nodes // QUOTAS + 1 + number % 40)
        bench.submit(number % QUOTAS, sizes if number % 3 else (9 + number % 40,), IdlePolicy.NEVER)
    bench.tick()
    bench.times.clear()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        bench.now_ms += 10
        size = chance.choice((1, 1, 1, 2, 4, 8))
        running.append(
            bench.submit(chance.randrange(QUOTAS), (size,), IdlePolicy.ACCEPTABLE, priority=chance.randint(1, 9))
        )
        bench.tick()
        at = chance.randrange(len(running))
        running[at], running[-1] = running[-1], running[at]
        bench.end(running.pop(), 1)
        bench.tick()
        done += 1
    wall = time.perf_counter() - start
    return {
        "lifecycles/s": done / wall,
        "handle p50 ms": percentile(bench.times, 0.5),
        "handle p99 ms": percentile(bench.times, 0.99),
        "us an event": sum(bench.times) / len(bench.times) / 1e3,
    }


def reclaims(nodes: int, seconds: float, *, borrower: int, claim: tuple[int, ...], nominal: int) -> dict[str, float]:
    """All is lent to borrowers of `borrower` GPUs; owners come one by one."""
    chance = random.Random(11)
    bench = Bench(nodes, nominal)
    for _ in range(nodes * GPUS // borrower):
        bench.submit(chance.randrange(QUOTAS), (borrower,), IdlePolicy.ONLY)
        bench.now_ms += chance.randrange(2_000)
        if bench.serial % 64 == 0:
            begin(bench, bench.tick())
    begin(bench, bench.tick())
    bench.now_ms += 600_000
    times: list[int] = []
    start, feasible = time.perf_counter(), 0
    while time.perf_counter() - start < seconds and len(times) < 300:
        bench.times.clear()
        owner = bench.submit(chance.randrange(QUOTAS), claim, IdlePolicy.NEVER)
        effects = bench.tick()
        times.append(sum(bench.times))
        victims = [(e.job, e.attempt) for e in effects if type(e).__name__ == "GiveNotice"]  # type: ignore[attr-defined]
        feasible += bool(victims)
        for job_id, attempt in victims:
            bench.end(job_id, attempt)
        bench.tick()
        bench.now_ms += 1_000
        if not victims:
            from sublet.domain.events import JobStopAsked

            bench.core.handle(JobStopAsked(at_ms=bench.now_ms, job=owner))
    return {"p50 ms": percentile(times, 0.5), "p99 ms": percentile(times, 0.99), "n": len(times), "feasible": feasible}


def begin(bench: Bench, effects: tuple[object, ...]) -> None:
    for effect in effects:
        if isinstance(effect, StartGang):
            for instance in effect.instances:
                bench.core.handle(
                    InstanceBegan(at_ms=bench.now_ms, job=effect.job, attempt=effect.attempt, instance=instance)
                )


def kueue_shape(seconds: float) -> dict[str, float]:
    """15,000 jobs, 30 quotas of 20 each, small, medium and large, as in Kueue's own baseline."""
    chance = random.Random(3)
    bench = Bench(75, 20)
    sizes = [1] * 70 + [5] * 20 + [8] * 10
    todo = [(chance.randrange(QUOTAS), chance.choice(sizes)) for _ in range(15_000)]
    running: list[tuple[str, int]] = []
    start = time.perf_counter()
    for quota, size in todo:
        bench.submit(quota, (size,), IdlePolicy.ACCEPTABLE)
    granted = 0
    while granted < len(todo) and time.perf_counter() - start < seconds:
        started = [e for e in bench.tick() if isinstance(e, StartGang)]
        granted += len(started)
        running += [(e.job, e.attempt) for e in started]
        bench.now_ms += 200
        for _ in range(min(len(running), 8)):
            job_id, attempt = running.pop(chance.randrange(len(running)))
            bench.end(job_id, attempt)
    return {"admitted/s": granted / (time.perf_counter() - start), "admitted": granted}


def row(name: str, figures: dict[str, float]) -> None:
    cells = "  ".join(f"{key} {value:,.3f}" if value < 100 else f"{key} {value:,.0f}" for key, value in figures.items())
    print(f"{name:<44}{cells}", flush=True)


def measure(nodes: list[int], seconds: float) -> None:
    for count in nodes:
        row(f"{count} nodes: lifecycle", lifecycles(count, seconds))
    for count in nodes:
        row(
            f"{count} nodes: reclaim 8 from 1-GPU jobs",
            reclaims(count, seconds, borrower=1, claim=(8,), nominal=count * GPUS // QUOTAS),
        )
        row(
            f"{count} nodes: reclaim 8 from 8-GPU jobs",
            reclaims(count, seconds, borrower=8, claim=(8,), nominal=count * GPUS // QUOTAS),
        )
        row(
            f"{count} nodes: reclaim 16 x 8",
            reclaims(count, seconds, borrower=4, claim=(8,) * 16, nominal=count * GPUS // QUOTAS),
        )
        row(
            f"{count} nodes: infeasible, all but one node",
            reclaims(count, seconds, borrower=1, claim=(8,) * (count + 1), nominal=count * GPUS * 2),
        )
    row("5000 nodes: lifecycle, 50,000 wait", lifecycles(5_000, seconds, backlog=50_000))
    row("Kueue's workload, 15,000 jobs", kueue_shape(seconds * 5))
    print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")


def profiled(work: Callable[[], object]) -> None:
    profile = cProfile.Profile()
    profile.runcall(work)
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="500,2000,5000,20000")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each figure")
    parser.add_argument("--profile", choices=("lifecycle", "backlog", "reclaim", "kueue"))
    args = parser.parse_args()
    nodes = [int(one) for one in args.nodes.split(",")]
    works: dict[str, Callable[[], object]] = {
        "lifecycle": lambda: lifecycles(nodes[0], args.seconds),
        "backlog": lambda: lifecycles(nodes[0], args.seconds, backlog=50_000),
        "reclaim": lambda: reclaims(nodes[0], args.seconds, borrower=1, claim=(8,), nominal=nodes[0] * GPUS // QUOTAS),
        "kueue": lambda: kueue_shape(args.seconds),
    }
    if args.profile:
        profiled(works[args.profile])
    else:
        measure(nodes, args.seconds)


if __name__ == "__main__":
    main()
