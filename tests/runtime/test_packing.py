"""Quick batches, which go to as few workers as have a core beside the training process."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from ringloader import FactorySpec, FaultPolicy, Loader
from ringloader._core import scheduler
from ringloader._core.session import BatchState
from ringloader._core.workers import WorkerState
from tests.runtime import case_datasets as cases
from tests.runtime.conftest import wait_until
from tests.runtime.more_case_datasets import SlowNowAndThen, TurnsSlow
from tests.runtime.sample_datasets import HangsOnce, Numbers

pytestmark = pytest.mark.packed


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def start_all(loader: Loader) -> None:
    """Have every worker ready before the first batch."""
    loader.start()
    engine = loader._engine
    assert engine is not None
    assert wait_until(lambda: all(worker.state is WorkerState.RUNNING for worker in engine.scheduler.workers.all))


def test_quick_batches_are_made_by_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ones sleep; what is read is the same."""
    monkeypatch.setattr(scheduler, "_WAKE_NS", 10**12)  # also where this machine is slow
    with Loader(FactorySpec(cases.Pid, 4000), batch_size=4, num_workers=3, output="numpy") as loader:
        start_all(loader)
        rows = [row for batch in loader for row in batch.tolist()]
        assert [row[0] for row in rows] == list(range(4000))
        (_, most), *_ = Counter(row[1] for row in rows).most_common()
        assert most > 3900  # all but those from before anything was known of them


def test_batches_that_turn_slow_are_made_by_all() -> None:
    """From one batch on each takes 20 ms: all workers have the same share of those."""
    with Loader(FactorySpec(TurnsSlow, 1200, 800, 0.005), batch_size=4, num_workers=3, output="numpy") as loader:
        start_all(loader)
        rows = [row for batch in loader for row in batch.tolist()]
    assert [row[0] for row in rows] == list(range(1200))
    slow = Counter(row[1] for row in rows[900:])
    assert len(slow) == 3
    assert min(slow.values()) > 50


def test_few_slow_batches_among_quick_ones_are_made_side_by_side() -> None:
    """Every eighth opens a file, say: all workers have a share of those."""
    spec = FactorySpec(SlowNowAndThen, 3200, 32, 0.005)
    with Loader(spec, batch_size=4, num_workers=3, prefetch_factor=16, output="numpy") as loader:
        start_all(loader)
        rows = [row for batch in loader for row in batch.tolist()]
    assert [row[0] for row in rows] == list(range(3200))
    slow = Counter(row[1] for row in rows[320::32])
    assert len(slow) == 3
    assert min(slow.values()) > 10


def test_worker_with_all_the_batches_may_be_killed() -> None:
    """Again and again, wherever it is: the same epoch, in order."""
    faults = FaultPolicy(restarts=99)
    with Loader(FactorySpec(cases.Pid, 4000), batch_size=4, num_workers=2, output="numpy", faults=faults) as loader:
        seen: list[int] = []
        for number, batch in enumerate(loader):
            seen += batch[:, 0].tolist()
            if number % 150 == 20:
                os.kill(int(batch[0, 1]), signal.SIGKILL)
                pid = int(batch[0, 1])
                assert wait_until(lambda pid=pid: pid not in loader.stats().worker_pids)
        assert seen == list(range(4000))
        assert loader.stats().num_restarts >= 7


def test_worker_that_hangs_with_all_the_batches_is_replaced(tmp_path: Path) -> None:
    """The one in progress is its fault, the others go on."""
    spec = FactorySpec(HangsOnce, 600, 8, str(tmp_path), [217, 455])
    with Loader(spec, batch_size=10, num_workers=2, timeout=1.5, output="numpy") as loader:
        assert [i for _, indices in loader for i in indices.tolist()] == list(range(600))
        assert loader.stats().num_restarts == 2
        assert loader.skipped == []


def test_abandoned_epochs_do_not_have_the_ring_grow_for_ever() -> None:
    """Batches of one that are still queued take slots until they are cancelled: one more segment at most."""
    with Loader(FactorySpec(cases.Epochs, 1000), batch_size=10, num_workers=2, prefetch_factor=2) as loader:
        next(iter(loader))
        early_nbytes = loader.stats().ring_nbytes
        for epoch in range(1, 200):
            assert next(iter(loader)).tolist() == [epoch * 100 + i for i in range(10)]
        assert loader.stats().ring_nbytes <= 2 * early_nbytes
        assert loader.stats().num_segments <= 2


def test_abandoned_epochs_with_more_made_ahead_have_a_ring_that_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots for eight batches of each worker and two that are held; as many once more for those that are being cancelled."""
    monkeypatch.setattr(scheduler, "_WAKE_NS", 0)
    monkeypatch.setattr(scheduler, "_AHEAD_NS", 10**12)
    with Loader(FactorySpec(cases.Epochs, 1000), batch_size=10, num_workers=2) as loader:
        for epoch in range(200):
            batches = iter(loader)
            for place in range(3):
                assert next(batches).tolist() == [epoch * 100 + 10 * place + i for i in range(10)]
        assert loader.stats().num_slots <= 2 * (2 * 8 + 2)


def test_two_iterators_over_quick_batches_are_both_right() -> None:
    """Each in its own order, whoever makes them."""
    with Loader(FactorySpec(Numbers, 400), batch_size=4, num_workers=2, shuffle=True, output="numpy") as loader:
        whole = [[indices.tolist() for _, indices in loader] for _ in range(2)]
    with Loader(FactorySpec(Numbers, 400), batch_size=4, num_workers=2, shuffle=True, output="numpy") as loader:
        first, second = iter(loader), iter(loader)
        found = [(next(first)[1].tolist(), next(second)[1].tolist()) for _ in range(100)]
    assert [list(epoch) for epoch in zip(*found, strict=True)] == whole


@pytest.mark.parametrize(("given", "is_ours"), [(None, True), (2, True), (None, False)])
def test_more_quick_batches_are_made_ahead_unless_it_shows(
    given: int | None, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an order of our own and no number from the user; the batches are the same, the ring larger."""
    monkeypatch.setattr(scheduler, "_WAKE_NS", 0)
    monkeypatch.setattr(scheduler, "_AHEAD_NS", 10**12)  # also where this machine is slow
    spec = FactorySpec(Numbers, 4000)
    sampler = None if is_ours else list(range(4000))
    with Loader(spec, batch_size=4, num_workers=2, prefetch_factor=given, sampler=sampler, output="numpy") as loader:
        for _ in range(2):
            assert [i for _, indices in loader for i in indices.tolist()] == list(range(4000))
        assert loader.prefetch_factor == 2
        is_deeper = given is None and is_ours
        assert (loader.stats().num_slots >= 2 * 8) == is_deeper
        assert loader.stats().num_slots <= 2 * 8 + 2


def test_ring_with_little_room_is_enough_for_quick_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is made ahead where the ring may not grow; every batch comes, and nobody is told of a ring that is full."""
    monkeypatch.setattr(scheduler, "_WAKE_NS", 0)
    monkeypatch.setattr(scheduler, "_AHEAD_NS", 10**12)
    spec = FactorySpec(Numbers, 2000, 4096)
    room = 7 * (4 * 4096 * 4 + 8192)
    with Loader(spec, batch_size=4, num_workers=2, max_ring_bytes=room, output="numpy") as loader:
        for _ in range(2):
            assert [i for _, indices in loader for i in indices.tolist()] == list(range(2000))
        assert loader.stats().ring_nbytes <= room
        engine = loader._engine
        assert engine is not None
        assert engine.scheduler.room.num_refused


def test_second_iterator_does_not_wait_for_a_long_queue_of_slow_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight quick batches are made ahead by each worker; those that follow take their time. What has not been begun when the
    other iterator comes is taken back: two by each worker are made at most."""
    monkeypatch.setattr(scheduler, "_WAKE_NS", 0)
    monkeypatch.setattr(scheduler, "_AHEAD_NS", 10**12)
    with Loader(FactorySpec(TurnsSlow, 400, 200, 0.1), batch_size=4, num_workers=2, output="numpy") as loader:
        first = iter(loader)
        assert [row[0] for _ in range(50) for row in next(first).tolist()] == list(range(200))
        engine = loader._engine
        assert engine is not None

        def num_held() -> list[int]:
            first_id = first._session.session_id
            return [sum(owner == first_id for owner, _ in worker.fills.values()) for worker in engine.scheduler.workers.all]

        assert wait_until(lambda: num_held() == [8, 8])
        second = iter(loader)
        assert wait_until(lambda: max(num_held()) <= 2)
        num_made = sum(batch.state is BatchState.READY for batch in first._session.batches.values())
        assert num_made <= 4
        assert next(second)[0][0] == 0
