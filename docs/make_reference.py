"""Writes the reference pages that follow from the code: `make docs`. A test holds that they are current.

Rule: what can be read from the code is read from it; nothing is said twice by hand.
"""

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from sublet.cli import front
from sublet.faces.pai.operations import OPERATIONS, VERSIONS
from sublet.service.jobfile import NOT_YET
from sublet.service.jobkeys import KEYS

HERE = Path(__file__).parent / "reference"
GENERATED = "<!-- Written by docs/make_reference.py; change the code and run `make docs`. -->"
JOB_FILE = """
A job is described by a YAML file (1.2), or by the same keys as JSON. The shortest one:

```yaml
quota: team-a
gpu: 1
command: python train.py
```

A key that is not known is refused with the nearest known one and its line, and nothing is stored. Times are written
`90s`, `10m`, `1h30m`, `2d`; a time without its unit is refused.

| key | may be | when left out | what it is for |
|---|---|---|---|
"""
EXIT_CODES = """
## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | what was asked for ended badly: `why` says never, a claim of the demo does not hold |
| 2 | refused, or wrong usage: something to correct |
| 70 | a fault of Sublet |
| 75 | the server cannot be reached or is busy: try again |
| 130 | Ctrl-C |

## Environment

| variable | meaning |
|---|---|
| `SUBLET_SERVER` | the server to call; else the one that listens on this machine |
| `SUBLET_USER` | in whose name; else who is logged in |
| `SUBLET_DATA` | the data directory; else `~/.local/share/sublet` |
| `SUBLET_DEBUG` | set: a fault of Sublet is shown whole |
"""

PAI = """
Client code that was written for Alibaba Cloud's PAI speaks to Sublet's own port. How, and what was chosen where PAI's
behaviour is not public: [howto/pai.md](../howto/pai.md).

*done*: as PAI does it, as far as that is public. *partly*: what is missing stands beside it. *not planned*: it answers
400 with the code `UnsupportedOperation`, and never a success.
"""


def pages() -> dict[str, str]:
    """Text by the name of the page."""
    return {"cli.md": cli(), "job-file.md": job_file(), "pai.md": pai()}


def cli() -> str:
    top = front.command
    parts = [f"{GENERATED}\n\n# Commands\n\n{_help(top)}\n", _options("Options before the command:", top)]
    known: dict[int, str] = {}
    for name, command in commands():
        parts.append(f"## sublet {name}\n")
        if id(command) in known:
            parts.append(f"The same as `sublet {known[id(command)]}`.\n")
            continue
        known[id(command)] = name
        parts.append(f"{_usage(name, command)}\n\n{_help(command)}\n")
        parts.append(_options("", command))
    return "\n".join(part for part in parts if part).rstrip() + "\n" + EXIT_CODES


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that can be called, with its whole name, in the order of the help."""
    context = click.Context(front.command)
    for name in front.command.list_commands(context):
        command = front.command.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", inner) for below, inner in sorted(command.commands.items()))
        else:
            yield name, command


def _usage(name: str, command: click.Command) -> str:
    context = _context(command)
    return f"    {' '.join([f'sublet {name}', *command.collect_usage_pieces(context)])}"


def _context(command: click.Command) -> click.Context:
    """As it is called: Click remembers how a command spells --help from the first time that it is asked."""
    return click.Context(command, help_option_names=["-h", "--help"])


def _help(command: click.Command) -> str:
    """Paragraphs on one line each; what stands behind a \\b is shown as it is written."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(map(_paragraph, paragraphs))


def _paragraph(text: str) -> str:
    mark, _, lines = text.partition("\n")
    if mark.strip() != "\b":
        return " ".join(text.split())
    return textwrap.indent(textwrap.dedent(lines), "    ")


def _options(title: str, command: click.Command) -> str:
    context = _context(command)
    options = [
        item for item in command.get_params(context) if isinstance(item, click.Option) and "--help" not in item.opts
    ]
    records = [record for item in options if (record := item.get_help_record(context)) is not None]
    rows = [f"| `{_cell(flags)}` | {_cell(words)} |" for flags, words in records]
    if not rows:
        return ""
    head = f"{title}\n\n" if title else ""
    return head + "\n".join(["| option | what it does |", "|---|---|", *rows]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def job_file() -> str:
    rows = []
    for path, key in KEYS.items():
        text = key.text
        rows.append(f"| `{path}` | {key.may_be} | {_usual(key.usual)} | {text} |")
    later = ", ".join(f"`{key}`" for key in NOT_YET)
    return (
        f"{GENERATED}\n\n# The job file\n{JOB_FILE}" + "\n".join(rows) + f"\n\n*Not acted on yet*: it is read and"
        f" checked, and nothing follows from it. Refused as not done yet: {later}.\n\nWhat a program finds in its"
        " environment and may say: [program.md](program.md).\n"
    )


def pai() -> str:
    parts = [f"{GENERATED}\n\n# PAI's API\n{PAI}"]
    for version, product in VERSIONS.items():
        rows = [
            f"| `{one.action}` | `{one.method} {one.path}` | {one.state} | {_cell(one.note)} |"
            for one in OPERATIONS
            if one.product == product
        ]
        head = "| operation | request | state | missing, or why not |\n|---|---|---|---|"
        parts.append("\n".join([f"\n## {product} {version}\n", head, *rows, ""]))
    return "".join(parts)


def _usual(text: str) -> str:
    return f"`{text}`" if text and " " not in text else text


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for page, text in pages().items():
        (HERE / page).write_text(text, "utf-8")
        print(f"{HERE / page}: {len(text.splitlines())} lines")
