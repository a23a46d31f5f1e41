"""What follows when an attempt is over.

Rule: only failures spend the restart budget, counted since the last new checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from sublet.core.state import JobBook
from sublet.domain.jobs import JobState, Outcome
from sublet.domain.rules import Rules

RETRY_EXIT = 75  # "try again later": the program asks for a restart that is no failure of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`end`: how the job ends, None = it is queued again. `wait_ms`: before it may start at all."""

    end: JobState | None = None
    why: str = ""
    wait_ms: int = 0


def outcome_of_attempt(job: JobBook) -> Outcome:
    """From how its instances ended, in the order in which they did."""
    bad = [outcome for outcome in job.outcomes if outcome is not Outcome.SUCCEEDED]
    is_elastic = job.request.min_instances is not None
    if not bad or (is_elastic and job.outcomes[-1] is Outcome.SUCCEEDED):
        return Outcome.SUCCEEDED
    return Outcome.PREEMPTED if Outcome.PREEMPTED in bad else bad[0]


def after(job: JobBook, outcome: Outcome) -> Verdict:
    """What becomes of the job; its counters are those after this end."""
    if outcome is Outcome.SUCCEEDED:
        return Verdict(end=JobState.SUCCEEDED)
    if outcome is Outcome.STOPPED or job.stop_asked:
        return Verdict(end=JobState.STOPPED, why="stopped by its user")
    if outcome is Outcome.PREEMPTED:
        if not job.request.fault_tolerance.enabled:
            return Verdict(end=JobState.STOPPED, why="preempted, and fault tolerance is off")
        return Verdict()
    return _after_failure(job) if outcome is Outcome.FAILED else Verdict()


def _after_failure(job: JobBook) -> Verdict:
    tolerance = job.request.fault_tolerance
    if not tolerance.enabled or tolerance.policy == "never":
        return Verdict(end=JobState.FAILED, why="fault tolerance is off")
    if job.failures_since > tolerance.max_restarts:
        return Verdict(end=JobState.FAILED, why=f"failed {job.failures_since} times since its last new checkpoint")
    if job.failures > tolerance.max_restarts_total:
        return Verdict(end=JobState.FAILED, why=f"failed {job.failures} times in all")
    same = _same_error(job)
    if tolerance.policy == "exit_code_and_error_msg" and same > tolerance.same_error:
        return Verdict(end=JobState.FAILED, why=f"failed {same} times in the same way: {job.errors[-1]}")
    if not tolerance.backoff_first_ms or not job.failures_since:
        return Verdict()
    doubled = tolerance.backoff_first_ms << min(job.failures_since - 1, 30)
    return Verdict(wait_ms=min(doubled, tolerance.backoff_max_ms))


def _same_error(job: JobBook) -> int:
    """How often in a row the newest diagnosed error came, since the last new checkpoint."""
    count = 0
    for error in reversed(job.errors):
        if not error or error != job.errors[-1]:
            break
        count += 1
    return count


def spends_budget(exit_code: int | None, was_withdrawn: bool) -> bool:
    """A program that asks for a retry, or that left because of a notice taken back meanwhile, is no failure."""
    return exit_code != RETRY_EXIT and not was_withdrawn


def cooldown_ms(rules: Rules, streak: int) -> int:
    """The pause before it borrows again, after the streak-th preemption in a row."""
    if not rules.cooldown_ms:
        return 0
    return min(rules.cooldown_ms << min(max(streak, 1) - 1, 30), rules.max_cooldown_ms)
