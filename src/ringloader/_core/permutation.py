"""Keyed permutations of range(n): the order of an epoch, from any position, the same in every process and version.

Owns the two algorithms and their ids, which are saved with a loader's state: what an id stands for never changes. Both use
frozen arithmetic only (numpy promises the raw streams of its bit generators, not the methods of `Generator`).

Source: NEP 19 (stream compatibility); Luby and Rackoff 1988 (Feistel permutations); Black and Rogaway 2002 (cycle walking);
MurmurHash3's 64-bit finalizer (the round function).
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from ringloader._core.blake2 import blake2b

Int64Array = npt.NDArray[np.int64]

# Up to here an epoch's whole order is kept (8 MiB) and is uniform over all orders; above, it is computed where it is needed.
MAX_SORTED = 1 << 20
# Each pass updates both halves. Two passes are the least that mixes both; the rest is margin for the weak round function.
_PASSES = 4
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


class Permutation:
    """The permutation of `range(n)` that belongs to (seed, epoch): sorted keys up to `MAX_SORTED`, else a Feistel network."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        self.algorithm = "philox-argsort-1" if n <= MAX_SORTED else "feistel-murmur-1"
        self._seed = seed
        self._epoch = epoch

    def take(self, start: int, stop: int) -> Int64Array:
        """Return elements start to stop - 1. Raises IndexError outside 0 <= start <= stop <= n."""
        if not 0 <= start <= stop <= self.n:
            raise IndexError(f"positions {start} to {stop} of a permutation of {self.n}")
        if self.n <= MAX_SORTED:
            return self._sorted[start:stop]
        return self._feistel.take(start, stop)

    def at(self, positions: Int64Array) -> Int64Array:
        """Return the elements at any positions in range(n)."""
        return self._sorted[positions] if self.n <= MAX_SORTED else self._feistel.at(positions)

    def digest(self) -> str:
        """Return 16 hexadecimal digits over algorithm, n and 8 spread elements: tells whether a saved state still fits."""
        positions = [index * (self.n - 1) // 7 for index in range(8)] if self.n else []
        elements = self.at(np.array(positions, np.int64)).astype("<i8").tobytes()
        return blake2b(f"{self.algorithm} {self.n} ".encode() + elements, digest_size=8).hexdigest()

    @functools.cached_property
    def _sorted(self) -> Int64Array:
        return permutation(self.n, self._seed, self._epoch)

    @functools.cached_property
    def _feistel(self) -> FeistelPermutation:
        return FeistelPermutation(self.n, self._seed, self._epoch)


def permutation(n: int, seed: int, epoch: int) -> Int64Array:
    """Return a whole permutation of `range(n)`, `(n,) int64`, read-only: the stable order of n raw 64-bit Philox keys."""
    keys = np.random.Philox(key=_key(seed, epoch, 2)).random_raw(n)
    order = np.argsort(keys)
    in_order = keys[order]
    # Without equal keys every sort gives the same order, and numpy's default one takes a third of the stable one's time.
    if np.any(in_order[1:] == in_order[:-1]):
        order = np.argsort(keys, kind="stable")
    order = order.astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


class FeistelPermutation:
    """A permutation of `range(n)` in constant memory, for any n from 1 to 2**62.

    Bijective for every n; not uniform over all orders, which no key of fixed size can be.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a Feistel permutation of {n} elements, not of 1 to 2**62")
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << bits // 2) - 1)
        self._high_mask = np.uint64((1 << bits - bits // 2) - 1)
        self._keys = _key(seed, epoch, 2 * _PASSES)

    def take(self, start: int, stop: int) -> Int64Array:
        """Return elements start to stop - 1, `(stop - start,) int64`; costs the same at every start."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def at(self, positions: Int64Array) -> Int64Array:
        """Return the elements at any positions in range(n)."""
        values = self._encipher(positions.astype(np.uint64))
        # The network permutes the next power of two, less than 2 n: walking on from a value outside leads to one inside.
        outside = np.flatnonzero(values >= self.n)
        while outside.size:
            walked = self._encipher(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.n]
        return values.astype(np.int64)

    def _encipher(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        high, low = values >> self._low_bits, values & self._low_mask
        for index in range(0, 2 * _PASSES, 2):
            high ^= _mix(low, self._keys[index]) & self._high_mask
            low ^= _mix(high, self._keys[index + 1]) & self._low_mask
        return (high << self._low_bits) | low


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed = values ^ key
    mixed *= _MULTIPLIERS[0]
    mixed ^= mixed >> _SHIFT
    mixed *= _MULTIPLIERS[1]
    mixed ^= mixed >> _SHIFT
    return mixed


def _key(seed: int, epoch: int, num_words: int) -> npt.NDArray[np.uint64]:
    digest = blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * num_words, person=b"permutation")
    return np.frombuffer(digest.digest(), "<u8").astype(np.uint64)
