"""Random worlds with trouble: the server crashes between any two steps, its store and its engine fail, messages are
lost, late or come twice, nodes are lost.

Rule: all chance comes from one seed. First trouble, in which nothing bad may happen; then quiet, in which everything
good must happen: every job ends.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from sublet.core.check import check
from sublet.domain.changes import Changes, Entry
from sublet.domain.errors import Unavailable
from sublet.domain.events import (
    Event,
    JobStopAsked,
    JobSubmitted,
    NodeDrained,
    NodeJoined,
    NodeLost,
    NodeReturned,
    QuotaDeleted,
    QuotaSet,
    RulesSet,
)
from sublet.ports import Store
from sublet.sim.checkers import Checker
from sublet.sim.invent import TROUBLE_MS, scenario_of
from sublet.sim.world import World
from sublet.store.memory import MemoryStore

PEOPLE = (JobSubmitted, JobStopAsked, QuotaSet, QuotaDeleted, NodeDrained, NodeJoined, RulesSet)
CRASH, REFUSAL = 0.02, 0.02  # at each step of a turn
COMMIT_FAILS, COMMIT_DOUBTFUL = 0.02, 0.02
LOST, TWICE, LATE = 0.1, 0.1, 0.05  # each message
LATEST_MS = 100_000


class Crash(Exception):
    """The server is gone, between two steps of a turn."""


class Troubles:
    """Decides by lot what goes wrong, and counts it, while `is_on`."""

    def __init__(self, seed: int) -> None:
        self._chance = Random(f"trouble {seed}")
        self.is_on = False
        self.crashes = self.refusals = self.lost = 0

    def step(self, name: str) -> None:
        """Crash, or Unavailable: what stands behind this step did its part, and its answer was lost."""
        if not self.is_on:
            return
        lot = self._chance.random()
        if lot < CRASH:
            self.crashes += 1
            raise Crash(name)
        if lot < CRASH + REFUSAL:
            self.refuse(f"No answer after {name}.")

    def refuse(self, what: str) -> None:
        self.refusals += 1
        raise Unavailable(what=what)

    def has_lot(self, chance: float) -> bool:
        return self.is_on and self._chance.random() < chance

    def line(self, event: Event) -> Sequence[int]:
        """What is said of a node comes in order, so it may be lost or come twice, but not late."""
        lot = self._chance.random() if self.is_on else 1.0
        is_of_node = isinstance(event, NodeLost | NodeReturned)
        if lot < LOST:
            self.lost += 1
            return ()
        if lot < LOST + TWICE:
            return (0, 0) if is_of_node else (0, self._chance.randint(1, LATEST_MS))
        if lot < LOST + TWICE + LATE and not is_of_node:
            return (self._chance.randint(1, LATEST_MS),)
        return (0,)


class ShakyStore:
    """A store in front of another: a commit may fail, and may be said to have failed although it counted."""

    def __init__(self, store: Store, troubles: Troubles) -> None:
        self._store, self._troubles = store, troubles
        self.load, self.entries, self.close = store.load, store.entries, store.close
        self.jobs, self.job, self.find_jobs = store.jobs, store.job, store.find_jobs

    def commit(self, entries: Sequence[Entry], changes: Changes, at_ms: int) -> None:
        if self._troubles.has_lot(COMMIT_FAILS):
            self._troubles.refuse("The disk is full.")
        self._store.commit(entries, changes, at_ms)
        if self._troubles.has_lot(COMMIT_DOUBTFUL):
            self._troubles.refuse("The connection broke.")


class TroubledWorld(World):
    """People ask again, after a crash, for what they got no answer to."""

    def __init__(self, seed: int, store: Store | None = None) -> None:
        self.troubles = Troubles(seed)
        self._asked: list[Event] = []
        self._seen = 0
        shaky = ShakyStore(store or MemoryStore(), self.troubles)
        super().__init__(scenario_of(seed), store=shaky, between=self.troubles.step, line=self.troubles.line)
        self.checker = Checker({node.name: node.gpu for node in self.scenario.nodes})

    def put(self, event: Event) -> None:
        if isinstance(event, PEOPLE):
            self._asked.append(event)
        self.controller.put(event)

    def instant(self) -> Iterator[Entry]:
        """Again, until it went without a crash or a refusal."""
        while True:
            self.troubles.is_on = self.clock.now_ms() < TROUBLE_MS
            try:
                yield from super().instant()
                break
            except Crash:
                self._start_again()
            except Unavailable:
                pass
        self.troubles.is_on = False
        self.checker.look(self.engine)
        self.checker.problems += self.controller.read(lambda core: check(core.state))

    def run(self, until_ms: int | None = None) -> Iterator[Entry]:
        """All durable entries, also those that were committed in a turn that did not live to tell."""
        for _ in super().run(until_ms):
            yield from self._durable()
        yield from self._durable()

    def left(self) -> list[str]:
        """What has not come to its end: jobs, and processes on the machines."""
        jobs = sorted(set(self.scenario.jobs) - set(self.checker.ended))
        return jobs + [f"{job}#{attempt} on {node}" for job, attempt, node, _ in self.engine.running()]

    def _durable(self) -> Iterator[Entry]:
        for entry in self.store.entries(after=self._seen, limit=10_000):
            self._seen = entry.sequence
            self.checker.observe(entry)
            yield entry

    def _start_again(self) -> None:
        while True:
            try:
                self.controller = self.new_controller()
                break
            except (Crash, Unavailable):
                continue
        answered = Counter(_without_time(entry.event) for entry in self.store.entries(limit=1_000_000))
        for event in self._asked:  # the same thing may have been asked for twice: so many answers, so many are done
            if answered[_without_time(event)]:
                answered[_without_time(event)] -= 1
            else:
                self.controller.put(event)


def _without_time(event: Event) -> tuple[str, str]:
    return type(event).__name__, repr(replace(event, at_ms=0))
