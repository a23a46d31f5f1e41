"""Plays a scenario: the production controller and core on a clock that jumps. Rule: the same file, the same story.

At one instant first comes what has ended by itself or is confirmed gone, then the scenario's events as written, then
the scheduler looks, until nothing more happens at that instant.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from sublet.controller.loop import Controller
from sublet.domain.changes import Entry
from sublet.domain.errors import Broken
from sublet.domain.events import (
    Event,
    JobAdopted,
    JobStopAsked,
    JobSubmitted,
    NodeDrained,
    NodeJoined,
    QuotaDeleted,
    QuotaSet,
    RulesSet,
)
from sublet.domain.quotas import Quota
from sublet.engines.simulated import Misdelivery, SimulatedEngine
from sublet.ports import Store
from sublet.sim.clock import SimulatedClock
from sublet.sim.scenario import Scenario, ScenarioEvent, quota_fields
from sublet.store.memory import MemoryStore

MOST_TURNS = 10_000  # at one instant; more is a world that does not come to rest


class World:
    """One run of one scenario. `store` may be read when it is over; `line`: see the engine."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        store: Store | None = None,
        between: Callable[[str], None] = lambda step: None,
        line: Callable[[Event], Sequence[int]] = lambda event: (0,),
    ) -> None:
        self.scenario, self._between = scenario, between
        self.clock = SimulatedClock()
        self.store: Store = store or MemoryStore()
        behaviours = {job_id: job.behaviour for job_id, job in scenario.jobs.items()}
        self.engine = SimulatedEngine(self.clock, behaviours, node_timeout_ms=scenario.node_timeout_ms, line=line)
        self._quotas = {quota.name: quota for quota in scenario.quotas}
        self.controller = self.new_controller()
        self._agenda = self._plan()

    def new_controller(self) -> Controller:
        """As after a start of the server: what is durable, and the engine as it is."""
        controller = Controller(self.store, self.engine, self.clock, between=self._between)
        controller.recover()
        return controller

    def run(self, until_ms: int | None = None) -> Iterator[Entry]:
        """The log, entry by entry, to the scenario's end or only to `until_ms`."""
        last_ms = self.scenario.until_ms if until_ms is None else min(until_ms, self.scenario.until_ms)
        while (at_ms := self._next_ms()) is not None and at_ms <= last_ms:
            self.clock.move_to(at_ms)
            yield from self.instant()

    def instant(self) -> Iterator[Entry]:
        """All that happens now."""
        self.engine.advance()
        while self._agenda and self._agenda[0][0] <= self.clock.now_ms():
            self._agenda.popleft()[1]()
        for _ in range(MOST_TURNS):
            self.engine.advance()
            entries = self.controller.turn()
            yield from entries
            if not entries:
                return
        raise Broken(
            what=f"The scenario {self.scenario.id} does not get past {self.clock.now_ms()} ms.",
            why=f"After {MOST_TURNS} turns something still happens at that instant.",
            hint="Please report it with the scenario.",
        )

    def _next_ms(self) -> int | None:
        deadline = self.controller.read(lambda core: core.next_deadline())
        planned = self._agenda[0][0] if self._agenda else None
        return min((at for at in (self.engine.next_ms(), planned, deadline) if at is not None), default=None)

    def _plan(self) -> deque[tuple[int, Callable[[], None]]]:
        """What the file says, by time; at one time: set-up, jobs in the order of the file, events as written."""
        scenario = self.scenario
        start: list[Event] = [RulesSet(at_ms=0, rules=scenario.rules)]
        start += [NodeJoined(at_ms=0, node=node) for node in scenario.nodes]
        start += [QuotaSet(at_ms=0, quota=quota) for quota in scenario.quotas]
        plan: list[tuple[int, Callable[[], None]]] = [(0, self._putter(event)) for event in start]
        for job in scenario.jobs.values():
            if job.running is not None:
                plan.append((0, self._putter(self._adopted(job.request.id))))
            elif job.at_ms is not None:
                plan.append((job.at_ms, self._putter(JobSubmitted(at_ms=0, request=job.request))))
        plan += [(event.at_ms, self._happening(event)) for event in scenario.events]
        return deque(sorted(plan, key=lambda one: one[0]))

    def _adopted(self, job_id: str) -> Event:
        job = self.scenario.jobs[job_id]
        assert job.running is not None
        kind, nodes = job.running
        spec = next(node.spec for node in self.scenario.nodes if node.name == nodes[0])
        return JobAdopted(at_ms=0, request=job.request, lease_kind=kind, spec=spec, nodes=nodes)

    def put(self, event: Event) -> None:
        """What people ask for."""
        self.controller.put(event)

    def _putter(self, event: Event) -> Callable[[], None]:
        return lambda: self.put(event)

    def _happening(self, event: ScenarioEvent) -> Callable[[], None]:
        return lambda: self._happen(event)

    def _happen(self, event: ScenarioEvent) -> None:
        match event.kind:
            case "submit":
                for job in event.jobs:
                    self.put(JobSubmitted(at_ms=0, request=self.scenario.jobs[job].request))
            case "stop":
                for job in event.jobs:
                    self.put(JobStopAsked(at_ms=0, job=job))
            case "finish":
                for job in event.jobs:
                    self.engine.finish(job, event.exit_code, event.instance)
            case "node_down":
                self.engine.node_down(event.subject)
            case "node_up":
                self.engine.node_up(event.subject)
            case "drain":
                self.engine.drained(event.subject)
                self.put(NodeDrained(at_ms=0, node=event.subject))
            case "quota":
                self._change_quota(event)
            case "lose" | "repeat":
                for job in event.jobs:
                    is_lost = event.kind == "lose"
                    self.engine.misdeliver(Misdelivery(job=job, is_lost=is_lost, again_after_ms=event.after_ms))

    def _change_quota(self, event: ScenarioEvent) -> None:
        name = str(event.subject["name"])
        if event.subject.get("delete"):
            self._quotas.pop(name, None)
            self.put(QuotaDeleted(at_ms=0, name=name))
            return
        before = self._quotas.get(name) or Quota(name=name)
        self._quotas[name] = replace(before, **quota_fields(event.subject))
        self.put(QuotaSet(at_ms=0, quota=self._quotas[name]))
