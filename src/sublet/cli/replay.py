"""`sublet replay`: a job stream through the production scheduler, and what it came to."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sublet.sim.metrics import Replayed
    from sublet.sim.replay import Settings
    from sublet.sim.traces import Cluster, TraceJob

POLICIES = ("isolated", "no-reclaim", "lend")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class Time(click.ParamType[int]):
    """`90s`, `5m`, `2h`, `7d` or plain seconds, as milliseconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from sublet.domain.errors import Refused
        from sublet.sim.scenario import milliseconds

        if isinstance(value, int):
            return value
        try:
            return milliseconds(float(value) if value.replace(".", "", 1).isdigit() else value, "the time")
        except Refused as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("trace", type=FILE)
@click.option("--cluster", type=FILE, required=True, help="Nodes and quotas, as in a scenario.")
@click.option("--policy", type=click.Choice(POLICIES), default="lend", show_default=True, help="What may be lent.")
@click.option("--checkpoint-every", type=Time(), default="30m", show_default=True, help="0: a job saves nothing.")
@click.option(
    "--restart-cost", type=Time(), default="60s", show_default=True, help="Running time that a restart costs."
)
@click.option(
    "--warm-up", type=Time(), default="7d", show_default=True, help="What is submitted before is not counted."
)
@click.option("--json", "as_json", is_flag=True, help="The metrics as one JSON object.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with pictures here.")
def command(
    trace: Path,
    cluster: Path,
    policy: str,
    checkpoint_every: int,
    restart_cost: int,
    warm_up: int,
    as_json: bool,
    report: Path | None,
) -> None:
    """Replay a job stream in simulated time.

    The production scheduler runs the stream TRACE on the cluster, with real placement, as fast as it goes. Measured are
    waiting, evictions, lost work and allocation. A job that is evicted goes on from its last checkpoint.
    """
    import json

    from sublet.sim.metrics import measure
    from sublet.sim.replay import Policy, Settings
    from sublet.sim.report import NAMES, figure
    from sublet.sim.report import report as page
    from sublet.sim.traces import read_cluster, read_stream

    settings = Settings(
        policy=Policy(policy),
        checkpoint_every_ms=checkpoint_every,
        restart_cost_ms=restart_cost,
        warm_up_ms=warm_up,
    )
    replayed = run(read_stream(trace), read_cluster(cluster), settings, policy)
    metrics = measure(replayed)
    if report is not None:
        report.write_text(page(f"Replay of {trace.stem}", policy, replayed, metrics), encoding="utf-8")
        click.echo(f"The report is in {report}.", err=True)
    if as_json:
        click.echo(json.dumps(metrics))
        return
    width = max(map(len, NAMES.values()))
    for key, words in NAMES.items():
        click.echo(f"{words:<{width}}  {figure(key, metrics[key]):>10}")


def run(jobs: "list[TraceJob]", cluster: "Cluster", settings: "Settings", label: str) -> "Replayed":
    """Replay with a progress bar, where somebody looks."""
    from sublet.sim.replay import replay

    is_watched = sys.stderr.isatty()
    with click.progressbar(length=len(jobs), label=label, file=sys.stderr, hidden=not is_watched) as bar:
        return replay(jobs, cluster, settings, bar.update)
