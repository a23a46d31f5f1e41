"""What the library tells its caller: frozen values. Times are whole milliseconds UTC, sizes are bytes."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One try of a load: which copy, and why it was not taken; an empty `why` is the copy that was taken."""

    tier: str  # memory or disk
    name: str
    step: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load found. `state` is the whole tree with tensors; what was passed to load() has been filled in place."""

    step: int
    name: str
    tier: str
    state: Any = None
    hops: tuple[Hop, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The warning before a stop. After `deadline_ms` (UTC) the process may be killed at any moment."""

    deadline_ms: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened to a checkpoint: kind is one of EVENTS, `message` a sentence, `facts` its numbers."""

    kind: str
    step: int
    message: str
    facts: dict[str, Any] = field(default_factory=dict)


EVENTS = ("copied", "skipped", "durable", "alarm", "retry", "degraded", "notice", "safe", "agent_lost", "loaded")
