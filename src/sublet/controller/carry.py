"""Hands durable effects to the engine. Rule: in the order in which they were decided; each may be repeated."""

from collections.abc import Iterable

from sublet.domain.effects import Effect
from sublet.ports import Engine


def carry_out(engine: Engine, effects: Iterable[Effect]) -> None:
    for effect in effects:
        engine.carry_out(effect)
