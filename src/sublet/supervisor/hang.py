"""Whether a gang still gets on: hangs, ends that do not come, an instance that holds the others up.

Rule: progress is new output or a reported step. How busy a machine is never makes a hang; it only spares one from a
limit that was learned and not given.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sublet.domain.faults import Trouble
from sublet.supervisor import files, report
from sublet.supervisor.report import Rank

LEARN_FROM = 16  # steps
LEARNED_TIMES = 20  # the longest step so far
LEARNED_AT_LEAST_MS = 60_000
SLOW_FROM = 20  # steps
SLOW_TIMES, NO_LONGER_SLOW_TIMES = 1.5, 1.2  # the median of the others
SLOW_BY_MS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long nothing may be seen, by phase. `action`: off, report or restart. `exit_ms` 0: for ever."""

    action: str = "report"
    after_ms: int = 1_800_000
    start_ms: int = 1_800_000
    save_ms: int = 1_800_000
    exit_ms: int = 600_000
    watch: tuple[str, ...] = ("output", "step")

    def smallest_ms(self) -> int:
        return min(self.after_ms, self.start_ms, self.save_ms, self.exit_ms or self.after_ms)


def limits_of(settings: Mapping[str, Any]) -> Limits:
    """From the job's settings; what is not said there is as usual."""
    usual = Limits()
    after = settings.get("hang_after_ms", usual.after_ms)
    return Limits(
        action=settings.get("hang_action", usual.action),
        after_ms=after,
        start_ms=settings.get("hang_start_ms", after),
        save_ms=settings.get("hang_save_ms", after),
        exit_ms=settings.get("exit_hang_ms", usual.exit_ms),
        watch=tuple(settings.get("hang_watch", usual.watch)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What can be seen of an instance from outside. Times UTC ms, None: not yet."""

    instance: int
    run: int = 0
    begun_ms: int | None = None
    output_ms: int | None = None
    ranks: tuple[Rank, ...] = ()
    done_ms: int | None = None  # it ended well
    is_gone: bool = False
    is_told_to_go: bool = False
    is_idle: bool = True  # next to no processor time since the last progress

    @property
    def is_live(self) -> bool:
        return self.begun_ms is not None and not self.is_gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`instance`: the one it is about, None = all of them."""

    trouble: Trouble
    instance: int | None
    since_ms: int
    text: str


def see(directory: str, instance: int, run: int, log: str) -> Seen:
    """A look at the instance's files."""
    end = files.read(directory, files.END)
    return Seen(
        instance=instance,
        run=run,
        begun_ms=_modified_ms(os.path.join(directory, files.KEEPER)),
        output_ms=_modified_ms(log, written=True),
        ranks=tuple(report.ranks(directory)),
        done_ms=end["ended_ms"] if end is not None and end["finished"] else None,
        is_gone=end is not None,
        is_told_to_go=files.exists(directory, files.STOP) or files.exists(directory, files.NOTICE),
    )


def _modified_ms(path: str, *, written: bool = False) -> int | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns // 1_000_000 if found.st_size or not written else None


def phase_of(ranks: Sequence[Rank], output_ms: int | None) -> str:
    """start, step, exit, or what the program called it."""
    named = next((rank.phase for rank in ranks if rank.phase), "")
    if named:
        return named
    if ranks and all(rank.is_through for rank in ranks):
        return "exit"
    has_stepped = any(rank.step is not None for rank in ranks)
    return "step" if has_stepped or (output_ms is not None and not ranks) else "start"


def progress_ms(seen: Seen, watch: Sequence[str]) -> int:
    """When it was last seen to get on."""
    times = [seen.begun_ms or 0]
    if "output" in watch:
        times.append(seen.output_ms or 0)
    if "step" in watch:
        times += [max(rank.at_ms, rank.phase_since_ms) for rank in seen.ranks]
    return max(times)


def limit_ms(gang: Sequence[Seen], limits: Limits) -> tuple[int, str, bool]:
    """How long it may be silent now, the phase, and whether the limit was learned."""
    ranks = [rank for seen in gang for rank in seen.ranks]
    outputs = [seen.output_ms for seen in gang if seen.output_ms is not None]
    phase = phase_of(ranks, max(outputs, default=None))
    given = {"start": limits.start_ms, "save": limits.save_ms, "exit": limits.exit_ms or limits.after_ms}.get(
        phase, limits.after_ms
    )
    if phase != "step" or not ranks or min(rank.steps for rank in ranks) < LEARN_FROM:
        return given, phase, False
    learned = max(LEARNED_AT_LEAST_MS, round(LEARNED_TIMES * max(rank.longest_ms for rank in ranks)))
    return (learned, phase, True) if learned < given else (given, phase, False)


def judge(gang: Sequence[Seen], limits: Limits, now_ms: int, *, is_async: bool = False) -> list[Finding]:
    """What is wrong with the gang now. Nothing, while somebody is told to go or has not begun."""
    live = [seen for seen in gang if seen.is_live]
    if not live or any(seen.is_told_to_go for seen in gang) or any(seen.begun_ms is None for seen in gang):
        return []
    found = [] if limits.action == "off" else _hangs(gang, live, limits, now_ms, is_async=is_async)
    return found if found or is_async else _slow(live)


def _hangs(gang: Sequence[Seen], live: Sequence[Seen], limits: Limits, now_ms: int, *, is_async: bool) -> list[Finding]:
    if is_async:
        each = [_silent([seen], limits, now_ms) for seen in live]
        return [one for one in each if one is not None]
    done = [seen for seen in gang if seen.done_ms is not None]
    if done:
        since_ms = max(seen.done_ms or 0 for seen in done)
        if not limits.exit_ms or now_ms - since_ms <= limits.exit_ms:
            return []
        names = ", ".join(str(seen.instance) for seen in live)
        text = f"instance {done[0].instance} is done since {seconds(now_ms - since_ms)}, instance {names} does not end"
        return [Finding(trouble=Trouble.EXIT_HANG, instance=live[0].instance, since_ms=since_ms, text=text)]
    one = _silent(live, limits, now_ms)
    return [] if one is None else [one]


def _silent(live: Sequence[Seen], limits: Limits, now_ms: int) -> Finding | None:
    since_ms = max(progress_ms(seen, limits.watch) for seen in live)
    limit, phase, is_learned = limit_ms(live, limits)
    if is_learned and not all(seen.is_idle for seen in live):
        limit = limits.after_ms  # it works: the limit that was given holds
    if now_ms - since_ms <= limit:
        return None
    trouble = Trouble.EXIT_HANG if phase == "exit" else Trouble.HANG
    what = " and no ".join("step" if word == "step" else "output" for word in limits.watch)
    instance = live[0].instance if len(live) == 1 else None
    text = f"no {what} for {seconds(now_ms - since_ms)} in phase {phase}"
    return Finding(trouble=trouble, instance=instance, since_ms=since_ms, text=text)


def seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.0f} s" if milliseconds >= 10_000 else f"{milliseconds / 1000:.1f} s"


def own_ms(seen: Seen, *, by_busy: bool) -> float:
    """What the slowest process of the instance needs for a step."""
    return max((rank.busy_ms or 0.0) if by_busy else rank.step_ms for rank in seen.ranks)


def _slow(live: Sequence[Seen], times: float = SLOW_TIMES) -> list[Finding]:
    """Who needs much longer for a step than the others. In step with the others all take the same time, so what counts
    is the time without waiting, where it is told."""
    if len(live) < 2 or not all(seen.ranks and min(r.steps for r in seen.ranks) >= SLOW_FROM for seen in live):
        return []
    by_busy = all(rank.busy_ms is not None for seen in live for rank in seen.ranks)
    own = {seen.instance: own_ms(seen, by_busy=by_busy) for seen in live}
    slowest = max(own, key=lambda instance: (own[instance], -instance))
    others = median(value for instance, value in own.items() if instance != slowest)
    if own[slowest] < times * others or own[slowest] - others < SLOW_BY_MS:
        return []
    text = f"instance {slowest} needs {own[slowest]:.0f} ms for a step, the others {others:.0f} ms"
    since_ms = max(rank.at_ms for seen in live for rank in seen.ranks)
    return [Finding(trouble=Trouble.SLOW, instance=slowest, since_ms=since_ms, text=text)]


def is_still_slow(gang: Sequence[Seen], instance: int | None) -> bool:
    """One that was found slow stays so until it is clearly no longer: no back and forth around the limit."""
    found = _slow([seen for seen in gang if seen.is_live], NO_LONGER_SLOW_TIMES)
    return bool(found) and found[0].instance == instance
