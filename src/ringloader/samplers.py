"""Samplers in torch's words: orders that are a function of (seed, epoch), computed where they are needed.

Owns how rank and world size are found when the caller does not say.

A sampler of one's own is any object with `__iter__`, and `__len__` if `len(loader)` is asked for. `set_epoch(n)` is called when
the user calls the loader's; `state_dict()` and `load_state_dict(state)` save its place, and without them it is replayed. Must
not import torch: a process group can only be initialised in a process whose own code has imported it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ringloader._core.batching import num_rank_samples
from ringloader._core.blake2 import blake2b
from ringloader._core.permutation import Int64Array, Permutation
from ringloader.errors import ConfigError

__all__ = ["BatchSampler", "DistributedSampler", "RandomSampler", "SequentialSampler", "WeightedSampler"]

logger = logging.getLogger("ringloader")

# Indices per step of an iteration: a Python list of this many stays small, whatever the size of the dataset.
_CHUNK = 1 << 14


# Gives elements start to stop - 1 of an epoch's order.
Order = Callable[[int, int], Int64Array]


class _Sampler:
    """What our samplers have in common: an order that is a function of (seed, epoch), as a whole, in batches, one by one.

    Under a `Loader` the loader numbers the epochs, unless the user has called `set_epoch`. By hand the user has to.
    """

    def __init__(self, seed: int) -> None:
        if type(seed) is not int or not 0 <= seed < 1 << 63:
            raise ConfigError(f"seed is {seed!r}; give an int from 0 to 2**63 - 1", option="seed", value=seed)
        self.seed = seed
        self.epoch = 0
        self._is_users = False  # the user numbers the epochs
        self._read_epoch = -1
        self._has_warned = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of iterations that start from now on."""
        self.epoch = epoch
        self._is_users = True

    def follow_epoch(self, epoch: int, *, explicit: bool = False) -> None:
        """Take the epoch's number from a loader, unless the user gives it; `explicit`: the user has told the loader."""
        if explicit or not self._is_users:
            self.epoch = epoch
            self._is_users = False
            self._read_epoch = -1

    def describe(self, epoch: int) -> str:
        """What decides the order of an epoch that a loader gives this number."""
        return f"{type(self).__name__} of {len(self)} seed {self.seed} epoch {self.epoch if self._is_users else epoch}"

    def __len__(self) -> int:
        raise NotImplementedError

    def sample_indices(self) -> Int64Array:
        """Return the whole order of this epoch, `(len(self),) int64`."""
        return self._order(self.epoch)(0, len(self))

    def batches(self, batch_size: int) -> Iterator[Int64Array]:
        """Return this epoch's order in arrays of `batch_size`, int64, the last maybe shorter: for loops without a loader."""
        if type(batch_size) is not int or batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size!r}; give an int of at least 1", option="batch_size", value=batch_size)
        self._note_reading()
        return _parts(self._order(self.epoch), len(self), batch_size)

    def __iter__(self) -> Iterator[int]:
        # The epoch counts that is set now, not at the first `next`.
        self._note_reading()
        return _one_by_one(_parts(self._order(self.epoch), len(self), _CHUNK))

    def _order(self, epoch: int) -> Order:
        """Return what gives any part of an epoch's order."""
        raise NotImplementedError

    def _note_reading(self) -> None:
        if self._read_epoch == self.epoch and self._is_random() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s is read a second time in epoch %d: the same order again; call set_epoch(n) before each epoch",
                type(self).__name__,
                self.epoch,
            )
        self._read_epoch = self.epoch

    def _is_random(self) -> bool:
        return True


class SequentialSampler(_Sampler):
    """The indices 0 to size - 1, in order. `size` is a number or anything with a length."""

    def __init__(self, size: int | Sized) -> None:
        super().__init__(0)
        self.size = _size_of(size)

    def __len__(self) -> int:
        return self.size

    def _order(self, epoch: int) -> Order:
        return lambda start, stop: np.arange(start, stop, dtype=np.int64)

    def _is_random(self) -> bool:
        return False


class RandomSampler(_Sampler):
    """Random indices below size for each epoch, given by (seed, epoch) alone.

    A permutation; with `num_samples` so many of it, one permutation after the other where that is more than `size`. With
    `replacement` each index is drawn by itself, from all.

    Raises ConfigError for counts that cannot be.
    """

    def __init__(self, size: int | Sized, seed: int = 0, *, replacement: bool = False, num_samples: int | None = None) -> None:
        super().__init__(seed)
        self.size = _size_of(size)
        self.replacement = replacement
        self.num_samples = self.size if num_samples is None else _count_of("num_samples", num_samples)
        if self.num_samples and not self.size:
            raise ConfigError("size is 0, so there is nothing to draw from", option="size", value=0)

    def __len__(self) -> int:
        return self.num_samples

    def _order(self, epoch: int) -> Order:
        if self.replacement:
            return lambda start, stop: _scaled(_raw(self.seed, epoch, start, stop), self.size)
        return _Turns(self.size, self.seed, epoch).take


class _Turns:
    """One permutation after the other, without end."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size, self._seed, self._epoch = size, seed, epoch
        self._turn = 0
        self._permutation = Permutation(size, seed, epoch)

    def take(self, start: int, stop: int) -> Int64Array:
        parts = [np.zeros(0, np.int64)]
        while start < stop:
            turn, first = divmod(start, self._size)
            last = min(self._size, first + stop - start)
            if turn != self._turn:
                # Epochs of this number are nobody's, so no two permutations are equal.
                self._turn, self._permutation = turn, Permutation(self._size, self._seed, self._epoch + (turn << 64))
            parts.append(self._permutation.take(first, last))
            start += last - first
        return parts[1] if len(parts) == 2 else np.concatenate(parts)


class WeightedSampler(_Sampler):
    """`num_samples` indices for each epoch, each as likely as its weight says, given by (seed, epoch) alone.

    With `replacement` each is drawn by itself; without, none comes twice, and the heavier ones tend to come first.

    Raises ConfigError for weights that are negative, not finite or all 0, and for more samples than can be had without
    replacement. Source: inversion of the cumulative sum; Efraimidis and Spirakis 2006 (without replacement).
    """

    def __init__(self, weights: Any, num_samples: int | None = None, *, replacement: bool = True, seed: int = 0) -> None:
        super().__init__(seed)
        self._weights = np.asarray(weights, np.float64).copy()
        if self._weights.ndim != 1:
            raise ConfigError(
                f"weights has shape {self._weights.shape}; give one number per sample",
                option="weights",
                value=self._weights.shape,
            )
        bad = np.flatnonzero(~(np.isfinite(self._weights) & (self._weights >= 0)))
        if bad.size:
            place, value = int(bad[0]), float(self._weights[bad[0]])
            raise ConfigError(f"weights[{place}] is {value}; give finite numbers from 0 on", option="weights", value=value)
        num_possible = int(np.count_nonzero(self._weights))
        self.num_samples = len(self._weights) if num_samples is None else _count_of("num_samples", num_samples)
        if self.num_samples and not num_possible:
            raise ConfigError("weights are all 0, so nothing can be drawn", option="weights", value=0.0)
        if not replacement and self.num_samples > num_possible:
            raise ConfigError(
                f"num_samples is {self.num_samples}, but only {num_possible} weights are above 0 and replacement=False",
                option="num_samples",
                value=self.num_samples,
            )
        self.replacement = replacement
        self._sums = np.cumsum(self._weights)
        self._last = int(np.flatnonzero(self._weights)[-1]) if num_possible else 0

    def __len__(self) -> int:
        return self.num_samples

    def _order(self, epoch: int) -> Order:
        if self.replacement:
            return lambda start, stop: self._drawn(epoch, start, stop)
        draws = _uniform(_raw(self.seed, epoch, 0, len(self._weights)))
        with np.errstate(divide="ignore", invalid="ignore"):
            keys = np.where(self._weights > 0, -np.log1p(-draws) / self._weights, np.inf)
        order = np.argsort(keys, kind="stable").astype(np.int64)
        return lambda start, stop: order[start:stop]

    def _drawn(self, epoch: int, start: int, stop: int) -> Int64Array:
        draws = _uniform(_raw(self.seed, epoch, start, stop)) * self._sums[-1]
        # From the right: an index of weight 0 has no stretch of its own to fall into.
        found: Int64Array = np.minimum(np.searchsorted(self._sums, draws, side="right"), self._last).astype(np.int64)
        return found


class BatchSampler:
    """The indices of a sampler in lists of `batch_size`; a last one that is not full is left out with `drop_last`.

    Raises ConfigError for a `batch_size` that is no count.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool = False) -> None:
        if type(batch_size) is not int or batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size!r}; give an int of at least 1", option="batch_size", value=batch_size)
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size if self.drop_last else -(-len(self.sampler) // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the next epoch on."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def follow_epoch(self, epoch: int, *, explicit: bool = False) -> None:
        """Pass the number on, unless the user gives it."""
        if explicit:
            set_epoch(self.sampler, epoch)
        else:
            follow_epoch(self.sampler, epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        iterator = iter(self.sampler)
        while batch := list(islice(iterator, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch


class DistributedSampler(_Sampler):
    """One rank's share of an epoch: every `num_replicas`-th position from `rank` on.

    `uneven` says what becomes of ranks that would have one sample less. "pad": positions are repeated from the epoch's start
    until all ranks have as many; with `drop_last` the rest is dropped instead. "keep": each sample once over all ranks, whose
    lengths then differ by one at most. `rank` and `num_replicas` default to those of `resolve_rank`. Positions are torch's; the
    shuffled order is our own.

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
        *,
        uneven: str = "pad",
    ) -> None:
        super().__init__(seed)
        if uneven not in ("pad", "keep"):
            raise ConfigError(f"uneven is {uneven!r}; choose one of 'pad', 'keep'", option="uneven", value=uneven)
        if drop_last and uneven == "keep":
            raise ConfigError("drop_last=True drops what uneven='keep' keeps; leave one out", option="uneven", value=uneven)
        self.size = _size_of(dataset_or_size)
        self.rank, self.num_replicas = resolve_rank(rank, num_replicas)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.uneven = uneven
        if uneven == "keep":
            self.num_samples = max(0, -(-(self.size - self.rank) // self.num_replicas))
            self.total_size = self.size
        else:
            self.num_samples = num_rank_samples(self.size, self.num_replicas, drop_last)
            self.total_size = self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def _order(self, epoch: int) -> Order:
        permutation = Permutation(self.size, self.seed, epoch) if self.shuffle else None
        return lambda start, stop: self._positions(permutation, start, stop)

    def _positions(self, permutation: Permutation | None, start: int, stop: int) -> Int64Array:
        positions = self.rank + self.num_replicas * np.arange(start, stop, dtype=np.int64)
        if positions.size:
            positions %= self.size
        return positions if permutation is None else permutation.at(positions)

    def _is_random(self) -> bool:
        return self.shuffle


def follow_epoch(sampler: Any, epoch: int) -> None:
    """Tell a sampler of ours the number of a loader's epoch; others are left to their users."""
    if isinstance(sampler, (_Sampler, BatchSampler)):
        sampler.follow_epoch(epoch)


def describe(sampler: Any, epoch: int) -> str:
    """What decides the order that a sampler gives to an epoch of a loader, as far as that can be told."""
    if isinstance(sampler, BatchSampler):
        return f"{type(sampler).__qualname__} over {describe(sampler.sampler, epoch)}"
    return sampler.describe(epoch) if isinstance(sampler, _Sampler) else type(sampler).__qualname__


def set_epoch(sampler: Any, epoch: int) -> None:
    """Tell a sampler the number of the next epoch, which the user has told a loader."""
    if isinstance(sampler, (_Sampler, BatchSampler)):
        sampler.follow_epoch(epoch, explicit=True)
    elif hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def _parts(order: Order, size: int, step: int) -> Iterator[Int64Array]:
    for start in range(0, size, step):
        yield order(start, min(start + step, size))


def _one_by_one(parts: Iterator[Int64Array]) -> Iterator[int]:
    for part in parts:
        yield from part.tolist()


def _raw(seed: int, epoch: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Numbers start to stop - 1 of the stream of (seed, epoch). Source: Philox4x64, whose raw stream is frozen."""
    digest = blake2b(f"{seed}:{epoch}".encode(), digest_size=16, person=b"draws").digest()
    generator = np.random.Philox(key=np.frombuffer(digest, "<u8").astype(np.uint64))
    # It makes four numbers a step, and advances by steps.
    generator.advance(start // 4)
    raw: npt.NDArray[np.uint64] = generator.random_raw(stop - start + start % 4)[start % 4 :]
    return raw


def _uniform(raw: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) of 53 bits each."""
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _scaled(raw: npt.NDArray[np.uint64], size: int) -> Int64Array:
    """Indices below size, each as likely as any other but for parts in 2**53."""
    return np.minimum((_uniform(raw) * size).astype(np.int64), size - 1)


def _count_of(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ConfigError(f"{name} is {value!r}; give an int of at least 0", option=name, value=value)
    return value


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
