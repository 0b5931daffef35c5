"""Healthy workers that give way to a successor: when they have grown, or have made enough batches."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringloader import ConfigError, FactorySpec, FaultPolicy, Loader
from ringloader._core.workers import WorkerState
from ringloader._runtime.memory import private_nbytes
from ringloader._runtime.process import WorkerProcess
from tests.runtime.conftest import wait_until
from tests.runtime.fault_datasets import Counted, Grows, OnceOnly
from tests.runtime.light_datasets import Scaled
from tests.runtime.sample_datasets import Numbers


def order_of(loader: Loader) -> list[int]:
    return [i for _, indices in loader for i in indices.tolist()]


def settled(loader: Loader) -> bool:
    workers = loader._engine.scheduler.workers  # type: ignore[union-attr]
    return not workers.successors and not workers.retiring


def test_recycling_after_so_many_batches_changes_every_worker_and_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Each batch once, in order, over several changes; information, no warning; no death is charged."""
    faults = FaultPolicy(max_batches_per_worker=20, restarts=0)
    with (
        caplog.at_level(logging.INFO, "ringloader"),
        Loader(FactorySpec(Numbers, 2000), batch_size=10, num_workers=2, faults=faults) as loader,
    ):
        before: set[int] = set()
        for _ in range(3):
            iterator, out = iter(loader), []
            before.update(loader.stats().worker_pids)
            for k, (_, indices) in enumerate(iterator):
                out += indices.tolist()
                if k % 50 == 49:
                    assert wait_until(lambda: settled(loader))  # a change takes longer than these batches
            assert out == list(range(2000))
        assert wait_until(lambda: settled(loader))
        stats = loader.stats()
        assert stats.num_recycled >= 4
        assert stats.num_restarts == stats.num_refilled == 0
        assert len(stats.worker_pids) == 2
        assert not before & {*stats.worker_pids}
    records = [record for record in caplog.records if "gives way" in record.getMessage()]
    assert len(records) == stats.num_recycled
    assert {record.levelno for record in records} == {logging.INFO}
    assert "faults.max_batches_per_worker=20" in records[0].getMessage()


def test_recycling_starts_the_successor_first() -> None:
    """While a successor starts, the worker goes on making batches: the pool is never without it."""
    with Loader(
        FactorySpec(Numbers, 3000), batch_size=10, num_workers=1, faults=FaultPolicy(max_batches_per_worker=5)
    ) as loader:
        iterator = iter(loader)
        made_meanwhile = 0
        workers = loader._engine.scheduler.workers  # type: ignore[union-attr]
        for _ in iterator:
            if any(one.state is WorkerState.STARTING for one in workers.successors.values()):
                made_meanwhile += 1
        assert made_meanwhile >= 10


def test_recycling_by_private_memory_keeps_workers_small() -> None:
    """A dataset that leaks 1 MB per sample: every worker gives way near the limit."""
    limit = 96 << 20
    faults = FaultPolicy(max_worker_rss=limit)
    with Loader(FactorySpec(Grows, 1200, 1 << 20), batch_size=4, num_workers=1, faults=faults, output="numpy") as loader:
        peak, pids, out = 0, set(), []
        for k, (rows, indices) in enumerate(loader):
            out += indices.tolist()
            pids.update(rows[:, 1].astype(int).tolist())
            peak = max([peak, *map(private_nbytes, loader.stats().worker_pids)])
            if k % 100 == 99:
                # By now the present one has leaked four times the limit.
                assert wait_until(lambda num_due=(k + 1) // 100: loader.stats().num_recycled >= num_due)
                assert wait_until(lambda: settled(loader))
        assert out == list(range(1200))
        assert len(pids) >= 3
        assert peak < 1200 << 20


def test_recycling_by_private_memory_is_blind_to_shared_pages(tmp_path: Path) -> None:
    """Pages of a file that every worker reads are not its own: 200 MB of them change nobody."""
    np.save(tmp_path / "rows.npy", np.ones((200, 1 << 17), np.float64))
    faults = FaultPolicy(max_worker_rss=128 << 20)
    spec = FactorySpec("ringloader:ArrayDataset", str(tmp_path))
    with Loader(spec, batch_size=1, num_workers=1, faults=faults, output="numpy", timeout=60) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch["rows"].ravel()[0] == 1.0
        assert loader.stats().num_recycled == 0


def test_recycling_survives_a_worker_that_dies_while_its_successor_starts() -> None:
    """The successor takes over; the death is charged once; nothing is lost."""
    faults = FaultPolicy(max_batches_per_worker=5)
    with Loader(FactorySpec(Numbers, 4000), batch_size=10, num_workers=1, faults=faults) as loader:
        out: list[int] = []
        killed: set[int] = set()
        for _, indices in loader:
            out += indices.tolist()
            workers = loader._engine.scheduler.workers  # type: ignore[union-attr]
            starting = [one for one in workers.successors.values() if one.state is WorkerState.STARTING]
            pid = int(workers.all[0].who.removeprefix("pid ")) if workers.all[0].who.startswith("pid ") else 0
            if starting and pid and pid not in killed and len(killed) < 3:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        assert out == list(range(4000))
        assert killed
        # A successor may have been ready by the time the worker was killed.
        stats = loader.stats()
        assert stats.num_restarts <= len(killed) <= stats.num_restarts + stats.num_recycled


def test_recycling_successor_that_cannot_start_leaves_the_worker_at_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed change is a warning with its reason; the worker goes on, and the change is tried again."""
    source = "import os\nfrom tests.runtime.sample_datasets import Numbers\ndef make(path):\n"
    source += "    if os.path.exists(path): raise OSError('the file server is away')\n    return Numbers(3000)\n"
    (tmp_path / "fragile.py").write_text(source)
    broken = tmp_path / "broken"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        faults = FaultPolicy(max_batches_per_worker=5, restarts=0, backoff_s=0.01)
        spec = FactorySpec("fragile:make", str(broken))
        with Loader(spec, batch_size=10, num_workers=1, faults=faults) as loader:
            iterator = iter(loader)
            next(iterator)
            broken.touch()
            out = [i for _ in range(50) for i in next(iterator)[1].tolist()]
            assert wait_until(lambda: "the file server is away" in caplog.text)
            broken.unlink()
            assert wait_until(lambda: loader.stats().num_recycled >= 1 or not next(iterator))
            assert out == list(range(10, 510))
            assert loader.stats().num_restarts == 0
    assert "which goes on" in caplog.text


@pytest.mark.parametrize("saves", [False, True])
def test_recycling_of_streams_waits_for_a_saved_state_or_the_end(saves: bool) -> None:
    """A stream that saves its state is taken over in the middle; another only between epochs; each sample once."""
    faults = FaultPolicy(max_batches_per_worker=5)
    with Loader(FactorySpec(Counted, 600, saves=saves), batch_size=5, num_workers=2, faults=faults) as loader:
        found = []
        for k, batch in enumerate(loader):
            found += batch.tolist()
            if k % 40 == 39:
                wait_until(lambda: settled(loader), 1.0)
        assert sorted(found) == list(range(600))
        assert (loader.stats().num_recycled > 0) is saves
        assert sorted(i for batch in loader for i in batch.tolist()) == list(range(600))
        assert wait_until(lambda: loader.stats().num_recycled > 0)


def test_recycled_worker_repeats_the_calls_of_methods() -> None:
    """What `call` changed holds for successors too."""
    faults = FaultPolicy(max_batches_per_worker=5)
    with Loader(FactorySpec(Scaled), batch_size=2, num_workers=1, faults=faults) as loader:
        loader.call("scale", 3)
        for num_epochs in range(1, 6):
            assert [i for batch in loader for i in batch.tolist()] == [3 * i for i in range(12)]
            assert wait_until(lambda: loader.stats().num_recycled >= num_epochs and settled(loader))  # noqa: B023


def test_recycling_with_threads_is_said_not_to_apply(caplog: pytest.LogCaptureFixture) -> None:
    """A thread has no memory of its own; the option is not swallowed."""
    faults = FaultPolicy(max_batches_per_worker=5)
    with Loader(Numbers(50), batch_size=5, num_workers=1, worker_backend="thread", faults=faults) as loader:
        assert order_of(loader) == list(range(50))
    assert "apply to worker processes" in caplog.text


@pytest.mark.parametrize("given", [{"max_worker_rss": 4096}, {"max_worker_rss": "2GB"}, {"max_batches_per_worker": 0}])
def test_recycling_refuses_limits_that_cannot_be(given: dict[str, Any]) -> None:
    """A number of bytes below a megabyte is a mistake in the unit."""
    with pytest.raises(ConfigError, match=r"faults\.max_\w+ is .*; give an int of at least"):
        FaultPolicy(**given)


def test_recycling_repeats_nothing_of_a_stream_that_cannot_be_read_again() -> None:
    """A successor that became ready in the middle of an epoch waits for its end."""
    faults = FaultPolicy(max_batches_per_worker=5)
    with Loader(FactorySpec(OnceOnly, 300), batch_size=5, num_workers=1, faults=faults) as loader:
        for _ in range(4):
            assert [i for batch in loader for i in batch.tolist()] == list(range(300))
        assert wait_until(lambda: loader.stats().num_recycled >= 1)
        assert loader.stats().num_restarts == 0


def test_recycling_successor_that_builds_another_dataset_leaves_the_worker_at_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on with the dataset that it began with."""
    size = tmp_path / "size"
    size.write_text("2000")
    (tmp_path / "sized.py").write_text(
        "from tests.runtime.sample_datasets import Numbers\ndef make(path):\n    return Numbers(int(open(path).read()))\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        faults = FaultPolicy(max_batches_per_worker=5, restarts=0)
        with Loader(FactorySpec("sized:make", str(size)), batch_size=10, num_workers=1, faults=faults) as loader:
            iterator = iter(loader)
            next(iterator)
            size.write_text("2001")
            assert wait_until(lambda: "built another dataset" in caplog.text or not next(iterator))
            assert len([*iterator]) > 0
    assert "which goes on" in caplog.text


def test_worker_that_ends_after_it_was_abandoned_is_no_zombie(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be reaped at close is collected when it ends."""
    reap = WorkerProcess.reap
    with Loader(FactorySpec(Numbers, 100), batch_size=10, num_workers=1) as loader:
        list(loader)
        (pid,) = loader.stats().worker_pids
        monkeypatch.setattr(WorkerProcess, "reap", lambda process, *, wait: False)
    monkeypatch.setattr(WorkerProcess, "reap", reap)
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_touched_file_is_no_changed_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its content counts."""
    module = tmp_path / "touched_code.py"
    module.write_text("from tests.runtime.sample_datasets import Numbers\ndef make():\n    return Numbers(200)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        with Loader(FactorySpec("touched_code:make"), batch_size=10, num_workers=1) as loader:
            loader.start()
            os.utime(module)
            os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
            assert order_of(loader) == list(range(200))
            assert loader.stats().num_restarts == 1
    assert "have changed" not in caplog.text
