"""Looks at a run from outside, event by event. Rule: it shares no code with the core, only the words.

What it holds: no node gives more than it has and no job runs twice, as the machines see it; promises are kept; attempts
count up by one; a gang is whole; each end is told once.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from sublet.domain import effects as eff
from sublet.domain.changes import Entry
from sublet.domain.events import QuotaDeleted, QuotaSet
from sublet.domain.jobs import JobRequest
from sublet.domain.leases import Lease
from sublet.domain.quotas import Quota, path_of
from sublet.engines.simulated import SimulatedEngine


class Checker:
    """`problems` are sentences; none means that all held so far."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self.problems: list[str] = []
        self.ended: dict[str, str] = {}
        self._capacity = capacity
        self._quotas: dict[str, Quota] = {}
        self._leases: dict[str, tuple[int, str, Lease, JobRequest, set[int]]] = {}
        self._attempts: dict[str, int] = defaultdict(int)
        self._queued: Counter[str] = Counter()

    def observe(self, entry: Entry) -> None:
        if isinstance(entry.event, QuotaSet):
            self._quotas[entry.event.quota.name] = entry.event.quota
        elif isinstance(entry.event, QuotaDeleted):
            self._quotas.pop(entry.event.name, None)
        for effect in entry.effects:
            self._observe(effect, entry.sequence)

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

    def _observe(self, effect: eff.Effect, sequence: int) -> None:
        match effect:
            case eff.QueueJob():
                self._queued[effect.job] += 1
                if self._queued[effect.job] > 1:
                    self._say(sequence, f"{effect.job} is queued twice")
            case eff.StartGang():
                self._granted(effect, sequence)
            case eff.ReleaseInstances():
                self._released(effect, sequence)
            case eff.UpgradeLease() if effect.job in self._leases:
                attempt, _, lease, request, live = self._leases[effect.job]
                self._leases[effect.job] = (attempt, "guaranteed", lease, request, live)
                self._check_promise(request, lease.spec, sequence)
            case eff.DowngradeLease() if effect.job in self._leases:
                attempt, _, lease, request, live = self._leases[effect.job]
                self._leases[effect.job] = (attempt, "idle", lease, request, live)
            case eff.EndJob():
                if effect.job in self.ended or effect.job in self._leases:
                    self._say(sequence, f"{effect.job} ends twice, or while it holds a lease")
                self.ended[effect.job] = effect.outcome
            case _:
                pass

    def _granted(self, effect: eff.StartGang, sequence: int) -> None:
        job, request, lease = effect.job, effect.request, effect.lease
        if job in self._leases or job in self.ended:
            self._say(sequence, f"{job} is granted a second lease")
        if effect.attempt != self._attempts[job] + 1:
            self._say(sequence, f"{job} starts attempt {effect.attempt} after {self._attempts[job]}")
        if len(lease.nodes) < (request.min_instances or len(request.sizes)):
            self._say(sequence, f"{job} is granted a part of its gang")
        self._attempts[job] = effect.attempt
        self._leases[job] = (effect.attempt, lease.kind, lease, request, set(range(len(effect.instances))))
        held: Counter[str] = Counter()
        for _, _, one, _, live in self._leases.values():
            for position in live:
                held[one.nodes[position]] += one.gpus[position]
        for node in set(lease.nodes):
            if held[node] > self._capacity[node]:
                self._say(sequence, f"node {node} is granted {held[node]} GPU, it has {self._capacity[node]}")
        if lease.kind == "guaranteed":
            self._check_promise(request, lease.spec, sequence)

    def _check_promise(self, request: JobRequest, spec: str, sequence: int) -> None:
        for level in path_of(request.quota):
            quota = self._quotas.get(level)
            if quota is None or quota.nominal is None:
                continue
            used = sum(
                sum(lease.gpus[position] for position in live)
                for _, kind, lease, one, live in self._leases.values()
                if kind == "guaranteed" and lease.spec == spec and level in path_of(one.quota)
            )
            if used > quota.nominal.get(spec, 0):
                self._say(
                    sequence, f"quota {level} holds {used} of {spec}, it is promised {quota.nominal.get(spec, 0)}"
                )

    def _released(self, effect: eff.ReleaseInstances, sequence: int) -> None:
        found = self._leases.get(effect.job)
        if found is None or found[0] != effect.attempt or not set(effect.instances) <= found[4]:
            self._say(sequence, f"{effect.job}#{effect.attempt} releases {effect.instances}, which it does not hold")
            return
        found[4].difference_update(effect.instances)
        if not found[4]:
            del self._leases[effect.job]

    def _say(self, sequence: int, sentence: str) -> None:
        self.problems.append(f"entry {sequence}: {sentence}")
