"""Looks at a run from outside, entry by entry. Rule: it shares no code with the core, only the words.

What it holds: no node gives more than it has and no job runs twice, as the machines see it; promises are kept, also to
who was promised not to be disturbed; attempts count up by one; a gang is whole; each end is told once.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sublet.domain import effects as eff
from sublet.domain.changes import Entry
from sublet.domain.events import QuotaDeleted, QuotaSet
from sublet.domain.jobs import JobRequest, Outcome
from sublet.domain.leases import Lease
from sublet.domain.quotas import Quota, path_of
from sublet.engines.simulated import SimulatedEngine


@dataclass(slots=True, kw_only=True)
class Held:
    """A lease as the log tells it. `may_leave`: instances that were told to leave, ever."""

    attempt: int
    kind: str
    lease: Lease
    request: JobRequest
    live: set[int]
    may_leave: set[int] = field(default_factory=set)


class Checker:
    """`problems` are sentences; none means that all held so far. `ended`: jobs and how they ended."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self.problems: list[str] = []
        self.ended: dict[str, str] = {}
        self._capacity = capacity
        self._quotas: dict[str, Quota] = {}
        self._held: dict[str, Held] = {}
        self._attempts: dict[str, int] = defaultdict(int)
        self._submitted_ms: dict[str, int] = {}
        self._sequence = 0
        self._rules: dict[type[Any], Callable[[Any], None]] = {
            eff.StartGang: self._granted,
            eff.GiveNotice: self._noticed,
            eff.ReleaseInstances: self._released,
            eff.UpgradeLease: self._upgraded,
            eff.DowngradeLease: self._downgraded,
            eff.RequeueJob: self._requeued,
            eff.EndJob: self._ended,
        }

    def observe(self, entry: Entry) -> None:
        self._sequence = entry.sequence
        if isinstance(entry.event, QuotaSet):
            self._quotas[entry.event.quota.name] = entry.event.quota
        elif isinstance(entry.event, QuotaDeleted):
            self._quotas.pop(entry.event.name, None)
        for effect in entry.effects:
            if isinstance(effect, eff.QueueJob):
                self._queued(effect, entry.event.at_ms)
            elif type(effect) in self._rules:
                self._rules[type(effect)](effect)

    def look(self, engine: SimulatedEngine) -> None:
        """At the machines themselves: what really runs where."""
        held: Counter[str] = Counter()
        running: dict[str, set[int]] = defaultdict(set)
        for job, attempt, node, gpus in engine.running():
            held[node] += gpus
            running[job].add(attempt)
        for node, gpus in held.items():
            if gpus > self._capacity[node]:
                self.problems.append(f"node {node} runs {gpus} GPU, it has {self._capacity[node]}")
        self.problems += [f"{job} runs {len(a)} attempts at once" for job, a in running.items() if len(a) > 1]

    def _queued(self, effect: eff.QueueJob, at_ms: int) -> None:
        if self._submitted_ms.setdefault(effect.job, at_ms) != at_ms or effect.job in self.ended:
            self._say(f"{effect.job} is queued twice")

    def _granted(self, effect: eff.StartGang) -> None:
        job, request, lease = effect.job, effect.request, effect.lease
        if job in self._held or job in self.ended:
            self._say(f"{job} is granted a second lease, or one after its end")
        if effect.attempt != self._attempts[job] + 1:
            self._say(f"{job} starts attempt {effect.attempt} after {self._attempts[job]}")
        if not (request.min_instances or len(request.sizes)) <= len(lease.nodes) <= len(request.sizes):
            self._say(f"{job} is granted {len(lease.nodes)} instances of its gang of {len(request.sizes)}")
        if (lease.kind, request.idle) in (("guaranteed", "only"), ("idle", "never")):
            self._say(f"{job} is granted an {lease.kind} lease, its idle policy is {request.idle}")
        self._attempts[job] = effect.attempt
        live = set(range(len(effect.instances)))
        self._held[job] = Held(attempt=effect.attempt, kind=lease.kind, lease=lease, request=request, live=live)
        self._check_nodes(set(lease.nodes))
        if lease.kind == "guaranteed":
            self._check_promise(job)

    def _check_nodes(self, nodes: set[str]) -> None:
        held: Counter[str] = Counter()
        for one in self._held.values():
            for place in one.live:
                held[one.lease.nodes[place]] += one.lease.gpus[place]
        for node in sorted(nodes):
            if held[node] > self._capacity[node]:
                self._say(f"node {node} is granted {held[node]} GPU, it has {self._capacity[node]}")

    def _check_promise(self, job: str) -> None:
        spec = self._held[job].lease.spec
        for level in path_of(self._held[job].request.quota):
            quota = self._quotas.get(level)
            if quota is None or quota.nominal is None:
                continue
            used = sum(
                sum(one.lease.gpus[place] for place in one.live)
                for one in self._held.values()
                if one.kind == "guaranteed" and one.lease.spec == spec and level in path_of(one.request.quota)
            )
            if used > quota.nominal.get(spec, 0):
                self._say(f"quota {level} holds {used} of {spec}, it is promised {quota.nominal.get(spec, 0)}")

    def _noticed(self, effect: eff.GiveNotice) -> None:
        held = self._held.get(effect.job)
        if held is None or held.attempt != effect.attempt:
            self._say(f"{effect.job}#{effect.attempt} is told to leave what it does not hold")
            return
        held.may_leave |= set(effect.instances)
        levels = [self._quotas.get(name) for name in path_of(held.request.quota)]
        is_inside = any(one is not None and (one.self_preemption or one.sub_quota_preemption) for one in levels)
        if held.kind == "guaranteed" and not is_inside:
            self._say(f"{effect.job} has a guaranteed lease and is told to leave")

    def _released(self, effect: eff.ReleaseInstances) -> None:
        held = self._held.get(effect.job)
        if held is None or held.attempt != effect.attempt or not set(effect.instances) <= held.live:
            self._say(f"{effect.job}#{effect.attempt} releases {effect.instances}, which it does not hold")
            return
        is_gang = held.request.min_instances is None
        if effect.outcome is Outcome.PREEMPTED and not (
            held.may_leave if is_gang else held.may_leave & set(effect.instances)
        ):
            self._say(f"{effect.job} is preempted without a notice")
        held.live.difference_update(effect.instances)
        if not held.live:
            del self._held[effect.job]

    def _upgraded(self, effect: eff.UpgradeLease) -> None:
        if effect.job not in self._held or self._held[effect.job].kind != "idle":
            self._say(f"{effect.job} is upgraded and holds no idle lease")
            return
        self._held[effect.job].kind = "guaranteed"
        self._check_promise(effect.job)

    def _downgraded(self, effect: eff.DowngradeLease) -> None:
        if effect.job not in self._held or self._held[effect.job].kind != "guaranteed":
            self._say(f"{effect.job} is downgraded and holds no guaranteed lease")
            return
        self._held[effect.job].kind = "idle"

    def _requeued(self, effect: eff.RequeueJob) -> None:
        if effect.job in self._held:
            self._say(f"{effect.job} is queued again and still holds a lease")
        if effect.submitted_ms != self._submitted_ms.get(effect.job):
            self._say(f"{effect.job} has lost its submit time {self._submitted_ms.get(effect.job)}")

    def _ended(self, effect: eff.EndJob) -> None:
        if effect.job in self.ended or effect.job in self._held:
            self._say(f"{effect.job} ends twice, or while it holds a lease")
        self.ended[effect.job] = effect.outcome

    def _say(self, sentence: str) -> None:
        self.problems.append(f"entry {self._sequence}: {sentence}")
