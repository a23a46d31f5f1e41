"""What a report draws, worked out from the runs: who held GPUs when, how long jobs waited, what was lost, who lent to
whom. The one rule kept: the same sums as in `metrics`, only split by time or by quota.
"""

from dataclasses import dataclass

from sublet.domain.quotas import path_of
from sublet.sim.metrics import HOUR_MS, Replayed, Run, counted_jobs, percentile, waits_ms

DAY_MS = 24 * HOUR_MS
SHARES = (50, 75, 95, 99)  # percent of the jobs of a quota


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """GPUs by slot of time: `own` under guaranteed leases, `borrowed` under idle ones, and those nobody held."""

    slot_ms: int
    own: list[float]
    borrowed: list[float]
    free: list[float]


def span_ms(replayed: Replayed) -> int:
    return max((run.end_ms for run in replayed.runs), default=0) or 1


def use_over_time(replayed: Replayed, slots: int = 400) -> Use:
    """From the first instant to the last arrival."""
    end = replayed.last_arrival_ms or span_ms(replayed)
    slot = max(1, -(-end // slots))
    own, borrowed = [0.0] * slots, [0.0] * slots
    for run in replayed.runs:
        gpus, turns = replayed.jobs[run.job].gpus, run.start_ms + run.borrowed_ms
        spread_over(borrowed, slot, run.start_ms, turns, gpus)
        spread_over(own, slot, turns, run.end_ms, gpus)
    used = max(1, -(-end // slot))
    free = [max(0.0, replayed.capacity - mine - theirs) for mine, theirs in zip(own, borrowed, strict=True)]
    return Use(slot_ms=slot, own=own[:used], borrowed=borrowed[:used], free=free[:used])


def spread_over(slots: list[float], slot_ms: int, start: int, end: int, amount: float) -> None:
    """Add to each slot the amount, weighed by how much of the slot it lasts."""
    first, last = start // slot_ms, min((end - 1) // slot_ms, len(slots) - 1)
    for index in range(first, last + 1):
        lasts = min(end, (index + 1) * slot_ms) - max(start, index * slot_ms)
        slots[index] += amount * lasts / slot_ms


def waits_by_quota(replayed: Replayed) -> dict[str, tuple[int, list[float]]]:
    """Jobs, and seconds of waiting at each of SHARES, by quota."""
    counted = counted_jobs(replayed)
    waits: dict[str, list[float]] = {}
    for index, wait in waits_ms(replayed, counted).items():
        waits.setdefault(counted[index].quota, []).append(wait / 1000)
    return {
        name: (len(values), [percentile(values, share) for share in SHARES]) for name, values in sorted(waits.items())
    }


def losses_by_day(replayed: Replayed) -> tuple[list[int], list[float]]:
    """Evictions of each day, and the GPU-hours that went into work done again and into restarts."""
    days = span_ms(replayed) // DAY_MS + 1
    evictions, lost = [0] * days, [0.0] * days
    for run in replayed.runs:
        day = run.end_ms // DAY_MS
        evictions[day] += run.preempted
        lost[day] += lost_gpu_h(replayed, run)
    return evictions, lost


def lost_gpu_h(replayed: Replayed, run: Run) -> float:
    return run.lost_ms * replayed.jobs[run.job].gpus / HOUR_MS


def losses_by_quota(replayed: Replayed) -> dict[str, tuple[int, float]]:
    """Evictions and lost GPU-hours by the quota of the job that was evicted."""
    found: dict[str, tuple[int, float]] = {}
    for run in replayed.runs:
        name = replayed.jobs[run.job].quota
        count, lost = found.get(name, (0, 0.0))
        found[name] = (count + run.preempted, lost + lost_gpu_h(replayed, run))
    return dict(sorted(found.items()))


def lending(replayed: Replayed) -> tuple[list[str], list[list[float]]]:
    """Quota names, and GPU-hours that each (row) lent to each (column), as of the grants; its own share counts, too."""
    names = sorted({name for name, _ in replayed.nominal if is_leaf(name, replayed)})
    place = {name: index for index, name in enumerate(names)}
    lent = [[0.0] * len(names) for _ in names]
    for run in replayed.runs:
        for lender, gpus in run.lenders.items():
            if lender in place:
                lent[place[lender]][place[replayed.jobs[run.job].quota]] += gpus * run.borrowed_ms / HOUR_MS
    return names, lent


def is_leaf(name: str, replayed: Replayed) -> bool:
    return not any(name in path_of(other)[1:] for other, _ in replayed.nominal)
