"""The controller: the only one that touches the core. Rule: nothing leaves until what it rests on is durable."""

import logging
from collections.abc import Callable
from threading import Event as Flag
from threading import RLock
from typing import TypeVar

from sublet.controller import recover
from sublet.controller.carry import acknowledge, carry_out
from sublet.controller.inbox import Inbox
from sublet.core.core import Core
from sublet.domain.changes import Entry
from sublet.domain.errors import Broken, Unavailable
from sublet.domain.events import Event
from sublet.ports import Clock, Engine, Store

log = logging.getLogger("sublet.controller")

Answer = TypeVar("Answer")
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 15.0  # after a turn that failed; the pause doubles
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
        self._taken: list[Event] = []  # out of the inbox, and not yet durable
        self._owed: list[Entry] = []  # durable, and not yet carried out
        self._is_ahead = False  # the core has moved on, and the store has not
        self.is_ready = False
        self._books = recover.restore(store)

    def put(self, event: Event) -> None:
        self.inbox.put(event)

    def read(self, look: Callable[[Core], Answer]) -> Answer:
        """`look` sees the books between two turns, and must not keep them. Unavailable while the store is away."""
        with self.lock:
            if self._is_ahead:
                hint = "Try again in some seconds."
                what, why = "The scheduler cannot answer now.", "Its last turn could not be stored."
                raise Unavailable(what=what, why=why, hint=hint, code="store_unavailable")
            return look(self._books.core)

    def recover(self) -> None:
        """After a start: hear what happened meanwhile, and tell the engine again what stands. Both may repeat."""
        self._engine.connect(self)
        self._between("connect")
        with self.lock:
            standing = self._books.core.standing_effects()
        carry_out(self._engine, standing, self._between)
        self.is_ready = True

    def turn(self) -> list[Entry]:
        """All events that are there, and one Tick. Nothing, when nothing happened and no deadline is due.

        Unavailable when the store or the engine is, Broken when the core is: call again, nothing is lost.
        """
        with self.lock:
            self._catch_up()
            self._taken += self.inbox.take()
            self._between("take")
            now_ms = max(self._books.at_ms, self._clock.now_ms())
            entries = self._decide_and_commit(now_ms) if self._is_due(now_ms) else []
        self._settle()
        return entries

    def run(self) -> None:
        """Turns until `stop`. What is not available, or broken, is tried again; nothing that came in is lost."""
        pause_s = FIRST_RETRY_S
        while not self._stopping.is_set():
            try:
                self.turn()
            except (Unavailable, Broken) as problem:
                self.is_ready = False
                log.error("%s The next try is in %s s.", problem, pause_s)
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            else:
                self.is_ready, pause_s = True, FIRST_RETRY_S
                self.inbox.wait(self._patience_s())

    def stop(self) -> None:
        self._stopping.set()
        self.inbox.wake()

    def _catch_up(self) -> None:
        """The books again as they are stored. A commit that was said to have failed may have counted all the same."""
        if not self._is_ahead:
            return
        before = self._books.sequence
        books = recover.restore(self._store)
        written = recover.written_since(self._store, before, books.sequence)
        if written:
            self._taken = []
            self._owed += written
        self._books, self._is_ahead = books, False

    def _is_due(self, now_ms: int) -> bool:
        deadline = self._books.core.next_deadline()
        return bool(self._taken) or (deadline is not None and deadline <= now_ms)

    def _decide_and_commit(self, now_ms: int) -> list[Entry]:
        books, self._is_ahead = self._books, True
        decided = recover.decide(books, self._store, self._taken, now_ms)
        entries = decided.entries(books.sequence)
        self._between("decide")
        self._store.commit(entries, decided.changes, now_ms)
        self._books = recover.Books(core=decided.core, sequence=entries[-1].sequence, at_ms=now_ms)
        self._taken, self._is_ahead = [], False
        self._owed += entries
        self._between("commit")
        return entries

    def _settle(self) -> None:
        """Carry out and acknowledge what is durable. What the engine cannot do now is tried again at the next turn."""
        if not self._owed:
            return
        carry_out(self._engine, (effect for entry in self._owed for effect in entry.effects), self._between)
        acknowledge(self._engine, self._owed, self._between)
        self._owed = []

    def _patience_s(self) -> float:
        with self.lock:
            deadline = self._books.core.next_deadline()
        if deadline is None:
            return LONGEST_WAIT_S
        return min(LONGEST_WAIT_S, max(0.0, (deadline - self._clock.now_ms()) / 1000))
