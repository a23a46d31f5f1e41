"""Job streams from a seed, for docs and tests: teams with a daily rhythm of their own. The one rule kept: the same
arguments give the same stream, on every machine.

A team submits most in its own working hours, half as much at night, little at weekends, and more in some weeks than in
others, so that some quotas lie idle while others queue. Most jobs are short and small; a few are long or large.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sublet.sim.traces import TraceJob

DAY_S = 86_400
MEDIAN_S = 900.0
SPREAD = 1.8  # sigma of the logarithm of a duration
LONGEST_S = 3 * DAY_S
SIZES = ((1, 0.72), (2, 0.12), (4, 0.09), (8, 0.05), (16, 0.02))  # GPUs, share of jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`quotas`: GPUs promised by name. `load`: GPU time asked for, as a share of all that is promised."""

    quotas: Mapping[str, int]
    days: float
    load: float = 0.75
    seed: int = 1


def generate(plan: Plan) -> list[TraceJob]:
    """Jobs by submission; none asks for more than its quota promises."""
    chance = random.Random(plan.seed)
    drawn = [job for name, gpus in plan.quotas.items() for job in team(plan, name, gpus, chance)]
    drawn.sort(key=lambda job: (job.submit_ms, job.quota))
    return [
        TraceJob(id=str(index), submit_ms=job.submit_ms, duration_ms=job.duration_ms, gpus=job.gpus, quota=job.quota)
        for index, job in enumerate(drawn)
    ]


def team(plan: Plan, name: str, gpus: int, chance: random.Random) -> list[TraceJob]:
    """One team's jobs: draw them until they ask for its share of the load, then spread them over its hours."""
    weeks = [chance.uniform(0.5, 1.5) for _ in range(math.ceil(plan.days / 7))]
    peak_hour = chance.uniform(9, 17)
    asked, wanted = 0.0, plan.load * gpus * plan.days * DAY_S
    jobs: list[TraceJob] = []
    while asked < wanted:
        size, duration = draw_size(gpus, chance), draw_duration(chance)
        asked += size * duration
        submit = draw_time(plan.days, weeks, peak_hour, chance)
        jobs.append(TraceJob(id="", submit_ms=submit * 1000, duration_ms=duration * 1000, gpus=size, quota=name))
    return jobs


def draw_size(most: int, chance: random.Random) -> int:
    sizes = [(size, share) for size, share in SIZES if size <= most]
    return chance.choices([size for size, _ in sizes], [share for _, share in sizes])[0]


def draw_duration(chance: random.Random) -> int:
    return max(10, min(LONGEST_S, round(MEDIAN_S * math.exp(chance.gauss(0, SPREAD)))))


def draw_time(days: float, weeks: Sequence[float], peak_hour: float, chance: random.Random) -> int:
    """A second in the stream, as likely as the team is busy then."""
    while True:
        second = int(chance.random() * days * DAY_S)
        if chance.random() < busyness(second, weeks, peak_hour):
            return second


def busyness(second: int, weeks: Sequence[float], peak_hour: float) -> float:
    """From 0 to 1."""
    day, hour = divmod(second / 3600, 24)
    rhythm = 0.625 + 0.375 * math.cos((hour - peak_hour) / 24 * math.tau)
    return rhythm * (0.4 if day % 7 >= 5 else 1.0) * weeks[int(day // 7)] / 1.5


# ---- a cluster for a stream


def quotas_for(jobs: Iterable[TraceJob], gpus: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Share out each spec's GPUs in proportion to what the quotas' jobs ask for, the last few by largest remainder."""
    asked: dict[str, dict[str, int]] = {}
    for job in jobs:
        by_quota = asked.setdefault(job.spec, {})
        by_quota[job.quota] = by_quota.get(job.quota, 0) + job.gpus * job.duration_ms
    shares: dict[str, dict[str, int]] = {}
    for spec in sorted(asked):
        for name, count in sorted(shared_out(asked[spec], gpus.get(spec, 0)).items()):
            shares.setdefault(name, {})[spec] = count
    return dict(sorted(shares.items()))


def shared_out(asked: Mapping[str, int], gpus: int) -> dict[str, int]:
    total = max(1, sum(asked.values()))
    exact = {name: (amount * gpus) // total for name, amount in asked.items()}
    by_remainder = sorted(asked, key=lambda name: (-(asked[name] * gpus % total), name))
    for name in by_remainder[: gpus - sum(exact.values())]:
        exact[name] += 1
    return exact


def nodes_needed(jobs: Sequence[TraceJob], load: float, node_gpus: int) -> dict[str, int]:
    """Nodes by spec so that the stream keeps them busy to `load`, and the largest job fits."""
    needed: dict[str, int] = {}
    span = max(1, max(job.submit_ms for job in jobs) - min(job.submit_ms for job in jobs))
    for spec in sorted({job.spec for job in jobs}):
        mine = [job for job in jobs if job.spec == spec]
        busy = sum(job.gpus * job.duration_ms for job in mine) / span / load
        needed[spec] = math.ceil(max(busy, *(job.gpus for job in mine), 1) / node_gpus)
    return needed
