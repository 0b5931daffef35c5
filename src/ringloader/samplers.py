"""Samplers in torch's words: orders that are a function of (seed, epoch), computed where they are needed.

Owns how rank and world size are found when the caller does not say. Must not import torch: a process group can only be
initialised in a process whose own code has imported it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sized

import numpy as np

from ringloader._core.batching import num_rank_samples
from ringloader._core.permutation import Int64Array, Permutation
from ringloader.errors import ConfigError

__all__ = ["DistributedSampler", "RandomSampler", "SequentialSampler"]

# Indices per step of an iteration: a Python list of this many stays small, whatever the size of the dataset.
_CHUNK = 1 << 14


class SequentialSampler:
    """The indices 0 to size - 1, in order. `size` is a number or anything with a length."""

    def __init__(self, size: int | Sized) -> None:
        self.size = _size_of(size)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def sample_indices(self) -> Int64Array:
        """Return the whole order, `(size,) int64`."""
        return np.arange(self.size, dtype=np.int64)


class RandomSampler:
    """A permutation of 0 to size - 1 for each epoch, given by (seed, epoch) alone."""

    def __init__(self, size: int | Sized, seed: int = 0) -> None:
        self.size = _size_of(size)
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of iterations that start from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return _iterate(Permutation(self.size, self.seed, self.epoch))

    def sample_indices(self) -> Int64Array:
        """Return the whole order of this epoch, `(size,) int64`, read-only; 8 bytes per index, 0.1 s for 10^6."""
        return Permutation(self.size, self.seed, self.epoch).take(0, self.size)


class DistributedSampler:
    """One rank's share of an epoch: every `num_replicas`-th position from `rank` on, the same number on every rank.

    Without `drop_last` positions are repeated from the epoch's start until all ranks have as many; with it the rest is dropped.
    `rank` and `num_replicas` default to those of `resolve_rank`. Positions are torch's; the shuffled order is our own.

    Source: torch.utils.data.distributed.DistributedSampler.
    """

    def __init__(
        self,
        dataset_or_size: int | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.size = _size_of(dataset_or_size)
        self.rank, self.num_replicas = resolve_rank(rank, num_replicas)
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self.num_samples = num_rank_samples(self.size, self.num_replicas, drop_last)
        self.total_size = self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of iterations that start from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        for start in range(0, self.num_samples, _CHUNK):
            yield from self._indices(order, start, min(start + _CHUNK, self.num_samples)).tolist()

    def sample_indices(self) -> Int64Array:
        """Return this rank's indices in order, `(num_samples,) int64`."""
        return self._indices(self._order(), 0, self.num_samples)

    def _order(self) -> Permutation | None:
        return Permutation(self.size, self.seed, self.epoch) if self.shuffle else None

    def _indices(self, order: Permutation | None, start: int, stop: int) -> Int64Array:
        positions = self.rank + self.num_replicas * np.arange(start, stop, dtype=np.int64)
        if positions.size:
            positions %= self.size
        return positions if order is None else order.at(positions)


def resolve_rank(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return (rank, world_size): given values first, then an initialised torch.distributed, then the environment, then (0, 1).

    `world_size=1` means rank 0, whatever the environment says. Raises ConfigError for a rank outside the world.
    """
    if world_size == 1 and rank is None:
        rank = 0
    if rank is None or world_size is None:
        found_rank, found_world_size = _process_group() or _environment() or (0, 1)
        rank = found_rank if rank is None else rank
        world_size = found_world_size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank is {rank} and world_size {world_size}; rank has to be from 0 to world_size - 1",
            rank=rank,
            world_size=world_size,
        )
    return rank, world_size


def _process_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _environment() -> tuple[int, int] | None:
    found = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if None in found:
        return None
    try:
        return int(found[0] or ""), int(found[1] or "")
    except ValueError:
        raise ConfigError(
            f"RANK={found[0]!r} and WORLD_SIZE={found[1]!r} in the environment are no numbers; give rank and world_size, "
            "or unset them",
            rank=found[0],
            world_size=found[1],
        ) from None


def _size_of(size: int | Sized) -> int:
    number = len(size) if isinstance(size, Sized) else int(size)
    if number < 0:
        raise ConfigError(f"size is {number}, and has to be 0 or more", size=number)
    return number


def _iterate(order: Permutation) -> Iterator[int]:
    for start in range(0, order.n, _CHUNK):
        yield from order.take(start, min(start + _CHUNK, order.n)).tolist()
