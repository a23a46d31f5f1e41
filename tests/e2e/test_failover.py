"""Two servers on one PostgreSQL: one leads, the other answers what only reads and takes over when it is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from sublet.client.http import API, Client
from sublet.domain.effects import ReleaseInstances
from sublet.domain.errors import SubletError
from sublet.store.sql import open_postgresql
from tests.e2e.server import PATIENCE_S, environment, until
from tests.postgresql import running

CLUSTER = "nodes: [{name: n1, spec: demo, gpu: 4}]\nquotas: {q: {nominal: {demo: 4}}}\n"
TAKES_OVER_WITHIN_S = 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server(folder: Path, url: str, port: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "sublet", "server", "--database", url, "--config", "cluster.yaml"]
    return subprocess.Popen(
        [*command, "--data", str(folder / "data"), "--port", str(port)],
        env=environment(folder / "data"), cwd=folder, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def answers(client: Client) -> bool:
    try:
        return client.get("/version") is not None
    except SubletError:
        return False


class Submitting:
    """One after the other, each under a key of its own, to whichever server takes it, until it is told to end."""

    def __init__(self, clients: list[Client], marks: Path) -> None:
        self.clients, self.marks, self.ids = clients, marks, list[str]()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        number = 0
        while not self.is_over.is_set():
            job = {"quota": "q", "gpu": 1, "command": f'echo x >> "{self.marks}/$SUBLET_JOB_ID.$SUBLET_ATTEMPT"'}
            taken = self.taken(job, f"key-{number}")
            if taken is not None:
                self.ids.append(taken)
                number += 1

    def taken(self, job: dict[str, Any], key: str) -> str | None:
        for client in self.clients:
            try:
                return str(client.post(f"{API}/jobs", job, key=key)["id"])
            except SubletError:
                continue
        return None


def test_a_standby_takes_over_and_nothing_is_lost_or_done_twice(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    marks = tmp_path / "marks"
    marks.mkdir()
    with running() as postgres:
        url = postgres.create("sublet")
        ports = free_port(), free_port()
        first, second = (Client(url=f"http://127.0.0.1:{port}", user="mei", timeout_s=5) for port in ports)
        leader = server(tmp_path, url, ports[0])
        standby = None
        try:
            until(lambda: answers(first), "the leader")
            standby = server(tmp_path, url, ports[1])
            until(lambda: answers(second), "the standby")
            load = Submitting([first, second], marks)
            load.thread.start()
            until(lambda: len(load.ids) >= 10, "ten jobs")
            until(lambda: len(second.get(f"{API}/jobs")["items"]) >= 5, "what the leader stored, read from the other")
            assert second.get(f"{API}/quotas")["items"][0]["name"] == "q"
            refused = refusal(second)
            assert refused["code"] == "standby" and first.url in refused["hint"]
            os.kill(leader.pid, signal.SIGKILL)
            leader.wait()
            count = len(load.ids)
            until(lambda: len(load.ids) > count + 3, "jobs that the second takes", TAKES_OVER_WITHIN_S)
            load.is_over.set()
            load.thread.join()
            all_done = {"state": "succeeded", "limit": 500}
            until(
                lambda: {view["id"] for view in second.get(f"{API}/jobs", all_done)["items"]} >= set(load.ids),
                "the end of all jobs",
            )
        finally:
            for process in (leader, standby):
                if process is not None:
                    process.terminate()
                    process.wait(PATIENCE_S)
        assert len(set(load.ids)) == len(load.ids)
        made = Counter(path.name.split(".")[0] for path in marks.iterdir())
        assert made == Counter(load.ids), "each ran once, as its first attempt and no other"
        assert all(path.read_text() == "x\n" for path in marks.iterdir())
        store = open_postgresql(url)
        entries = store.entries(limit=100_000)
        store.close()
        assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
        effects = [effect for entry in entries for effect in entry.effects]
        ends = Counter((one.job, one.attempt) for one in effects if isinstance(one, ReleaseInstances))
        assert set(ends.values()) == {1} and len(ends) == len(load.ids), "each attempt ended exactly once"


def refusal(client: Client) -> dict[str, str]:
    try:
        client.post(f"{API}/jobs", {"quota": "q", "gpu": 1, "command": "true"})
    except SubletError as error:
        return {"code": error.code, "hint": error.hint}
    return json.loads("{}")  # type: ignore[no-any-return]
