"""The front door: which module knows which command, and the one place where errors become words and exit codes.

One rule: every end has an exit code of the table below, and a traceback is never the answer.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from sublet.domain.errors import Broken, Refused, SubletError, Unavailable

EXIT_REFUSED = 2  # refused, or wrong usage
EXIT_BROKEN = 70  # our fault
EXIT_UNAVAILABLE = 75  # try again
EXIT_INTERRUPTED = 130  # Ctrl-C

COMMANDS = {  # name: (module:attribute, how its help begins)
    "up": ("sublet.cli.serve:up", "Start a server on this machine, with its store and its engine."),
    "submit": ("sublet.cli.job:submit", "Submit a job: FILE (- reads the standard input), or a command after --."),
    "ls": ("sublet.cli.job:ls", "List jobs, newest first."),
    "show": ("sublet.cli.job:show", "All that is known of a job."),
    "why": ("sublet.cli.job:why", "Why a job waits, who is ahead, and what would change it."),
    "logs": ("sublet.cli.job:logs", "What a job printed."),
    "stop": ("sublet.cli.job:stop", "Stop jobs; each ends as stopped."),
    "events": ("sublet.cli.events:events", "What happened, as sentences."),
    "quota": ("sublet.cli.quota:quota", "Who is promised what, and where it is now."),
    "node": ("sublet.cli.node:node", "The machines."),
    "notify": ("sublet.cli.notify:notify", "Webhooks: who is told when jobs fail, hang, or have to leave."),
    "job": ("sublet.cli.job:job", "Jobs: the same commands under one noun."),
    "dlc": ("sublet.cli.dlc:dlc", "PAI's dlc tool: submit, create, get, stop, logs, with its options and its output."),
    "demo": ("sublet.cli.demo:command", "The whole idea on this machine, with real training, in a minute or two."),
    "whatif": ("sublet.cli.whatif:command", "What a change would do: who starts, who is evicted, what is lost."),
    "simulate": ("sublet.cli.simulate:command", "Run a scenario in simulated time."),
    "replay": ("sublet.cli.replay:command", "Replay a job stream in simulated time."),
    "compare": ("sublet.cli.compare:command", "Replay a job stream under two policies, side by side."),
    "trace": ("sublet.cli.trace:command", "Job streams: import published ones, generate others."),
    "checkpoint": ("sublet.cli.checkpoint:command", "Checkpoints on disk: ls, verify, show, diff, export, import, gc."),
    "server": ("sublet.cli.serve:server", "Run the server for the nodes and quotas that --config describes."),
    "version": ("sublet.cli.version:version", "Versions of this program and of the server."),
}


class Lazy(click.Group):
    """A group whose commands are imported when they are called; Click asks for no more than these two methods."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in COMMANDS.items()])


@click.command(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.option("--server", metavar="URL", help="The server to call; else SUBLET_SERVER, or the one on this machine.")
@click.option("--user", "as_user", metavar="NAME", envvar="SUBLET_USER", help="In whose name; else who is logged in.")
@click.pass_context
def command(context: click.Context, /, **settings: Any) -> None:
    """Lend idle quota, take it back in seconds, lose nothing."""
    context.obj = settings


def run(arguments: Sequence[str] | None = None) -> None:
    """The process's main function: ends it with the exit code."""
    code = call(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: nothing to flush at exit
    sys.exit(code)


def call(arguments: Sequence[str]) -> int:
    """Runs a command; what it says of errors goes to stderr."""
    try:
        result = command.main(args=list(arguments), prog_name="sublet", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return 0
    except SubletError as error:
        click.echo(sentence(error), err=True)
        return exit_code(error)
    except Exception as error:  # the edge: what nobody foresaw is a fault of ours
        if os.environ.get("SUBLET_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}".rstrip(".")
        hint = "Please report it; SUBLET_DEBUG=1 shows where."
        click.echo(sentence(Broken(what=f"{what}.", why="This is a fault of Sublet.", hint=hint)), err=True)
        return EXIT_BROKEN


def exit_code(error: SubletError) -> int:
    if isinstance(error, Unavailable):
        return EXIT_UNAVAILABLE
    return EXIT_REFUSED if isinstance(error, Refused) else EXIT_BROKEN


def sentence(error: SubletError) -> str:
    """What and why on one line with the place in the user's file, what to do below it."""
    said = f"{type(error).__name__}: {' '.join(part for part in (error.what, error.why) if part)}"
    placed = f"{said}   ({error.where})" if error.where else said
    return f"{placed}\n{error.hint}" if error.hint else placed
