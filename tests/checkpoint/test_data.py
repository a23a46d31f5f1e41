"""The position in the data and the interval between saves: plain arithmetic, held to its promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from sublet.checkpoint import Position, Refused, loader
from sublet.checkpoint.data import permuted
from sublet.checkpoint.interval import auto_ms, duration_ms, parse_interval


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_an_epoch_is_a_permutation_that_can_be_asked_anywhere(length: int, seed: int, epoch: int) -> None:
    whole = permuted(torch.arange(length), length, seed, epoch)
    assert sorted(whole.tolist()) == list(range(length))
    place = torch.tensor([length // 2])
    assert permuted(place, length, seed, epoch).item() == whole[length // 2].item()


def test_orders_differ_between_epochs_and_seeds_and_look_random() -> None:
    orders = [permuted(torch.arange(1000), 1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    fixed = [(a == b).sum().item() for i, a in enumerate(orders) for b in orders[:i]]
    assert max(fixed) < 12  # about one place in a thousand agrees by chance
    for order in orders:
        together = torch.stack([torch.arange(1000.0), order.double().float()])
        assert abs(torch.corrcoef(together)[0, 1].item()) < 0.15


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 30))
@settings(max_examples=12, deadline=None)
def test_a_batch_holds_the_same_samples_for_any_number_of_ranks(before: int, after: int, drawn: int) -> None:
    def batches(world: int, first: int, last: int) -> list[set[int]]:
        ranks = [Position(100, batch_size=12, seed=4, rank=rank, world=world) for rank in range(world)]
        for each in ranks:
            each.load_state_dict({"drawn": first * 12, "length": 100, "batch_size": 12, "seed": 4})
        return [{sample for each in ranks for sample in each.next_batch()} for _ in range(last - first)]

    assert batches(before, 0, drawn) + batches(after, drawn, 40) == batches(1, 0, 40)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes_within_an_epoch_and_leaves_the_random_numbers_alone(workers: int) -> None:
    data = TensorDataset(torch.arange(50))

    def drawn(position: Position, count: int) -> list[list[int]]:
        out: list[list[int]] = []
        batches = loader(data, position, num_workers=workers)
        while len(out) < count:
            for (batch,) in batches:
                out.append(batch.tolist())
                if len(out) == count:
                    break
        return out

    torch.manual_seed(3)
    before = torch.get_rng_state()
    whole = drawn(Position(50, batch_size=8, seed=1), 14)
    assert torch.equal(before, torch.get_rng_state())
    first = Position(50, batch_size=8, seed=1)
    begin = drawn(first, 9)
    second = Position(50, batch_size=8, seed=1)
    second.load_state_dict(first.state_dict())
    assert begin + drawn(second, 5) == whole
    assert sorted(sample for batch in whole[:6] for sample in batch) != list(range(48))


def test_a_position_that_does_not_fit_is_refused() -> None:
    with pytest.raises(Refused):
        Position(10, batch_size=11)
    position = Position(10, batch_size=4, rank=0, world=1)
    with pytest.raises(Refused):
        position.load_state_dict({"drawn": 0, "length": 11, "batch_size": 4, "seed": 0})
    with pytest.raises(Refused):
        position.load_state_dict({"drawn": 9, "length": 10, "batch_size": 3, "seed": 0})


def test_durations_and_intervals() -> None:
    assert (duration_ms("90s"), duration_ms("1h30m"), duration_ms("250ms")) == (90_000, 5_400_000, 250)
    for wrong in ("", "5", "s", "5 m", "-1s"):
        with pytest.raises(Refused):
            duration_ms(wrong)
    with pytest.raises(Refused):
        parse_interval(0)


def test_the_automatic_interval_costs_at_most_a_hundredth() -> None:
    assert auto_ms(100, 500, 3_600_000) == 26_833
    assert auto_ms(100, 60_000, 3_600_000) == 60_000
    assert auto_ms(5_000, 0, 60_000) == 500_000
    interval = parse_interval("auto", "2h")
    interval.saved(1, 200)
    assert interval.every_ms == auto_ms(200, 0, 7_200_000)


def test_steps_may_come_in_leaps() -> None:
    interval = parse_interval(10)
    due = []
    for step in (4, 8, 12, 16, 20, 31):
        if interval.is_due(step):
            due.append(step)
            interval.saved(step, 1)
    assert due == [12, 20, 31]
