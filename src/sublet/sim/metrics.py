"""What is measured on a replayed stream. The one rule kept: every figure follows from the jobs and their runs alone, so
that any scheduler's runs could be measured by it.

Means are over the jobs submitted after the warm-up; allocation is counted from the first instant to the last arrival.
"""

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sublet.domain.quotas import path_of
from sublet.sim.traces import TraceJob

HOUR_MS = 3_600_000


@dataclass(slots=True, kw_only=True)
class Run:
    """One start of a job, by its place in the stream. `guaranteed_ms`: since when its lease is guaranteed, if ever."""

    job: int
    start_ms: int
    end_ms: int = -1
    guaranteed_ms: int | None = None
    preempted: bool = False
    lost_ms: int = 0  # of its running time: work that has to be done again, and what the restart cost
    lenders: Mapping[str, int] = field(default_factory=dict)  # as of the grant

    @property
    def is_borrowed(self) -> bool:
        return self.guaranteed_ms != self.start_ms

    @property
    def borrowed_ms(self) -> int:
        return (self.end_ms if self.guaranteed_ms is None else self.guaranteed_ms) - self.start_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """All that a replay leaves: runs in order of their start; `nominal`: GPUs promised by quota and spec."""

    jobs: Sequence[TraceJob]
    runs: Sequence[Run]
    nominal: Mapping[tuple[str, str], int]
    capacity: int  # GPUs of all nodes
    warm_up_ms: int
    events: int = 0
    wall_s: float = 0.0

    @property
    def last_arrival_ms(self) -> int:
        return self.jobs[-1].submit_ms if self.jobs else 0


def measure(replayed: Replayed) -> dict[str, float]:
    """The metrics by key. Times in seconds, shares from 0 to 1."""
    jobs, counted = replayed.jobs, counted_jobs(replayed)
    runs = [run for run in replayed.runs if run.job in counted]
    waits = [wait / 1000 for wait in waits_ms(replayed, counted).values()]
    entitled = entitled_waits_ms(replayed)
    quota_waits = [entitled.get(job, 0) / 1000 for job in counted]
    ended = {run.job: run.end_ms for run in runs}
    evictions = sum(run.preempted for run in runs)
    borrowed = sum(run.is_borrowed for run in runs)
    used = sum((run.end_ms - run.start_ms) * jobs[run.job].gpus for run in runs)
    lost = sum(run.lost_ms * jobs[run.job].gpus for run in runs)
    allocated, under_idle = allocated_gpu_ms(replayed)
    span = max(1, replayed.last_arrival_ms)
    figures = {
        "jobs": len(counted),
        "runs": len(runs),
        "queue_mean_s": mean(waits),
        "queue_p50_s": percentile(waits, 50),
        "queue_p95_s": percentile(waits, 95),
        "jct_mean_s": mean([(end - jobs[job].submit_ms) / 1000 for job, end in ended.items()]),
        "quota_wait_mean_s": mean(quota_waits),
        "quota_wait_p99_s": percentile(quota_waits, 99),
        "evictions": evictions,
        "evictions_per_run": evictions / max(1, len(runs)),
        "evictions_per_borrowed_run": evictions / max(1, borrowed),
        "lost_gpu_h": lost / HOUR_MS,
        "lost_share": lost / max(1, used),
        "allocation": allocated / (span * max(1, replayed.capacity)),
        "borrowed_share": under_idle / max(1, allocated),
        "wall_s": replayed.wall_s,
        "events": replayed.events,
    }
    return {key: round(value, 6) for key, value in figures.items()}


def counted_jobs(replayed: Replayed) -> dict[int, TraceJob]:
    """Those submitted after the warm-up, by place in the stream; of a stream shorter than that, all."""
    late = {index: job for index, job in enumerate(replayed.jobs) if job.submit_ms >= replayed.warm_up_ms}
    return late or dict(enumerate(replayed.jobs))


def waits_ms(replayed: Replayed, counted: Mapping[int, TraceJob]) -> dict[int, int]:
    """All waiting of each job: to its first start, and after each preemption to the next start."""
    waits = dict.fromkeys(counted, 0)
    since = {index: job.submit_ms for index, job in counted.items()}
    for run in replayed.runs:
        if run.job in waits:
            waits[run.job] += run.start_ms - since[run.job]
            since[run.job] = run.end_ms
    return waits


def allocated_gpu_ms(replayed: Replayed) -> tuple[int, int]:
    """GPU time held until the last arrival, and the part of it under idle leases."""
    first, last = 0, replayed.last_arrival_ms
    held = idle = 0
    for run in replayed.runs:
        gpus = replayed.jobs[run.job].gpus
        held += gpus * overlap(run.start_ms, run.end_ms, first, last)
        idle += gpus * overlap(run.start_ms, run.start_ms + run.borrowed_ms, first, last)
    return held, idle


def overlap(start: int, end: int, first: int, last: int) -> int:
    return max(0, min(end, last) - max(start, first))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def percentile(values: Iterable[float], share: int) -> float:
    """The smallest value that is not below `share` percent of all (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)] if ordered else 0.0


# ---- waiting while entitled


@dataclass(frozen=True, slots=True)
class Change:
    """At this instant: `waits` True enters its quota's queue, False leaves it; `used`: GPUs charged or given back."""

    at_ms: int
    job: int
    waits: bool | None
    used: int


def changes_of(replayed: Replayed) -> list[Change]:
    changes = [Change(job.submit_ms, index, True, 0) for index, job in enumerate(replayed.jobs)]
    for run in replayed.runs:
        gpus = replayed.jobs[run.job].gpus
        changes.append(Change(run.start_ms, run.job, False, 0))
        if run.guaranteed_ms is not None:
            changes.append(Change(run.guaranteed_ms, run.job, None, gpus))
            changes.append(Change(run.end_ms, run.job, None, -gpus))
        if run.preempted:
            changes.append(Change(run.end_ms, run.job, True, 0))
    return sorted(changes, key=lambda change: change.at_ms)  # stable: of one job in order of its life


@dataclass(slots=True)
class Queue:
    """The jobs of a quota that wait, by size, each line in order of submission."""

    by_size: dict[int, list[int]] = field(default_factory=dict)
    entitled: dict[int, int] = field(default_factory=dict)  # job -> since when

    def enter(self, job: int, size: int) -> None:
        insort(self.by_size.setdefault(size, []), job)

    def leave(self, job: int, size: int) -> None:
        self.by_size[size].remove(job)

    def fitting(self, headroom: int) -> Iterator[int]:
        """In queue order, those that fit beside the ones before them; one too large is skipped."""
        places = dict.fromkeys(self.by_size, 0)
        while True:
            heads = [
                (line[places[size]], size)
                for size, line in self.by_size.items()
                if size <= headroom and places[size] < len(line)
            ]
            if not heads:
                return
            job, size = min(heads)
            places[size] += 1
            headroom -= size
            yield job


Account = tuple[str, str]  # quota, spec


def entitled_waits_ms(replayed: Replayed) -> dict[int, int]:
    """By job, where more than zero: how long it waited though its quota had headroom for it beside those ahead."""
    waits: dict[int, int] = {}
    used = dict.fromkeys(replayed.nominal, 0)
    queues: dict[Account, Queue] = {account: Queue() for account in replayed.nominal}
    changes = changes_of(replayed)
    position = 0
    while position < len(changes):
        now = changes[position].at_ms
        touched: set[str] = set()
        while position < len(changes) and changes[position].at_ms == now:
            touched.add(apply(changes[position], replayed.jobs, queues, used))
            position += 1
        for account in affected(touched, queues):
            settle(queues[account], headroom(account, replayed.nominal, used), now, waits)
    return waits


def apply(change: Change, jobs: Sequence[TraceJob], queues: Mapping[Account, Queue], used: dict[Account, int]) -> str:
    """Book it; returns the root of the quota's tree."""
    job = jobs[change.job]
    if change.waits is not None:
        queue = queues[job.quota, job.spec]
        (queue.enter if change.waits else queue.leave)(change.job, job.gpus)
    if change.used:
        for name in path_of(job.quota):
            used[name, job.spec] += change.used
    return path_of(job.quota)[-1]


def affected(roots: set[str], queues: Mapping[Account, Queue]) -> list[Account]:
    """Quotas of one tree share headroom."""
    return [account for account in queues if path_of(account[0])[-1] in roots]


def headroom(account: Account, nominal: Mapping[Account, int], used: Mapping[Account, int]) -> int:
    name, spec = account
    return min(nominal[each, spec] - used[each, spec] for each in path_of(name))


def settle(queue: Queue, room: int, now: int, waits: dict[int, int]) -> None:
    fitting = dict.fromkeys(queue.fitting(room), now)
    for job, since in queue.entitled.items():
        if job in fitting:
            fitting[job] = since
        elif now > since:
            waits[job] = waits.get(job, 0) + now - since
    queue.entitled = fitting
