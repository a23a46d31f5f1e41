"""Reads the log and delivers what webhooks want of it, each try signed, until it is taken or given up.

One rule: a webhook that does not answer costs the others nothing, and the scheduler nothing.
"""

import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sublet.domain.changes import Entry
from sublet.domain.errors import Unavailable
from sublet.notify.book import Book, Delivery, Hook
from sublet.notify.hooks import secret_of, wants, with_secret
from sublet.notify.messages import Look, Message, messages_of
from sublet.notify.post import post
from sublet.ports import Clock

BATCH = 500
AT_ONCE = 32  # webhooks that are spoken to at the same time, each in a thread of its own
IN_A_ROW = 50  # messages to one of them
PAUSES_S = (5, 30, 120, 600, 1_800, 3_600, 7_200, 14_400, 28_800)  # after each try that failed; then it is given up
LOOK_AGAIN_S = 60  # at the latest
WRITE_EVERY = 1_000  # entries that told nobody anything
END_WITHIN_S = 3  # what is under way then is tried again by the next server, under the same id

Entries = Callable[[int, int], Sequence[Entry]]  # after this number, at most so many


@dataclass(slots=True, kw_only=True)
class Sender:
    """`source`: who tells, in each message. `chance`: so many random bytes. `wake` it when the log has grown."""

    book: Book
    entries: Entries
    last_sequence: Callable[[], int]
    look: Look
    clock: Clock
    source: str
    chance: Callable[[int], bytes]
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)  # no webhook comes while it reads
    _woken: threading.Event = field(default_factory=threading.Event, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _read_to: int = field(default=0, init=False)
    _busy: dict[str, threading.Thread] = field(default_factory=dict, init=False)  # by the name of the webhook

    def run(self) -> None:
        """Until `end`; what waits then is tried by the next server."""
        while not self._over.is_set():
            self._woken.clear()
            try:
                with self._guard:
                    more = self._read()
                self._send()
                pause_s = 0 if more else self._pause_s()
            except (sqlite3.Error, Unavailable):  # a full disk, say: the server goes on, and so does this, later
                logging.getLogger("sublet").error("webhooks cannot be served now", exc_info=True)
                pause_s = LOOK_AGAIN_S
            self._woken.wait(pause_s)
        busy = list(self._busy.values())
        for thread in busy:
            thread.join(END_WITHIN_S / len(busy))

    def wake(self) -> None:
        self._woken.set()

    def end(self) -> None:
        self._over.set()
        self._woken.set()

    def _pause_s(self) -> float:
        """Until a try is due, or the log has grown, or a webhook is no longer busy."""
        due_ms = [at_ms for name, at_ms in self.book.next_ms().items() if name not in self._busy]
        if not due_ms or len(self._busy) >= AT_ONCE:
            return LOOK_AGAIN_S
        return min(LOOK_AGAIN_S, max(0.05, (min(due_ms) - self.clock.now_ms()) / 1000))

    def _read(self) -> bool:
        """True: there is more. What tells nobody anything is written down now and then only: to read it again would
        tell nobody anything again."""
        hooks = self.book.hooks()
        if not hooks:
            return False
        written = self.book.read_until() or 0
        after = max(written, self._read_to)
        found = self.entries(after, BATCH)
        if not found:
            return False
        made = [one for entry in found for one in self._deliveries(entry, hooks)]
        last = found[-1].sequence
        if made or last - written >= WRITE_EVERY:
            self.book.add(last, self.clock.now_ms(), made)
        self._read_to = last  # not before that is durable: after a full disk it is read again
        return len(found) == BATCH

    def _deliveries(self, entry: Entry, hooks: Sequence[Hook]) -> list[tuple[str, str, str, str, str]]:
        return [
            (hook.name, message.id, message.kind, message.subject, message.body(self.source))
            for message in messages_of(entry, self.look)
            for hook in hooks
            if hook.since < entry.sequence and wants(hook, message)
        ]

    def _send(self) -> None:
        """Sets out to every webhook for which something is due, and waits for none."""
        now_ms = self.clock.now_ms()
        for name, due_ms in self.book.next_ms().items():
            if due_ms <= now_ms and name not in self._busy and len(self._busy) < AT_ONCE:
                thread = threading.Thread(target=self._send_to, args=(name,), name="webhook", daemon=True)
                self._busy[name] = thread
                thread.start()

    def _send_to(self, name: str) -> None:
        try:
            for delivery in self.book.due(name, self.clock.now_ms(), IN_A_ROW):
                hook = self.book.hook(name)
                if hook is None or self._over.is_set() or not self._try(hook, delivery):
                    break
        except sqlite3.Error:
            if not self._over.is_set():
                logging.getLogger("sublet").error("a delivery cannot be written down", exc_info=True)
            self._over.wait(LOOK_AGAIN_S)  # else it would be sent again and again
        finally:
            del self._busy[name]
            self.wake()

    def _try(self, hook: Hook, delivery: Delivery) -> bool:
        """False: nobody answered, and would not answer the next one either."""
        status, answer = post(hook, delivery.id, delivery.body, self.clock.now_ms() // 1000)
        is_last = delivery.tries >= len(PAUSES_S)
        state = "delivered" if 200 <= status < 300 else "given_up" if is_last else "waiting"
        pause_ms = 0 if is_last else PAUSES_S[delivery.tries] * 1000
        done_ms = self.clock.now_ms()
        self.book.tried(delivery, done_ms, state=state, next_ms=done_ms + pause_ms, answer=answer)
        return status > 0

    def add(self, hook: Hook) -> None:
        """It hears of what happens from now on: what was before there was any webhook is told to nobody."""
        with self._guard:
            now = self.last_sequence()
            if not self.book.hooks():
                self.book.add(now, self.clock.now_ms(), [])
            self.book.put(replace(hook, since=now))
        self.wake()

    def change(self, known: Hook, hook: Hook) -> None:
        """What it heard of so far it goes on to hear of."""
        self.book.put(replace(hook, since=known.since))
        self.wake()

    def rotate(self, hook: Hook) -> str:
        """The new secret. The one before it signs as well, until the next time."""
        secret = secret_of(self.chance(32))
        self.change(hook, with_secret(hook, secret))
        return secret

    def test(self, hook: Hook) -> Delivery:
        """A message that says that it is a test, tried once and at once."""
        now_ms = self.clock.now_ms()
        message = Message(id=f"test-{self.chance(8).hex()}", kind="test", subject=hook.name, at_ms=now_ms, data={})
        self.book.add_one(now_ms, (hook.name, message.id, message.kind, message.subject, message.body(self.source)))
        (made,) = [one for one in self.book.deliveries(hook.name) if one.id == message.id]
        status, answer = post(hook, made.id, made.body, now_ms // 1000)
        state = "delivered" if 200 <= status < 300 else "given_up"
        self.book.tried(made, self.clock.now_ms(), state=state, next_ms=now_ms, answer=answer)
        (tried,) = [one for one in self.book.deliveries(hook.name) if one.id == message.id]
        return tried
