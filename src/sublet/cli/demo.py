"""`sublet demo`: lend, reclaim and resume on real training, told as a table and checked. Exit 0 only if all holds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

STAGE = """\
A server on this machine, two nodes of 2 pretended GPUs each, team-a and team-b with a quota of 2 GPUs each.
Beside it the same training runs without interruption, to compare with. Ctrl-C ends everything.
"""


@click.command()
@click.option("--steps", type=click.IntRange(30), default=300, show_default=True, help="Of the borrower's training.")
@click.option("--owner-steps", type=click.IntRange(1), default=40, show_default=True, help="Of the owner's training.")
def command(steps: int, owner_steps: int) -> int:
    """Two teams, one server, real training: borrow, take back, resume, compare bit for bit.

    Needs no GPU, no root and no network, and leaves nothing behind. Exit code 1: something it claims does not hold.
    """
    from sublet.demo.story import play

    click.echo(STAGE)
    with _shown() as show:
        outcome = play(steps, owner_steps, show)
    click.echo()
    _print_table(outcome.rows)
    click.echo()
    for claim in outcome.claims:
        click.echo(f"{'holds ' if claim.holds else 'FAILS '} {claim.text}: {claim.evidence}")
    if outcome.kept is not None:
        click.echo(f"Everything is kept in {outcome.kept}")
    click.echo(f"{'All of it holds.' if outcome.holds else 'Not all of it holds.'} {outcome.seconds:.0f} s in all.")
    return 0 if outcome.holds else 1


@contextmanager
def _shown() -> Iterator[Callable[[str, float], None]]:
    """On a terminal a bar, below what is over; else a line whenever something new happens."""
    said: list[str] = []
    if not sys.stdout.isatty():

        def say(what: str, _done: float) -> None:
            if what not in said:
                said.append(what)
                click.echo(f"... {what}")

        yield say
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bars:
        task = bars.add_task("the server starts", total=1.0)

        def draw(what: str, done: float) -> None:
            if what not in said:
                if said:
                    bars.console.print(f"[green]✓[/green] {said[-1]}")
                said.append(what)
            bars.update(task, description=what, completed=done)

        yield draw


def _print_table(rows: list[tuple[str, str, str]]) -> None:
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table: Any = Table(box=None, header_style="bold")
        for title in ("TIME", "WHO", "WHAT HAPPENED"):
            table.add_column(title, justify="right" if title == "TIME" else "left")
        for row in rows:
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    for at, who, text in (("TIME", "WHO", "WHAT HAPPENED"), *rows):
        click.echo(f"{at:>9}  {who:<4} {text}")
