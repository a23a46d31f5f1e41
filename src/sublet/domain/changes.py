"""What a turn changed, as records that a store keeps and from which the core can be made again."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sublet.domain.effects import Effect, EndJob, ReleaseInstances, RequeueJob
from sublet.domain.events import Event
from sublet.domain.jobs import JobRecord
from sublet.domain.nodes import Node, NodeState
from sublet.domain.quotas import Quota
from sublet.domain.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    node: Node
    state: NodeState = NodeState.UP


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """New records by name; None = removed. `core`: what else the core must remember, JSON text; None = unchanged."""

    jobs: Mapping[str, JobRecord] = field(default_factory=dict)
    nodes: Mapping[str, NodeRecord | None] = field(default_factory=dict)
    quotas: Mapping[str, Quota | None] = field(default_factory=dict)
    rules: Rules | None = None
    core: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the log: an event and the effects that followed from it."""

    sequence: int
    event: Event
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a store holds of the present: what `Core.restore` takes. `jobs`: those that have not ended."""

    sequence: int = 0
    at_ms: int = 0
    rules: Rules = field(default_factory=Rules)
    nodes: tuple[NodeRecord, ...] = ()
    quotas: tuple[Quota, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    core: str = ""


def attempts_ended(entry: Entry) -> list[ReleaseInstances]:
    """The last release of each attempt that ended with this entry: the job is queued again, or over, behind it."""
    last: dict[str, ReleaseInstances] = {}
    found = []
    for effect in entry.effects:
        if isinstance(effect, ReleaseInstances):
            last[effect.job] = effect
        elif isinstance(effect, RequeueJob | EndJob) and effect.job in last:
            found.append(last.pop(effect.job))
    return found
