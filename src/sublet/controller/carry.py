"""Hands to the engine what is durable.

Rule: effects leave in the order in which they were decided, and an event is acknowledged only after all of them left;
whatever happens in between, each may be repeated.
"""

from collections.abc import Callable, Iterable

from sublet.domain.changes import Entry
from sublet.domain.effects import Effect
from sublet.ports import Engine


def carry_out(engine: Engine, effects: Iterable[Effect], between: Callable[[str], None]) -> None:
    for effect in effects:
        engine.carry_out(effect)
        between("carry out")


def acknowledge(engine: Engine, entries: Iterable[Entry], between: Callable[[str], None]) -> None:
    for entry in entries:
        engine.acknowledge(entry.event)
        between("acknowledge")
