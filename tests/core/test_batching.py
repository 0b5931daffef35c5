"""Epoch plans: every sample in one batch of one rank, torch's padding, random access."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringloader._core.batching import EpochPlan
from ringloader._core.permutation import Permutation
from ringloader.errors import ConfigError


def all_keys(plan: EpochPlan) -> list[int]:
    """The keys of every batch of one rank, in order."""
    return [key for index in range(len(plan)) for key in plan.batch(index)[0].tolist()]


@given(
    size=st.integers(0, 300),
    batch_size=st.integers(1, 40),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
def test_plan_single_rank_covers_epoch_in_order(size: int, batch_size: int, drop_last: bool, shuffle: bool, seed: int) -> None:
    """One rank sees the epoch's order cut into full batches, the last one short or dropped."""
    plan = EpochPlan(size, batch_size, drop_last, shuffle, seed, 1)
    expected = Permutation(size, seed, 1).take(0, size).tolist() if shuffle else list(range(size))
    count = size // batch_size if drop_last else math.ceil(size / batch_size)
    assert len(plan) == count
    assert all_keys(plan) == expected[: count * batch_size]


@given(size=st.integers(1, 200), batch_size=st.integers(1, 20), world_size=st.integers(1, 9), shuffle=st.booleans())
def test_plan_several_ranks_padded_have_equal_steps_and_cover_all(
    size: int, batch_size: int, world_size: int, shuffle: bool
) -> None:
    """Every rank has as many batches of the same sizes; together they hold each sample, each at its own position."""
    plans = [EpochPlan(size, batch_size, shuffle=shuffle, rank=rank, world_size=world_size) for rank in range(world_size)]
    shares = [all_keys(plan) for plan in plans]
    assert len({len(share) for share in shares}) == 1
    assert {key for share in shares for key in share} == set(range(size))
    assert sum(map(len, shares)) == math.ceil(size / world_size) * world_size
    positions = [plan.batch(index)[1] for plan in plans for index in range(len(plan))]
    assert len(set(positions)) == len(positions)


@given(size=st.integers(0, 200), batch_size=st.integers(1, 20), world_size=st.integers(1, 9))
def test_plan_drop_last_never_repeats_a_sample(size: int, batch_size: int, world_size: int) -> None:
    """With drop_last all batches are full, of equal number on every rank, and no sample comes twice."""
    plans = [EpochPlan(size, batch_size, True, True, rank=rank, world_size=world_size) for rank in range(world_size)]
    keys = [key for plan in plans for key in all_keys(plan)]
    assert len(keys) == len(set(keys))
    assert {len(plan) for plan in plans} == {size // world_size // batch_size}


@given(size=st.integers(1, 200), world_size=st.integers(1, 6), data=st.data())
def test_plan_position_names_the_batch_keys(size: int, world_size: int, data: st.DataObject) -> None:
    """Row r of a batch is the element at position + r * world_size of the epoch's permutation, wrapped at its end."""
    rank = data.draw(st.integers(0, world_size - 1))
    plan = EpochPlan(size, 7, shuffle=True, seed=3, epoch=4, rank=rank, world_size=world_size)
    order = Permutation(size, 3, 4).take(0, size)
    keys, position = plan.batch(data.draw(st.integers(0, len(plan) - 1)))
    assert keys.dtype == np.int64
    assert keys.tolist() == [order[(position + row * world_size) % size] for row in range(len(keys))]


def test_plan_any_order_of_access_gives_the_same_batches() -> None:
    """A batch is a function of its index alone, across the blocks that keys are computed in."""
    forward = EpochPlan(100_000, 333, shuffle=True)
    expected = [forward.batch(index)[0].tolist() for index in range(len(forward))]
    scattered = EpochPlan(100_000, 333, shuffle=True)
    for index in np.random.default_rng(0).permutation(len(scattered)).tolist():
        assert scattered.batch(index)[0].tolist() == expected[index]


def test_plan_over_a_billion_starts_at_once_anywhere() -> None:
    """An epoch that no memory could hold gives its last batch first, each rank its own."""
    plans = [EpochPlan(10**12, 256, shuffle=True, rank=rank, world_size=4) for rank in range(4)]
    last = [plan.batch(len(plan) - 1)[0] for plan in plans]
    assert len(set(np.concatenate(last).tolist())) == 1024


@given(size=st.integers(2, 120), before=st.integers(1, 5), after=st.integers(1, 5), steps=st.integers(0, 5))
def test_plan_resumed_with_other_world_size_completes_the_epoch(size: int, before: int, after: int, steps: int) -> None:
    """What all ranks consumed is a prefix of the epoch, and a plan that starts behind it holds exactly the rest."""
    old = [EpochPlan(size, 2, True, True, rank=rank, world_size=before) for rank in range(before)]
    steps = min(steps, len(old[0]))
    seen = [key for plan in old for index in range(steps) for key in plan.batch(index)[0].tolist()]
    new = [EpochPlan(size, 3, False, True, rank=rank, world_size=after, start=len(seen)) for rank in range(after)]
    rest = [key for plan in new for key in all_keys(plan)]
    assert set(seen) | set(rest) == set(range(size))
    if (size - len(seen)) % after == 0:
        assert sorted(seen + rest) == list(range(size))


def test_plan_batch_keys_are_read_only() -> None:
    """Nobody changes the order of an epoch by writing into a batch's keys."""
    keys, _ = EpochPlan(10, 4, shuffle=True).batch(0)
    assert not keys.flags.writeable


@pytest.mark.parametrize("index", [-1, 3])
def test_plan_batch_outside_the_epoch_raises(index: int) -> None:
    """A batch that does not exist is an error."""
    with pytest.raises(IndexError, match="3 batches"):
        EpochPlan(9, 3).batch(index)


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1, "rank": 2, "world_size": 2}, "rank"),
        ({"batch_size": 1, "world_size": 0}, "world_size"),
        ({"batch_size": 1, "start": 11}, "start"),
        ({"batch_size": 1, "start": -1}, "start"),
    ],
)
def test_plan_impossible_values_are_refused(plan: dict[str, Any], word: str) -> None:
    """Values that make no epoch are named when the plan is made."""
    with pytest.raises(ConfigError, match=word):
        EpochPlan(10, **plan)
