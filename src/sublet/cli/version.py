"""Which versions are at work. One rule: it answers without a server, too."""

import click

from sublet.cli.call import client
from sublet.domain.errors import Unavailable


@click.command()
@click.pass_context
def version(context: click.Context) -> None:
    """Versions of this program and of the server."""
    from importlib.metadata import version as installed

    click.echo(f"sublet  {installed('sublet')}")
    try:
        server = client(context, timeout_s=3)
        click.echo(f"server  {server.get('/version')['version']}  {server.url}")
    except Unavailable as error:
        click.echo(f"server  none: {error.what}")
