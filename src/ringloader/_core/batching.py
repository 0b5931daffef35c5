"""Which samples make up which batch of an epoch, for one rank.

Owns the rule that rank r of W takes the positions r, r + W, r + 2 W, ... of the epoch's order, so that what all ranks together
have consumed is a prefix of it, and torch's rule for uneven sizes. Batch i is a pure function of the plan and i.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from ringloader._core.permutation import Int64Array, Permutation
from ringloader.errors import ConfigError

# Keys are computed this many at a time: a Feistel network costs about 0.1 ms a call, whatever the number.
_BLOCK = 1 << 14


def num_rank_samples(size: int, world_size: int, drop_last: bool) -> int:
    """Return how many samples each rank takes: all the same number, by dropping the rest or by repeating from the start.

    Source: torch.utils.data.distributed.DistributedSampler.
    """
    return size // world_size if drop_last else -(-size // world_size)


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch over `range(size)`, as seen by one rank.

    Positions count through the epoch's order, all ranks together. `start` leaves out a prefix of it, consumed before, perhaps
    by another number of ranks. With several ranks and without `drop_last`, positions from `size` on wrap around to the start.

    Raises ConfigError for values that make no plan.
    """

    size: int
    batch_size: int
    drop_last: bool = False
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    start: int = 0
    _block: list[tuple[int, Int64Array]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}, and has to be at least 1", batch_size=self.batch_size)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank is {self.rank} and world_size {self.world_size}; rank has to be from 0 to world_size - 1",
                rank=self.rank,
                world_size=self.world_size,
            )
        if not 0 <= self.start <= self.size:
            raise ConfigError(f"an epoch of {self.size} samples cannot start at {self.start}", size=self.size, start=self.start)

    def __len__(self) -> int:
        return self.num_batches

    @functools.cached_property
    def num_batches(self) -> int:
        """How many batches this rank makes of its samples."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @functools.cached_property
    def num_samples(self) -> int:
        """How many samples this rank takes, repeated ones included, those of a dropped last batch too."""
        return num_rank_samples(self.size - self.start, self.world_size, self.drop_last)

    @functools.cached_property
    def permutation(self) -> Permutation | None:
        """The epoch's order; None when it is that of the dataset."""
        return Permutation(self.size, self.seed, self.epoch) if self.shuffle else None

    def batch(self, index: int) -> tuple[Int64Array, int]:
        """Return the dataset keys of batch `index`, and the position of its first sample.

        Row r has the position of the first plus r * world_size. A position may be `size` or more, where samples are repeated:
        no two samples of an epoch share one. Raises IndexError outside range(len(self)).
        """
        if not 0 <= index < self.num_batches:
            raise IndexError(f"batch {index} of an epoch of {self.num_batches} batches")
        first = index * self.batch_size
        stop = min(first + self.batch_size, self.num_samples)
        return self._keys(first, stop), self._position(first)

    def _position(self, local: int) -> int:
        return self.start + self.rank + self.world_size * local

    def _keys(self, first: int, stop: int) -> Int64Array:
        block_index, offset = divmod(first, _BLOCK)
        if offset + stop - first > _BLOCK:
            return self._compute_keys(first, stop)
        # One entry, replaced in one step: two threads may compute the same block, and neither sees half of one.
        for cached_index, cached in self._block:
            if cached_index == block_index:
                return cached[offset : offset + stop - first]
        block = self._compute_keys(block_index * _BLOCK, min((block_index + 1) * _BLOCK, self.num_samples))
        self._block[:] = [(block_index, block)]
        return block[offset : offset + stop - first]

    def _compute_keys(self, first: int, stop: int) -> Int64Array:
        positions = np.arange(self._position(first), self._position(stop), self.world_size, dtype=np.int64)
        positions %= self.size
        keys = positions if self.permutation is None else self.permutation.at(positions)
        keys.flags.writeable = False
        return keys
