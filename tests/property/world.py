"""A small world around the core for random tests: it plays the engine, and sees to it that every invariant holds."""

from dataclasses import dataclass, field

from sublet.core.check import check
from sublet.core.core import Core
from sublet.domain.changes import Snapshot
from sublet.domain.effects import (
    DowngradeLease,
    Effect,
    EndJob,
    GiveNotice,
    ReleaseInstances,
    StartGang,
    StopInstances,
    UpgradeLease,
    WithdrawNotice,
)
from sublet.domain.events import Event, InstanceBegan, InstanceEnded, NodeJoined, QuotaSet, Tick
from sublet.domain.jobs import JobRecord
from sublet.domain.leases import LeaseKind
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota
from sublet.domain.rules import Rules

Instance = tuple[str, int, int]  # job, attempt, number


@dataclass
class World:
    """`running`: instances that live, as the engine knows; `told`: those that were told to leave."""

    core: Core = field(default_factory=Core)
    now_ms: int = 0
    events: int = 0
    running: dict[Instance, str] = field(default_factory=dict)
    kinds: dict[str, LeaseKind] = field(default_factory=dict)
    told: set[Instance] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    story: list[Effect] = field(default_factory=list)
    records: dict[str, JobRecord] = field(default_factory=dict)
    nodes: dict[str, object] = field(default_factory=dict)
    quotas: dict[str, object] = field(default_factory=dict)
    core_text: str = ""
    preempts_inside: bool = False

    def do(self, event: Event) -> tuple[Effect, ...]:
        """One event, and all invariants after it."""
        self.events += 1
        self.now_ms = max(self.now_ms, event.at_ms)
        effects = self.core.handle(event)
        self.story.extend(effects)
        for effect in effects:
            self._hear(effect)
        wrong = check(self.core.state, is_closed=isinstance(event, Tick))
        assert not wrong, (event, wrong)
        return effects

    def close(self, after_ms: int = 0) -> tuple[Effect, ...]:
        """The instant is over, `after_ms` later; no deadline is missed on the way."""
        until = self.now_ms + after_ms
        while (due := self.core.next_deadline()) is not None and due < until:
            self.do(Tick(at_ms=max(due, self.now_ms)))
        return self.do(Tick(at_ms=until))

    def begin_all(self) -> None:
        for job, attempt, instance in list(self.running):
            self.do(InstanceBegan(at_ms=self.now_ms, job=job, attempt=attempt, instance=instance))

    def end(self, one: Instance, exit_code: int, *, finished: bool = False, verdict: str = "") -> None:
        job, attempt, number = one
        self.running.pop(one, None)
        self.do(
            InstanceEnded(
                at_ms=self.now_ms,
                job=job,
                attempt=attempt,
                instance=number,
                exit_code=exit_code,
                finished=finished,
                verdict=verdict,
            )
        )

    def restart(self) -> None:
        """The server dies and comes back from what the store holds."""
        self.keep()
        snapshot = Snapshot(
            sequence=self.events,
            at_ms=self.now_ms,
            rules=self.core.state.rules,
            nodes=tuple(self.nodes.values()),
            quotas=tuple(self.quotas.values()),
            jobs=tuple(r for _, r in sorted(self.records.items()) if not r.state.is_final),
            core=self.core_text,
        )
        self.core = Core.restore(snapshot)
        assert not check(self.core.state, is_closed=False)

    def keep(self) -> None:
        """What a store would do with the changes."""
        changes = self.core.take_changes()
        self.records.update(changes.jobs)
        for kept, new in ((self.nodes, changes.nodes), (self.quotas, changes.quotas)):
            for name, record in new.items():
                if record is None:
                    kept.pop(name, None)
                else:
                    kept[name] = record
        if changes.core is not None:
            self.core_text = changes.core

    def _hear(self, effect: Effect) -> None:
        match effect:
            case StartGang():
                assert effect.job not in self.ended, f"{effect.job} starts after its end"
                assert not any(job == effect.job for job, _, _ in self.running), f"{effect.job} has two attempts"
                self.kinds[effect.job] = effect.lease.kind
                for instance, node in zip(effect.instances, effect.lease.nodes, strict=True):
                    self.running[effect.job, effect.attempt, instance] = node
            case GiveNotice():
                guaranteed = self.kinds[effect.job] is LeaseKind.GUARANTEED
                assert not guaranteed or self.preempts_inside, f"{effect.job} is guaranteed and told to leave"
                assert effect.claimant != effect.job
                self.told |= {(effect.job, effect.attempt, i) for i in effect.instances}
            case WithdrawNotice():
                self.told -= {(effect.job, effect.attempt, i) for i in effect.instances}
            case StopInstances():
                self.told |= {(effect.job, effect.attempt, i) for i in effect.instances}
            case ReleaseInstances():
                for i in effect.instances:
                    self.running.pop((effect.job, effect.attempt, i), None)
                    self.told.discard((effect.job, effect.attempt, i))
            case UpgradeLease():
                self.kinds[effect.job] = LeaseKind.GUARANTEED
            case DowngradeLease():
                self.kinds[effect.job] = LeaseKind.IDLE
            case EndJob():
                assert effect.job not in self.ended, f"{effect.job} ends twice"
                self.ended.add(effect.job)


def build(nodes: list[Node], quotas: list[Quota], rules: Rules | None = None) -> World:
    world = World(core=Core(rules or Rules()))
    world.preempts_inside = any(q.self_preemption or q.sub_quota_preemption for q in quotas)
    for node in nodes:
        world.do(NodeJoined(at_ms=0, node=node))
    for quota in quotas:
        world.do(QuotaSet(at_ms=0, quota=quota))
    world.close()
    return world


def fingerprint(core: Core) -> tuple[object, ...]:
    """All that a decision may depend on."""
    state = core.state
    nodes = tuple(
        (n, b.state, b.free, b.leaving, b.earmarked, b.idle, b.avail, b.blamed, b.suspected_until_ms)
        for n, b in sorted(state.nodes.items())
    )
    quotas = tuple(
        (
            name,
            tuple(sorted(q.nominal.items())),
            tuple(sorted((k, v) for k, v in q.used.items() if v)),
            q.closed,
            q.head,
        )
        for name, q in sorted(state.quotas.items())
    )
    pools = tuple(
        (key, p.available, p.capacity, p.idle, p.guaranteed) for key, p in sorted(state.pools.items()) if p.nodes
    )
    return (tuple(core.jobs()), nodes, quotas, pools, state.now_ms, state.rules)


def difference(before: tuple[object, ...], after: tuple[object, ...]) -> list[object]:
    """What is in one and not in the other, for a message one can read."""
    if before == after:
        return []
    if len(before) == len(after) and all(isinstance(part, tuple) for part in (*before, *after)):
        return [d for old, new in zip(before, after, strict=True) for d in difference(old, new)]  # type: ignore[arg-type]
    found: list[object] = [("before", part) for part in before if part not in after]
    return [*found, *(("after", part) for part in after if part not in before)] or ["another order"]
