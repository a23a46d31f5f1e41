"""Random worlds with crashes, lost messages and lost nodes: safety all the time, liveness once the trouble is over.

A failure prints its seed: `pytest tests/sim --seed N` runs it alone.
"""

import pytest

from sublet.sim.faults import TroubledWorld

SEEDS = 150


def seeds(config: pytest.Config) -> list[int]:
    given = config.getoption("--seed")
    return [given] if given is not None else list(range(SEEDS))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds(metafunc.config))


def test_nothing_bad_happens_and_everything_ends(seed: int) -> None:
    world = TroubledWorld(seed)
    for _ in world.run():
        assert not world.checker.problems, f"seed {seed}: {world.checker.problems}"
    left = set(world.scenario.jobs) - set(world.checker.ended)
    assert not left, f"seed {seed}: {sorted(left)} never ended after {world.crashes} crashes"
