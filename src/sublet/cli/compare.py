"""`sublet compare`: one job stream under two policies or settings, side by side."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sublet.cli.replay import FILE, POLICIES, Time, run

if TYPE_CHECKING:
    from sublet.sim.replay import Settings

TIMES = {"checkpoint-every": "checkpoint_every_ms", "restart-cost": "restart_cost_ms", "warm-up": "warm_up_ms"}
RULES = {"grace": "grace_ms", "cooldown": "cooldown_ms", "reclaim-delay": "reclaim_delay_ms"}
RESERVE = "reserve"  # percent


class Variant(click.ParamType[tuple[str, dict[str, int]]]):
    """A policy, and settings that differ from the usual ones: `lend,cooldown=5m`."""

    name = "variant"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, dict[str, int]]:
        policy, *pairs = str(value).split(",")
        if policy not in POLICIES:
            self.fail(f"There is no policy {policy!r}. Choose from {', '.join(POLICIES)}.", param, ctx)
        given: dict[str, int] = {}
        for pair in pairs:
            key, _, text = pair.partition("=")
            if key == RESERVE:
                given[key] = int(text) if text.isdigit() else self.fail(f"{text!r} is no percentage.", param, ctx)
            elif key in TIMES or key in RULES:
                given[key] = Time().convert(text, param, ctx)
            else:
                known = ", ".join([*TIMES, *RULES, RESERVE])
                self.fail(f"There is no setting {key!r}. Choose from {known}.", param, ctx)
        return str(value), {"": POLICIES.index(policy), **given}


@click.command()
@click.argument("trace", type=FILE)
@click.argument("left", type=Variant())
@click.argument("right", type=Variant())
@click.option("--cluster", type=FILE, required=True, help="Nodes and quotas, as in a scenario.")
@click.option("--json", "as_json", is_flag=True, help="The comparison as JSON.")
def command(
    trace: Path, left: tuple[str, dict[str, int]], right: tuple[str, dict[str, int]], cluster: Path, as_json: bool
) -> None:
    """Replay a job stream under two policies, side by side.

    LEFT and RIGHT are a policy (isolated, no-reclaim or lend) with settings after commas, as in lend,cooldown=5m.
    Settings are checkpoint-every, restart-cost, warm-up, grace, cooldown, reclaim-delay and reserve (in percent).
    """
    import json

    from sublet.sim.compare import compare, table
    from sublet.sim.metrics import measure
    from sublet.sim.traces import read_cluster, read_stream

    jobs, nodes = read_stream(trace), read_cluster(cluster)
    measured = [measure(run(jobs, nodes, settings_of(given), name)) for name, given in (left, right)]
    rows = compare(*measured)
    if as_json:
        click.echo(json.dumps({"left": left[0], "right": right[0], "metrics": rows}))
    else:
        click.echo(table((left[0], right[0]), rows))


def settings_of(given: dict[str, int]) -> "Settings":
    from sublet.sim.replay import Policy, Settings

    usual = Settings(policy=Policy(POLICIES[given[""]]))
    times: dict[str, Any] = {name: given[key] for key, name in TIMES.items() if key in given}
    rules: dict[str, Any] = {name: given[key] for key, name in RULES.items() if key in given}
    if RESERVE in given:
        rules["reserve_percent"] = given[RESERVE]
    return replace(usual, rules=replace(usual.rules, **rules), **times)
