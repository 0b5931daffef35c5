"""Reported cases around randomness and epochs: draws, order, `set_epoch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ringloader import FactorySpec, Loader
from tests.runtime import case_datasets as cases
from tests.runtime.sample_datasets import Numbers


def epochs(loader: Loader, count: int) -> list[list[Any]]:
    """Every batch of so many epochs."""
    return [[batch.tolist() for batch in loader] for _ in range(count)]


def test_b12_draws_differ_everywhere_and_repeat_with_the_seed(tmp_path: Path) -> None:
    """2 epochs of 16 samples and 4 workers: 32 different draws per generator, equal for one seed, also after a death."""
    spec = FactorySpec(cases.DrawsAll, 16, str(tmp_path), [3, 11])
    with Loader(spec, batch_size=1, num_workers=4, seed=5) as loader:
        drawn = epochs(loader, 2)
        assert loader.stats().num_restarts == 2
    plain = FactorySpec(cases.DrawsAll, 16)
    for generator in range(3):
        assert len({batch[0][generator] for epoch in drawn for batch in epoch}) == 32
    with Loader(plain, batch_size=1, seed=5) as loader:
        assert epochs(loader, 2) == drawn
    with Loader(plain, batch_size=1, seed=6) as loader:
        others = epochs(loader, 2)
    assert not {batch[0][0] for epoch in others for batch in epoch} & {batch[0][0] for epoch in drawn for batch in epoch}


def test_b12_draws_inside_one_batch_differ() -> None:
    """Seeding by batch does not make the samples of a batch equal."""
    with Loader(FactorySpec(cases.UnevenDraws, 16), batch_size=8, num_workers=1) as loader:
        assert len({draw for batch in loader for _, *draws in batch.tolist() for draw in draws}) == 32


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_b32_epoch_reaches_every_sample_of_every_worker(num_workers: int) -> None:
    """`set_epoch` of the dataset runs before the first sample of an epoch, and none is made ahead under the old number."""
    with Loader(FactorySpec(cases.Epochs, 40), batch_size=4, num_workers=num_workers, prefetch_factor=4) as loader:
        for epoch in (0, 1, 2, 7, 3):
            loader.set_epoch(epoch)
            assert torch.cat(list(loader)).tolist() == [epoch * 100 + i for i in range(40)]
        loader.set_epoch(50)
        loader.set_epoch(60)
        assert next(iter(loader)).tolist() == [6000, 6001, 6002, 6003]
        assert next(iter(loader)).tolist() == [6100, 6101, 6102, 6103]  # the loader counts on by itself


def test_b32_two_epochs_at_one_time_keep_their_numbers() -> None:
    """A worker that serves two iterators in turn is told the epoch each time."""
    with Loader(FactorySpec(cases.Epochs, 40), batch_size=4, num_workers=1) as loader:
        for k, (first, second) in enumerate(zip(loader, loader, strict=True)):
            assert first.tolist() == [4 * k + i for i in range(4)]
            assert second.tolist() == [100 + 4 * k + i for i in range(4)]


def test_b32_replacement_learns_the_epoch_before_its_first_sample(tmp_path: Path) -> None:
    """A worker that dies in the middle of epoch 2 is replaced by one that is in epoch 2."""
    spec = FactorySpec(cases.Epochs, 40, str(tmp_path), (2, 17))
    with Loader(spec, batch_size=4, num_workers=2) as loader:
        for epoch in range(4):
            assert torch.cat(list(loader)).tolist() == [epoch * 100 + i for i in range(40)]
        assert loader.stats().num_restarts == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_b32_dataset_without_set_epoch_is_fine(num_workers: int) -> None:
    """Nothing fails where there is nothing to tell."""
    with Loader(FactorySpec(Numbers, 4), batch_size=4, num_workers=num_workers) as loader:
        loader.set_epoch(3)
        assert next(iter(loader))[1].tolist() == [0, 1, 2, 3]


def test_b39_order_and_draws_are_a_function_of_the_seed(tmp_path: Path) -> None:
    """Three shuffled epochs are equal in five runs with 0, 1, 2, 2 and 4 workers, random pauses and deaths notwithstanding."""
    runs = []
    for num_workers, dies_at in ((0, []), (1, []), (2, []), (4, []), (2, [5, 20])):
        spec = FactorySpec(cases.UnevenDraws, 24, str(tmp_path), dies_at)
        with Loader(spec, batch_size=3, shuffle=True, num_workers=num_workers, seed=7) as loader:
            runs.append(epochs(loader, 3))
            assert loader.stats().num_restarts == len(dies_at)
    assert all(run == runs[0] for run in runs)
    orders = [[index for batch in epoch for index, *_ in batch] for epoch in runs[0]]
    assert [sorted(order) for order in orders] == [list(range(24))] * 3
    assert len({tuple(order) for order in orders}) == 3
    draws = [draw for epoch in runs[0] for batch in epoch for _, *pair in batch for draw in pair]
    assert len(set(draws)) == 3 * 24 * 2
