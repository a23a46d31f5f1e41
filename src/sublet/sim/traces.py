"""Job streams and the clusters they run on: reading and writing them. The one rule kept: a line that makes no sense is
refused with its number, never skipped.

A stream is a CSV file with the columns `job, submit_s, duration_s, gpus, quota`; further ones may follow: `idle`
(never, acceptable or only) and `spec`. A cluster is a YAML file with the `nodes` and `quotas` of a scenario.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sublet.domain.errors import Refused
from sublet.domain.jobs import IdlePolicy
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota, Strategy
from sublet.sim import scenario

COLUMNS = ("job", "submit_s", "duration_s", "gpus", "quota")
FURTHER_COLUMNS = ("idle", "spec")
DEFAULT_SPEC = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One line of a stream: `gpus` in all, whole; times since the stream's start."""

    id: str
    submit_ms: int
    duration_ms: int
    gpus: int
    quota: str
    idle: IdlePolicy = IdlePolicy.ACCEPTABLE
    spec: str = DEFAULT_SPEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    nodes: tuple[Node, ...]
    quotas: tuple[Quota, ...]

    @property
    def gpus(self) -> int:
        return sum(node.gpu for node in self.nodes)

    def node_gpus(self, spec: str) -> int:
        """GPUs of the largest node of a spec; 0 = there is none."""
        return max((node.gpu for node in self.nodes if node.spec == spec), default=0)


def read_stream(path: Path) -> list[TraceJob]:
    """The jobs in order of their submission, then of the file. `Refused` with the line when one makes no sense."""
    with opened(path) as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise Refused(
                what=f"{path.name} is no job stream.",
                why=f"It lacks the columns {', '.join(missing)}.",
                hint="Published traces are converted with `sublet trace import`.",
                code="stream_malformed",
            )
        jobs = [job_of(row, path.name, reader.line_num) for row in reader]
    if not jobs:
        raise Refused(what=f"{path.name} holds no jobs.", hint="A stream has one line a job.", code="stream_malformed")
    return sorted(jobs, key=lambda job: job.submit_ms)


def opened(path: Path) -> TextIO:
    try:
        return path.open(newline="", encoding="utf-8")
    except OSError as error:
        raise Refused(
            what=f"{path} cannot be read.", why=f"{error.strerror}.", hint="Check the path.", code="file_unreadable"
        ) from error


def job_of(row: Mapping[str, str], file: str, line: int) -> TraceJob:
    try:
        job = TraceJob(
            id=row["job"],
            submit_ms=milliseconds(row["submit_s"]),
            duration_ms=milliseconds(row["duration_s"]),
            gpus=int(row["gpus"]),
            quota=row["quota"],
            idle=IdlePolicy(row.get("idle") or IdlePolicy.ACCEPTABLE),
            spec=row.get("spec") or DEFAULT_SPEC,
        )
    except (TypeError, ValueError) as error:
        raise malformed(file, line, f"{error}.") from error
    if job.gpus < 1 or job.duration_ms < 0 or not job.quota or not job.id:
        raise malformed(file, line, "A job has a name, a quota, one GPU or more and a duration of zero or more.")
    return job


def malformed(file: str, line: int, why: str) -> Refused:
    return Refused(
        what=f"Line {line} of {file} cannot be understood.", why=why, hint="Correct the line.", code="stream_malformed"
    )


def milliseconds(seconds: str | float) -> int:
    return round(float(seconds) * 1000)


def seconds(value_ms: int) -> str:
    return f"{value_ms / 1000:.3f}".rstrip("0").rstrip(".")


def write_stream(jobs: Iterable[TraceJob], file: TextIO) -> int:
    """Write the five columns, and the further ones where a job needs them; returns the number of jobs."""
    rows = list(jobs)
    plain = all(job.idle is IdlePolicy.ACCEPTABLE and job.spec == DEFAULT_SPEC for job in rows)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS if plain else COLUMNS + FURTHER_COLUMNS)
    for job in rows:
        cells = [job.id, seconds(job.submit_ms), seconds(job.duration_ms), str(job.gpus), job.quota]
        writer.writerow(cells if plain else [*cells, job.idle.value, job.spec])
    return len(rows)


def sizes_of(gpus: int, node_gpus: int) -> tuple[int, ...]:
    """GPUs of each instance: one instance up to a whole node, else whole nodes, the last holds the rest."""
    if node_gpus < 1 or gpus <= node_gpus:
        return (gpus,)
    whole, rest = divmod(gpus, node_gpus)
    return (node_gpus,) * whole + ((rest,) if rest else ())


# ---- clusters


def read_cluster(path: Path) -> Cluster:
    """The nodes and quotas of a scenario file. `Refused` when it has none or says what no scenario can say."""
    found = scenario.load(path)
    if not found.nodes or not found.quotas:
        raise Refused(
            what=f"{path.name} is no cluster.",
            why="It needs `nodes` and `quotas`.",
            hint="Write them as in a scenario.",
            code="cluster_malformed",
        )
    return Cluster(nodes=found.nodes, quotas=found.quotas)


def write_cluster(nodes: Sequence[Mapping[str, Any]], quotas: Mapping[str, Mapping[str, int]], file: TextIO) -> None:
    """`nodes` are entries as the file holds them; `quotas`: GPUs by spec by name. All queues skip a blocked head."""
    file.write("nodes:\n")
    for node in nodes:
        file.write("  - {" + ", ".join(f"{key}: {quoted(value)}" for key, value in node.items()) + "}\n")
    file.write("quotas:\n")
    for name, nominal in quotas.items():
        plain = list(nominal) == [DEFAULT_SPEC]
        gpu = nominal[DEFAULT_SPEC] if plain else "{" + ", ".join(f"{quoted(s)}: {n}" for s, n in nominal.items()) + "}"
        file.write(f"  - {{name: {quoted(name)}, gpu: {gpu}, strategy: {Strategy.ROUND_ROBIN.value}}}\n")


def quoted(value: object) -> str:
    return str(value) if isinstance(value, int) else '"' + str(value).replace('"', "") + '"'
