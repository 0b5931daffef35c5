"""Permutations: bijective, the same everywhere, different from epoch to epoch, and close to uniform."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringloader._core.permutation import MAX_SORTED, FeistelPermutation, Permutation, permutation

SRC = Path(__file__).parents[2] / "src"
RECORDED_SORTED = [9, 1, 3, 7, 4, 10, 6, 5, 0, 11, 8, 2]
RECORDED_FEISTEL = [859678628, 703040969, 165692037, 736769743]
SEEDS = st.integers(-(2**70), 2**70)


@given(n=st.integers(0, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_permutation_any_size_is_bijective(n: int, seed: int, epoch: int) -> None:
    """The sorted-keys permutation holds every index once."""
    assert sorted(permutation(n, seed, epoch).tolist()) == list(range(n))


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_feistel_any_size_is_bijective(n: int, seed: int, epoch: int) -> None:
    """The Feistel permutation holds every index once, powers of two or not."""
    assert sorted(FeistelPermutation(n, seed, epoch).take(0, n).tolist()) == list(range(n))


@settings(max_examples=50)
@given(n=st.integers(MAX_SORTED + 1, 2**62), seed=SEEDS, data=st.data())
def test_feistel_huge_size_stays_in_range_without_repeats(n: int, seed: int, data: st.DataObject) -> None:
    """A window anywhere in a huge permutation holds distinct indices of its range."""
    start = data.draw(st.integers(0, n - 100))
    window = Permutation(n, seed, 0).take(start, start + 100)
    assert window.dtype == np.int64
    assert window.min() >= 0
    assert window.max() < n
    assert len(set(window.tolist())) == 100


@given(n=st.integers(1, 500), seed=st.integers(0, 99), data=st.data())
def test_take_any_window_equals_slice_of_the_whole(n: int, seed: int, data: st.DataObject) -> None:
    """Random access gives what the whole order has there, with both algorithms."""
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    for order in (Permutation(n, seed, 1), FeistelPermutation(n, seed, 1)):
        np.testing.assert_array_equal(order.take(start, stop), order.take(0, n)[start:stop])


def test_take_outside_the_range_raises() -> None:
    """Positions that do not exist are an error, not a wrapped or shortened answer."""
    for start, stop in ((-1, 2), (0, 11), (5, 4)):
        with pytest.raises(IndexError):
            Permutation(10, 0, 0).take(start, stop)
    for n in (0, 2**62 + 1):
        with pytest.raises(ValueError, match="Feistel"):
            FeistelPermutation(n, 0, 0)


def test_permutation_given_key_equals_recorded_order() -> None:
    """The orders behind the two algorithm ids never change, or saved states would resume elsewhere."""
    assert permutation(12, 7, 3).tolist() == RECORDED_SORTED
    assert FeistelPermutation(10**9, 7, 3).take(123, 127).tolist() == RECORDED_FEISTEL
    assert (Permutation(12, 7, 3).algorithm, Permutation(10**9, 7, 3).algorithm) == ("philox-argsort-1", "feistel-murmur-1")


def test_permutation_other_process_gives_the_same_order() -> None:
    """Another interpreter with another hash seed computes the same epoch."""
    code = "from ringloader._core.permutation import Permutation as P; print(P(999, 5, 2).digest(), P(10**9, 5, 2).digest())"
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [Permutation(999, 5, 2).digest(), Permutation(10**9, 5, 2).digest()]


@pytest.mark.parametrize("n", [1000, 10**9])
def test_digest_other_key_or_size_differs(n: int) -> None:
    """A saved state is recognised as foreign when seed, epoch or size are not its own."""
    digests = {Permutation(*key).digest() for key in ((n, 0, 0), (n, 1, 0), (n, 0, 1), (n + 1, 0, 0), (n, -1, 0))}
    assert len(digests) == 5
    assert Permutation(0, 0, 0).digest() == Permutation(0, 0, 1).digest()


@pytest.mark.parametrize("n", [1000, MAX_SORTED + 1])
def test_permutation_epochs_share_hardly_any_position(n: int) -> None:
    """Two epochs agree in about one position in n, as two random orders do."""
    first, second = (Permutation(n, 0, epoch).take(0, 1000) for epoch in (0, 1))
    assert np.count_nonzero(first == second) < 10


def test_permutation_first_element_is_uniform() -> None:
    """Over many seeds each index comes first equally often (chi-square, 5 sigma)."""
    n, draws = 8, 8000
    counts = np.bincount([permutation(n, seed, 0)[0] for seed in range(draws)], minlength=n)
    _assert_uniform(counts)


def test_feistel_first_element_and_successor_are_uniform() -> None:
    """At a size that needs it, first elements and the steps between neighbours spread evenly over 16 bins."""
    n = 10**7
    firsts = np.array([FeistelPermutation(n, seed, 0).take(0, 1)[0] for seed in range(3000)])
    _assert_uniform(np.bincount(firsts * 16 // n, minlength=16))
    steps = np.diff(FeistelPermutation(n, 0, 0).take(0, 20_000)) % n
    _assert_uniform(np.bincount(steps * 16 // n, minlength=16))


def _assert_uniform(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5
