"""What is kept free for owners who lately took capacity back."""

from sublet.core import reserve
from sublet.core.core import Core
from sublet.core.trial import trial
from sublet.domain.changes import NodeRecord, Snapshot
from sublet.domain.effects import GiveNotice, StartGang
from sublet.domain.events import InstanceBegan, InstanceEnded, JobSubmitted, NodeJoined, QuotaSet, Tick
from sublet.domain.jobs import IdlePolicy, JobRequest
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota, Strategy
from sublet.domain.reasons import ReasonCode
from sublet.domain.rules import Rules

HOUR = 3_600_000
DAY = 24 * HOUR


class Played:
    """A core and the shortest world: what starts begins, and who is told to leave is gone at once."""

    def __init__(self, nodes: int = 2, *, percent: int = 100) -> None:
        self.core = Core(Rules(grace_ms=0, reserve_percent=percent))
        self.now = 0
        for at in range(nodes):
            self.core.handle(NodeJoined(at_ms=0, node=Node(name=f"n{at}", spec="gpu", gpu=8)))
        for name in ("A", "B"):
            quota = Quota(name=name, nominal={"gpu": 8 * nodes // 2}, strategy=Strategy.ROUND_ROBIN)
            self.core.handle(QuotaSet(at_ms=0, quota=quota))
        self.runs: dict[str, int] = {}

    def submit(self, name: str, quota: str, *sizes: int) -> None:
        request = JobRequest(id=name, quota=quota, idle=IdlePolicy.ACCEPTABLE, sizes=sizes or (1,), grace_ms=0)
        self.settle([JobSubmitted(at_ms=self.now, request=request)])

    def end(self, name: str) -> None:
        self.settle([InstanceEnded(at_ms=self.now, job=name, attempt=self.runs[name], instance=0, exit_code=0)])

    def wait(self, ms: int) -> None:
        until = self.now + ms
        while (due := self.core.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.settle([])
        self.now = until
        self.settle([])

    def settle(self, events: list[JobSubmitted | InstanceEnded | InstanceBegan]) -> None:
        while True:
            effects = [effect for event in events for effect in self.core.handle(event)]
            effects += self.core.handle(Tick(at_ms=self.now))
            events = []
            for effect in effects:
                if isinstance(effect, StartGang):
                    self.runs[effect.job] = effect.attempt
                    for i in effect.instances:
                        events.append(InstanceBegan(at_ms=self.now, job=effect.job, attempt=effect.attempt, instance=i))
                elif isinstance(effect, GiveNotice):
                    events += [
                        InstanceEnded(at_ms=self.now, job=effect.job, attempt=effect.attempt, instance=i, exit_code=143)
                        for i in effect.instances
                    ]
            if not events:
                return

    def kept(self) -> tuple[int, int]:
        return reserve.kept(self.core.state, self.core.state.pools["t", "gpu"])

    def runs_now(self, name: str) -> bool:
        return bool(self.core.state.jobs[name].live)


def after_a_day(percent: int = 100, size: int = 1, nodes: int = 2) -> Played:
    """B has borrowed all that A left; A took one GPU (or node) back a day ago, and again now."""
    played = Played(nodes, percent=percent)
    for at in range(8 * nodes // size):
        played.submit(f"b{at}", "B", size)
    played.submit("a0", "A", size)
    played.wait(DAY)
    played.submit("a1", "A", size)
    return played


def test_without_history_nothing_is_kept() -> None:
    played = Played()
    for at in range(16):
        played.submit(f"b{at:02}", "B")
    played.submit("a0", "A")
    assert played.core.state.memory == {("A", "gpu", False): 1000}
    assert played.kept() == (0, 0)
    played.end("a0")
    assert sum(played.runs_now(f"b{at:02}") for at in range(16)) == 16


def test_what_was_taken_back_is_kept_from_borrowers_and_fades() -> None:
    played = after_a_day()
    assert played.kept() == (1, 0)
    waiting = [f"b{at}" for at in range(16) if not played.runs_now(f"b{at}")]
    played.end("a1")
    assert not any(played.runs_now(name) for name in waiting)  # one GPU is free, and kept
    played.wait(2 * HOUR)
    assert played.kept() == (0, 0)
    assert sum(played.runs_now(name) for name in waiting) == 1


def test_the_owner_may_use_at_once_what_is_kept() -> None:
    played = after_a_day()
    played.end("a1")
    evictions = len(played.core.state.noticed)
    played.submit("a2", "A")
    assert played.runs_now("a2")
    assert len(played.core.state.noticed) == evictions


def test_a_borrower_is_told_what_it_waits_for() -> None:
    played = after_a_day()
    played.end("a1")
    waiting = next(f"b{at}" for at in range(16) if not played.runs_now(f"b{at}"))
    why = played.core.why(waiting)
    assert why is not None
    kept = [line for line in why.reasons if line.reason.code is ReasonCode.EARMARKED]
    assert kept
    assert kept[0].reason.numbers["kept"] == 1
    assert "A" in kept[0].reason.subjects


def test_instances_of_a_whole_node_keep_whole_nodes() -> None:
    played = after_a_day(size=8, nodes=4)
    waiting = [f"b{at}" for at in range(4) if not played.runs_now(f"b{at}")]
    assert len(waiting) == 2
    played.end("a1")
    assert played.kept() == (0, 1)
    assert not any(played.runs_now(name) for name in waiting)  # a node is free, and kept whole
    played.submit("small", "B")
    assert not played.runs_now("small")
    played.wait(2 * HOUR)
    assert played.kept() == (0, 0)
    assert sum(played.runs_now(name) for name in waiting) == 1


def test_it_is_never_more_than_the_owner_could_ask_for() -> None:
    played = after_a_day(percent=1000)
    state = played.core.state
    assert played.kept() == (6, 0)  # of its eight A uses two
    state.memory = {("A", "gpu", False): 900_000}
    assert played.kept() == (6, 0)


def test_no_share_keeps_nothing() -> None:
    played = after_a_day(percent=0)
    assert played.kept() == (0, 0)


def test_a_trial_leaves_no_memory() -> None:
    played = after_a_day()
    before = (dict(played.core.state.memory), played.core.state.memory_since_ms, played.core.state.memory_step)
    played.now += HOUR
    request = JobRequest(id="try", quota="A", idle=IdlePolicy.ACCEPTABLE, sizes=(1,), grace_ms=0)
    with trial(played.core.state):
        played.core.state.now_ms = played.now
        played.core.handle(JobSubmitted(at_ms=played.now, request=request))
        played.core.handle(Tick(at_ms=played.now))
        assert played.core.state.memory != before[0]
    assert (played.core.state.memory, played.core.state.memory_since_ms, played.core.state.memory_step) == before


def test_what_is_remembered_survives_a_restart() -> None:
    played = after_a_day()
    state = played.core.state
    text = played.core.take_changes().core
    assert text is not None
    nodes = tuple(NodeRecord(node=node.node) for node in state.nodes.values())
    quotas = tuple(book.quota for book in state.quotas.values())
    stored = Snapshot(at_ms=played.now, rules=state.rules, nodes=nodes, quotas=quotas, core=text)
    again = Core.restore(stored).state
    assert (again.memory, again.memory_since_ms, again.memory_step) == (
        state.memory,
        state.memory_since_ms,
        state.memory_step,
    )
