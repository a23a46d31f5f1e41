"""Commands about webhooks.

One rule: a secret is shown once, by the command that makes it.
"""

from collections.abc import Sequence
from typing import Any

import click

from sublet.cli.call import client
from sublet.cli.show import NONE, clock, columns, emit, output_option
from sublet.client.http import API, segment


@click.group()
def notify() -> None:
    """Webhooks: who is told when jobs fail, hang, or have to leave."""


@notify.command()
@click.argument("name")
@click.option("--url", required=True, help="Where to: https://host/path.")
@click.option(
    "--on", "kinds", metavar="KINDS", default="", help="failed,notice,preempted,hang,lost_progress,suspected."
)
@click.option("--quota", default="", help="Only of this quota's jobs, and of those below it.")
@output_option
@click.pass_context
def add(context: click.Context, name: str, url: str, kinds: str, quota: str, output: str) -> None:
    """Tell NAME from now on. Without --on it hears only of jobs that name it in their file."""
    body = {"name": name, "url": url, "on": [kind for kind in kinds.split(",") if kind], "quota": quota}
    emit(output, client(context).post(f"{API}/webhooks", body), _made, name="name")


@notify.command()
@click.argument("name")
@output_option
@click.pass_context
def rotate(context: click.Context, name: str, output: str) -> None:
    """Give NAME a new secret. The one before it signs as well, until the next time."""
    emit(output, client(context).post(f"{API}/webhooks/{segment(name)}/rotate"), _made, name="name")


@notify.command()
@output_option
@click.pass_context
def ls(context: click.Context, output: str) -> None:
    """The webhooks."""
    emit(output, client(context).get(f"{API}/webhooks"), _hooks, name="name")


@notify.command()
@click.argument("name")
@click.pass_context
def rm(context: click.Context, name: str) -> None:
    """Tell NAME nothing more; what waits for it is given up."""
    client(context).call("DELETE", f"{API}/webhooks/{segment(name)}")
    click.echo(f"{name} is removed")


@notify.command()
@click.argument("name")
@output_option
@click.pass_context
def test(context: click.Context, name: str, output: str) -> int:
    """Send NAME a test message, once. Exit code 1: it was not taken."""
    view = client(context).post(f"{API}/webhooks/{segment(name)}/test")
    emit(output, view, lambda view: f"{view['state'].replace('_', ' ')}: {view['answer']}")
    return 0 if view["state"] == "delivered" else 1


@notify.command()
@click.argument("name", required=False, default="")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="So many at most.")
@output_option
@click.pass_context
def log(context: click.Context, name: str, limit: int, output: str) -> None:
    """What was told, the newest first, and what came back."""
    emit(output, client(context).get(f"{API}/deliveries", {"webhook": name, "limit": limit}), _deliveries)


def _made(view: dict[str, Any]) -> str:
    what = ", ".join(view["on"]) or "what jobs ask for"
    return f"{view['name']} is told of {what}.\nIts secret, shown this once: {view['secret']}"


def _hooks(answer: dict[str, Any]) -> str:
    if not answer["items"]:
        return "No webhooks. Add one: sublet notify add NAME --url URL --on failed,preempted"
    rows = [[one["name"], one["url"], ", ".join(one["on"]) or NONE, one["quota"] or NONE] for one in answer["items"]]
    return columns(("WEBHOOK", "URL", "ON", "QUOTA"), rows)


def _deliveries(answer: dict[str, Any]) -> str:
    head = ("MADE", "WEBHOOK", "KIND", "SUBJECT", "STATE", "TRIES", "NEXT", "ANSWER")
    rows: Sequence[list[str]] = [
        [
            clock(one["made"]),
            one["webhook"],
            one["kind"],
            one["subject"],
            one["state"].replace("_", " "),
            str(one["tries"]),
            clock(one["next"]) if one["next"] else NONE,
            one["answer"] or NONE,
        ]
        for one in answer["items"]
    ]
    return columns(head, rows, right=("TRIES",)) if rows else "Nothing was told yet."
