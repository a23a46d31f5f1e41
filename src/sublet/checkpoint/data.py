"""Where training stands in its data. Rule: the position is one number; resuming costs the same after ten steps or
ten million.

The order of an epoch is a permutation that can be asked for any place in it (a Feistel network keyed by seed and
epoch), so nothing is replayed and nothing is stored but the count of samples drawn by all ranks together. That
count means the same for any number of ranks: batch n of the run holds the same samples whoever draws them, as long
as the global batch size stays.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from sublet.checkpoint.errors import Refused

ROUNDS = 6
MIX_1, MIX_2 = -49064778989728563, -4265267296055464877  # odd 64-bit constants of splitmix64, as signed numbers


def permuted(places: torch.Tensor, length: int, seed: int, epoch: int) -> torch.Tensor:
    """Which samples stand at `places` (int64, 0 … length-1) of an epoch's order; a permutation of range(length)."""
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    out = network(places, half, seed, epoch)
    while bool((outside := out >= length).any()):  # walk along the cycle until inside: at most a few times
        out[outside] = network(out[outside], half, seed, epoch)
    return out


def network(values: torch.Tensor, half: int, seed: int, epoch: int) -> torch.Tensor:
    """A permutation of the numbers of 2·half bits."""
    mask = (1 << half) - 1
    left, right = values >> half, values & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (mixed(right, seed, epoch * ROUNDS + number) & mask)
    return (left << half) | right


def mixed(values: torch.Tensor, seed: int, salt: int) -> torch.Tensor:
    """Well-mixed 64 bits of each value, a seed and a salt; arithmetic wraps."""
    x = values + wrapped(seed * 0x9E3779B97F4A7C15 + salt * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def wrapped(value: int) -> int:
    """The number as a signed 64-bit one."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


class Position:
    """How far a run has come in its data. `drawn` counts samples of all ranks, over all epochs.

    `batch_size` is that of all ranks together. An epoch drops its last samples that fill no batch. Keep it in the
    state; it has state_dict and load_state_dict. Not for use from several threads.
    """

    def __init__(
        self, length: int, *, batch_size: int, seed: int = 0, rank: int | None = None, world: int | None = None
    ) -> None:
        if rank is None or world is None:
            ready = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if ready else (0, 1)
        if not 0 < batch_size <= length or batch_size % world or not 0 <= rank < world:
            raise Refused(
                what=f"A batch of {batch_size} of {length} samples for {world} ranks makes no sense.",
                why="The batch is the global one: at most all samples, and the same share for each rank.",
            )
        self.length, self.batch_size, self.seed, self.rank, self.world = length, batch_size, seed, rank, world
        self.drawn = 0

    @property
    def batches_per_epoch(self) -> int:
        return self.length // self.batch_size

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self.drawn // (self.batches_per_epoch * self.batch_size)

    def batch_at(self, number: int) -> list[int]:
        """This rank's samples of the run's batch `number`, counted from 0."""
        epoch, within = divmod(number, self.batches_per_epoch)
        first = within * self.batch_size
        places = torch.arange(first + self.rank, first + self.batch_size, self.world)
        return [int(each) for each in permuted(places, self.length, self.seed, epoch).tolist()]

    def next_batch(self) -> list[int]:
        """This rank's samples of the next batch; the position moves on."""
        batch = self.batch_at(self.drawn // self.batch_size)
        self.drawn += self.batch_size
        return batch

    def seed_at(self, sample: int) -> int:
        """A seed for what is random about one sample in this epoch (augmentation): the same wherever it is drawn."""
        value = mixed(torch.tensor([sample]), self.seed, self.epoch * 2 + 1)
        return int(value) & ((1 << 62) - 1)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn, "length": self.length, "batch_size": self.batch_size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a kept position. Refused if the data is of another length or order."""
        if (state["length"], state["seed"]) != (self.length, self.seed):
            raise Refused(
                what="The position does not fit the data.",
                why=f"It was {state['length']} samples, seed {state['seed']}; now it is {self.length}, {self.seed}.",
            )
        if state["batch_size"] != self.batch_size and state["drawn"] % self.batch_size:
            raise Refused(
                what=f"The position {state['drawn']} is between two batches of {self.batch_size}.",
                why=f"The global batch was {state['batch_size']}.",
                hint="Resume with the same global batch size, whatever the number of ranks.",
            )
        self.drawn = state["drawn"]


class Batches:
    """A batch sampler for one epoch of a DataLoader, from where the position is; it may run ahead of training."""

    def __init__(self, position: Position) -> None:
        self.position = position

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch = self.position.batches_per_epoch
        first = self.position.drawn // self.position.batch_size
        for number in range(first, (first // per_epoch + 1) * per_epoch):
            yield self.position.batch_at(number)

    def __len__(self) -> int:
        per_epoch = self.position.batches_per_epoch
        return per_epoch - self.position.drawn // self.position.batch_size % per_epoch


class Loader:
    """Batches of a dataset, epoch after epoch; each iteration ends with its epoch.

    The position moves as batches come out.
    """

    def __init__(self, dataset: Dataset[Any], position: Position, **options: Any) -> None:
        self.position = position
        self.batches: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=Batches(position), generator=torch.Generator(), **options
        )

    def __iter__(self) -> Iterator[Any]:
        if self.batches.generator is not None:  # its own, so that the training's random numbers are not touched
            self.batches.generator.manual_seed(self.position.seed ^ self.position.epoch)
        for batch in self.batches:
            self.position.drawn += self.position.batch_size
            yield batch

    def __len__(self) -> int:
        """Batches of a whole epoch; the first iteration after a resume gives what is left of its epoch."""
        return self.position.batches_per_epoch

    def state_dict(self) -> dict[str, int]:
        return self.position.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position.load_state_dict(state)


def loader(dataset: Dataset[Any], position: Position, **options: Any) -> Loader:
    """A DataLoader that resumes exactly: `options` are DataLoader's own, without batch size, sampler and shuffle."""
    return Loader(dataset, position, **options)
