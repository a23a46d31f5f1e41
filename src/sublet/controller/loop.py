"""The controller: the only one that touches the core. Rule: nothing leaves until what it rests on is durable."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event as Flag
from threading import RLock
from typing import TypeVar

from sublet.controller.carry import carry_out
from sublet.controller.inbox import Inbox
from sublet.core.core import Core
from sublet.domain.changes import Entry
from sublet.domain.errors import Unavailable
from sublet.domain.events import Event, Tick
from sublet.ports import Clock, Engine, Store

log = logging.getLogger("sublet.controller")

Answer = TypeVar("Answer")
RETRY_S = 1.0  # after a commit that failed
LONGEST_WAIT_S = 5.0  # a turn at least so often, so that a clock that jumps is noticed


class Controller:
    """`between` is called with the name of the step that was just done; a simulation may crash there."""

    def __init__(
        self, store: Store, engine: Engine, clock: Clock, *, between: Callable[[str], None] = lambda step: None
    ) -> None:
        self._store, self._engine, self._clock, self._between = store, engine, clock, between
        self.inbox = Inbox()
        self.lock = RLock()
        self._stopping = Flag()
        self._owed: list[Entry] = []  # durable, and not yet carried out
        self.is_ready = False
        self._restore()

    def put(self, event: Event) -> None:
        self.inbox.put(event)

    def read(self, look: Callable[[Core], Answer]) -> Answer:
        """`look` sees the books between two turns. It must not keep the core."""
        with self.lock:
            return look(self._core)

    def recover(self) -> None:
        """After a start: hear what happened meanwhile, and tell the engine again what stands. Both may repeat."""
        self._engine.connect(self)
        with self.lock:
            standing = self._core.standing_effects()
        carry_out(self._engine, standing)
        self.is_ready = True

    def turn(self) -> list[Entry]:
        """All events that are there, and one Tick. Nothing, when nothing happened and no deadline is due."""
        with self.lock:
            events = self.inbox.take()
            self._between("take")
            now_ms = max(self._at_ms, self._clock.now_ms())
            deadline = self._core.next_deadline()
            if not events and (deadline is None or deadline > now_ms):
                if self._owed:
                    self.settle()
                return []
            entries = self._decide_and_commit(events, now_ms)
        self._owed += entries
        self.settle()
        return entries

    def settle(self) -> None:
        """Carry out and acknowledge what is durable. What the engine cannot do now is tried again at the next turn."""
        for entry in self._owed:
            carry_out(self._engine, entry.effects)
        self._between("carry out")
        owed, self._owed = self._owed, []
        for entry in owed:
            self._engine.acknowledge(entry.event)
        self._between("acknowledge")

    def run(self) -> None:
        """Turns until `stop`. A store that is not available is tried again; nothing that came in is lost."""
        while not self._stopping.is_set():
            try:
                self.turn()
                self.is_ready = True
                self.inbox.wait(self._patience_s())
            except Unavailable as problem:
                self.is_ready = False
                log.error("%s", problem)
                self._stopping.wait(RETRY_S)

    def stop(self) -> None:
        self._stopping.set()
        self.inbox.wake()

    def _restore(self) -> None:
        snapshot = self._store.load()
        self._core = Core.restore(snapshot)
        self._sequence, self._at_ms = snapshot.sequence, snapshot.at_ms

    def _decide_and_commit(self, events: Sequence[Event], now_ms: int) -> list[Entry]:
        decided = self._decide(events, now_ms)
        self._between("decide")
        try:
            self._store.commit(decided, self._core.take_changes(), now_ms)
        except Unavailable:
            self.inbox.put_back(events)
            self._restore_when_possible()
            raise
        self._sequence, self._at_ms = decided[-1].sequence, now_ms
        self._between("commit")
        return decided

    def _decide(self, events: Sequence[Event], now_ms: int) -> list[Entry]:
        """One entry an event. An event that the core cannot digest is dropped, told, and leaves no trace."""
        remaining = list(events)
        while True:
            entries: list[Entry] = []
            for event in (*remaining, Tick(at_ms=now_ms)):
                stamped = replace(event, at_ms=now_ms)
                try:
                    effects = self._core.handle(stamped)
                except Exception:
                    log.critical("The core cannot digest %r. It is dropped. Please report this.", event, exc_info=True)
                    if isinstance(event, Tick):
                        raise
                    remaining.remove(event)
                    self._restore()
                    break
                entries.append(Entry(sequence=self._sequence + len(entries) + 1, event=stamped, effects=effects))
            else:
                return entries

    def _restore_when_possible(self) -> None:
        """The books have moved on and the store has not: make them again from what is durable."""
        while not self._stopping.is_set():
            try:
                self._restore()
            except Unavailable as problem:
                log.error("%s", problem)
                self._stopping.wait(RETRY_S)
            else:
                return

    def _patience_s(self) -> float:
        with self.lock:
            deadline = self._core.next_deadline()
        if deadline is None:
            return LONGEST_WAIT_S
        return min(LONGEST_WAIT_S, max(0.0, (deadline - self._clock.now_ms()) / 1000))
