"""Reads the log and delivers what webhooks want of it, each try signed, until it is taken or given up.

One rule: a webhook that does not answer costs the others nothing but the time of one try, and the scheduler nothing.
Signed as the Standard Webhooks specification says: HMAC-SHA256 over id, time and body, with the webhook's own secret.
"""

import base64
import hashlib
import hmac
import http.client
import logging
import sqlite3
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sublet.domain.changes import Entry
from sublet.domain.errors import Refused, Unavailable
from sublet.notify.book import Book, Delivery, Hook
from sublet.notify.messages import KINDS, Look, Message, messages_of
from sublet.ports import Clock

SECRET_PREFIX = "whsec_"
BATCH = 500
TRY_WITHIN_S = 10
AT_ONCE = 8
PAUSES_S = (5, 30, 120, 600, 1_800, 3_600, 7_200, 14_400, 28_800)  # after each try that failed; then it is given up
MOST_ANSWER = 200  # characters of an answer that are kept
LOOK_AGAIN_S = 60  # at the latest
WRITE_EVERY = 1_000  # entries that told nobody anything

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
    _woken: threading.Event = field(default_factory=threading.Event, init=False)
    _is_over: bool = field(default=False, init=False)
    _read_to: int = field(default=0, init=False)

    def run(self) -> None:
        """Until `end`; what waits then is tried by the next server."""
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="webhook") as pool:
            while not self._is_over:
                self._woken.clear()
                try:
                    more = self._read()
                    self._send(pool)
                    pause_s = 0 if more else self._pause_s()
                except (sqlite3.Error, Unavailable):  # a full disk, say: the server goes on, and so does this, later
                    logging.getLogger("sublet").error("webhooks cannot be served now", exc_info=True)
                    pause_s = LOOK_AGAIN_S
                self._woken.wait(pause_s)

    def wake(self) -> None:
        self._woken.set()

    def end(self) -> None:
        self._is_over = True
        self._woken.set()

    def _pause_s(self) -> float:
        """Until a try is due, or the log has grown."""
        next_ms = self.book.next_ms()
        if next_ms is None:
            return LOOK_AGAIN_S
        return min(LOOK_AGAIN_S, max(0.05, (next_ms - self.clock.now_ms()) / 1000))

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
        self._read_to = found[-1].sequence
        if made or self._read_to - written >= WRITE_EVERY:
            self.book.add(self._read_to, self.clock.now_ms(), made)
        return len(found) == BATCH

    def _deliveries(self, entry: Entry, hooks: Sequence[Hook]) -> list[tuple[str, str, str, str, str]]:
        return [
            (hook.name, message.id, message.kind, message.subject, message.body(self.source))
            for message in messages_of(entry, self.look)
            for hook in hooks
            if wants(hook, message)
        ]

    def _send(self, pool: ThreadPoolExecutor) -> None:
        hooks = {hook.name: hook for hook in self.book.hooks()}
        due = [one for one in self.book.due(self.clock.now_ms()) if one.hook in hooks]
        list(pool.map(lambda one: self._try(hooks[one.hook], one), due))

    def _try(self, hook: Hook, delivery: Delivery) -> None:
        now_ms = self.clock.now_ms()
        taken, answer = post(hook, delivery.id, delivery.body, now_ms // 1000)
        is_last = delivery.tries >= len(PAUSES_S)
        state = "delivered" if taken else "given_up" if is_last else "waiting"
        pause_ms = 0 if is_last else PAUSES_S[delivery.tries] * 1000
        done_ms = self.clock.now_ms()
        self.book.tried(delivery, done_ms, state=state, next_ms=done_ms + pause_ms, answer=answer)

    def add(self, hook: Hook) -> None:
        """It hears of what happens from now on: what was before there was any webhook is told to nobody."""
        if not self.book.hooks():
            self.book.add(self.last_sequence(), self.clock.now_ms(), [])
        self.book.put(hook)
        self.wake()

    def test(self, hook: Hook) -> Delivery:
        """A message that says that it is a test, tried once and at once."""
        now_ms = self.clock.now_ms()
        message = Message(id=f"test-{self.chance(8).hex()}", kind="test", subject=hook.name, at_ms=now_ms, data={})
        self.book.add_one(now_ms, (hook.name, message.id, message.kind, message.subject, message.body(self.source)))
        (made,) = [one for one in self.book.deliveries(hook.name) if one.id == message.id]
        taken, answer = post(hook, made.id, made.body, now_ms // 1000)
        state = "delivered" if taken else "given_up"
        self.book.tried(made, self.clock.now_ms(), state=state, next_ms=now_ms, answer=answer)
        (tried,) = [one for one in self.book.deliveries(hook.name) if one.id == message.id]
        return tried


def wants(hook: Hook, message: Message) -> bool:
    """A quota's webhook hears of the quotas below it as well."""
    if hook.name in message.asked:
        return True
    is_its = not hook.quota or message.quota == hook.quota or message.quota.startswith(f"{hook.quota}/")
    return message.kind in hook.kinds and is_its


def new_hook(name: str, url: str, kinds: Sequence[str], quota: str, key: bytes) -> Hook:
    """`key`: 32 random bytes, its secret. Refused for what is no address, or a kind that there is not."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable():
        hint = "Write https://host/path."
        raise Refused(what=f"{url or 'Nothing'} is no address of a webhook.", hint=hint, code="malformed", field="url")
    if not name or len(name) > 100 or not name.isprintable() or "/" in name:
        raise Refused(what="That is no name of a webhook.", hint="A word will do.", code="malformed", field="name")
    known = [kind for kind in KINDS if kind != "test"]
    for kind in kinds:
        if kind not in known:
            raise Refused(
                what=f"{kind} is not known.", why=f"It may be {', '.join(known)}.", code="malformed", field="on"
            )
    secret = SECRET_PREFIX + base64.b64encode(key).decode()
    return Hook(name=name, url=url, secret=secret, kinds=tuple(dict.fromkeys(kinds)), quota=quota)


def signature(secret: str, message_id: str, time_s: int, body: str) -> str:
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = hmac.digest(key, f"{message_id}.{time_s}.{body}".encode(), hashlib.sha256)
    return f"v1,{base64.b64encode(signed).decode()}"


def post(hook: Hook, message_id: str, body: str, time_s: int) -> tuple[bool, str]:
    """Whether it was taken (any answer of 200 to 299; nothing is followed elsewhere), and what the answer was."""
    headers = {
        "Content-Type": "application/cloudevents+json; charset=utf-8",
        "User-Agent": "sublet-webhook",
        "webhook-id": message_id,
        "webhook-timestamp": str(time_s),
        "webhook-signature": signature(hook.secret, message_id, time_s, body),
    }
    parts = urlsplit(hook.url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection = _connection(parts.scheme, parts.hostname or "", parts.port)
        try:
            connection.request("POST", path, body.encode(), headers)
            answer = connection.getresponse()
            said = answer.read(MOST_ANSWER).decode("utf-8", "replace")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as problem:
        return False, f"{type(problem).__name__}: {problem}"[:MOST_ANSWER]
    return 200 <= answer.status < 300, f"{answer.status} {answer.reason} {said}".strip()[:MOST_ANSWER]


def _connection(scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=TRY_WITHIN_S, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, port, timeout=TRY_WITHIN_S)
