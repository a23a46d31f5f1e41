"""What happened, as sentences, from the log.

One rule: in order, each once; with --follow also across a restart of the server.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from sublet.cli.call import client
from sublet.cli.show import clock, cut
from sublet.client import follow as sse
from sublet.client.http import API, Client
from sublet.domain.errors import Unavailable

RETRY_S = 0.5
RETRIES = 60


@click.command()
@click.option("-f", "--follow", "is_followed", is_flag=True, help="Go on with what happens.")
@click.option("--job", default="", help="Only of this job.")
@click.option("--after", type=click.IntRange(0), default=0, help="Only behind this number.")
@click.option("--type", "kinds", multiple=True, help="Only of this kind, as preempted; repeatable.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "jsonl"]), default="table", help="How to print it.")
@click.pass_context
def events(
    context: click.Context, is_followed: bool, job: str, after: int, kinds: tuple[str, ...], output: str
) -> None:
    """What happened, as sentences."""
    server = client(context)
    found = (view for view in _past(server, job, after) if not kinds or view["type"] in kinds)
    if output == "json" and not is_followed:
        click.echo(json.dumps({"api": "sublet/v1", "kind": "EventList", "items": list(found), "next": None}, indent=2))
        return
    if not is_followed:
        for view in found:
            _print(view, output)
        return
    for view in _present(server, job, after):
        if not kinds or view["type"] in kinds:
            _print(view, output)


def _past(server: Client, job: str, after: int) -> Iterator[dict[str, Any]]:
    cursor: str | None = str(after)
    while cursor is not None:
        page = server.get(f"{API}/events", {"after": cursor, "job": job})
        yield from page["items"]
        cursor = page["next"]


def _present(server: Client, job: str, after: int) -> Iterator[dict[str, Any]]:
    """Goes on behind the last one seen when the server was away for a while."""
    left = RETRIES
    while True:
        try:
            with server.stream(f"{API}/events", {"after": after, "job": job}) as chunks:
                for view in sse.events(chunks):
                    after, left = view["sequence"], RETRIES
                    yield view
        except Unavailable:
            left -= 1
            if left == 0:
                raise
        time.sleep(RETRY_S)


def _print(view: dict[str, Any], output: str) -> None:
    click.echo(json.dumps(view, ensure_ascii=False) if output in ("json", "jsonl") else _line(view))
    sys.stdout.flush()


def _line(view: dict[str, Any]) -> str:
    who = f" ({view['user']})" if view["user"] else ""
    about = " ".join(part for part in (view["subject"], view["name"]) if part) + who
    return cut(f"{clock(view['time'])}  {view['type']:<11} {about:<32}  {view['text']}   seq {view['sequence']:,}")
