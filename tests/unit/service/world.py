"""A small world for the service: the real core, controller and reference store; machines and time are simulated."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import TypeVar

from sublet.controller.loop import Controller
from sublet.core.core import Core
from sublet.domain.events import Event, NodeJoined, QuotaSet
from sublet.domain.jobs import JobRecord
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota
from sublet.engines.simulated import Behaviour, SimulatedEngine
from sublet.service import commands, jobfile
from sublet.service.desk import Desk
from sublet.service.feed import Feed
from sublet.store.memory import MemoryStore

Answer = TypeVar("Answer")
START_MS = 1_700_000_000_000


class Clock:
    def __init__(self) -> None:
        self.ms = START_MS

    def now_ms(self) -> int:
        return self.ms


class World:
    """`desk` as a server has it; `put` turns the controller at once, so that nothing waits for a thread."""

    def __init__(self, nodes: Iterable[Node], quotas: Iterable[Quota], logs: Path = Path("/nowhere")) -> None:
        self.clock = Clock()
        self.feed = Feed(MemoryStore())
        self.behaviours: defaultdict[str, Behaviour] = defaultdict(Behaviour)
        self.engine = SimulatedEngine(self.clock, self.behaviours)
        self.controller = Controller(self.feed, self.engine, self.clock)
        numbers = count(1)
        self.desk = Desk(
            books=self,
            feed=self.feed,
            clock=self.clock,
            new_id=lambda: f"job_{next(numbers)}",
            log_path=lambda job, attempt, instance: logs / f"{job}.{attempt}.{instance}",
            answer_within_ms=0,
        )
        self.controller.recover()
        for node in nodes:
            self.put(NodeJoined(at_ms=0, node=node))
        for quota in quotas:
            self.put(QuotaSet(at_ms=0, quota=quota))

    def read(self, look: Callable[[Core], Answer]) -> Answer:
        return self.controller.read(look)

    def put(self, event: Event) -> None:
        self.controller.put(event)
        self.controller.turn()

    def pass_ms(self, milliseconds: int) -> None:
        """Time goes by, and all that is due happens."""
        end = self.clock.ms + milliseconds
        while (due := self._next_ms()) is not None and due <= end:
            self.clock.ms = max(self.clock.ms, due)
            self.engine.advance()
            self.controller.turn()
        self.clock.ms = end

    def _next_ms(self) -> int | None:
        known = (self.engine.next_ms(), self.controller.read(lambda core: core.next_deadline()))
        return min((at_ms for at_ms in known if at_ms is not None), default=None)

    def submit(self, text: str, user: str = "mei") -> JobRecord:
        origin = jobfile.Origin(job_id=self.desk.new_id(), user=user, file="job.yaml", base="/home")
        return commands.submit(self.desk, jobfile.parse(text, origin))


def two_teams(logs: Path = Path("/nowhere")) -> World:
    """Two nodes of two GPUs, spec demo; team-a and team-b with two each."""
    nodes = [Node(name=name, spec="demo", gpu=2, tenant="demo") for name in ("n1", "n2")]
    quotas = [Quota(name=name, tenant="demo", nominal={"demo": 2}, owner="ana") for name in ("team-a", "team-b")]
    return World(nodes, quotas, logs)
