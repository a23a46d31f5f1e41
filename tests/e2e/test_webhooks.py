"""Webhooks: what is told is what the log says, whenever the server is killed and whatever the receiver answers."""

import base64
import hashlib
import hmac
import json
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.e2e.server import Server, end, start, until

SEED = 20261201
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
CLUSTER = """
nodes: [{{name: n1, spec: demo, gpu: 4}}]
quotas:
  owner: {{nominal: {{demo: 4}}}}
  guest: {{nominal: {{demo: 0}}}}
webhooks:
  all: {{url: "{url}", on: [failed, notice, preempted, hang, lost_progress], secret_file: all.secret}}
  guests: {{url: "{url}guests", on: failed, quota: guest}}
"""
NEVER = {"fault_tolerance": {"policy": "never"}}


class Receiver(ThreadingHTTPServer):
    """Keeps what is posted to it. Every other message is refused the first time it comes, after it was read."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.seen: set[str] = set()
        super().__init__(("127.0.0.1", 0), Taker)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"


class Taker(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {key.lower(): value for key, value in self.headers.items()}
        is_new, message = headers["webhook-id"] not in self.server.seen, headers["webhook-id"]
        self.server.seen.add(message)
        self.server.got.append((self.path, headers, body))
        self.send_response(503 if is_new and hashlib.sha256(message.encode()).digest()[0] % 2 else 204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.shutdown()
        thread.join()
        receiver.server_close()


class Killed:
    """A server that is killed now and then, and started again at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.chance, self.kills = folder, random.Random(SEED), 0
        self.server = self._start()

    def _start(self) -> Server:
        return start(self.folder / "data", self.folder, "--config", "cluster.yaml", errors=self.folder / "errors")

    def kill(self) -> None:
        """After a time that the seed draws: in the middle of whatever it does then."""
        threading.Event().wait(self.chance.random() / 4)
        end(self.server, signal.SIGKILL)
        self.kills += 1
        self.server = self._start()

    def submit(self, **keys: Any) -> str:
        return self.server.submit(json.dumps({"quota": "owner", "gpu": 1, **keys}))


def items(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.run("events", "-o", "json").out)["items"]
    return found


def deliveries(server: Server, *more: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.run("notify", "log", *more, "--limit", "1000", "-o", "json").out)[
        "items"
    ]
    return found


def a_story(world: Killed) -> None:
    """Failures, a hang, and a guest that is preempted and loses what it did, with kills in between."""
    loops = "while :; do sleep 0.05; done"
    guest = world.submit(quota="guest", idle="only", gpu=4, command=f"echo on; {loops}",
                         fault_tolerance={"grace": "1s"})  # fmt: skip
    world.server.reaches(guest, "running")
    threading.Event().wait(1.1)  # GPU time that it can lose
    world.submit(gpu=4, command="exit 3", **NEVER)
    world.kill()
    for code in range(4, 8):
        world.submit(command=f"exit {code}", priority=9, **NEVER)
    world.kill()
    silent = world.submit(priority=9, command=f"echo on; {loops}", fault_tolerance={"hang": {"after": "1s"}})
    until(lambda: any(one["type"] == "diagnosed" for one in items(world.server)), "the hang")
    world.kill()
    world.submit(quota="guest", idle="only", gpu=1, command="exit 9", **NEVER)
    world.server.run("stop", silent)
    until(lambda: len([one for one in world.server.jobs() if one["state"] == "failed"]) == 6, "all failures")
    world.kill()
    world.server.run("stop", guest)


def test_what_is_told_is_what_the_log_says_though_the_server_is_killed(tmp_path: Path) -> None:
    (tmp_path / "all.secret").write_text(SECRET + "\n")
    with receiving() as receiver:
        (tmp_path / "cluster.yaml").write_text(CLUSTER.format(url=receiver.url))
        world = Killed(tmp_path)
        try:
            a_story(world)
            world.server.stop_all()
            until(lambda: {one["state"] for one in deliveries(world.server)} == {"delivered"}, "all deliveries")
            log, told, jobs = items(world.server), deliveries(world.server), world.server.jobs()
        finally:
            end(world.server, signal.SIGTERM)
        got = list(receiver.got)
    failed = Counter(one["id"] for one in jobs if one["state"] == "failed")
    kinds = {kind: Counter(one["subject"] for one in told if one["kind"] == kind and one["webhook"] == "all")
             for kind in ("failed", "notice", "preempted", "hang", "lost_progress")}  # fmt: skip
    assert kinds["failed"] == failed and len(failed) == 6
    assert kinds["notice"] == Counter(one["job"] for one in log if one["type"] == "notice")
    assert kinds["preempted"] == Counter({one["id"]: one["preemptions"] for one in jobs if one["preemptions"]})
    assert kinds["hang"] == Counter(one["job"] for one in log if is_hang(one))
    assert set(kinds["lost_progress"]) >= set(kinds["preempted"]) and kinds["preempted"]
    guests = [one for one in told if one["webhook"] == "guests"]
    assert [one["subject"] for one in guests] == [one["id"] for one in jobs if one["quota"] == "guest" and
                                                  one["state"] == "failed"]  # fmt: skip
    assert_received(got, told)
    assert SECRET not in (tmp_path / "errors").read_text()


def is_hang(told: dict[str, Any]) -> bool:
    return told["type"] == "diagnosed" and "no longer" not in told["text"]


def assert_received(got: list[tuple[str, dict[str, str], bytes]], told: list[dict[str, Any]]) -> None:
    """Everything that the log of deliveries names came, nothing else did, and each time with the same body."""
    bodies: dict[tuple[str, str], set[bytes]] = {}
    for path, headers, body in got:
        bodies.setdefault((path, headers["webhook-id"]), set()).add(body)
        if path == "/":
            signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
            digest = hmac.digest(bytes(range(32)), signed, "sha256")
            assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
        event = json.loads(body)
        assert (event["specversion"], event["id"]) == ("1.0", headers["webhook-id"])
    assert set(bodies) == {("/" if one["webhook"] == "all" else "/guests", one["id"]) for one in told}
    assert {len(one) for one in bodies.values()} == {1}
    assert len(got) > len(bodies), "some were refused at first, and came again"


def test_webhooks_by_the_command_line(tmp_path: Path) -> None:
    with receiving() as receiver:
        receiver.seen |= {""}
        server = start(tmp_path / "data", tmp_path)
        try:
            made = server.run("notify", "add", "mine", "--url", receiver.url, "--on", "failed")
            assert made.code == 0 and "whsec_" in made.out
            assert "whsec_" in server.run("notify", "rotate", "mine").out
            assert "whsec_" not in server.run("notify", "ls").out
            answers = {server.run("notify", "test", "mine").out.partition(" ")[0] for _ in range(8)}
            assert "delivered:" in answers
            assert server.run("notify", "add", "bad", "--url", "file:///etc/passwd").code == 2
            assert server.run("notify", "rm", "mine").code == 0
            assert server.run("notify", "test", "mine").code == 2
            assert "test" in server.run("notify", "log").out
        finally:
            end(server, signal.SIGTERM)
