"""What the supervisor costs, and how soon a job goes on after one of its ranks was killed; torchrun beside it.

Three tables: the start of a program (against the same program without us), a running program that prints a line each
millisecond, and seconds from `kill -9` of a rank to the first step after it, for 2 and 4 ranks. Rule: both sides run
the same program on the same machine in turn, kill by kill, because a shared machine drifts; times are medians.

    python benchmarks/supervisor.py [--kills 5] [--starts 30] [--seconds 8] [--ranks 2,4] [--json]
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sublet.domain.effects import StartGang, StopInstances
from sublet.domain.events import Event, InstanceEnded
from sublet.domain.jobs import JobRequest, Program
from sublet.domain.leases import Lease, LeaseKind
from sublet.domain.nodes import Node
from sublet.engines.local import LocalEngine

RANK = Path(__file__).with_name("supervisor_rank.py")
TALKER = "import time\nfor n in range(10**9):\n    print(n, flush=True)\n    time.sleep(0.001)\n"
CALLS = """
import timeit
from sublet.job import notice, progress
for call in (notice.received, lambda: progress(1, 2)):
    print(min(timeit.repeat(call, number=20_000, repeat=5)) / 20_000 * 1e9)
"""
PATIENCE_S = 120
SETTLE_STEPS = 15  # between two kills
LOOK_S = 0.005
# As it comes, torchrun 2.13 lets its workers share a store that outlives them: after a restart gloo finds addresses of
# the dead there, and now and then never gets on again. With a store of their own they do.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def until(is_so: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (answer := is_so()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come within {PATIENCE_S} s")
        time.sleep(LOOK_S)
    return answer


def binary(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


# ---- the cost of a start, and of a program that runs


class Inbox:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def put(self, event: Event) -> None:
        self.events.append(event)


@dataclass(slots=True, kw_only=True)
class Stage:
    """The engine of one machine without a server: programs start when they are told to."""

    engine: LocalEngine
    inbox: Inbox
    count: int = 0

    def start(self, *command: str) -> Path:
        """The directory of the instance."""
        self.count += 1
        job = f"job_{self.count}"
        request = JobRequest(id=job, quota="q", sizes=(1,), program=Program(command=command))
        lease = Lease(kind=LeaseKind.GUARANTEED, spec="s", nodes=("n",), gpus=(1,), granted_ms=0)
        self.engine.carry_out(StartGang(job=job, attempt=1, lease=lease, instances=(0,), request=request))
        return self.engine.directory / job / "1" / "0"

    def ended(self, directory: Path) -> None:
        job = directory.parts[-3]
        until(lambda: any(isinstance(e, InstanceEnded) and e.job == job for e in self.inbox.events), "its end")
        for event in self.inbox.events:
            self.engine.acknowledge(event)

    def stop(self, directory: Path) -> None:
        effect = StopInstances(job=directory.parts[-3], attempt=1, instances=(0,), reason="stopped")
        self.engine.carry_out(effect)
        self.ended(directory)


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    engine, inbox = LocalEngine(directory=folder, nodes=(Node(name="n", spec="s", gpu=8),)), Inbox()
    engine.connect(inbox)
    try:
        yield Stage(engine=engine, inbox=inbox)
    finally:
        engine.close()


def start_ms(on: Stage, folder: Path, count: int) -> dict[str, list[float]]:
    """From the order to the program's first word, with us and without; the two in turn."""
    found: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(count):
        began = time.time_ns()
        directory = on.start("date", "+%s%N")
        on.ended(directory)
        found["ours"].append((int((directory / "log").read_text()) - began) / 1e6)
        log = folder / f"bare.{number}"
        began = time.time_ns()
        with log.open("wb") as file:
            subprocess.run(["date", "+%s%N"], stdout=file, check=True)
        found["bare"].append((int(log.read_text()) - began) / 1e6)
    return found


def cpu_ns(pid: int) -> int:
    """Processor time of all its threads."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def memory_mib(pid: int) -> float:
    """The most that was resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def running(on: Stage, folder: Path, seconds: float) -> dict[str, dict[str, float]]:
    """Of the one that watches, while the program prints."""
    directory = on.start(sys.executable, "-c", TALKER)
    until(lambda: (directory / "log").exists() and (directory / "log").stat().st_size > 100, "its output")
    supervisor = int((directory / "lock").read_text())
    ours = _watched(supervisor, directory / "log", seconds)
    on.stop(directory)
    script, log = folder / "talker.py", folder / "talker.log"
    script.write_text(TALKER)
    with log.open("wb") as file:
        agent = subprocess.Popen([binary("torchrun"), "--standalone", str(script)], stdout=file, stderr=file)
    try:
        until(lambda: log.stat().st_size > 2_000, "its output")
        return {"sublet": ours, "torchrun": _watched(agent.pid, log, seconds)}
    finally:
        agent.terminate()
        agent.wait()


def call_ns(folder: Path) -> dict[str, float]:
    """Of what a program calls each step, in a process of its own; no notice is there."""
    files = {"SUBLET_NOTICE_FILE": f"{folder}/notice.json", "SUBLET_REPORT_FILE": f"{folder}/report.jsonl"}
    argv = [sys.executable, "-c", CALLS]
    done = subprocess.run(argv, env=_environment() | files, capture_output=True, text=True, check=True)
    received, progress = map(float, done.stdout.split())
    return {"notice.received()": received, "progress()": progress}


def _watched(pid: int, log: Path, seconds: float) -> dict[str, float]:
    size, used, began = log.stat().st_size, cpu_ns(pid), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    percent = (cpu_ns(pid) - used) / took / 1e7
    with log.open("rb") as file:
        file.seek(size)
        lines = file.read().count(b"\n") / took
    return {"cpu_percent": percent, "memory_mib": memory_mib(pid), "lines_s": lines}


# ---- from the loss of a rank to the next step


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    rank: int
    step: int
    at_ns: int
    pid: int


def read_steps(folder: Path) -> list[Line]:
    try:
        text = (folder / "steps").read_text()
    except FileNotFoundError:
        return []
    rows = (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [Line(rank=int(a), step=int(b), at_ns=int(c), pid=int(d)) for a, b, c, d in rows]


@dataclass(slots=True, kw_only=True)
class Side:
    """A job that loses ranks. `detected_ns`: when its keeper knew of the newest loss."""

    name: str
    folder: Path
    ranks: int
    detected_ns: Callable[[int, int], int | None]  # of which pid, killed when
    samples: list[dict[str, float]] = field(default_factory=list)

    def is_settled(self, pids: frozenset[int] = frozenset()) -> dict[int, int] | None:
        """Rank and pid of those that run, all of them past so many steps since these were killed."""
        steps: dict[int, int] = {}
        pid_of: dict[int, int] = {}
        for line in read_steps(self.folder):
            if line.pid not in pids and line.step > 0:
                is_new = pid_of.get(line.rank) != line.pid
                steps[line.rank] = 1 if is_new else steps[line.rank] + 1
                pid_of[line.rank] = line.pid
        is_so = len(steps) == self.ranks and min(steps.values()) >= SETTLE_STEPS
        return pid_of if is_so else None

    def lose_one(self, gone: frozenset[int]) -> frozenset[int]:
        """All that have run by now."""
        alive = until(lambda: self.is_settled(gone), f"steps of {self.name}")
        before = gone | frozenset(alive.values())
        victim = alive[self.ranks - 1]
        killed_ns = time.time_ns()
        os.kill(victim, signal.SIGKILL)
        until(lambda: self.is_settled(before), f"steps of {self.name} after the loss")
        self.samples.append(self._measured(before, victim, killed_ns))
        return before

    def _measured(self, before: frozenset[int], victim: int, killed_ns: int) -> dict[str, float]:
        new = [line for line in read_steps(self.folder) if line.pid not in before]

        def after(step: int) -> float:
            """The last rank to come there; the first step is made by all at once."""
            return (max(line.at_ns for line in new if line.step == step) - killed_ns) / 1e9

        detected = until(lambda: self.detected_ns(victim, killed_ns), "word of the loss")
        first = (min(line.at_ns for line in new if line.step > 0) - killed_ns) / 1e9
        return {
            "detected_s": (detected - killed_ns) / 1e9,
            "program_s": after(-3),
            "imported_s": after(-2),
            "joined_s": after(-1),
            "total_s": first,
        }


@contextmanager
def torchrun(folder: Path, ranks: int) -> Iterator[Side]:
    folder.mkdir()
    log = folder / "log"
    argv = [binary("torchrun"), "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=100"]
    with log.open("wb") as file:
        agent = subprocess.Popen(
            [*argv, str(RANK), str(folder)], stdout=file, stderr=file, env=OWN_STORE | _environment()
        )

    def detected(pid: int, killed_ns: int) -> int | None:
        """From its own log: `E1201 14:03:19.123456 …] failed (exitcode: -9) local_rank: 1 (pid: 4242) …`."""
        found = re.search(rf"E(\d{{4}} [\d:.]+) .*failed \(exitcode: -9\).*\(pid: {pid}\)", log.read_text())
        if found is None:
            return None
        year = datetime.fromtimestamp(killed_ns / 1e9).astimezone().year
        at = datetime.strptime(f"{year}{found[1]}", "%Y%m%d %H:%M:%S.%f").astimezone()
        return round(at.timestamp() * 1e9)

    try:
        yield Side(name="torchrun", folder=folder, ranks=ranks, detected_ns=detected)
    finally:
        agent.terminate()
        agent.wait()


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SUBLET_")}
    return kept | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"}


@contextmanager
def server(folder: Path, gpu: int) -> Iterator[Callable[..., str]]:
    """A real `sublet up`; what comes back runs the command line against it."""
    nodes = f"nodes: [{{name: n1, spec: s, gpu: {gpu}}}]\nquotas: {{q: {{nominal: {{s: {gpu}}}}}}}\n"
    (folder / "cluster.yaml").write_text(nodes)
    environment = _environment() | {"SUBLET_DATA": str(folder / "data")}
    argv = [binary("sublet"), "up", "--port", "0", "--config", "cluster.yaml"]
    with (folder / "server.log").open("wb") as file:
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=file, stderr=file)

    def run(*arguments: str) -> str:
        argv = [binary("sublet"), *arguments]
        return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout

    try:
        until((folder / "data" / "server.json").exists, "the server")
        yield run
    finally:
        process.terminate()
        process.wait()


@contextmanager
def sublet(run: Callable[..., str], data: Path, folder: Path, ranks: int, name: str, **keys: Any) -> Iterator[Side]:
    folder.mkdir()
    tolerance = {"max_restarts": 100, "max_restarts_total": 100}
    keys = {"quota": "q", "command": f"{RANK} {folder}", "env": {"OMP_NUM_THREADS": "1"}, **keys}
    (folder / "job.json").write_text(json.dumps({**keys, "fault_tolerance": tolerance}))
    job = run("submit", str(folder / "job.json"), "-o", "name").strip()

    def detected(pid: int, killed_ns: int) -> int | None:
        """When the first supervisor wrote down that its program is gone, all of it."""
        ends = [json.loads(path.read_text()) for path in (data / "instances" / job).glob("*/*/end.json")]
        times = [end["ended_ms"] * 1_000_000 for end in ends if end["ended_ms"] * 1_000_000 > killed_ns - 1_000_000]
        return min(times, default=None)

    try:
        yield Side(name=name, folder=folder, ranks=ranks, detected_ns=detected)
    finally:
        run("stop", job)
        until(lambda: json.loads(run("show", job, "-o", "json"))["job"]["state"] == "stopped", "its end")


def recovery(folder: Path, ranks: int, kills: int) -> list[Side]:
    folder.mkdir()
    with (
        server(folder, ranks) as run,
        sublet(run, folder / "data", folder / "ours", ranks, "sublet", instances=ranks, gpu=1,
               command=f"{sys.executable} {RANK} {folder / 'ours'}") as ours,
        torchrun(folder / "theirs", ranks) as theirs,
    ):  # fmt: skip
        gone = {side.name: frozenset[int]() for side in (ours, theirs)}
        for _ in range(kills):
            for side in (ours, theirs):
                gone[side.name] = side.lose_one(gone[side.name])
    return [ours, theirs]


# ---- tables


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def middle(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--starts", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sublet-bench-") as name:
        folder = Path(name)
        with stage(folder / "instances") as on:
            starts = start_ms(on, folder, chosen.starts)
            costs = running(on, folder, chosen.seconds)
        calls = call_ns(folder)
        sides = {
            ranks: recovery(folder / f"ranks-{ranks}", ranks, chosen.kills)
            for ranks in map(int, chosen.ranks.split(","))
        }
    if chosen.json:
        samples = {f"{side.name} {ranks}": side.samples for ranks, both in sides.items() for side in both}
        print(json.dumps({"start_ms": starts, "running": costs, "call_ns": calls, "recovery": samples}))
        return
    print(datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    added = [a - b for a, b in zip(starts["ours"], starts["bare"], strict=True)]
    print(f"added to the start of a program: {middle(added):.0f} ms, at most {max(added):.0f} ms of {len(added)}\n")
    head = ["a program that prints each ms", "lines/s", "processor, % of a core", "memory, MiB"]
    print(
        table(
            head,
            [[k, f"{v['lines_s']:.0f}", f"{v['cpu_percent']:.3f}", f"{v['memory_mib']:.0f}"] for k, v in costs.items()],
        )
        + "\n"
    )
    print("; ".join(f"{name} takes {ns / 1000:.1f} µs" for name, ns in calls.items()) + "\n")
    words = ["detected", "program", "imported", "joined", "total"]
    head = ["seconds after kill -9", *words[:-1], "first step", "least to most"]
    print(table(head, [_row(side, ranks, words) for ranks, both in sides.items() for side in both]))


def _row(side: Side, ranks: int, words: list[str]) -> list[str]:
    shown = [f"{middle([one[f'{word}_s'] for one in side.samples]):.2f}" for word in words]
    totals = [one["total_s"] for one in side.samples]
    return [f"{side.name}, {ranks} ranks", *shown, f"{min(totals):.2f} to {max(totals):.2f}"]


if __name__ == "__main__":
    main()
