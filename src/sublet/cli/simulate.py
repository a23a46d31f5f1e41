"""`sublet simulate`: a scenario through the production scheduler, in simulated time."""

from collections.abc import Iterable
from pathlib import Path

import click

from sublet.domain.errors import Broken, Unavailable


@click.command()
@click.argument("scenario", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--story", type=click.Path(dir_okay=False, path_type=Path), help="Write the story here, one JSON a line.")
@click.option("--faults", type=click.IntRange(min=0), metavar="SEED", help="Instead: a random scenario under faults.")
def command(scenario: Path | None, story: Path | None, faults: int | None) -> None:
    """Run SCENARIO in simulated time and tell its story, to standard output or to a file.

    With --faults the server crashes, messages are lost and nodes fail, all drawn from SEED; what does not hold is an
    error.
    """
    if (scenario is None) == (faults is None):
        raise click.UsageError("Give a SCENARIO, or --faults SEED.")
    if scenario is not None:
        _write(_told(scenario), story)
        return
    assert faults is not None
    _under_faults(faults, story)


def _told(scenario: Path) -> Iterable[str]:
    from sublet.sim import scenario as scenarios
    from sublet.sim import story
    from sublet.sim.world import World

    return story.lines(World(scenarios.load(scenario)).run())


def _under_faults(seed: int, path: Path | None) -> None:
    from sublet.sim import story
    from sublet.sim.faults import TroubledWorld

    world = TroubledWorld(seed)
    _write(story.lines(world.run()), path)
    wrong = [*world.checker.problems, *(f"{one} has not ended" for one in world.left())]
    if wrong:
        hint = f"Run it again with --faults {seed}, and report it."
        raise Broken(what=f"{len(wrong)} rules do not hold.", why=f"The first: {wrong[0]}.", hint=hint)
    had = world.troubles
    click.echo(f"All held: {had.crashes} crashes, {had.refusals} refusals, {had.lost} lost messages.", err=True)


def _write(lines: Iterable[str], path: Path | None) -> None:
    if path is None:
        for line in lines:
            click.echo(line)
        return
    try:
        with path.open("w", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in lines)
    except OSError as error:
        why, hint = f"The system says: {error.strerror}.", "Choose another with --story."
        raise Unavailable(what=f"{path} cannot be written.", why=why, hint=hint, code="file") from error
