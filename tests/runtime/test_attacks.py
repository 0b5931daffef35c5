"""What an attacker of the loader found, each as a guarantee."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ringloader
from ringloader import FactoryError, FactorySpec, FaultPolicy, Loader, LoaderError, SampleError
from ringloader._core.events import AddSegment, SegmentRefused
from ringloader._runtime import cuda, memory, segment
from ringloader._runtime.lacks import RoomError
from ringloader._runtime.pump import Pump
from ringloader._runtime.ring import Ring
from tests.runtime.light_datasets import BadEpoch, ForksAndReturns, OneBuffer
from tests.runtime.sample_datasets import Numbers


@pytest.mark.parametrize("num_workers", [1, 2])
def test_dataset_that_reuses_a_buffer_keeps_its_values_while_room_is_made(num_workers: int) -> None:
    """What waits for room is the batch's bytes, not the user's memory, which the next sample overwrites."""
    with Loader(FactorySpec(OneBuffer), batch_size=1, num_workers=num_workers) as loader:
        assert all(bool((batch == i % 251).all()) for i, batch in enumerate(loader))


class _Handle:
    """Gives its batch back when the collector ends it."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.me = batch, self

    def __del__(self) -> None:
        ringloader.release(self.batch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_release_in_a_finalizer_inside_next_does_not_deadlock(num_workers: int) -> None:
    """Garbage collection inside `next` may run code that releases batches: nothing waits for its own lock."""
    threshold = gc.get_threshold()
    gc.set_threshold(50)
    try:
        with Loader(FactorySpec(Numbers, 2000), batch_size=4, num_workers=num_workers) as loader:
            for batch in loader:
                _Handle(batch)
                del batch
            assert loader.stats().num_batches == 500
    finally:
        gc.set_threshold(*threshold)
        gc.collect()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_close_and_stats_in_a_signal_handler_do_not_deadlock(num_workers: int) -> None:
    """SIGTERM that closes the loader is everyday code; it may arrive anywhere inside `next`."""
    for delay_s in np.linspace(1e-4, 4e-2, 12):
        loader = Loader(FactorySpec(Numbers, 100_000), batch_size=4, num_workers=num_workers)
        iterator = iter(loader)
        next(iterator)

        def handler(_: int, frame: FrameType | None, loader: Loader = loader) -> None:
            loader.stats()
            loader.close()
            raise SystemExit

        before = signal.signal(signal.SIGALRM, handler)
        try:
            with pytest.raises(SystemExit):
                _read_on(iterator, float(delay_s))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            loader.close()


def _read_on(iterator: Iterator[Any], delay_s: float) -> None:
    """Read until the alarm."""
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    while True:
        for _ in iterator:
            pass


def test_leader_that_was_interrupted_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that left `next` by Ctrl-C and does not come back costs the others nothing."""
    with Loader(FactorySpec(Numbers, 4000), batch_size=4, num_workers=1) as loader:
        first, second = iter(loader), iter(loader)
        next(second)
        bounded, main = Pump._bounded, threading.get_ident()

        def interrupted(self: Pump, timeout_s: float | None) -> float | None:
            if threading.get_ident() == main:
                monkeypatch.setattr(Pump, "_bounded", bounded)
                self.leader = main  # the worst moment: it leads, and has not begun to wait
                raise KeyboardInterrupt
            return bounded(self, timeout_s)

        monkeypatch.setattr(Pump, "_bounded", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for _ in first:
                pass
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.extend(int(i) for _, indices in second for i in indices))
        thread.start()
        thread.join(20)
        assert seen == list(range(4, 4000))


def test_interpreter_that_cannot_be_started_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system's reason is in the error, and no attempt waits for anything but the backoff."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    faults = FaultPolicy(restarts=2, backoff_s=0.01)
    with (
        Loader(FactorySpec(Numbers, 10), num_workers=1, faults=faults) as loader,
        pytest.raises(FactoryError, match=r"could not be started: .*No such file"),
    ):
        loader.start()


def test_two_threads_that_iterate_first_share_one_pool() -> None:
    """The first `iter` of several threads makes one engine."""
    for _ in range(4):
        loader = Loader(FactorySpec(Numbers, 40), batch_size=4, num_workers=1)
        gate = threading.Barrier(3)
        seen: list[list[int]] = []

        def read(loader: Loader = loader, gate: threading.Barrier = gate, seen: list[list[int]] = seen) -> None:
            gate.wait()
            seen.append([int(i) for _, indices in loader for i in indices])

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [list(range(40))] * 3
        loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_set_epoch_that_fails_is_named_and_no_batch_of_that_epoch_passes(num_workers: int) -> None:
    """Nothing is read under the epoch before."""
    with Loader(FactorySpec(BadEpoch, 12), batch_size=4, num_workers=num_workers) as loader:
        assert len(list(loader)) == 3
        iterator = iter(loader)
        for _ in range(3):
            with pytest.raises(SampleError, match="set_epoch raised ValueError: boom in set_epoch"):
                next(iterator)
        assert next(iterator, None) is None
        assert len(list(loader)) == 3


def test_long_epoch_keeps_nothing_per_batch() -> None:
    """An epoch without end does not grow the tables."""
    with Loader(FactorySpec(Numbers, 4000), batch_size=2, num_workers=1) as loader:
        iterator = iter(loader)
        for _ in range(1500):
            next(iterator)
        session = iterator._session
        assert len(session.batches) + len(session._ready) + len(session._waiting) < 20


@pytest.mark.parametrize("width", [8, 65536])
def test_fork_that_returns_from_a_sample_cannot_answer_or_write(width: int, tmp_path: Path) -> None:
    """The forked copy of a worker ends; every batch comes once, with its own bytes."""
    spec = FactorySpec(ForksAndReturns, str(tmp_path), width)
    with Loader(spec, batch_size=1, num_workers=2) as loader:
        assert [int(indices[0]) for _, indices in loader] == list(range(60))


def test_iterator_shared_by_threads_refuses_or_delivers_each_batch_once() -> None:
    """Two threads inside one iterator: a clear error, never a batch twice."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Loader(FactorySpec(Numbers, 4000), batch_size=1, num_workers=1) as loader:
            iterator = iter(loader)
            seen: list[int] = []
            refused: list[str] = []

            def read() -> None:
                while True:
                    try:
                        _, indices = next(iterator)
                    except StopIteration:
                        return
                    except LoaderError as error:
                        refused.append(str(error))
                        continue
                    seen.append(int(indices[0]))

            threads = [threading.Thread(target=read) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(seen) == list(range(4000))
            assert all("in use by another thread" in text for text in refused)
    finally:
        sys.setswitchinterval(interval)


def test_segment_that_cannot_be_mapped_is_refused_with_its_memory_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of address space is a refusal in words before any worker writes, not an error in the middle of a hand-over."""

    def no_room(fd: int, nbytes: int) -> Any:
        raise RoomError("the system has no memory or mappings left")

    monkeypatch.setattr(segment, "map_shared", no_room)
    before = memory.ACCOUNT.nbytes
    answer = Ring(1 << 30, cuda.CUDA).add_segment(AddSegment(4096, 2, 2, False))
    assert isinstance(answer, SegmentRefused)
    assert "no memory or mappings left" in answer.reason
    assert memory.ACCOUNT.nbytes == before


def test_forked_child_counts_no_ring_of_its_parent() -> None:
    """The account of ring bytes begins anew in a fork: what the parent holds is not the child's."""
    account = memory.RingAccount()
    assert account.take(100, 2, least=2, limit=1000, own_nbytes=0, forced=False) == 2
    account.reset()
    assert account.nbytes == 0


def test_segment_made_while_the_ring_is_closed_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader reserves memory outside the lock; a signal handler, or another thread, may close the loader meanwhile."""
    ring = Ring(1 << 30, cuda.CUDA)
    create = segment.Segment.create

    def slow(nbytes: int) -> segment.Segment:
        ring.close()
        return create(nbytes)

    monkeypatch.setattr(segment.Segment, "create", slow)
    before = memory.ACCOUNT.nbytes
    ring.add_segment(AddSegment(4096, 2, 2, False))
    assert not ring.segments
    assert not ring.retired
    assert memory.ACCOUNT.nbytes == before
