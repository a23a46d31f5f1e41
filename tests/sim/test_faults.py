"""Random worlds under faults: safety all the time, liveness once the trouble is over.

A failure prints its seed: `pytest tests/sim --seed N` runs it alone, `sublet simulate --faults N` tells its story.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sublet.sim.faults import TroubledWorld
from sublet.store.sql import open_sqlite

SEEDS = 1_000
TOLD_TWICE, ON_DISK = 20, 8


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


@pytest.mark.parametrize("seed", range(ON_DISK))
def test_a_store_on_disk_tells_the_same_story_as_the_one_in_memory(seed: int, tmp_path: Path) -> None:
    """What is read back after a crash is what was written, to the last field that a decision rests on."""
    store = open_sqlite(tmp_path)
    on_disk = TroubledWorld(seed, store)
    assert list(on_disk.run()) == list(TroubledWorld(seed).run())
    assert not on_disk.checker.problems and not on_disk.left()
    store.close()


def test_the_same_seeds_tell_the_same_stories_whatever_the_hash_seed() -> None:
    told = (
        "import hashlib; from sublet.sim.faults import TroubledWorld\n"
        "told = hashlib.sha256()\n"
        f"for seed in range({TOLD_TWICE}):\n"
        "    for entry in TroubledWorld(seed).run(): told.update(repr(entry).encode())\n"
        "print(told.hexdigest())"
    )

    def digest(hash_seed: str) -> bytes:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, check=True).stdout

    assert len(digest("1")) == 65 and digest("1") == digest("2")


@pytest.mark.parametrize("seed", range(TOLD_TWICE))
def test_the_same_seed_tells_the_same_story(seed: int) -> None:
    assert list(TroubledWorld(seed).run()) == list(TroubledWorld(seed).run())
