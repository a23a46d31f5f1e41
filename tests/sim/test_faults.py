"""Random worlds under faults: safety all the time, liveness once the trouble is over.

A failure prints its seed: `pytest tests/sim --seed N` runs it alone, `sublet simulate --faults N` tells its story.
"""

import pytest

from sublet.sim.faults import TroubledWorld

SEEDS = 1_000
TOLD_TWICE = 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--seed")
    if "chunk" in metafunc.fixturenames:
        chunks = [range(given, given + 1)] if given is not None else [range(n, n + 50) for n in range(0, SEEDS, 50)]
        metafunc.parametrize("chunk", chunks, ids=lambda chunk: f"{chunk.start}-{chunk.stop - 1}")


def test_nothing_bad_happens_and_everything_ends(chunk: range) -> None:
    for seed in chunk:
        world = TroubledWorld(seed)
        for _ in world.run():
            assert not world.checker.problems, f"seed {seed}: {world.checker.problems}"
        assert not world.left(), f"seed {seed}: {world.left()} never ended after {world.troubles.crashes} crashes"


def test_there_is_trouble_of_every_kind() -> None:
    """Faults that do not happen prove nothing."""
    crashes = refusals = lost = 0
    kinds: set[str] = set()
    for seed in range(40):
        world = TroubledWorld(seed)
        kinds |= {type(effect).__name__ for entry in world.run() for effect in entry.effects}
        crashes, refusals = crashes + world.troubles.crashes, refusals + world.troubles.refusals
        lost += world.troubles.lost
    assert min(crashes, refusals, lost) > 100
    assert {"GiveNotice", "DowngradeLease", "UpgradeLease", "RequeueJob", "StopInstances", "WithdrawNotice"} <= kinds


@pytest.mark.parametrize("seed", range(TOLD_TWICE))
def test_the_same_seed_tells_the_same_story(seed: int) -> None:
    assert list(TroubledWorld(seed).run()) == list(TroubledWorld(seed).run())
