"""Published traces, in the formats in which their publishers give them, as job streams. The one rule kept: a row that
cannot be a job (it never ran, it asks for no GPU) is left out and counted, never made up.

philly  Microsoft Philly (msr-fiddle/philly-traces): `cluster_job_log`, one JSON list; a virtual cluster is a quota.
itp     Microsoft ITP (microsoft/elasticflow-traces): one CSV file a cluster; a cluster, named by its file, is a quota.
openb   Alibaba OpenB (clusterdata, cluster-trace-gpu-v2023): pod lists, CSV; a service class is a quota.
gfs     Alibaba GFS (clusterdata, cluster-trace-v2026-spot-gpu): `job_info_df.csv`; an organisation is a quota.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sublet.domain.errors import Refused
from sublet.domain.jobs import IdlePolicy
from sublet.sim.traces import DEFAULT_SPEC, TraceJob, opened

# Machine lists: the columns of the name, of the GPUs, and of the kind of node ("": pods do not ask for one).
NODE_COLUMNS = {"openb": ("sn", "gpu", ""), "gfs": ("node_name", "gpu_capacity_num", "gpu_model")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """`jobs` by submission, the first at 0. `left_out`: rows by why. `nodes`: spec and GPUs of each machine given."""

    jobs: tuple[TraceJob, ...]
    left_out: Mapping[str, int]
    nodes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LeftOut:
    why: str


Reader = Callable[[Path], Iterator[TraceJob | LeftOut]]


def import_trace(
    kind: str, paths: Sequence[Path], *, from_s: int = 0, days: float | None = None, max_duration_ms: int | None = None
) -> Imported:
    """Read the files; keep what was submitted in the window that starts `from_s` after the first; cut durations."""
    reader = IMPORTERS[kind]
    left_out: dict[str, int] = {}
    jobs: list[TraceJob] = []
    nodes: list[tuple[str, int]] = []
    for path in paths:
        if kind in NODE_COLUMNS and is_node_list(path, NODE_COLUMNS[kind]):
            nodes += read_nodes(path, *NODE_COLUMNS[kind])
            continue
        for found in checked(reader, path):
            if isinstance(found, LeftOut):
                left_out[found.why] = left_out.get(found.why, 0) + 1
            else:
                jobs.append(found)
    return Imported(jobs=window(jobs, from_s, days, max_duration_ms), left_out=left_out, nodes=tuple(nodes))


def checked(reader: Reader, path: Path) -> Iterator[TraceJob | LeftOut]:
    try:
        yield from reader(path)
    except (TypeError, ValueError) as error:
        raise wrong_format(path, f"A row cannot be understood: {error}.") from error


def window(
    jobs: Iterable[TraceJob], from_s: int, days: float | None, max_duration_ms: int | None
) -> tuple[TraceJob, ...]:
    ordered = sorted(jobs, key=lambda job: job.submit_ms)
    if not ordered:
        return ()
    start = ordered[0].submit_ms + from_s * 1000
    end = math.inf if days is None else start + days * 86_400_000
    cut = math.inf if max_duration_ms is None else max_duration_ms
    return tuple(
        replace(job, submit_ms=job.submit_ms - start, duration_ms=int(min(job.duration_ms, cut)))
        for job in ordered
        if start <= job.submit_ms < end
    )


# ---- Philly


def philly(path: Path) -> Iterator[TraceJob | LeftOut]:
    with opened(path) as file:
        try:
            document = json.load(file)
        except json.JSONDecodeError as error:
            raise wrong_format(path, "It is no JSON list of jobs, as `cluster_job_log` is.") from error
    if not isinstance(document, list):
        raise wrong_format(path, "It is no JSON list of jobs, as `cluster_job_log` is.")
    for entry in document:
        yield philly_job(entry, path)


def philly_job(entry: Mapping[str, Any], path: Path) -> TraceJob | LeftOut:
    """GPUs: the most that an attempt held. Duration: the running time of all attempts."""
    try:
        attempts, submitted = entry["attempts"], philly_ms(entry["submitted_time"])
        gpus = max((sum(len(host["gpus"]) for host in attempt["detail"]) for attempt in attempts), default=0)
        times = [(philly_ms(attempt["start_time"]), philly_ms(attempt["end_time"])) for attempt in attempts]
        name, quota = str(entry["jobid"]), str(entry["vc"])
    except (KeyError, TypeError, ValueError) as error:
        raise wrong_format(path, f"A job lacks what every job has: {error!r}.") from error
    if submitted is None:
        return LeftOut("no submit time")
    duration = sum(end - start for start, end in times if start is not None and end is not None)
    if not gpus or duration <= 0:
        return LeftOut("never ran")
    return TraceJob(id=name, submit_ms=submitted, duration_ms=duration, gpus=gpus, quota=quota)


def philly_ms(text: str | None) -> int | None:
    """Their clocks tell no zone; a missing time is null or the text None."""
    if not text or text == "None":
        return None
    return round(datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp() * 1000)


# ---- the CSV formats


def itp(path: Path) -> Iterator[TraceJob | LeftOut]:
    for row in rows_of(path, ("job_id", "submission_time", "duration", "num_gpu")):
        yield job_or_why(
            name=row["job_id"],
            submit_s=row["submission_time"],
            duration_s=float(row["duration"]),
            gpus=whole(row["num_gpu"]),
            quota=path.stem,
        )


def openb(path: Path) -> Iterator[TraceJob | LeftOut]:
    """A share of a GPU counts as a whole one: capacity is lent in whole GPUs."""
    for row in rows_of(path, ("name", "num_gpu", "qos", "creation_time", "deletion_time", "scheduled_time")):
        if not row["scheduled_time"] or not row["deletion_time"]:
            yield LeftOut("never ran")
            continue
        yield job_or_why(
            name=row["name"],
            submit_s=row["creation_time"],
            duration_s=float(row["deletion_time"]) - float(row["scheduled_time"]),
            gpus=whole(row["num_gpu"]),
            quota=row["qos"],
        )


def gfs(path: Path) -> Iterator[TraceJob | LeftOut]:
    """High-priority jobs run in their organisation's own quota alone, spot jobs on idle capacity alone."""
    columns = (
        "job_name",
        "organization",
        "gpu_model",
        "gpu_request",
        "worker_num",
        "submit_time",
        "duration",
        "job_type",
    )
    for row in rows_of(path, columns):
        if row["job_type"] not in ("HP", "Spot"):
            yield LeftOut("neither HP nor Spot")
            continue
        yield job_or_why(
            name=row["job_name"],
            submit_s=row["submit_time"],
            duration_s=float(row["duration"]),
            gpus=whole(row["gpu_request"]) * whole(row["worker_num"]),
            quota=f"org{row['organization']}",
            idle=IdlePolicy.NEVER if row["job_type"] == "HP" else IdlePolicy.ONLY,
            spec=row["gpu_model"] or DEFAULT_SPEC,
        )


def job_or_why(
    *,
    name: str,
    submit_s: str,
    duration_s: float,
    gpus: int,
    quota: str,
    idle: IdlePolicy = IdlePolicy.ACCEPTABLE,
    spec: str = DEFAULT_SPEC,
) -> TraceJob | LeftOut:
    if gpus < 1:
        return LeftOut("asks for no GPU")
    if duration_s <= 0:
        return LeftOut("never ran")
    return TraceJob(
        id=name,
        submit_ms=round(float(submit_s) * 1000),
        duration_ms=round(duration_s * 1000),
        gpus=gpus,
        quota=quota,
        idle=idle,
        spec=spec,
    )


def whole(text: str) -> int:
    return math.ceil(float(text or 0))


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    with opened(path) as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise wrong_format(path, f"It lacks the columns {', '.join(missing)}.")
        yield from reader


def is_node_list(path: Path, columns: Sequence[str]) -> bool:
    with opened(path) as file:
        return set(columns) - {""} <= set(csv.DictReader(file).fieldnames or ())


def read_nodes(path: Path, name: str, gpu: str, model: str) -> list[tuple[str, int]]:
    """Spec and GPUs of every machine that has one."""
    rows = rows_of(path, (name, gpu, *([model] if model else [])))
    return [(row[model] if model else DEFAULT_SPEC, int(row[gpu])) for row in rows if int(row[gpu])]


def wrong_format(path: Path, why: str) -> Refused:
    return Refused(
        what=f"{path.name} is not in the expected format.",
        why=why,
        hint="Name the file as its publisher gives it, unpacked.",
        code="trace_format",
    )


IMPORTERS: Mapping[str, Reader] = {
    "philly": philly,
    "itp": itp,
    "openb": openb,
    "gfs": gfs,
}
