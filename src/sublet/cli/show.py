"""How data becomes text: columns, times and numbers as people read them.

One rule: data goes to stdout whole; only a terminal that is too narrow cuts the last column.
"""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

NONE = "–"  # noqa: RUF001  a dash of the width of a letter
output_option = click.option(
    "-o", "--output", type=click.Choice(["table", "json", "name"]), default="table", help="How to print it."
)


def emit(output: str, answer: Any, table: Callable[[Any], str], name: str = "id") -> None:
    """The answer of the server as it came, one name a line, or the table made of it."""
    if output == "json":
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    if output == "name":
        items = answer.get("items", [answer])
        text = "\n".join(str(item[name]) for item in items)
    else:
        text = table(answer)
    if text:
        click.echo(text)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), gap: int = 2) -> str:
    """Aligned columns; those named in `right` to the right."""
    widths = [max(len(line[place]) for line in (head, *rows)) for place in range(len(head))]
    aligned = [
        (" " * gap)
        .join(
            cell.rjust(width) if title in right else cell.ljust(width)
            for cell, width, title in zip(line, widths, head, strict=True)
        )
        .rstrip()
        for line in (head, *rows)
    ]
    return "\n".join(cut(line) for line in aligned)


def cut(line: str) -> str:
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return line if len(line) <= width else line[: width - 1] + "…"


def count(number: int) -> str:
    return f"{number:,}"


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def clock(time: str) -> str:
    """The local time of day of an RFC 3339 time."""
    from datetime import datetime

    return datetime.fromisoformat(time).astimezone().strftime("%H:%M:%S")
