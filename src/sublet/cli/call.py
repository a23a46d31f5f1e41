"""From the command line to the server: which one, and in whose name."""

import getpass
import os

import click

from sublet.client.find import server_url
from sublet.client.http import Client


def client(context: click.Context, timeout_s: float = 30.0) -> Client:
    """A client for the server that the global options, the environment or the data directory name."""
    settings = context.find_root().obj or {}
    return Client(
        url=server_url(settings.get("server"), os.environ), user=user_name(settings.get("as_user")), timeout_s=timeout_s
    )


def user_name(named: str | None) -> str:
    if named:
        return named
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no login name and no entry for the user's number: as in many containers
        return str(os.getuid())
