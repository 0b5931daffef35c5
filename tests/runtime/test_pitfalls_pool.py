"""Pitfalls of a shared pool: room, stale Fills, budgets, samplers, two consumers, epochs that travel with their Fills."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ringloader import FactorySpec, FaultPolicy, Loader, RingFullError, SampleError
from tests.runtime import more_case_datasets as cases
from tests.runtime.conftest import UNIT_S, wait_until
from tests.runtime.sample_datasets import Numbers

KIB = 1 << 10


def test_p07_worker_that_lacks_room_for_one_iterator_serves_the_other() -> None:
    """zip on one worker: with the ring at its bound and full of a's batches, b goes on, and a says what it lacks."""
    room = 3 * (8 * 8192 * 4 + 4096)
    with Loader(FactorySpec(Numbers, 8 * 12, 8192), batch_size=8, num_workers=1, max_ring_bytes=room) as loader:
        a, b = iter(loader), iter(loader)
        kept = [next(a)[0] for _ in range(3)]
        with pytest.raises(RingFullError):
            next(a)
        assert [int(rows[0, 0]) for rows, _ in b] == list(range(0, 96, 8))
        assert [int(rows[0, 0]) for rows in kept] == [0, 8, 16]
        kept.clear()
        assert [int(rows[0, 0]) for rows, _ in a] == list(range(24, 96, 8))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_p07_room_for_the_oldest_batch_is_taken_from_younger_ones(num_workers: int, tmp_path: Path) -> None:
    """Batch 4 needs three times the room and comes last, when younger ones fill the ring: it is made, and they again."""
    width = 25 * KIB
    spec = FactorySpec(cases.Sized, 16, width, {4: 3 * width}, str(tmp_path), (4,) if num_workers > 1 else ())
    with Loader(spec, batch_size=1, num_workers=num_workers, max_ring_bytes=6 * (width * 4 + 4096)) as loader:
        iterator = iter(loader)
        seen = [int(next(iterator)[0, 0]) for _ in range(4)]
        if num_workers > 1:
            # What can be made beside batch 4, all but one that waits behind it, is made first.
            assert wait_until(lambda: sum((tmp_path / f"made-{k}").exists() for k in (5, 6, 7)) >= 2)
            (tmp_path / "go-4").touch()
        for batch in iterator:
            assert batch.shape == (1, 3 * width if batch[0, 0] == 4 else width)
            seen.append(int(batch[0, -1]))
            del batch
        assert seen == list(range(16))


def test_p09_abandoned_iterators_do_not_delay_the_next(tmp_path: Path) -> None:
    """After `next(iter(loader))` only the sample in progress is finished; the rest of what was asked for is dropped."""
    notes = tmp_path / "notes"
    spec = FactorySpec(cases.Slow, 400, 0.05, str(notes))
    with Loader(spec, batch_size=4, num_workers=1, prefetch_factor=4) as loader:
        for _ in range(4):
            assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    samples = [int(line) for line in notes.read_text().split()]
    starts = [place for place, sample in enumerate(samples) if sample == 0]
    assert len(starts) == 4
    # Four samples of batch 0, and of the sixteen stale ones those in progress when the iterator was dropped.
    assert all(end - start <= 4 + 2 for start, end in pairwise(starts)), samples


@pytest.mark.parametrize("num_workers", [1, 2])
def test_p12_samples_that_are_skipped_cost_no_restarts(num_workers: int) -> None:
    """Three deadly samples, three deaths each, with three restarts allowed: all are left out, no worker is given up."""
    at = (9, 33, 71)
    faults = FaultPolicy(restarts=3, sample_deaths=3, on_bad_sample="skip", backoff_s=0.01)
    with Loader(FactorySpec(cases.Deadly, 80, at), batch_size=4, num_workers=num_workers, faults=faults) as loader:
        seen = [int(i) for _, indices in loader for i in indices]
        assert seen == [i for i in range(80) if i not in at]
        assert loader.skipped == list(at)


def test_p12_build_that_fails_at_a_restart_is_tried_again(tmp_path: Path) -> None:
    """A replacement that cannot build its dataset is a death like any other: backoff, then another try."""
    faults = FaultPolicy(backoff_s=0.05)
    with Loader(FactorySpec(cases.FailsToBuildOnce, 40, str(tmp_path)), batch_size=4, num_workers=1, faults=faults) as loader:
        assert [int(i) for _, indices in loader for i in indices] == list(range(40))
        assert loader.stats().num_restarts == 3


class Watched:
    """A sampler that counts what was pulled from it, and by whom."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_pulled = 0
        self.threads: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        self.num_pulled = 0
        for i in range(self.size):
            self.num_pulled += 1
            self.threads.add(threading.get_ident())
            yield i


@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(0, 2), (1, 3), (2, 2)])
def test_p14_sampler_is_pulled_as_far_as_the_number_of_calls_says(num_workers: int, prefetch_factor: int) -> None:
    """The k-th `next` has pulled k + prefetch x workers, on the thread that called it; time alone pulls nothing."""
    sampler, options = Watched(30), {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
    with Loader(FactorySpec(Numbers, 30), batch_size=1, sampler=sampler, **options) as loader:  # type: ignore[arg-type]
        iterator = iter(loader)
        assert sampler.num_pulled == 0
        for k in range(1, 31):
            assert next(iterator)[1].tolist() == [k - 1]
            expected = min(30, k + prefetch_factor * num_workers)
            assert sampler.num_pulled == expected
            if k in (1, 9):
                time.sleep(0.25)  # longer than it takes the loader's own thread to look after the workers
                assert sampler.num_pulled == expected
        assert next(iterator, None) is None
        assert sampler.threads == {threading.get_ident()}


def test_p18_one_large_batch_does_not_make_the_ring_large() -> None:
    """An outlier's slot goes when it is over; slots of the usual size stay few."""
    spec = FactorySpec(cases.Sized, 200, 1024, {50: 4 << 20})
    with Loader(spec, batch_size=1, num_workers=2) as loader:
        largest = 0
        for k, batch in enumerate(loader):
            assert batch.shape == (1, 4 << 20 if k == 50 else 1024)
            largest = max(largest, loader.stats().ring_nbytes)
            del batch
        # Two slots for the large one, with an eighth to spare, and no further ones of nearly its size for what follows.
        assert 16 << 20 <= largest <= 2 * (16 << 20) * 9 // 8 + (1 << 20)
        # Below 1 MiB a slot may stay as it is.
        assert loader.stats().ring_nbytes <= 10 << 20


def test_p22_two_threads_read_one_loader_side_by_side() -> None:
    """Each gets its own epoch whole, and neither waits for the other: the pump is handed over."""
    seen: list[list[int]] = [[], []]

    def read(iterator: Iterator[Any], k: int) -> None:
        for batch in iterator:
            seen[k] += batch.tolist()

    with Loader(FactorySpec(cases.Slow, 40, 0.01), batch_size=2, num_workers=2) as loader:
        loader.start()
        threads = [threading.Thread(target=read, args=(iter(loader), k)) for k in range(2)]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(cases.PATIENCE_S)
        # 80 samples of 10 ms by two workers; a consumer that sleeps through its batch would wait for seconds.
        assert time.monotonic() - began_s < 0.4 + 2.0 * UNIT_S
    assert seen == [list(range(40))] * 2


@pytest.mark.parametrize("ends_by", ["result", "error"])
def test_p22_whoever_stops_pumping_wakes_the_one_who_waits(ends_by: str) -> None:
    """One thread takes one batch, or an error, and leaves for good; the other gets its batches in the time they take."""
    spec = FactorySpec(cases.Slow, 8, 0.15, "", 0 if ends_by == "error" else -1)
    with Loader(spec, batch_size=1, num_workers=1, prefetch_factor=1) as loader:
        loader.start()
        leaver, stayer = iter(loader), iter(loader)
        outcome: list[Any] = []

        def leave() -> None:
            try:
                outcome.append(next(leaver).tolist())
            except SampleError as error:
                outcome.append(error.index)

        thread = threading.Thread(target=leave)
        thread.start()
        began_s = time.monotonic()
        seen: list[Any] = []
        while len(seen) < 4:
            try:
                seen += next(stayer).tolist()
            except SampleError as error:
                seen.append(error.index)
        elapsed_s = time.monotonic() - began_s
        thread.join()
        assert outcome == [[0]] if ends_by == "result" else [0]
        assert seen == [0, 1, 2, 3]
        # Six batches of 0.15 s at the most, on the one worker.
        assert elapsed_s < 6 * 0.15 + 1.0 * UNIT_S


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_p27_epoch_travels_with_the_fill(num_workers: int) -> None:
    """Two iterators of different epochs, interleaved on the same workers, each see their own `set_epoch`."""
    with Loader(FactorySpec(cases.Epochs, 60), batch_size=4, num_workers=num_workers) as loader:
        loader.set_epoch(3)
        a = iter(loader)
        loader.set_epoch(8)
        b = iter(loader)
        pairs = list(zip(a, b, strict=True))
        assert torch.cat([first for first, _ in pairs]).tolist() == [[i, 3] for i in range(60)]
        assert torch.cat([second for _, second in pairs]).tolist() == [[i, 8] for i in range(60)]


def test_p27_batches_made_again_belong_to_their_own_epoch() -> None:
    """A worker dies after the next epoch has begun: what it held of the earlier one is made with the earlier number."""
    with Loader(FactorySpec(cases.Epochs, 80, 0.002), batch_size=4, num_workers=2) as loader:
        a = iter(loader)
        first = [next(a) for _ in range(5)]
        b = iter(loader)
        second = [next(b) for _ in range(3)]
        for pid in loader.stats().worker_pids:
            psutil.Process(pid).kill()
        first += list(a)
        second += list(b)
        assert torch.cat(first).tolist() == [[i, 0] for i in range(80)]
        assert torch.cat(second).tolist() == [[i, 1] for i in range(80)]
        assert loader.stats().num_restarts == 2
