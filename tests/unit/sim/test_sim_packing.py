"""The packing benchmark on clusters small enough to see what is right."""

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[3] / "benchmarks" / "packing.py"


@pytest.fixture(scope="module")
def packing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packing", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["packing"] = module
    spec.loader.exec_module(module)
    return module


def test_a_pod_fits_by_cpu_memory_model_and_each_gpu(packing: ModuleType) -> None:
    state = packing.State(4000, 1024, (300, 700, 1000), "T4")
    assert packing.fits(state, packing.Pod(4000, 1024, 1, 700))
    assert packing.fits(state, packing.Pod(4000, 1024, 2, 700))
    assert not packing.fits(state, packing.Pod(4000, 1024, 2, 1000))
    assert not packing.fits(state, packing.Pod(4001, 1024, 0, 0))
    assert not packing.fits(state, packing.Pod(1, 1025, 0, 0))
    assert not packing.fits(state, packing.Pod(1, 1, 1, 100, frozenset({"A10"})))


def test_a_fragment_is_what_the_next_pod_cannot_use(packing: ModuleType) -> None:
    half, whole = packing.Pod(1000, 1, 1, 500), packing.Pod(1000, 1, 1, 1000)
    fragments = packing.Fragments([half, whole])
    assert fragments.of(packing.State(1000, 1, (500, 1000), "")) == 250  # half the time 500 are of no use
    assert fragments.of(packing.State(999, 1, (500, 1000), "")) == 1500  # no cpu: nothing is of use
    assert fragments.of(packing.State(1000, 1, (1000, 1000), "")) == 0


def test_the_gradient_keeps_whole_gpus_whole(packing: ModuleType) -> None:
    half, whole = packing.Pod(1000, 1, 1, 500), packing.Pod(1000, 1, 1, 1000)
    _, after = packing.Fragments([half, whole]).gradient(packing.State(9000, 9, (500, 1000), ""), half)
    assert after.gpus == (0, 1000)


def test_arrivals_are_the_whole_list_and_more(packing: ModuleType) -> None:
    pods = [packing.Pod(1, 1, 1, 1000 if at % 2 else 500) for at in range(8)]
    order = packing.arrivals(pods, 8000, seed=1)
    assert sorted(order[:8], key=repr) == sorted(pods, key=repr)
    assert 9000 < sum(pod.gpu_total for pod in order) <= 10_400
    assert packing.arrivals(pods, 8000, seed=1) == order


@pytest.mark.parametrize("name", ["Random", "DotProd", "BestFit", "FGD"])
def test_even_pods_fill_a_cluster_under_every_policy(packing: ModuleType, name: str) -> None:
    nodes = [packing.State(8000, 8, (1000, 1000), "T4")] * 4
    pods = [packing.Pod(1000, 1, 1, 500)] * 16
    chance = random.Random(1) if name == "Random" else None
    assert packing.allocation(nodes, pods, packing.policy_of(name, nodes, pods), chance) == 100
