"""Samplers: torch's positions, our own orders, rank and world size from the right place."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from ringloader._core.batching import EpochPlan
from ringloader._core.permutation import Permutation
from ringloader.errors import ConfigError
from ringloader.samplers import DistributedSampler, RandomSampler, SequentialSampler, resolve_rank

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
