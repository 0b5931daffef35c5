"""Samplers: torch's positions, our own orders, rank and world size from the right place."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from ringloader._core.batching import EpochPlan
from ringloader._core.permutation import Permutation
from ringloader.errors import ConfigError
from ringloader.factory import FactorySpec
from ringloader.loader import Loader
from ringloader.samplers import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedSampler,
    resolve_rank,
)
from tests.runtime.sample_datasets import Numbers

SRC = pathlib.Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def _single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_sequential_sampler_gives_indices_in_order() -> None:
    """Order of the dataset, from a number or anything with a length."""
    assert list(SequentialSampler(4)) == [0, 1, 2, 3]
    assert SequentialSampler("abc").sample_indices().tolist() == [0, 1, 2]
    assert len(SequentialSampler([])) == 0
    with pytest.raises(ConfigError, match="size"):
        SequentialSampler(-1)


def test_random_sampler_order_depends_on_seed_and_epoch_alone() -> None:
    """The same epoch gives the same plain ints every time, another seed or epoch another order."""
    sampler = RandomSampler(40_000, seed=3)
    order = list(sampler)
    assert order == list(RandomSampler(40_000, seed=3)) == sampler.sample_indices().tolist()
    assert type(order[0]) is int
    assert sorted(order) == list(range(len(sampler)))
    assert order != list(RandomSampler(40_000, seed=4))
    sampler.set_epoch(1)
    assert order != list(sampler)
    assert list(sampler) == Permutation(40_000, 3, 1).take(0, 40_000).tolist()


def test_random_sampler_over_a_billion_starts_at_once() -> None:
    """The first indices of a huge epoch come without the others."""
    iterator = iter(RandomSampler(10**12))
    assert len({next(iterator) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
def test_distributed_sampler_unshuffled_equals_torch(world_size: int, drop_last: bool) -> None:
    """Which positions go to which rank, padding and lengths are torch's, for datasets smaller than the world too."""
    distributed = pytest.importorskip("torch.utils.data.distributed")
    for size in (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 100, 101):
        for rank in range(world_size):
            ours = DistributedSampler(size, world_size, rank, shuffle=False, drop_last=drop_last)
            theirs = distributed.DistributedSampler(range(size), world_size, rank, shuffle=False, drop_last=drop_last)
            assert list(ours) == list(theirs)
            assert (len(ours), ours.total_size) == (len(theirs), theirs.total_size)


@pytest.mark.parametrize("drop_last", [False, True])
def test_distributed_sampler_shuffled_shares_one_permutation(drop_last: bool) -> None:
    """Ranks take turns in one order of the epoch; the loader's own plan gives the same indices."""
    order = Permutation(50, 9, 2).take(0, 50)
    for rank in range(4):
        sampler = DistributedSampler(50, 4, rank, seed=9, drop_last=drop_last)
        sampler.set_epoch(2)
        positions = rank + 4 * np.arange(len(sampler))
        assert list(sampler) == sampler.sample_indices().tolist() == order[positions % 50].tolist()
        plan = EpochPlan(50, 100, shuffle=True, seed=9, epoch=2, rank=rank, world_size=4)
        assert drop_last or plan.batch(0)[0].tolist() == list(sampler)


def test_resolve_rank_prefers_arguments_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given values win; without any, RANK and WORLD_SIZE together; else a world of one."""
    assert resolve_rank() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    assert resolve_rank() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert resolve_rank() == (3, 8)
    assert resolve_rank(1, 2) == (1, 2)
    assert resolve_rank(rank=5) == (5, 8)
    assert resolve_rank(world_size=1) == (0, 1)
    assert DistributedSampler(16).sample_indices().shape == (2,)
    with pytest.raises(ConfigError, match="rank is 3 and world_size 2"):
        resolve_rank(world_size=2)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK='first'"):
        resolve_rank()


def test_resolve_rank_finds_an_initialised_process_group(tmp_path: pathlib.Path) -> None:
    """torch.distributed, once initialised, wins over the environment."""
    pytest.importorskip("torch.distributed")
    code = """if True:
        import torch.distributed as dist
        from ringloader.samplers import resolve_rank
        print(resolve_rank())
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        print(resolve_rank())
        dist.destroy_process_group()
        """
    environment = {**os.environ, "PYTHONPATH": str(SRC), "RANK": "1", "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["(1, 2)", "(0, 1)"], done.stderr


def test_random_sampler_of_more_samples_than_there_are_goes_round_again() -> None:
    """num_samples without replacement: whole permutations, other ones each, and a part of the last; each epoch anew."""
    sampler = RandomSampler(10, seed=2, num_samples=25)
    order = sampler.sample_indices().tolist()
    assert len(sampler) == len(order) == 25
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]
    assert len(set(order[20:])) == 5
    assert [part.tolist() for part in sampler.batches(7)] == [order[:7], order[7:14], order[14:21], order[21:]]
    assert RandomSampler(10, seed=2, num_samples=4).sample_indices().tolist() == order[:4]


def test_random_sampler_with_replacement_is_uniform_and_the_same_in_parts() -> None:
    """Chi-square over ten values; any part of the order is that part of the whole."""
    sampler = RandomSampler(10, seed=1, replacement=True, num_samples=100_000)
    whole = sampler.sample_indices()
    counts = np.bincount(whole, minlength=10)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 28  # one in a thousand, and the seed is fixed
    assert sampler._order(0)(4321, 4331).tolist() == whole[4321:4331].tolist()
    sampler.set_epoch(1)
    assert sampler.sample_indices().tolist() != whole.tolist()


def test_weighted_sampler_draws_as_its_weights_say() -> None:
    """With replacement by chi-square; weight 0 never comes; parts are parts of the whole."""
    weights = [0.0, 1.0, 2.0, 0.0, 5.0, 0.0]
    sampler = WeightedSampler(weights, 80_000, seed=3)
    whole = sampler.sample_indices()
    counts = np.bincount(whole, minlength=6)
    expected = np.array(weights) * 10_000
    assert counts[expected == 0].sum() == 0
    assert ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum() < 14
    assert sampler._order(0)(777, 780).tolist() == whole[777:780].tolist()


def test_weighted_sampler_without_replacement_prefers_the_heavy_and_repeats_none() -> None:
    """The first drawn follows the weights, over many epochs."""
    sampler = WeightedSampler([1.0, 0.0, 3.0], 2, replacement=False)
    firsts = []
    for epoch in range(2000):
        sampler.set_epoch(epoch)
        order = sampler.sample_indices().tolist()
        assert sorted(order) == [0, 2]
        firsts.append(order[0])
    assert 1400 < firsts.count(2) < 1600


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 23])
def test_distributed_sampler_that_keeps_gives_each_sample_once(world_size: int, size: int) -> None:
    """uneven="keep": nothing repeated, nothing dropped, lengths differ by one at most."""
    parts = [list(DistributedSampler(size, world_size, rank, uneven="keep")) for rank in range(world_size)]
    assert sorted(index for part in parts for index in part) == list(range(size))
    lengths = {len(part) for part in parts}
    assert max(lengths) - min(lengths) <= 1
    assert [len(DistributedSampler(size, world_size, rank, uneven="keep")) for rank in range(world_size)] == list(
        map(len, parts)
    )


@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_sampler_is_torchs(drop_last: bool) -> None:
    """The same lists and the same length."""
    data = pytest.importorskip("torch.utils.data")
    for size in range(12):
        ours = BatchSampler(SequentialSampler(size), 4, drop_last)
        theirs = data.BatchSampler(range(size), 4, drop_last)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: WeightedSampler([1.0, float("nan")]), r"weights\[1\] is nan"),
        (lambda: WeightedSampler([1.0, -2.0]), r"weights\[1\] is -2.0"),
        (lambda: WeightedSampler([float("inf")]), r"weights\[0\] is inf"),
        (lambda: WeightedSampler([0.0, 0.0]), "weights are all 0"),
        (lambda: WeightedSampler([[1.0]]), "weights has shape"),
        (lambda: WeightedSampler([1.0, 0.0], 2, replacement=False), "only 1 weights are above 0"),
        (lambda: WeightedSampler([1.0], -1), "num_samples is -1"),
        (lambda: RandomSampler(0, num_samples=3), "size is 0, so there is nothing to draw from"),
        (lambda: RandomSampler(3, num_samples=-2), "num_samples is -2"),
        (lambda: RandomSampler(3, seed=-1), "seed is -1"),
        (lambda: BatchSampler([1], 0), "batch_size is 0"),
        (lambda: list(RandomSampler(3).batches(True)), "batch_size is True"),
        (lambda: DistributedSampler(3, 2, 0, uneven="drop"), "uneven is 'drop'"),
        (lambda: DistributedSampler(3, 2, 0, drop_last=True, uneven="keep"), "drops what uneven='keep' keeps"),
    ],
)
def test_samplers_refuse_what_cannot_be(make: Callable[[], object], match: str) -> None:
    """By option and value, when they are made."""
    with pytest.raises(ConfigError, match=match):
        make()


def test_sampler_read_twice_by_hand_without_set_epoch_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """The same order again is what people forget; a sampler without chance does not mind."""
    sampler = RandomSampler(5)
    for _ in range(3):
        list(sampler)
    assert caplog.text.count("RandomSampler is read a second time in epoch 0") == 1
    other = DistributedSampler(5, 1, 0)
    for epoch in range(3):
        other.set_epoch(epoch)
        list(other)
    for _ in range(2):
        list(SequentialSampler(3))
    assert caplog.text.count("read a second time") == 1


def test_loader_numbers_the_epochs_of_our_samplers_unless_the_user_does(caplog: pytest.LogCaptureFixture) -> None:
    """Another order each epoch without a word; the user's own set_epoch counts, also inside a BatchSampler."""

    def order(epoch: int) -> list[int]:
        indices: list[int] = RandomSampler(20, seed=1)._order(epoch)(0, 20).tolist()
        return indices

    with Loader(range(20), batch_size=20, sampler=RandomSampler(20, seed=1)) as loader:
        assert [next(iter(loader)).tolist() for _ in range(3)] == [order(0), order(1), order(2)]
        loader.set_epoch(7)
        assert [next(iter(loader)).tolist() for _ in range(2)] == [order(7), order(8)]
    batched = BatchSampler(RandomSampler(20, seed=1), 20)
    with Loader(range(20), batch_sampler=batched) as loader:
        assert [next(iter(loader)).tolist() for _ in range(2)] == [order(0), order(1)]
        batched.set_epoch(5)
        assert [next(iter(loader)).tolist() for _ in range(2)] == [order(5), order(5)]
        loader.set_epoch(9)
        assert [next(iter(loader)).tolist() for _ in range(2)] == [order(9), order(10)]
    assert caplog.text.count("read a second time in epoch 5") == 1


def test_sampler_keeps_the_epoch_of_its_iteration() -> None:
    """set_epoch in the midst of an iteration is for the next one, also before its first element."""
    sampler = RandomSampler(50_000, seed=1)
    first = iter(sampler)
    sampler.set_epoch(1)
    second = iter(sampler)
    assert list(first) == RandomSampler(50_000, seed=1)._order(0)(0, 50_000).tolist()
    assert list(second) == RandomSampler(50_000, seed=1)._order(1)(0, 50_000).tolist()


def test_length_by_a_sampler_starts_no_worker() -> None:
    """With a spec only workers know what the dataset is; the sampler knows how long the epoch is."""
    with Loader(FactorySpec(Numbers, 20), batch_size=4, sampler=range(10), num_workers=2) as loader:
        assert len(loader) == 3
        assert loader._engine is None
    with Loader(FactorySpec(Numbers, 20), batch_sampler=[[1], [2, 3]], num_workers=2) as loader:
        assert len(loader) == 2
        assert loader._engine is None


class IterableDataset:
    """A map-style dataset of the user's that happens to have torch's name."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def test_class_is_not_taken_for_torchs_by_its_name_alone() -> None:
    """Where it comes from counts, too."""
    with Loader(IterableDataset(), batch_size=4, sampler=[3, 1]) as loader:
        assert [batch.tolist() for batch in loader] == [[3, 1]]
