"""Commands about nodes.

One rule: who stands on idle resources of a node is not said, only how much is lent.
"""

from typing import Any

import click

from sublet.cli.call import client
from sublet.cli.show import NONE, clock, columns, count, emit, output_option, plural
from sublet.client.http import API, segment

HEAD = ("NODE", "SPEC", "STATE", "GPU", "OWN", "LENT", "FREE", "JOBS")


@click.group()
def node() -> None:
    """The machines."""


@node.command()
@output_option
@click.pass_context
def ls(context: click.Context, output: str) -> None:
    """The nodes, their state, and what is free of them."""
    emit(output, client(context).get(f"{API}/nodes"), _table, name="name")


@node.command()
@click.argument("name")
@output_option
@click.pass_context
def show(context: click.Context, name: str, output: str) -> None:
    """One node, and the faults that are held against it."""
    emit(output, client(context).get(f"{API}/nodes/{segment(name)}"), _node, name="name")


@node.command()
@click.argument("name")
@click.pass_context
def drain(context: click.Context, name: str) -> None:
    """Give the node nobody new; who is there stays."""
    _change(context, name, "drain")


@node.command()
@click.argument("name")
@click.pass_context
def resume(context: click.Context, name: str) -> None:
    """Use a drained node again."""
    _change(context, name, "resume")


def _change(context: click.Context, name: str, verb: str) -> None:
    view = client(context).post(f"{API}/nodes/{segment(name)}/{verb}")
    click.echo(f"{view['name']} is {view['state']}")


def _node(view: dict[str, Any]) -> str:
    suspected = "no" if view["suspected_until"] is None else f"until {clock(view['suspected_until'])}"
    lines = [
        ("node", view["name"]),
        ("spec", view["spec"]),
        ("state", view["state"].capitalize()),
        ("gpu", f"{count(view['gpu'])}: {view['own']} own, {view['lent']} lent, {view['free']} free"),
        ("jobs", ", ".join(view["jobs"]) or NONE),
        ("suspected", suspected),
    ]
    text = "\n".join(f"{name:<11}{value}" for name, value in lines)
    rows = [[clock(one["time"]), one["cause"].replace("_", " ")] for one in view["faults"]]
    head = f"Faults of machines met {plural(view['faulted_jobs'], 'job')} there:"
    return "\n".join([text, "", head, columns(("TIME", "FAULT"), rows)]) if rows else text


def _table(answer: dict[str, Any]) -> str:
    rows = [
        [
            item["name"],
            item["spec"],
            item["state"].capitalize() + (", suspected" if item["suspected_until"] else ""),
            *(count(item[key]) for key in ("gpu", "own", "lent", "free")),
            ", ".join(item["jobs"]) or NONE,
        ]
        for item in answer["items"]
    ]
    return columns(HEAD, rows, right=HEAD[3:7]) if rows else "No nodes."
