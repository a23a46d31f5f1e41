"""Webhooks: what is told of the log, how it is signed, and what becomes of deliveries that are not taken."""

import base64
import hashlib
import hmac
import json
import os
import re
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sublet.core.core import Core
from sublet.domain.changes import Entry
from sublet.domain.errors import Refused
from sublet.domain.events import (
    CheckpointSaved,
    Diagnosed,
    Event,
    InstanceBegan,
    InstanceEnded,
    JobSubmitted,
    NodeJoined,
    QuotaSet,
    Tick,
)
from sublet.domain.jobs import FaultTolerance, IdlePolicy, JobRecord, JobRequest, Program
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota
from sublet.notify import post as posting
from sublet.notify.book import Book, Hook
from sublet.notify.hooks import new_hook, secret_of, wants
from sublet.notify.messages import messages_of
from sublet.notify.post import post
from sublet.notify.sender import PAUSES_S, Sender

KEY = secret_of(bytes(range(32)))
FAILS_ONCE = FaultTolerance(policy="never")


class Log:
    """A core, its entries, and its records as a store would have them."""

    def __init__(self) -> None:
        self.core, self.entries, self.records, self.at_ms = Core(), list[Entry](), dict[str, JobRecord](), 0
        self.put(NodeJoined(at_ms=0, node=Node(name="n1", spec="gpu", gpu=4)))
        self.put(QuotaSet(at_ms=0, quota=Quota(name="a/b", nominal={"gpu": 4})))
        self.put(QuotaSet(at_ms=0, quota=Quota(name="c", nominal={"gpu": 0})))

    def put(self, event: Event) -> None:
        for one in (event, Tick(at_ms=event.at_ms)):
            effects = self.core.handle(one)
            self.entries.append(Entry(sequence=len(self.entries) + 1, event=one, effects=effects))
        self.records |= self.core.take_changes().jobs

    def job(self, name: str, quota: str, gpu: int = 4, **more: object) -> None:
        request = JobRequest(id=name, quota=quota, sizes=(gpu,), specs=("gpu",), **more)  # type: ignore[arg-type]
        self.put(JobSubmitted(at_ms=self.at_ms, request=request))
        self.put(InstanceBegan(at_ms=self.at_ms, job=name, attempt=1, instance=0))

    def told(self) -> list[tuple[str, str]]:
        found = [one for entry in self.entries for one in messages_of(entry, self.records.get)]
        assert len({one.id for one in found}) == len(found)
        return [(one.kind, one.subject) for one in found]


def a_story() -> Log:
    log = Log()
    log.job("borrower", "c", idle=IdlePolicy.ONLY)
    log.put(CheckpointSaved(at_ms=10_000, job="borrower", attempt=1, step=1))
    log.put(Diagnosed(at_ms=20_000, job="borrower", attempt=1, trouble="hang", instance=None, evidence="silent",
                      restart=False, is_over=False, run=0))  # fmt: skip
    log.at_ms = 30_000
    log.put(JobSubmitted(at_ms=30_000, request=JobRequest(id="owner", quota="a/b", sizes=(4,), specs=("gpu",),
                                                          fault_tolerance=FAILS_ONCE)))  # fmt: skip
    log.put(InstanceEnded(at_ms=40_000, job="borrower", attempt=1, instance=0, exit_code=143))
    log.put(InstanceEnded(at_ms=50_000, job="owner", attempt=1, instance=0, exit_code=1))
    return log


def test_what_is_told_of_a_story() -> None:
    log = a_story()
    assert log.told() == [
        ("hang", "borrower"), ("notice", "borrower"), ("preempted", "borrower"), ("lost_progress", "borrower"),
        ("failed", "owner"),
    ]  # fmt: skip
    bodies = [json.loads(m.body("/s")) for entry in log.entries for m in messages_of(entry, log.records.get)]
    lost = bodies[3]
    assert (lost["specversion"], lost["type"], lost["time"]) == (
        "1.0", "dev.sublet.lost_progress", "1970-01-01T00:00:40.000Z",
    )  # fmt: skip
    assert lost["data"]["gpu_seconds"] == 80 and lost["data"]["quota"] == "c"


def test_who_hears_what() -> None:
    log = a_story()
    messages = [m for entry in log.entries for m in messages_of(entry, log.records.get)]
    every = new_hook("every", "https://x.example/", ["failed", "notice"], "", KEY)
    parent = new_hook("parent", "https://x.example/", ["failed", "notice"], "a", KEY)
    asked = new_hook("asked", "https://x.example/", [], "", KEY)
    assert [m.kind for m in messages if wants(every, m)] == ["notice", "failed"]
    assert [m.subject for m in messages if wants(parent, m)] == ["owner"], "of the quotas below it too"
    assert not [m for m in messages if wants(asked, m)]
    settings = json.dumps({"notify": [{"to": "asked", "on": ["failed"]}]})
    log = Log()
    log.job("asks", "a/b", fault_tolerance=FAILS_ONCE, program=Program(settings=settings))
    log.put(InstanceEnded(at_ms=60_000, job="asks", attempt=1, instance=0, exit_code=1))
    messages = [m for entry in log.entries for m in messages_of(entry, log.records.get)]
    assert [m.subject for m in messages if wants(asked, m)] == ["asks"]


NO_URLS = [
    "",
    "ftp://x/",
    "file:///etc/passwd",
    "https://",
    "http://a b/\n",
    "http://x:99999/",
    "http://[x/",
    "gopher://x",
]


@pytest.mark.parametrize("url", NO_URLS)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(Refused, match="no address of a webhook"):
        new_hook("x", url, [], "", KEY)
    with pytest.raises(Refused, match="It may be failed, notice"):
        new_hook("x", "https://x/", ["fialed"], "", KEY)


class Receiver(ThreadingHTTPServer):
    """Answers with the next of `answers`, then with 204."""

    def __init__(self, *answers: int) -> None:
        self.answers, self.got = list(answers), list[tuple[dict[str, str], str]]()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/hook?a=b"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.got.append(({key.lower(): value for key, value in self.headers.items()}, body))
        self.send_response(self.server.answers.pop(0) if self.server.answers else 204)
        self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver(500, 302)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms


def sender_of(log: Log, book: Book, clock: Clock) -> Sender:
    return Sender(
        book=book,
        entries=lambda after, limit: log.entries[after : after + limit],
        last_sequence=lambda: 0,
        look=log.records.get,
        clock=clock,
        source="/s",
        chance=os.urandom,
    )


def turn(sender: Sender) -> None:
    """One round of reading and sending, in this thread."""
    sender._over.clear()
    thread = threading.Thread(target=sender.run)
    thread.start()
    newest = len(sender.entries(0, 1 << 30))
    until(lambda: max(sender.book.read_until() or 0, sender._read_to) == newest)
    until(lambda: min(sender.book.next_ms().values(), default=1 << 62) > sender.clock.now_ms() and not sender._busy)
    sender.end()
    thread.join()


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def test_tried_again_under_the_same_id_and_signed_each_time(tmp_path: Path, receiver: Receiver) -> None:
    log, clock, book = a_story(), Clock(), Book(tmp_path / "notify.db")
    sender = sender_of(log, book, clock)
    hook = new_hook("one", receiver.url, ["failed"], "", KEY)
    sender.add(hook)
    for _ in range(3):
        turn(sender)
        clock.ms += 60_000
    (delivery,) = book.deliveries("one")
    assert (delivery.state, delivery.tries, delivery.kind) == ("delivered", 3, "failed"), delivery
    assert len(receiver.got) == 3 and len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    for headers, body in receiver.got:
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{body}".encode()
        key = base64.b64decode(hook.secrets[0].removeprefix("whsec_"))
        expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert headers["content-type"].startswith("application/cloudevents+json")
    assert len({headers["webhook-timestamp"] for headers, _ in receiver.got}) == 3


def test_nothing_is_lost_or_made_twice_by_a_new_server(tmp_path: Path, receiver: Receiver) -> None:
    log, clock = a_story(), Clock()
    book = Book(tmp_path / "notify.db")
    sender_of(log, book, clock).add(new_hook("one", receiver.url, ["failed", "notice"], "", KEY))
    turn(sender_of(log, book, clock))
    book.close()
    again = Book(tmp_path / "notify.db")
    clock.ms += 60_000
    for _ in range(2):
        turn(sender_of(log, again, clock))
        clock.ms += 60_000
    kinds = sorted((one.kind, one.state) for one in again.deliveries())
    assert kinds == [("failed", "delivered"), ("notice", "delivered")]
    assert (tmp_path / "notify.db").stat().st_mode & 0o077 == 0, "secrets are its owner's alone"


def test_who_never_takes_it_is_given_up_and_a_removed_one_too(tmp_path: Path) -> None:
    log, clock, book = a_story(), Clock(), Book(tmp_path / "notify.db")
    sender = sender_of(log, book, clock)
    sender.add(new_hook("dead", "http://127.0.0.1:1/", ["failed"], "", KEY))
    sender.add(new_hook("gone", "http://127.0.0.1:1/", ["failed"], "", KEY))
    turn(sender)
    book.remove("gone")
    for pause_s in PAUSES_S:
        clock.ms += pause_s * 1000
        turn(sender)
    ends = {one.hook: (one.state, one.tries) for one in book.deliveries()}
    assert ends == {"dead": ("given_up", len(PAUSES_S) + 1), "gone": ("given_up", 1)}
    assert "refused" in book.deliveries("dead")[0].answer


def test_a_test_message_says_how_it_went(tmp_path: Path, receiver: Receiver) -> None:
    book = Book(tmp_path / "notify.db")
    sender = sender_of(Log(), book, Clock())
    hook = new_hook("one", receiver.url, [], "", KEY)
    sender.add(hook)
    first, second = sender.test(hook), sender.test(hook)
    assert (first.state, first.answer) == ("given_up", "500 Internal Server Error")
    assert (second.state, second.answer) == ("given_up", "302 Found"), "nobody is sent elsewhere"
    assert sender.test(hook).state == "delivered" and post(hook, "x", "{}", 1)[0] == 204


def test_who_does_not_answer_costs_the_others_nothing(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answers.clear()
    log, clock, book = a_story(), Clock(), Book(tmp_path / "notify.db")
    sender = sender_of(log, book, clock)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections, and never says a word
        sender.add(new_hook("deaf", f"http://127.0.0.1:{deaf.getsockname()[1]}/", ["failed", "notice"], "", KEY))
        sender.add(new_hook("good", receiver.url, ["failed", "notice"], "", KEY))
        thread = threading.Thread(target=sender.run)
        thread.start()
        try:
            until(lambda: len(receiver.got) == 2)
            assert [one.tries for one in book.deliveries("deaf")] == [0, 0], "it is still being waited for"
        finally:
            sender.end()
            thread.join()


def test_an_answer_that_comes_byte_by_byte_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "TRY_WITHIN_S", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def drip() -> None:
            connection, _ = slow.accept()
            with connection:
                while not over.wait(0.1):
                    try:
                        connection.send(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        hook = new_hook("slow", f"http://127.0.0.1:{slow.getsockname()[1]}/", [], "", KEY)
        status, answer = post(hook, "x", "{}", 1)
        over.set()
        thread.join()
    assert status == 0 and answer


def test_a_new_secret_and_the_one_before_it_sign_together(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answers.clear()
    sender = sender_of(Log(), Book(tmp_path / "notify.db"), Clock())
    sender.add(new_hook("one", receiver.url, [], "", KEY))
    newer = sender.rotate(one_of(sender))
    sender.test(one_of(sender))
    newest = sender.rotate(one_of(sender))
    assert one_of(sender).secrets == (newest, newer), "the oldest is out"
    headers, body = receiver.got[0]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{body}".encode()
    expected = [
        base64.b64encode(hmac.digest(base64.b64decode(secret.removeprefix("whsec_")), signed, "sha256")).decode()
        for secret in (newer, KEY)
    ]
    assert headers["webhook-signature"] == " ".join(f"v1,{one}" for one in expected)


def one_of(sender: Sender) -> Hook:
    hook = sender.book.hook("one")
    assert hook is not None
    return hook


def test_a_webhook_hears_only_of_what_comes_after_it(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answers.clear()
    log, book = a_story(), Book(tmp_path / "notify.db")
    sender = sender_of(log, book, Clock())
    sender.add(new_hook("early", receiver.url, ["failed", "notice"], "", KEY))
    sender.last_sequence = lambda: len(log.entries)
    sender.add(new_hook("late", receiver.url, ["failed", "notice"], "", KEY))
    turn(sender)
    assert [one.hook for one in book.deliveries()] == ["early", "early"]


def test_after_a_full_disk_nothing_is_missing(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answers.clear()
    log, book = a_story(), Book(tmp_path / "notify.db")
    sender = sender_of(log, book, Clock())
    sender.add(new_hook("one", receiver.url, ["failed", "notice"], "", KEY))
    with monkeypatch.context() as full:
        full.setattr(book, "add", lambda *_: (_ for _ in ()).throw(sqlite3.OperationalError("disk full")))
        with pytest.raises(sqlite3.OperationalError):
            sender._read()
    turn(sender)
    assert sorted(one.kind for one in book.deliveries()) == ["failed", "notice"]


@pytest.mark.parametrize("secret", ["whsec_", "whsec_c2hvcnQ=", "whsec_%%%", "x" * 200])
def test_what_is_no_secret_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(Refused) as told:
        new_hook("x", "https://x/", [], "", secret)
    assert secret.removeprefix("whsec_") not in str(told.value) or secret == "whsec_"
    with pytest.raises(Refused, match="names a user") as told:
        new_hook("x", "https://me:hunter2@x/", [], "", KEY)
    assert "hunter2" not in str(told.value)


def test_a_book_from_before_is_taken_over(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "notify.db") as old:
        old.execute("CREATE TABLE hooks (name TEXT PRIMARY KEY, url TEXT, secret TEXT, kinds TEXT, quota TEXT)")
        old.execute("INSERT INTO hooks VALUES ('one', 'https://x/', ?, 'failed', '')", (KEY,))
    (hook,) = Book(tmp_path / "notify.db").hooks()
    assert (hook.name, hook.secrets, hook.since) == ("one", (KEY,), 0)


def test_the_page_checks_signatures_as_they_are_made(receiver: Receiver) -> None:
    receiver.answers.clear()
    page = (Path(__file__).parents[3] / "docs" / "howto" / "webhooks.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    hook = new_hook("one", receiver.url, [], "", KEY)
    assert post(hook, "x", "{}", int(time.time()))[0] == 204
    headers, body = receiver.got[0]
    assert names["is_genuine"](KEY, headers, body.encode())
    assert not names["is_genuine"](KEY, headers, b"{ }")
    assert not names["is_genuine"](secret_of(bytes(32)), headers, body.encode())
    assert not names["is_genuine"](KEY, headers | {"webhook-timestamp": "1"}, body.encode())
