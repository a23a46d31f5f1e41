"""What follows when a program fails: the cause among several failures, the budget, the restart, and its record.

Rule: only failures spend the restart budget, counted since the last new checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sublet.core.state import Cause, JobBook, NodeBook, Pool
from sublet.core.suspects import OF_MACHINES
from sublet.domain.events import InstanceEnded
from sublet.domain.faults import Fault
from sublet.domain.jobs import JobState, Outcome, Restart
from sublet.domain.rules import Rules

RETRY_EXIT = 75  # "try again later": the program asks for a restart that is no failure of it
SAVED_EXIT = 85  # saved, and left as it was asked to
SIGNAL_EXITS = 128  # codes above stand for a signal, or for a launcher that lost a connection
MOST_RESTARTS = 50  # that are remembered
NOT_OF_PROGRAMS = (*OF_MACHINES, Fault.NETWORK, Fault.PREEMPTED)  # that come twice is no sign of a wrong program
ON_ONE_NODE = 2  # the same fault so often on one node: the job keeps away from it
STRENGTH = {fault.value: place for place, fault in enumerate(Fault)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`end`: how the job ends, None = it is queued again. `wait_ms`: before it may start at all."""

    end: JobState | None = None
    why: str = ""
    wait_ms: int = 0


# ---- the cause


def with_cause(job: JobBook, event: InstanceEnded, outcome: Outcome) -> Cause:
    """Of several failures in a gang the strongest verdict is the cause, of equal ones the first."""
    known, verdict = job.fault, event.verdict
    seen = next((one.evidence for one in job.troubles if one.instance == event.instance), "")
    if verdict and (not known.verdict or STRENGTH.get(verdict, 99) < STRENGTH.get(known.verdict, 99)):
        return Cause(
            exit_code=event.exit_code,
            verdict=verdict,
            evidence=(seen if verdict == Fault.HANG else "") or event.evidence,
            error=event.error or verdict,
            phase=event.phase,
            instance=event.instance,
        )
    is_first = outcome is Outcome.FAILED and job.broken is None and not known.verdict
    if known.exit_code is None or is_first:
        return replace(known, exit_code=event.exit_code, evidence=known.evidence or event.evidence)
    return known


def outcome_of_attempt(job: JobBook) -> Outcome:
    """From how its instances ended, in the order in which they did."""
    bad = [outcome for outcome in job.outcomes if outcome is not Outcome.SUCCEEDED]
    is_elastic = job.request.min_instances is not None
    if not bad or (is_elastic and job.outcomes[-1] is Outcome.SUCCEEDED):
        return Outcome.SUCCEEDED
    return Outcome.PREEMPTED if Outcome.PREEMPTED in bad else bad[0]


# ---- what follows


def after(job: JobBook, outcome: Outcome) -> Verdict:
    """What becomes of the job; its counters are those after this end."""
    if outcome is Outcome.SUCCEEDED:
        return Verdict(end=JobState.SUCCEEDED)
    if outcome is Outcome.STOPPED or job.stop_asked:
        return Verdict(end=JobState.STOPPED, why="stopped by its user")
    if is_out_of_time(job):
        return Verdict(end=JobState.FAILED, why=f"it has run as long as its max_time allows, {job.ran_ms // 1000} s")
    if outcome is Outcome.PREEMPTED:
        if not job.request.fault_tolerance.enabled:
            return Verdict(end=JobState.STOPPED, why="preempted, and fault tolerance is off")
        return Verdict()
    return _after_failure(job) if outcome is Outcome.FAILED else Verdict()


def _after_failure(job: JobBook) -> Verdict:
    tolerance = job.request.fault_tolerance
    why = (
        ("fault tolerance is off" if not tolerance.enabled or tolerance.policy == "never" else "")
        or _lasting(job)
        or _too_often(job)
    )
    if why:
        return Verdict(end=JobState.FAILED, why=why)
    again = job.failures_since - 1  # the first failure since a new checkpoint is followed by a restart at once
    if not tolerance.backoff_first_ms or again < 1:
        return Verdict()
    doubled = tolerance.backoff_first_ms << min(again - 1, 30)
    return Verdict(wait_ms=min(doubled, tolerance.backoff_max_ms))


def _lasting(job: JobBook) -> str:
    """Why a restart would fail as well, in the eyes of the job's policy; empty = it may help."""
    policy, cause = job.request.fault_tolerance.policy, job.fault
    if policy == "on_failure":
        return ""
    if cause.verdict == Fault.USER_ERROR:
        return f"a restart would not help: {cause.evidence}"
    code = cause.exit_code
    is_retried = code is None or code > SIGNAL_EXITS or code in (RETRY_EXIT, SAVED_EXIT)
    if policy == "exit_code" and not is_retried and cause.verdict != Fault.HANG:
        return f"exit code {code} is not retried under the policy exit-code"
    return ""


def _too_often(job: JobBook) -> str:
    tolerance = job.request.fault_tolerance
    if job.failures_since > tolerance.max_restarts:
        return f"failed {job.failures_since} times since its last new checkpoint"
    if job.failures > tolerance.max_restarts_total:
        return f"failed {job.failures} times in all"
    same = _same_error(job)
    if 0 < tolerance.most_same_errors <= same:
        return f"failed {same} times in the same way without a new checkpoint in between: {job.errors[-1]}"
    return ""


def _same_error(job: JobBook) -> int:
    """How often in a row the newest diagnosed error came, since the last new checkpoint."""
    count = 0
    for error in reversed(job.errors):
        if not error or error != job.errors[-1]:
            break
        count += 1
    return count


def is_out_of_time(job: JobBook) -> bool:
    """What it waited, and was preempted, does not count."""
    return job.request.max_time_ms is not None and job.ran_ms >= job.request.max_time_ms


# ---- counting


def count_failure(job: JobBook) -> None:
    """The caller has touched the job."""
    job.failures += 1
    if not spends_budget(job.fault, job.was_withdrawn):
        return
    job.failures_since += 1
    is_its_own = job.fault.verdict not in NOT_OF_PROGRAMS
    job.errors = (*job.errors, job.fault.error if is_its_own else "")


def spends_budget(cause: Cause, was_withdrawn: bool) -> bool:
    """A program that asks for a retry, or that left as on a notice, is no failure."""
    is_asked = cause.exit_code in (RETRY_EXIT, SAVED_EXIT) or cause.verdict == Fault.PREEMPTED
    return not is_asked and not was_withdrawn


def cooldown_ms(rules: Rules, streak: int) -> int:
    """The pause before it borrows again, after the streak-th preemption in a row."""
    if not rules.cooldown_ms:
        return 0
    return min(rules.cooldown_ms << min(max(streak, 1) - 1, 30), rules.max_cooldown_ms)


# ---- the record


def record(job: JobBook, outcome: Outcome, now_ms: int, *, is_single: bool, avoided: bool) -> None:
    """The caller has touched the job, and its lease is not cleared yet."""
    cause = job.fault
    node = job.nodes[cause.instance] if cause.instance is not None else job.nodes[0] if len(job.nodes) == 1 else ""
    restart = Restart(
        number=job.restarts[-1].number + 1 if job.restarts else 1,
        attempt=job.attempt,
        is_single=is_single,
        instance=cause.instance,
        node=node,
        phase=cause.phase or ("start" if job.begun_ms is None else ""),
        failed_ms=now_ms,
        verdict=cause.verdict or outcome.value,
        evidence=cause.evidence,
        exit_code=cause.exit_code,
        avoided=avoided,
    )
    job.restarts = (*job.restarts, restart)[-MOST_RESTARTS:]


def began_again(job: JobBook, now_ms: int, instance: int | None) -> None:
    """Work goes on after the newest restart: of this instance alone, or of the whole gang."""
    for place in range(len(job.restarts) - 1, -1, -1):
        one = job.restarts[place]
        if one.is_single == (instance is not None) and instance in (None, one.instance):
            if one.began_ms is None:
                again = replace(one, began_ms=now_ms)
                job.restarts = (*job.restarts[:place], again, *job.restarts[place + 1 :])
            return


# ---- nodes to keep away from


def keep_away(job: JobBook, pool: Pool) -> str:
    """The node to avoid from here on, because a fault of machines met the job there again; else nothing."""
    node = next_to_avoid(job, pool)
    blame(job)
    if node:
        job.request = replace(job.request, avoid=(*job.request.avoid, node))
    return node


def blame(job: JobBook) -> None:
    """A fault of machines is held against the node where it met the job."""
    cause = job.fault
    if cause.verdict in OF_MACHINES and cause.instance is not None:
        job.faults = (*job.faults, (job.nodes[cause.instance], cause.verdict))[-MOST_RESTARTS:]


def next_to_avoid(job: JobBook, pool: Pool) -> str:
    """The node of the present fault, where it is one time too many and the job could stand elsewhere; else nothing."""
    cause = job.fault
    if cause.verdict not in OF_MACHINES or cause.instance is None:
        return ""
    node = job.nodes[cause.instance]
    is_again = job.faults.count((node, cause.verdict)) + 1 >= ON_ONE_NODE
    return node if is_again and _could_stand(job, pool, (*job.request.avoid, node)) else ""


def rather_there(job: JobBook, pools: Iterable[Pool]) -> bool:
    """Than nowhere: where no node is left but those that it avoids it avoids none. The caller has touched the job."""
    if not job.request.avoid or any(_could_stand(job, pool, job.request.avoid) for pool in pools):
        return False
    job.request, job.faults = replace(job.request, avoid=()), ()
    return True


def _could_stand(job: JobBook, pool: Pool, avoid: Sequence[str]) -> bool:
    sizes, names = job.request.least_sizes, job.request.nodes
    others: list[NodeBook] = [
        one
        for one in pool.nodes.values()
        if one.is_up and one.name not in avoid and (names is None or one.name in names)
    ]
    return sum(one.node.gpu // max(sizes) for one in others) >= len(sizes)
