"""Reported cases around batches and epochs: batch samplers, odd sizes, more workers than work, slow samples, epoch after
epoch."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from ringloader import ConfigError, FactorySpec, Loader, LoaderError
from tests.runtime import more_case_datasets as cases
from tests.runtime.conftest import UNIT_S, wait_until
from tests.runtime.sample_datasets import Numbers

MIB = 1 << 20
BUCKETS = [[i for i in range(100) if i % 3 == k] for k in range(3)]
BATCHES = [bucket[j : j + n] for bucket, n in zip(BUCKETS, (2, 7, 16), strict=True) for j in range(0, len(bucket), n)]


class Once:
    """A batch sampler that is a generator and knows no length."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from BATCHES


class Reordered:
    """A batch sampler with another order in every epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return len(BATCHES)

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        yield from random.Random(self.epoch).sample(BATCHES, len(BATCHES))


class Changeable:
    """Whatever batch sampler it holds at the moment."""

    batches: Any = ()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_b52_batch_samplers_of_any_kind_give_what_torch_gives(num_workers: int) -> None:
    """Shapes, values and lengths are torch's, for two epochs; without a length `len` is a TypeError."""
    data: Any = cases.Buckets(100)
    current = Changeable()
    with Loader(FactorySpec(cases.Buckets, 100), batch_sampler=current, num_workers=num_workers) as loader:
        for ours, theirs in ((BATCHES, BATCHES), (Once(), Once()), (Reordered(), Reordered())):
            current.batches = ours
            for _ in range(2):
                expected = list(DataLoader(data, batch_sampler=theirs))
                found = list(loader)
                assert [tuple(batch.shape) for batch in found] == [tuple(batch.shape) for batch in expected]
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert len(loader) == len(BATCHES)
        current.batches = Once()
        with pytest.raises(TypeError):
            len(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_b52_empty_batch_is_named_by_its_position(num_workers: int) -> None:
    """What comes before an empty batch arrives, then the error says where the empty one is."""
    sampler = [[0, 1], [2], [3, 4, 5], [], [6]]
    with Loader(FactorySpec(cases.Plain, 10), batch_sampler=sampler, num_workers=num_workers) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(3)] == sampler[:3]
        with pytest.raises(ConfigError, match="empty batch at position 3"):
            next(iterator)


@pytest.mark.parametrize("option", [{"batch_size": 4}, {"shuffle": True}, {"drop_last": True}, {"sampler": [1, 2]}])
def test_b52_options_that_a_batch_sampler_decides_are_refused(option: dict[str, Any]) -> None:
    """A ValueError that names the option given too many."""
    with pytest.raises(ValueError, match=next(iter(option))):
        Loader(cases.Plain(10), batch_sampler=BATCHES, **option)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_b52_last_batch_a_thousand_times_larger(num_workers: int) -> None:
    """Slots are not sized once by the first batch; where memory is too little, sizes and option are named."""
    sampler = [*([k] for k in range(20)), list(range(1000))]
    spec = FactorySpec(Numbers, 1000, 1024)
    with Loader(spec, batch_sampler=sampler, num_workers=num_workers) as loader:
        assert [indices.tolist() for rows, indices in loader if (rows[:, 7] == indices).all()] == sampler
    with Loader(spec, batch_sampler=sampler, num_workers=num_workers, max_ring_bytes=2 * MIB) as loader:
        iterator = iter(loader)
        assert [next(iterator)[1].tolist() for _ in range(20)] == sampler[:20]
        with pytest.raises(LoaderError, match=r"max_ring_bytes=2097152 \(2\.0 MiB\).* slot of [34]\.\d MiB"):
            next(iterator)


def test_b58_dataset_of_a_worker_is_built_once_and_keeps_its_cache(tmp_path: Path) -> None:
    """Five epochs, one construction per worker and one per restart; a sample is a hit exactly where its worker had it."""
    builds = tmp_path / "builds"
    with Loader(FactorySpec(cases.Cached, 64, str(builds)), batch_size=4, num_workers=2) as loader:
        served: set[tuple[int, int]] = set()
        for _ in range(5):
            for i, pid, hit in (row for batch in loader for row in batch.tolist()):
                assert hit == ((i, pid) in served)
                served.add((i, pid))
        # The second may still be starting when the first has read everything.
        assert wait_until(lambda: len(builds.read_text().split()) == 2)
        assert sorted(map(int, builds.read_text().split())) == sorted(loader.stats().worker_pids)
        psutil.Process(loader.stats().worker_pids[0]).kill()
        assert sum(len(batch) for batch in loader) == 64
        assert wait_until(lambda: len(builds.read_text().split()) == 3)


def test_b58_one_worker_hits_everything_in_its_second_epoch(tmp_path: Path) -> None:
    """What one worker has cached it finds again."""
    with Loader(FactorySpec(cases.Cached, 64, str(tmp_path / "builds")), batch_size=4, num_workers=1) as loader:
        assert [torch.cat(list(loader))[:, 2].tolist() for _ in range(3)] == [[0] * 64, [1] * 64, [1] * 64]


@pytest.mark.parametrize("max_slots", [2, 4, 8, 1000])
def test_b67_others_go_on_behind_a_slow_sample_within_the_ring(max_slots: int, tmp_path: Path) -> None:
    """While batch 0 takes its time the others fill what there is and no more; then all come in order."""
    spec = FactorySpec(cases.Sized, 60, 16384, {}, str(tmp_path), (0,))
    slot_nbytes = 65536 + 4096
    with Loader(spec, batch_size=1, num_workers=4, max_ring_bytes=max_slots * slot_nbytes) as loader:
        iterator = iter(loader)
        first: list[Any] = []
        # Eight batches are with workers, one of them behind batch 0; the rest is made as far as there is room beside batch 0.
        num_ahead = min(7, max_slots - 1)
        assert wait_until(lambda: first or _opens(tmp_path, num_ahead, iterator, first), 20.0)
        assert len(list(tmp_path.glob("made-*"))) <= 9
        assert loader.stats().num_slots <= min(max_slots, 8 + 2)
        seen = [int(first.pop()[0, 0]), *(int(batch[0, 0]) for batch in iterator)]
        assert seen == list(range(60))
        assert loader.stats().ring_nbytes <= min(max_slots, 8 + 2) * slot_nbytes


def _opens(folder: Path, num_ahead: int, iterator: Any, first: list[Any]) -> bool:
    """Ask for batch 0 on another thread and let it through once `num_ahead` others are made."""
    thread = threading.Thread(target=lambda: first.append(next(iterator)))
    thread.start()
    others = wait_until(lambda: len(list(folder.glob("made-*"))) >= num_ahead)
    (folder / "go-0").touch()
    thread.join(cases.PATIENCE_S)
    assert others, f"only {len(list(folder.glob('made-*')))} batches were made meanwhile, of {num_ahead}"
    return bool(first)


def test_b67_out_of_order_a_slow_sample_delays_itself_only(tmp_path: Path) -> None:
    """`in_order=False`: every other batch arrives before the slow one is through, each exactly once."""
    spec = FactorySpec(cases.Sized, 60, 64, {}, str(tmp_path), (0,))
    # One Fill per worker: nothing waits behind the slow one.
    with Loader(spec, batch_size=1, num_workers=3, in_order=False, prefetch_factor=1) as loader:
        iterator = iter(loader)
        seen = [int(next(iterator)[0, 0]) for _ in range(59)]
        assert sorted(seen) == list(range(1, 60))
        (tmp_path / "go-0").touch()
        assert [int(batch[0, 0]) for batch in iterator] == [0]


def _wakeups(pids: list[int]) -> int:
    """How often any thread of these processes has gone to sleep so far."""
    statuses = [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/status")]
    lines = [line for path in statuses for line in path.read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_b77_more_workers_than_work_is_quick_and_sleeps() -> None:
    """Three batches for eight workers: exactly three, the end at once, and then hardly a wake-up, epoch after epoch."""
    with Loader(FactorySpec(Numbers, 12), batch_size=4, num_workers=8) as loader:
        for _ in range(3):
            iterator = iter(loader)
            assert [next(iterator)[1].tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
            began_s = time.monotonic()
            assert next(iterator, None) is None
            assert time.monotonic() - began_s < 1.0 * UNIT_S
        assert wait_until(lambda: len(loader.stats().worker_pids) == 8)  # three epochs are over before the last has started
        pids = list(loader.stats().worker_pids)
        assert wait_until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_SLEEPING for pid in pids))
        engine = loader._engine
        assert engine is not None
        assert engine.pump.thread is not None
        watcher = f"/proc/self/task/{engine.pump.thread.native_id}/status"
        before, cpu_before = _wakeups(pids), [psutil.Process(pid).cpu_times() for pid in pids]
        own_before = Path(watcher).read_text().split("voluntary_ctxt_switches:")[1].split()[0]
        time.sleep(1.0)  # the length of the measurement
        assert _wakeups(pids) - before < 20
        own = Path(watcher).read_text().split("voluntary_ctxt_switches:")[1].split()[0]
        assert int(own) - int(own_before) < 20
        cpu = [psutil.Process(pid).cpu_times() for pid in pids]
        assert sum(b.user + b.system - a.user - a.system for a, b in zip(cpu_before, cpu, strict=True)) <= 0.05


SIZES, BATCH_SIZES = (0, 1, 2, 7, 16, 17), (1, 3, 8, 16, 32)


def _check_batches(found: list[Any], size: int, batch_size: int, drop_last: bool) -> None:
    """Hold batches against torch's; no byte outside the batch is in a storage."""
    expected = list(DataLoader(Numbers(size), batch_size=batch_size, drop_last=drop_last))  # type: ignore[arg-type]
    assert len(found) == len(expected)
    for (rows, indices), (expected_rows, expected_indices) in zip(found, expected, strict=True):
        assert torch.equal(indices, expected_indices)
        assert torch.equal(rows, expected_rows)
        assert rows.shape == expected_rows.shape
        assert rows.untyped_storage().nbytes() == rows.nbytes
        assert indices.untyped_storage().nbytes() == indices.nbytes


def _copies(loader: Loader) -> list[Any]:
    """The batches, each checked to be whole before its slot is used again."""
    return [(rows.clone(), indices.clone()) for rows, indices in loader]


@pytest.mark.parametrize("drop_last", [False, True])
def test_b78_every_size_inline_is_torchs(drop_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes of dataset and batch: the batches and the length that torch gives, free slots being full of marks."""
    monkeypatch.setenv("RINGLOADER_DEBUG", "1")
    for size in SIZES:
        for batch_size in BATCH_SIZES:
            with Loader(Numbers(size), batch_size=batch_size, drop_last=drop_last) as loader:
                for _ in range(2):
                    _check_batches(_copies(loader), size, batch_size, drop_last)
                assert len(loader) == (size // batch_size if drop_last else -(-size // batch_size))


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_b78_every_size_by_workers_is_torchs(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from processes, one set of which reads all sizes one after the other."""
    monkeypatch.setenv("RINGLOADER_DEBUG", "1")
    current = Changeable()
    with Loader(FactorySpec(Numbers, max(SIZES)), batch_sampler=current, num_workers=num_workers) as loader:
        for size in SIZES:
            for batch_size in BATCH_SIZES:
                for drop_last in (False, True):
                    current.batches = BatchSampler(range(size), batch_size, drop_last)
                    _check_batches(_copies(loader), size, batch_size, drop_last)
                    assert len(loader) == len(current)
    for size in SIZES:
        with Loader(FactorySpec(Numbers, size), batch_size=8, drop_last=size % 2 == 1, num_workers=num_workers) as loader:
            _check_batches(_copies(loader), size, 8, size % 2 == 1)
            assert len(loader) == (size // 8 if size % 2 == 1 else -(-size // 8))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("max_slots", [2, 3])
def test_b78_few_slots_and_odd_sizes(max_slots: int, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short last batch in a slot that held a full one shows none of its rows, with two and three slots."""
    monkeypatch.setenv("RINGLOADER_DEBUG", "1")
    spec = FactorySpec(Numbers, 17, 2048)
    room = max_slots * (8 * 2048 * 4 + 4096)
    with Loader(spec, batch_size=8, num_workers=num_workers, max_ring_bytes=room) as loader:
        for _ in range(3):
            lengths = []
            for rows, indices in loader:
                assert (rows == indices[:, None]).all()
                assert rows.untyped_storage().nbytes() == rows.nbytes
                lengths.append(len(rows))
            del rows, indices  # or the next epoch has one slot less to begin with
            assert lengths == [8, 8, 1]
        assert loader.stats().num_slots <= max_slots


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, "8"])
def test_b78_impossible_batch_size_is_refused_by_value(batch_size: Any) -> None:
    """A ValueError at construction that shows the value."""
    with pytest.raises(ValueError, match=f"batch_size is {batch_size!r}"):
        Loader(Numbers(8), batch_size=batch_size)


def test_b92_next_epoch_begins_within_a_batch_and_with_its_own_number() -> None:
    """No process is made between epochs, the first batch of one is there after the time it takes, and `set_epoch` holds."""
    batch_s = 4 * 0.02
    with Loader(FactorySpec(cases.Epochs, 24, 0.02), batch_size=4, num_workers=2) as loader:
        delays_s, pids = [], set()
        for epoch in (0, 1, 7, 3, 4):
            loader.set_epoch(epoch)
            began_s = time.monotonic()
            iterator = iter(loader)
            rows = [next(iterator)]
            delays_s.append(time.monotonic() - began_s)
            rows += list(iterator)
            assert torch.cat(rows).tolist() == [[i, epoch] for i in range(24)]
            pids.add(loader.stats().worker_pids)
        assert len(pids) == 1
        # The best of four: a busy machine may delay one.
        assert min(delays_s[1:]) <= batch_s + 0.05 * UNIT_S
        assert os.getpid() not in pids.pop()
