"""`sublet checkpoint`: the tools of the checkpoint library. One rule: the words go to the library as they are."""

import importlib.util

import click

from sublet.domain.errors import Refused


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", metavar="VERB DIRECTORY ...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> int:
    """Look at checkpoints on disk and move them.

    ls, verify, show, diff, export, import, pin, unpin or gc, then the directory; --help after any of them tells more.
    Exits with 65 if a checkpoint does not hold. Without the rest of Sublet: python -m sublet.checkpoint.
    """
    if importlib.util.find_spec("xxhash") is None or importlib.util.find_spec("torch") is None:
        hint = "Install it: pip install 'sublet[checkpoint]'."
        raise Refused(what="The checkpoint library is not installed.", why="It needs torch and xxhash.", hint=hint)
    from sublet.checkpoint.__main__ import main

    return main(list(words))
