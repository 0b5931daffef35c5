"""The border between two epochs: the next one's first batches are made while the last ones of this one are consumed."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import pytest

from ringloader import FactorySpec, FaultPolicy, Loader
from ringloader._core.session import BatchState
from tests.runtime.conftest import wait_until
from tests.runtime.light_datasets import Draws, Noticing
from tests.runtime.sample_datasets import Numbers
from tests.runtime.stream_datasets import Sharded

_OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 2, "output": "numpy"}
_SPEC = FactorySpec(Numbers, 50)


def plain(batch: Any) -> list[list[float]]:
    return [leaf.tolist() for leaf in batch]


def epochs_apart(spec: FactorySpec, count: int) -> list[list[Any]]:
    """Each epoch by a loader of its own: nothing is made ahead of it."""
    return [epoch_apart(spec, epoch) for epoch in range(count)]


@functools.cache
def epoch_apart(spec: FactorySpec, epoch: int) -> list[Any]:
    """One of them."""
    with Loader(spec, **_OPTIONS) as loader:
        loader.set_epoch(epoch)
        return [plain(batch) for batch in loader]


def num_early_ready(loader: Loader) -> int:
    early = loader._early
    if early is None or early.session is None:
        return 0
    return sum(batch.state is BatchState.READY for batch in early.session.batches.values())


def test_first_batches_of_the_next_epoch_are_there_when_it_begins() -> None:
    """As many as were in flight, made before anybody asked; the same bytes as without, epoch after epoch."""
    spec = FactorySpec(Draws)
    with Loader(spec, **_OPTIONS) as loader:
        found = []
        for epoch in range(4):
            found.append([plain(batch) for batch in loader])
            assert wait_until(lambda: num_early_ready(loader) == 4)
            assert loader.epoch == epoch + 1
            assert loader.state_dict()["epoch"] == epoch + 1
            assert loader.state_dict()["position"] == 0
    assert found == epochs_apart(spec, 4)


def test_nothing_is_made_early_while_this_epoch_has_work_left() -> None:
    """Workers have better things to do."""
    with Loader(_SPEC, **_OPTIONS) as loader:
        iterator = iter(loader)
        for _ in range(8):
            next(iterator)
        assert loader._early is None


@pytest.mark.parametrize("way", ["set_epoch", "load_state_dict", "call", "same epoch again"])
def test_another_use_cancels_what_was_made_early(way: str) -> None:
    """And gets its own."""
    spec = FactorySpec(Draws)
    expected = epochs_apart(spec, 4)
    with Loader(spec, **_OPTIONS) as loader:
        state = loader.state_dict()
        list(loader)
        assert wait_until(lambda: num_early_ready(loader) == 4)
        if way == "set_epoch":
            loader.set_epoch(3)
        elif way == "load_state_dict":
            loader.load_state_dict(state)
        elif way == "call":
            loader.call("__len__")
        else:
            loader.set_epoch(0)
        assert loader._early is None
        epoch = {"set_epoch": 3, "call": 1}.get(way, 0)
        assert [plain(batch) for batch in loader] == expected[epoch]
        assert all(session.is_early for session in loader._engine.scheduler.sessions.values())  # type: ignore[union-attr]


def test_second_iterator_and_an_abandoned_one_are_right() -> None:
    """The early epoch goes to whoever asks for the next one; nothing is left of it when nobody does."""
    spec = FactorySpec(Draws)
    expected = epochs_apart(spec, 3)
    with Loader(spec, **_OPTIONS) as loader:
        first = iter(loader)
        head = [plain(next(first)) for _ in range(12)]
        second = iter(loader)
        assert [plain(batch) for batch in second] == expected[1]
        assert head + [plain(batch) for batch in first] == expected[0]
        third = iter(loader)
        assert plain(next(third)) == expected[2][0]
        del third
    with Loader(spec, **_OPTIONS) as loader:
        list(loader)
        assert wait_until(lambda: num_early_ready(loader) == 4)
        iterator = iter(loader)
        assert plain(next(iterator)) == expected[1][0]
        del iterator
        assert plain(next(iter(loader))) == expected[2][0]


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (FactorySpec(Noticing), {}),
        (FactorySpec(Draws), {"shuffle": False, "sampler": list(range(50))}),
        (FactorySpec(Draws), {"persistent_workers": False}),
        (FactorySpec(Draws), {"num_workers": 0}),
        (Draws(), {"worker_backend": "thread"}),
        (FactorySpec(Sharded, 50), {"shuffle": False}),
    ],
    ids=["set_epoch", "sampler", "workers that end", "inline", "threads", "stream"],
)
def test_epochs_that_nobody_can_foresee_are_not_begun(dataset: Any, options: dict[str, Any]) -> None:
    """What the user changes between two epochs counts for the second."""
    with Loader(dataset, **{**_OPTIONS, **options}) as loader:
        for _ in range(2):
            list(loader)
            assert loader._early is None


def test_worker_that_dies_has_its_early_batches_made_again() -> None:
    """They are batches like any other."""
    spec = FactorySpec(Draws)
    with Loader(spec, **_OPTIONS, faults=FaultPolicy(restarts=20)) as loader:
        found = []
        for _ in range(3):
            found.append([plain(batch) for batch in loader])
            for pid in loader.stats().worker_pids:
                os.kill(pid, signal.SIGKILL)
    assert found == epochs_apart(spec, 3)


def test_early_batches_give_way_in_a_full_ring() -> None:
    """Batches that the user keeps, and a ring of few slots: the epoch that is read gets what there is."""
    row_nbytes = 1 << 16
    spec = FactorySpec(Numbers, 24, row_nbytes // 4)
    room = 7 * (2 * row_nbytes + 8192)
    with Loader(spec, **{**_OPTIONS, "batch_size": 2, "shuffle": False}, max_ring_bytes=room) as loader:
        for _ in range(3):
            kept: list[Any] = []
            for rows, indices in loader:
                assert (rows == indices[:, None]).all()
                kept = [*kept[-3:], rows]
            assert len(kept) == 4


def test_state_saved_at_the_border_is_the_next_epoch_whole() -> None:
    """Batches that were made early were given to nobody."""
    spec = FactorySpec(Draws)
    expected = epochs_apart(spec, 2)
    with Loader(spec, **_OPTIONS) as loader:
        list(loader)
        assert wait_until(lambda: num_early_ready(loader) == 4)
        state = loader.state_dict()
    with Loader(spec, **_OPTIONS) as loader:
        loader.load_state_dict(state)
        assert [plain(batch) for batch in loader] == expected[1]
