"""What the supervisor costs, and how fast a gang is back after a lost rank: `make bench-supervisor`.

Rule: the same program on the same machine in the same run; torchrun stands beside ours as a user would run it.

    python benchmarks/supervisor.py [--ranks 2,4] [--kills 5] [--seconds 10]

Cost: one instance that prints a line each millisecond. Recovery: a gang of torch.distributed (gloo) that saves at each
step; one rank is killed with SIGKILL; `detected`: until that was known, `first step`: until the first step after it.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sublet.client.http import API, Client

PATIENCE_S = 60
GANG = """
import json, os, pathlib, time
import torch, torch.distributed as dist
from sublet.job import checkpointed, progress
place = pathlib.Path(os.environ["BENCH_DIRECTORY"])
again = os.environ.get("TORCHELASTIC_RESTART_COUNT")
if again is None:
    dist.init_process_group("gloo")
else:  # torchrun keeps its store over a restart, and gloo then waits for ranks that are gone: a fresh store each time
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    where = f"tcp://127.0.0.1:{int(os.environ['BENCH_PORT']) + int(again)}"
    dist.init_process_group("gloo", where, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
rank = dist.get_rank()
file = place / "step"
step = int(file.read_text()) if file.exists() else 0
(place / f"pid.{rank}").write_text(str(os.getpid()))
is_first = True
while not (place / "done").exists():
    step += 1
    time.sleep(0.01)
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        if is_first:
            (place / "first.new").write_text(str(time.time_ns()))
            os.replace(place / "first.new", place / "first")
        (place / "step.new").write_text(str(step))
        os.replace(place / "step.new", file)
        checkpointed(step)
    is_first = False
    progress(step)
"""
LINES = """
import sys, time
number = 0
while True:
    number += 1
    print("a line of output that is about as long as those of a training loop usually are", number, flush=True)
    time.sleep(0.001)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sublet-bench-") as name:
        folder = Path(name)
        with serving(folder) as client:
            show("to the start of a process, ms (median of 10)", start_ms(client, folder))
            for label, value in cost(client, folder, asked.seconds):
                show(label, value)
            for ranks in map(int, asked.ranks.split(",")):
                show_recovery("sublet", ranks, recovery(client, folder, ranks, asked.kills))
        for ranks in map(int, asked.ranks.split(",")):
            show_recovery("torchrun", ranks, torchrun(folder, ranks, asked.kills))


def show(label: str, value: float) -> None:
    print(f"{label:<66} {value:8.2f}", flush=True)


def show_recovery(who: str, ranks: int, times: list[tuple[float | None, float]]) -> None:
    if not times:
        return
    seen = [detected for detected, _ in times if detected is not None]
    if seen:
        show(f"{who}, {ranks} ranks: detected, s (median of {len(seen)})", statistics.median(seen))
    show(f"{who}, {ranks} ranks: first step after the kill, s (median of {len(times)})",
         statistics.median(total for _, total in times))  # fmt: skip


# ---- ours


@contextmanager
def serving(folder: Path) -> Iterator[Client]:
    (folder / "cluster.yaml").write_text("nodes: [{name: n1, spec: demo, gpu: 8}]\nquotas: {q: {nominal: {demo: 8}}}\n")
    data = folder / "data"
    command = [sys.executable, "-m", "sublet", "up", "--port", "0", "--data", str(data), "--config", "cluster.yaml"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SUBLET_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder, env=kept | {"PATH": path})
    note = data / "server.json"
    until(note.exists, "the server")
    client = Client(url=json.loads(note.read_text())["url"], user="bench")
    try:
        yield client
        for view in client.get(f"{API}/jobs")["items"]:
            client.post(f"{API}/jobs/{view['id']}/stop")
        until(lambda: not client.get(f"{API}/jobs")["items"], "the end of all jobs")
    finally:
        server.terminate()
        server.wait()


def submit(client: Client, command: list[str], **keys: Any) -> str:
    job = {"quota": "q", "gpu": 1, "command": command, "workdir": "/tmp", **keys}
    return str(client.post(f"{API}/jobs", job)["id"])


def start_ms(client: Client, folder: Path) -> float:
    """From the grant, as the server stamped it, to the first instruction of a shell; less what a bare one takes."""
    found = []
    for _ in range(10):
        job = submit(client, ["/bin/sh", "-c", "date +%s%N"])
        detail = until(
            lambda job=job: (d := client.get(f"{API}/jobs/{job}"))["job"]["state"] == "succeeded" and d, "it"
        )
        place = folder / "data" / "instances" / job / "1" / "0"
        begun_ns = int((place / "log").read_text())
        written_ns = (place / "start.json").stat().st_mtime_ns  # the engine was told: from here on it exists
        assert detail["attempts"]
        found.append((begun_ns - written_ns) / 1e6)
    return statistics.median(found)


def cost(client: Client, folder: Path, seconds: int) -> list[tuple[str, float]]:
    job = submit(client, [sys.executable, "-c", LINES])
    lock = folder / "data" / "instances" / job / "1" / "0" / "lock"
    pid = int(until(lambda: lock.exists() and lock.read_text(), "the supervisor"))
    until(lambda: client.get(f"{API}/jobs/{job}")["job"]["state"] == "running", "the program")
    before, began = ticks(pid), time.monotonic()
    time.sleep(seconds)
    used_s = (ticks(pid) - before) / os.sysconf("SC_CLK_TCK")
    share = 100 * used_s / (time.monotonic() - began)
    memory = {
        line.split(":")[0]: int(line.split()[1]) / 1024 for line in rollup(pid) if line.startswith(("Rss", "Pss:"))
    }
    client.post(f"{API}/jobs/{job}/stop")
    return [
        ("CPU of the supervisor at a line each ms, % of one core", share),
        ("memory of the supervisor, RSS MiB", memory["Rss"]),
        ("  of which not shared with others, PSS MiB", memory["Pss"]),
    ]


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


def rollup(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()


def recovery(client: Client, folder: Path, ranks: int, kills: int) -> list[tuple[float | None, float]]:
    place = new_place(folder, f"sublet-{ranks}")
    environment = {"BENCH_DIRECTORY": str(place), "OMP_NUM_THREADS": "1"}
    job = submit(client, [sys.executable, str(place / "gang.py")], instances=ranks, env=environment)

    def detected_ns(attempt: int) -> int:
        ends = [folder / "data" / "instances" / job / str(attempt) / str(ranks - 1) / "end.json"]
        return (
            int(json.loads(until(lambda: ends[0].exists() and ends[0].read_text(), "its end"))["ended_ms"]) * 1_000_000
        )

    times = [kill_one(place, ranks, lambda number=number: detected_ns(number)) for number in range(1, kills + 1)]
    (place / "done").touch()
    until(lambda: client.get(f"{API}/jobs/{job}")["job"]["state"] in ("succeeded", "failed"), "its end")
    return times


# ---- torchrun


def torchrun(folder: Path, ranks: int, kills: int) -> list[tuple[float | None, float]]:
    """Each kill in a launch of its own."""
    return [time for number in range(kills) for time in _torchrun_once(folder, ranks, number)]


def _torchrun_once(folder: Path, ranks: int, number: int) -> list[tuple[float | None, float]]:
    """Nothing when it did not come back."""
    place = new_place(folder, f"torchrun-{ranks}-{number}")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        f"--master-port={free_port()}",
    ]
    command += ["--max-restarts=3", str(place / "gang.py")]
    environment = {**os.environ, "BENCH_DIRECTORY": str(place), "OMP_NUM_THREADS": "1", "BENCH_PORT": str(free_port())}
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return [kill_one(place, ranks, None)]
    except TimeoutError:
        show(f"torchrun, {ranks} ranks: not back within so many seconds", PATIENCE_S)
        return []
    finally:
        (place / "done").touch()
        launcher.terminate()
        launcher.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- both


def new_place(folder: Path, name: str) -> Path:
    place = folder / name
    place.mkdir()
    (place / "gang.py").write_text(GANG)
    return place


def kill_one(place: Path, ranks: int, detected_ns: Callable[[], int] | None) -> tuple[float | None, float]:
    """Seconds until the loss was known, where that can be seen, and until the first step after it."""
    until((place / "first").exists, "the first step")
    steps = int((place / "step").read_text()) if (place / "step").exists() else 0
    until(lambda: int((place / "step").read_text()) >= steps + 20, "20 steps")
    (place / "first").unlink()
    killed_ns = time.time_ns()
    os.kill(int((place / f"pid.{ranks - 1}").read_text()), signal.SIGKILL)
    first_ns = int(until(lambda: (place / "first").exists() and (place / "first").read_text(), "the next first step"))
    known = None if detected_ns is None else (detected_ns() - killed_ns) / 1e9
    return known, (first_ns - killed_ns) / 1e9


def until(holds: Callable[[], Any], what: str) -> Any:
    limit = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        if time.monotonic() > limit:
            raise TimeoutError(f"{what} did not come within {PATIENCE_S} s")
        time.sleep(0.01)
    return found


if __name__ == "__main__":
    main()
