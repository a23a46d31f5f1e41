"""Makes the books again from what is durable, and decides on them. Rule: what failed leaves no trace in them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sublet.core.core import Core
from sublet.domain.changes import Changes, Entry, Snapshot
from sublet.domain.effects import Effect
from sublet.domain.errors import Broken
from sublet.domain.events import Event, Tick
from sublet.ports import Store

log = logging.getLogger("sublet.controller")


@dataclass(slots=True, kw_only=True)
class Books:
    """The core, and where the log stood when it was made or last agreed with the store."""

    core: Core
    sequence: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """`effects` has one element an event, and the last one for the Tick that closed the instant."""

    core: Core
    events: tuple[Event, ...]
    effects: tuple[tuple[Effect, ...], ...]
    changes: Changes

    def entries(self, after: int) -> list[Entry]:
        pairs = zip(self.events, self.effects, strict=True)
        return [Entry(sequence=after + n, event=event, effects=effects) for n, (event, effects) in enumerate(pairs, 1)]


class _Tripped(Exception):
    """The core tripped over the event at this place; over the Tick when the place is behind the last one."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


def restore(store: Store) -> Books:
    snapshot = store.load()
    return Books(core=Core.restore(snapshot), sequence=snapshot.sequence, at_ms=snapshot.at_ms)


def written_since(store: Store, before: int, last: int) -> list[Entry]:
    """The entries after `before`: those of a commit that was said to have failed and that counted all the same."""
    return store.entries(after=before, limit=last - before) if last > before else []


def decide(books: Books, store: Store, events: list[Event], now_ms: int) -> Decided:
    """All that follows from the events. One that the core cannot digest is told and taken out of `events`.

    Broken when the core cannot even close the instant without any event: then nothing is taken out.
    """
    core = books.core
    while True:
        try:
            return _handle(core, events, now_ms)
        except _Tripped as tripped:
            snapshot = store.load()
            place = tripped.place if tripped.place < len(events) else _culprit(snapshot, events, now_ms)
            told = f"The core cannot digest {events[place]!r}. It is dropped. Please report this."
            log.critical(told, exc_info=tripped.__cause__)
            del events[place]
            core = Core.restore(snapshot)


def _handle(core: Core, events: Sequence[Event], now_ms: int) -> Decided:
    stamped = tuple(replace(event, at_ms=now_ms) for event in (*events, Tick(at_ms=now_ms)))
    effects: list[tuple[Effect, ...]] = []
    try:
        for event in stamped:
            effects.append(core.handle(event))
        changes = core.take_changes()
    except Exception as problem:  # whatever it is: the caller finds out what brought it about
        raise _Tripped(min(len(effects), len(events))) from problem
    return Decided(core=core, events=stamped, effects=tuple(effects), changes=changes)


def _culprit(snapshot: Snapshot, events: Sequence[Event], now_ms: int) -> int:
    """The place of an event after which the instant cannot be closed, and before which it can: found by halving."""

    def trips(count: int) -> BaseException | None:
        try:
            _handle(Core.restore(snapshot), events[:count], now_ms)
        except _Tripped as tripped:
            return tripped.__cause__
        return None

    problem = trips(0)
    if problem is not None:
        raise Broken(
            what="The scheduler cannot go on.",
            why=f"It met {problem!r} where nothing had happened.",
            hint="Please report this with the log; the server goes on trying.",
            code="core_broken",
        ) from problem
    good, bad = 0, len(events)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if trips(middle) else (middle, bad)
    return bad - 1
