"""Commands about quotas.

One rule: the numbers of a line add up: guaranteed = own + lent + free.
"""

from pathlib import Path
from typing import Any

import click

from sublet.cli.call import client
from sublet.cli.show import NONE, columns, count, emit, output_option, plural
from sublet.client.http import API
from sublet.domain.errors import Refused

HEAD = ("QUOTA", "SPEC", "GUARANTEED", "OWN", "LENT", "FREE", "BORROWED", "WAITING", "OWNER")
NUMBERS = ("guaranteed", "own", "lent", "free", "borrowed")


@click.group()
def quota() -> None:
    """Who is promised what, and where it is now."""


@quota.command()
@output_option
@click.pass_context
def ls(context: click.Context, output: str) -> None:
    """What each quota is promised, uses, lends and borrows."""
    emit(output, client(context).get(f"{API}/quotas"), _table, name="name")


@quota.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.pass_context
def apply(context: click.Context, file: str) -> None:
    """Set the quotas and rules that FILE describes; those that it does not name stay."""
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(what=f"{file} cannot be read.", why=f"The system says: {error}.", code="file") from error
    answer = client(context).call("PUT", f"{API}/quotas", query={"file": file}, body=text)
    click.echo(f"Set: {', '.join(answer['changed'])}" if answer["changed"] else "Nothing to change.")


def _table(answer: dict[str, Any]) -> str:
    items = answer["items"]
    if not items:
        return "No quotas. Describe some in a file: sublet quota apply FILE"
    sums = [_sum(items, spec) for spec in sorted({item["spec"] for item in items})]
    rows = [_row(item) for item in (*items, *sums)]
    rows[-1][-1] = "guaranteed = own + lent + free"
    single = len(sums) == 1
    head = [title for title in HEAD if not (single and title == "SPEC")]
    cells = [[cell for title, cell in zip(HEAD, row, strict=True) if not (single and title == "SPEC")] for row in rows]
    return columns(head, cells, right=HEAD[2:7])


def _row(item: dict[str, Any]) -> list[str]:
    waiting = f"{plural(item['waiting_jobs'], 'job')}, {count(item['waiting_gpus'])} GPU"
    return [
        item["name"],
        item["spec"],
        *(count(item[key]) for key in NUMBERS),
        waiting if item["waiting_jobs"] else NONE,
        item["owner"] or NONE,
    ]


def _sum(items: list[dict[str, Any]], spec: str) -> dict[str, Any]:
    """Of the quotas at the top: what those below them have is part of it."""
    top = [item for item in items if item["spec"] == spec and "/" not in item["name"]]
    totals = {key: sum(item[key] for item in top) for key in (*NUMBERS, "waiting_jobs", "waiting_gpus")}
    return {"name": "sum", "spec": spec, "owner": "", **totals}
