"""Random worlds with trouble: crashes of the server between any two steps, lost and repeated messages, lost nodes.

Rule: all chance comes from one seed. First trouble (nothing bad may happen), then quiet (everything good must happen):
when the faults have stopped, every job ends.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from sublet.domain.changes import Entry
from sublet.domain.events import (
    Event,
    JobStopAsked,
    JobSubmitted,
    NodeDrained,
    NodeJoined,
    QuotaDeleted,
    QuotaSet,
    RulesSet,
)
from sublet.domain.jobs import CheckpointHint, FaultTolerance, IdlePolicy, JobRequest
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota, Strategy
from sublet.domain.rules import Rules
from sublet.engines.simulated import Behaviour
from sublet.sim.checkers import Checker
from sublet.sim.scenario import Scenario, ScenarioEvent, ScenarioJob
from sublet.sim.world import World

TROUBLE_MS = 1_200_000  # faults happen until then
UNTIL_MS = 48 * 3_600_000
PEOPLE = (JobSubmitted, JobStopAsked, QuotaSet, QuotaDeleted, NodeDrained, NodeJoined, RulesSet)


class Crash(Exception):
    """The server is gone, between two steps of a turn."""


class TroubledWorld(World):
    """A world whose server crashes with a chance at every step. People ask again for what they got no answer to."""

    def __init__(self, seed: int, *, crash_chance: float = 0.02) -> None:
        self._chance, self._crash_chance = Random(f"crash {seed}"), crash_chance
        self._is_armed = False
        self.crashes = 0
        self._asked: list[Event] = []
        super().__init__(random_scenario(seed), between=self._step)
        self.checker = Checker({node.name: node.gpu for node in self.scenario.nodes})
        self._is_armed = True
        self._seen = 0

    def put(self, event: Event) -> None:
        if isinstance(event, PEOPLE):
            self._asked.append(event)
        self.controller.put(event)

    def instant(self) -> Iterator[Entry]:
        try:
            yield from super().instant()
        except Crash:
            self.crashes += 1
            self._start_again()
            yield from self.instant()
        self.checker.look(self.engine)

    def run(self) -> Iterator[Entry]:
        """All durable entries, also those that were committed in a turn that did not live to tell."""
        for _ in super().run():
            yield from self._durable()
        yield from self._durable()

    def _durable(self) -> Iterator[Entry]:
        for entry in self.store.entries(after=self._seen, limit=10_000):
            self._seen = entry.sequence
            self.checker.observe(entry)
            yield entry

    def _step(self, step: str) -> None:
        in_trouble = self._is_armed and self.clock.now_ms() < TROUBLE_MS
        if in_trouble and self._chance.random() < self._crash_chance:
            raise Crash(step)

    def _start_again(self) -> None:
        self._is_armed = False
        self.controller = self.new_controller()
        known = [_without_time(entry.event) for entry in self.store.entries(limit=1_000_000)]
        self._asked = [event for event in self._asked if _without_time(event) not in known]
        for event in self._asked:
            self.controller.put(event)
        self._is_armed = True


def _without_time(event: Event) -> tuple[str, str]:
    return type(event).__name__, repr(replace(event, at_ms=0))


def random_scenario(seed: int) -> Scenario:
    """Every job fits some day: into the promise of its quota, or as an idle job into the whole cluster."""
    chance = Random(f"scenario {seed}")
    nodes = tuple(
        Node(name=f"n{i}", spec="gpu", gpu=chance.choice([2, 4, 8]), rack=chance.choice(["a", "b"]))
        for i in range(chance.randint(2, 4))
    )
    total = sum(node.gpu for node in nodes)
    quotas = _quotas(chance, total)
    jobs = {job.request.id: job for job in _jobs(chance, nodes, quotas)}
    return Scenario(
        id=f"seed-{seed}",
        rules=Rules(
            grace_ms=chance.choice([0, 5_000, 30_000]),
            cooldown_ms=chance.choice([0, 10_000, 60_000]),
            reclaim_delay_ms=chance.choice([0, 0, 20_000]),
        ),
        node_timeout_ms=60_000,
        nodes=nodes,
        quotas=quotas,
        jobs=jobs,
        events=tuple(sorted(_events(chance, nodes, list(jobs)), key=lambda event: event.at_ms)),
        until_ms=UNTIL_MS,
    )


def _quotas(chance: Random, total: int) -> tuple[Quota, ...]:
    count = chance.randint(2, 3)
    return tuple(
        Quota(
            name=f"Q{i}",
            nominal={"gpu": total // count},
            strategy=chance.choice(list(Strategy)),
            self_preemption=chance.random() < 0.2,
        )
        for i in range(count)
    )


def _jobs(chance: Random, nodes: tuple[Node, ...], quotas: tuple[Quota, ...]) -> Iterator[ScenarioJob]:
    largest = max(node.gpu for node in nodes)
    for number in range(chance.randint(5, 14)):
        quota = chance.choice(quotas)
        promised = (quota.nominal or {})["gpu"]
        idle = chance.choice(list(IdlePolicy))
        gpu = chance.randint(1, min(largest, promised, 4))
        fitting = sum(node.gpu // gpu for node in nodes)
        instances = chance.randint(1, max(1, min(3, promised // gpu, fitting)))
        elastic = instances > 1 and chance.random() < 0.3
        every, on_notice = chance.choice([None, 10_000, 60_000]), chance.choice([None, 1_000])
        request = JobRequest(
            id=f"j{number:02d}",
            name=f"j{number:02d}",
            quota=quota.name,
            idle=idle,
            priority=chance.randint(1, 9),
            sizes=(gpu,) * instances,
            min_instances=1 if elastic else None,
            fault_tolerance=FaultTolerance(max_restarts=50, max_restarts_total=100, policy="on_failure", same_error=0),
            checkpoint=CheckpointHint(every_ms=every, on_notice_ms=on_notice),
            grace_ms=chance.choice([None, 10_000]),
        )
        behaviour = Behaviour(
            work_ms=chance.randint(5_000, 400_000),
            start_takes_ms=chance.choice([0, 2_000]),
            stop_takes_ms=1_000,
            leaves_after_ms=chance.choice([None, 0, 1_000, 8_000]),
            leaves_with=chance.choice([0, 1, 85, 143]),
            checkpoint_every_ms=every,
            checkpoint_on_notice_ms=on_notice,
        )
        yield ScenarioJob(request=request, behaviour=behaviour, at_ms=chance.randint(0, TROUBLE_MS // 2))


def _events(chance: Random, nodes: tuple[Node, ...], jobs: list[str]) -> Iterator[ScenarioEvent]:
    for node in nodes:
        for _ in range(chance.randint(0, 2)):
            kind = chance.choice(["node_down", "node_down", "drain"])
            at = chance.randint(0, TROUBLE_MS - 200_000)
            yield ScenarioEvent(at_ms=at, kind=kind, subject=node.name)
            yield ScenarioEvent(at_ms=at + chance.randint(1_000, 180_000), kind="node_up", subject=node.name)
        yield ScenarioEvent(at_ms=TROUBLE_MS, kind="node_up", subject=node.name)
    for job in jobs:
        at = chance.randint(0, TROUBLE_MS)
        match chance.randint(0, 8):
            case 0:
                yield ScenarioEvent(at_ms=at, kind="stop", subject=job, jobs=(job,))
            case 1:
                yield ScenarioEvent(at_ms=at, kind="finish", subject=job, jobs=(job,), exit_code=1)
            case 2:
                yield ScenarioEvent(at_ms=at, kind="lose", subject="released", jobs=(job,))
            case 3:
                yield ScenarioEvent(at_ms=at, kind="repeat", subject="released", jobs=(job,), after_ms=90_000)
            case _:
                pass
