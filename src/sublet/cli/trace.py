"""`sublet trace`: job streams from published traces, and from a seed."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from sublet.cli.replay import FILE, Time

if TYPE_CHECKING:
    from sublet.sim.traces import TraceJob

OUT = click.Path(dir_okay=False, path_type=Path, allow_dash=True)
LOAD = 0.8  # of the cluster that is written for a stream
NODE_GPUS = 8


@click.group()
def command() -> None:
    """Job streams: import published ones, generate others."""


@command.command("import")
@click.argument("kind", type=click.Choice(("philly", "itp", "openb", "gfs")))
@click.argument("files", type=FILE, nargs=-1, required=True)
@click.option("--out", type=OUT, default="-", help="Where the stream goes; else to the standard output.")
@click.option("--cluster-out", type=OUT, help="Also write a cluster that fits the stream.")
@click.option("--from-day", type=float, default=0.0, help="Leave out what was submitted before this day of the trace.")
@click.option("--days", type=float, help="Keep what was submitted within so many days.")
@click.option("--max-duration", type=Time(), help="Cut longer jobs to this, as in 7d.")
def import_(
    kind: str,
    files: tuple[Path, ...],
    out: Path,
    cluster_out: Path | None,
    from_day: float,
    days: float | None,
    max_duration: int | None,
) -> None:
    """Convert published FILES of a trace, unpacked, to a job stream.

    \b
    philly  cluster_job_log                  github.com/msr-fiddle/philly-traces
    itp     one CSV file a cluster           github.com/microsoft/elasticflow-traces (data/raw-traces.tar.gz)
    openb   openb_pod_list_*.csv, and the    github.com/alibaba/clusterdata (cluster-trace-gpu-v2023)
            node list for --cluster-out
    gfs     job_info_df.csv, and             github.com/alibaba/clusterdata (cluster-trace-v2026-spot-gpu)
            node_info_df.csv likewise

    Virtual clusters (philly), clusters (itp, by file), service classes (openb) and organisations (gfs) become quotas.
    """
    from sublet.sim.importers import import_trace

    found = import_trace(kind, files, from_s=round(from_day * 86_400), days=days, max_duration_ms=max_duration)
    left_out = ", ".join(f"{count} {why}" for why, count in sorted(found.left_out.items()))
    click.echo(f"{len(found.jobs)} jobs" + (f"; left out: {left_out}" if left_out else "") + ".", err=True)
    write(found.jobs, out)
    if cluster_out is not None and found.jobs:
        write_fitting_cluster(found.jobs, found.nodes, cluster_out)


@command.command()
@click.option("--quota", "quotas", multiple=True, metavar="NAME=GPUS", help="Once for each quota; else three of them.")
@click.option("--days", type=click.FloatRange(min=0.01), default=7.0, show_default=True, help="How long it is.")
@click.option("--load", type=click.FloatRange(min=0.01), default=0.75, show_default=True, help="Of what is promised.")
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same stream.")
@click.option("--out", type=OUT, default="-", help="Where the stream goes; else to the standard output.")
@click.option("--cluster-out", type=OUT, help="Also write the cluster that it is made for, nodes of 8 GPUs.")
def generate(quotas: tuple[str, ...], days: float, load: float, seed: int, out: Path, cluster_out: Path | None) -> None:
    """Make a job stream from a seed: teams with a daily rhythm, mostly short and small jobs."""
    from sublet.sim.generate import Plan
    from sublet.sim.generate import generate as make
    from sublet.sim.traces import DEFAULT_SPEC, write_cluster

    promised = dict(quota_of(text) for text in quotas or ("research=64", "vision=32", "speech=16"))
    write(make(Plan(quotas=promised, days=days, load=load, seed=seed)), out)
    if cluster_out is not None:
        nodes = [{"name": "n", "count": -(-sum(promised.values()) // NODE_GPUS), "gpu": NODE_GPUS}]
        with opened(cluster_out) as file:
            write_cluster(nodes, {name: {DEFAULT_SPEC: gpus} for name, gpus in promised.items()}, file)


def quota_of(text: str) -> tuple[str, int]:
    name, _, gpus = text.partition("=")
    if not name or not gpus.isdigit() or int(gpus) < 1:
        raise click.BadParameter(f"{text!r} is no NAME=GPUS.", param_hint="--quota")
    return name, int(gpus)


def write(jobs: "Sequence[TraceJob]", out: Path) -> None:
    from sublet.sim.traces import write_stream

    with opened(out) as file:
        write_stream(jobs, file)


def opened(out: Path) -> Any:
    """A file to write to; `-` is the standard output, which stays open."""
    from contextlib import nullcontext

    if str(out) == "-":
        return nullcontext[TextIO](sys.stdout)
    return out.open("w", encoding="utf-8", newline="")


def write_fitting_cluster(jobs: "Sequence[TraceJob]", machines: Sequence[tuple[str, int]], out: Path) -> None:
    """The machines of the trace where it names them, else as many nodes of 8 GPUs as keep busy to LOAD."""
    from collections import Counter

    from sublet.sim.generate import nodes_needed, quotas_for
    from sublet.sim.traces import write_cluster

    kinds: Mapping[tuple[str, int], int] = Counter(machines)
    if not kinds:
        kinds = {(spec, NODE_GPUS): count for spec, count in nodes_needed(jobs, LOAD, NODE_GPUS).items()}
    gpus: dict[str, int] = {}
    nodes = []
    for index, ((spec, size), count) in enumerate(sorted(kinds.items())):
        gpus[spec] = gpus.get(spec, 0) + size * count
        nodes.append({"name": f"n{index}-", "count": count, "gpu": size, "spec": spec})
    with opened(out) as file:
        write_cluster(nodes, quotas_for(jobs, gpus), file)
