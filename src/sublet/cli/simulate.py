"""`sublet simulate`: a scenario through the production scheduler, in simulated time."""

from pathlib import Path

import click


@click.command()
@click.argument("scenario", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--story", type=click.Path(dir_okay=False, path_type=Path), help="Write the story here, one JSON a line.")
def command(scenario: Path, story: Path | None) -> None:
    """Run SCENARIO in simulated time and tell its story, to standard output or to a file."""
    from sublet.sim import scenario as scenarios
    from sublet.sim import story as stories
    from sublet.sim.world import World

    told = stories.lines(World(scenarios.load(scenario)).run())
    if story is None:
        for line in told:
            click.echo(line)
    else:
        with story.open("w", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in told)
