"""What happened: the only input of the core. Past tense; `at_ms` is UTC and never runs backwards.

An event alone changes the books; the scheduler looks, deadlines fall due and reasons are written when a `Tick` closes
the instant. A turn is therefore: all events of the instant, then one Tick.
"""

from dataclasses import dataclass

from sublet.domain.jobs import JobRequest
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota
from sublet.domain.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The instant is over: what is due falls due, the scheduler looks until it has nothing more to do."""

    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesSet:
    at_ms: int
    rules: Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    at_ms: int
    request: JobRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdopted:
    """It runs already, without a choice of the scheduler: attempt 0 (a scenario's start, an import)."""

    at_ms: int
    request: JobRequest
    lease_kind: str
    spec: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStopAsked:
    at_ms: int
    job: str
    user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrioritySet:
    """Of a job that waits; one that holds a lease keeps the priority it was granted with."""

    at_ms: int
    job: str
    priority: int
    user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSet:
    """Created or changed, whole."""

    at_ms: int
    quota: Quota


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaDeleted:
    at_ms: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """New, or the same node with other capacity; no more than that: a lost node comes back by NodeReturned."""

    at_ms: int
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """The engine says: silent for the node timeout, or fenced. All that ran there counts as gone."""

    at_ms: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReturned:
    """Usable again. Of a lost node the engine says so only after it has ended all that still ran there.

    `is_open`: also if it was drained: somebody has opened it again. An engine that says it is back does not open it.
    """

    at_ms: int
    node: str
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrained:
    at_ms: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRemoved:
    at_ms: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceBegan:
    """Its program runs. The work of an attempt begins when all its instances began. `run`: see RestartInstance."""

    at_ms: int
    job: str
    attempt: int
    instance: int
    run: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceEnded:
    """Its processes are confirmed gone. Delivered until acknowledged, so it may come twice.

    `exit_code`: 128 + n for signal n; None = unknown. `finished`: the program's work is done, as the program itself
    says or as an exit 0 without a notice tells; an exit 0 after a notice alone does not tell it.
    `verdict`, `evidence`: the supervisor's diagnosis (a `Fault`) and the line that shows it; two failures with the same
    `error` failed in the same way. `phase`: start, step, save or exit, as far as the program told. `run`: see
    RestartInstance.
    """

    at_ms: int
    job: str
    attempt: int
    instance: int
    exit_code: int | None
    finished: bool = False
    verdict: str = ""
    evidence: str = ""
    error: str = ""
    phase: str = ""
    run: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint of this attempt is durable; `step` where the program tells it."""

    at_ms: int
    job: str
    attempt: int
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """Something is wrong with what runs (a `Trouble`), or, `is_over`, no more. Told again and again while it lasts.

    `instance`: the one that stands out, None = none does. `restart`: the job asked for a restart in such a case.
    """

    at_ms: int
    job: str
    attempt: int
    trouble: str
    instance: int | None = None
    evidence: str = ""
    restart: bool = False
    is_over: bool = False
    run: int = 0  # of the instance


Event = (
    Tick
    | RulesSet
    | JobSubmitted
    | JobAdopted
    | JobStopAsked
    | PrioritySet
    | QuotaSet
    | QuotaDeleted
    | NodeJoined
    | NodeLost
    | NodeReturned
    | NodeDrained
    | NodeRemoved
    | InstanceBegan
    | InstanceEnded
    | CheckpointSaved
    | Diagnosed
)
