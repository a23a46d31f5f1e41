"""Random jobs, events and message faults: every invariant holds after every event.

A failure prints how to repeat it.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sublet.core.check import check
from sublet.core.whatif import sets_going
from sublet.domain.events import (
    CheckpointSaved,
    InstanceBegan,
    InstanceEnded,
    JobStopAsked,
    JobSubmitted,
    NodeDrained,
    NodeLost,
    NodeReturned,
    PrioritySet,
    QuotaDeleted,
    QuotaSet,
    RulesSet,
)
from sublet.domain.jobs import CheckpointHint, FaultTolerance, IdlePolicy, JobRequest
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota, Scope, Strategy
from sublet.domain.rules import Rules
from tests.property.world import Instance, World, build, difference, fingerprint

NAMES = ("A", "B", "P/c", "P/d", "G")
LIMITS = st.sampled_from([None, None, None, None, 0, 2, 4])

quotas = st.builds(
    Quota,
    name=st.sampled_from(NAMES),
    nominal=st.fixed_dictionaries({"gpu": st.sampled_from([4, 8, 0, 2, 16]), "cheap": st.sampled_from([4, 0, 8])}),
    scope=st.sampled_from([Scope.LINGJUN, Scope.LINGJUN, Scope.GENERAL]),
    strategy=st.sampled_from(list(Strategy)),
    lend_max=LIMITS,
    borrow_max=LIMITS,
    self_preemption=st.sampled_from([False, False, True]),
)
rules = st.builds(
    Rules,
    cooldown_ms=st.sampled_from([0, 60_000]),
    reclaim_delay_ms=st.sampled_from([0, 0, 30_000]),
)
shapes = st.sampled_from([(1,), (1,), (2,), (4,), (1, 1), (2, 2), (3, 1), (1, 1, 1, 1), (2, 2, 2)])


class CoreMachine(RuleBasedStateMachine):
    world: World

    @initialize(first=st.lists(quotas, min_size=2, max_size=5, unique_by=lambda q: q.name), rules=rules)
    def begin(self, first: list[Quota], rules: Rules) -> None:
        nodes = [Node(name=f"n{i}", spec="gpu" if i < 4 else "cheap", gpu=4, rack=f"r{i % 2}") for i in range(6)]
        self.world = build(nodes, first, rules)
        self.world.preempts_inside = True
        self.submitted = 0
        self.old: list[InstanceEnded] = []

    def pick(self, at: int) -> Instance | None:
        running = sorted(self.world.running)
        return running[at % len(running)] if running else None

    @rule(
        quota=st.sampled_from(NAMES),
        idle=st.sampled_from(list(IdlePolicy)),
        sizes=shapes,
        priority=st.integers(1, 9),
        least=st.booleans(),
        same_rack=st.booleans(),
        specs=st.sampled_from([("gpu",), ("gpu", "cheap"), ("cheap",)]),
        nodes=st.sampled_from([None, None, None, ("n0", "n1"), ("n4",)]),
        tolerant=st.sampled_from([True, True, False]),
        every=st.sampled_from([None, 60_000]),
        most=st.sampled_from([None, None, None, 60_000]),
        dry_run_first=st.booleans(),
    )
    def submit(self, quota: str, idle: IdlePolicy, sizes: tuple[int, ...], priority: int, least: bool, same_rack: bool,
               specs: tuple[str, ...], nodes: tuple[str, ...] | None, tolerant: bool, every: int | None,
               most: int | None, dry_run_first: bool) -> None:  # fmt: skip
        request = JobRequest(
            id=self.new_id(),
            quota=quota,
            idle=idle,
            sizes=sizes,
            priority=priority,
            min_instances=1 if least and len(sizes) > 1 else None,
            same_rack=same_rack,
            specs=specs,
            nodes=nodes,
            fault_tolerance=FaultTolerance(enabled=tolerant, max_restarts=1),
            checkpoint=CheckpointHint(every_ms=every),
            max_time_ms=most,
        )
        if not dry_run_first:
            self.world.do(JobSubmitted(at_ms=self.world.now_ms, request=request))
            return
        self.world.close()
        planned = self.world.core.plan(request, self.world.now_ms)
        assert not check(self.world.core.state)
        happened = self.world.do(JobSubmitted(at_ms=self.world.now_ms, request=request))
        wrong = difference(planned.effects, happened + self.world.close())
        assert not wrong, f"what happened is not what was planned: {wrong}"

    def new_id(self) -> str:
        self.submitted += 1
        return f"j{self.submitted:03}"

    @rule(
        count=st.integers(1, 6),
        quota=st.sampled_from(NAMES),
        priority=st.integers(1, 9),
        gpu=st.sampled_from([1, 2, 4]),
    )
    def borrow(self, count: int, quota: str, priority: int, gpu: int) -> None:
        """A crowd of borrowers that run."""
        for _ in range(count):
            request = JobRequest(id=self.new_id(), quota=quota, idle=IdlePolicy.ONLY, sizes=(gpu,), priority=priority)
            self.world.do(JobSubmitted(at_ms=self.world.now_ms, request=request))
        self.world.close()
        self.world.begin_all()

    @rule(quota=st.sampled_from(NAMES), sizes=shapes, priority=st.integers(1, 9))
    def claim(self, quota: str, sizes: tuple[int, ...], priority: int) -> None:
        """An owner comes."""
        request = JobRequest(id=self.new_id(), quota=quota, sizes=sizes, priority=priority)
        self.world.do(JobSubmitted(at_ms=self.world.now_ms, request=request))
        self.world.close()

    @rule(at=st.integers(0, 99))
    def ask_why(self, at: int) -> None:
        """Every wait has a reason, advice works, and asking changes nothing."""
        self.world.close()
        core = self.world.core
        before = fingerprint(core)
        waiting = sorted(job.id for job in core.state.jobs.values() if job.is_waiting)
        for job_id in waiting[at % 7 :: 7]:
            told = core.why(job_id)
            assert told is not None
            assert told.reasons and all(line.sentence for line in told.reasons)
            for advice in core.advice(job_id):
                at_ms = max((event.at_ms for event in advice.events), default=self.world.now_ms)
                assert sets_going(core.what_if(advice.events, at_ms), job_id), advice.text
        assert fingerprint(core) == before
        assert not check(core.state)

    @rule(after_ms=st.sampled_from([0, 0, 1_000, 10_000, 31_000, 120_000, 4_000_000]))
    def close(self, after_ms: int) -> None:
        self.world.close(after_ms)

    @rule()
    def begin_work(self) -> None:
        self.world.begin_all()

    @rule(
        at=st.integers(0, 99),
        exit_code=st.sampled_from([0, 1, 75, 143]),
        finished=st.booleans(),
        verdict=st.sampled_from(["", "", "hardware", "user_error"]),
    )
    def end_any(self, at: int, exit_code: int, finished: bool, verdict: str) -> None:
        one = self.pick(at)
        if one is not None:
            self.world.end(one, exit_code, finished=finished and exit_code == 0, verdict=verdict if exit_code else "")
            self.old.append(InstanceEnded(at_ms=0, job=one[0], attempt=one[1], instance=one[2], exit_code=exit_code))

    @precondition(lambda self: self.world.told)
    @rule(at=st.integers(0, 99))
    def end_told(self, at: int) -> None:
        told = sorted(self.world.told)
        self.world.end(told[at % len(told)], 143)

    @precondition(lambda self: self.old)
    @rule(at=st.integers(0, 99))
    def repeat(self, at: int) -> None:
        """A late second copy changes nothing."""
        before = fingerprint(self.world.core)
        old = self.old[at % len(self.old)]
        if not any((old.job, old.attempt, old.instance) == one for one in self.world.running):
            self.world.do(InstanceEnded(at_ms=self.world.now_ms, job=old.job, attempt=old.attempt,
                                        instance=old.instance, exit_code=old.exit_code))  # fmt: skip
            assert fingerprint(self.world.core) == before

    @rule(at=st.integers(0, 99), again=st.booleans())
    def save(self, at: int, again: bool) -> None:
        one = self.pick(at)
        if one is not None:
            attempt = one[1] - 1 if again else one[1]
            self.world.do(CheckpointSaved(at_ms=self.world.now_ms, job=one[0], attempt=attempt, step=at))
            self.world.do(InstanceBegan(at_ms=self.world.now_ms, job=one[0], attempt=one[1], instance=one[2]))

    @rule(at=st.integers(0, 99), priority=st.integers(0, 10))
    def hurry(self, at: int, priority: int) -> None:
        if self.submitted:
            job = f"j{at % self.submitted + 1:03}"
            self.world.do(PrioritySet(at_ms=self.world.now_ms, job=job, priority=priority))

    @rule(at=st.integers(0, 99))
    def stop(self, at: int) -> None:
        if self.submitted:
            self.world.do(JobStopAsked(at_ms=self.world.now_ms, job=f"j{at % self.submitted + 1:03}"))

    @rule(node=st.integers(0, 5), what=st.sampled_from([NodeLost, NodeReturned, NodeDrained]))
    def node(self, node: int, what: type[NodeLost]) -> None:
        self.world.do(what(at_ms=self.world.now_ms, node=f"n{node}"))

    @rule(node=st.integers(0, 5))
    def reopen(self, node: int) -> None:
        self.world.do(NodeReturned(at_ms=self.world.now_ms, node=f"n{node}", is_open=True))

    @rule(quota=quotas, delete=st.sampled_from([False, False, False, True]))
    def edit(self, quota: Quota, delete: bool) -> None:
        if delete:
            self.world.do(QuotaDeleted(at_ms=self.world.now_ms, name=quota.name))
        else:
            self.world.do(QuotaSet(at_ms=self.world.now_ms, quota=quota))

    @rule(rules=rules)
    def set_rules(self, rules: Rules) -> None:
        self.world.do(RulesSet(at_ms=self.world.now_ms, rules=rules))

    @rule()
    def restart(self) -> None:
        """Nothing that a decision depends on is lost with the process."""
        before = fingerprint(self.world.core)
        self.world.restart()
        after = fingerprint(self.world.core)
        lost = difference(before[:2], after[:2])
        assert not lost, lost


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=350,  # some 27,000 events
    stateful_step_count=50,
    deadline=None,
    derandomize="SUBLET_EXPLORE" not in os.environ,  # the same examples each time; set it to look for new ones
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
