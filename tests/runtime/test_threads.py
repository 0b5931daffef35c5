"""Worker threads: stuck ones are left alone with what they hold, replaced and named; nothing is shared that must not be."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringloader import ConfigError, FactorySpec, FaultPolicy, Loader, WorkerError, get_worker_info
from tests.runtime.conftest import wait_until
from tests.runtime.running import run
from tests.runtime.stream_datasets import HangsInThread


def test_stuck_thread_is_abandoned_with_its_stack_and_its_slot(caplog: pytest.LogCaptureFixture) -> None:
    """Its batch is made by another; when it goes on at last, it writes into nobody's batch and ends."""
    dataset = HangsInThread()
    kept = []
    with Loader(dataset, batch_size=4, num_workers=2, worker_backend="thread", output="numpy", timeout=0.3) as loader:
        for number, batch in enumerate(loader):
            kept.append(batch)
            if number == 5:
                dataset.go_on.set()
                assert wait_until(dataset.left.is_set)
        assert np.concatenate(kept)[:, 0].tolist() == list(range(40))
        assert all((batch == batch[:, :1]).all() for batch in kept)
        assert loader.stats().num_restarts == 1
        assert wait_until(lambda: sum(t.name.startswith("ringloader-worker") for t in threading.enumerate()) == 2)
        del batch, kept
        again = np.concatenate([batch[:, 0] for batch in loader])
        assert again.tolist() == list(range(40))
    assert "timeout=0.3" in caplog.text
    assert "while fetching sample 13 of batch 3" in caplog.text
    assert "self.go_on.wait()" in caplog.text


class AlwaysHangs(HangsInThread):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            self.go_on.wait()
        return index


def test_sample_that_hangs_again_and_again_is_named() -> None:
    """As one that kills processes is."""
    dataset = AlwaysHangs()
    faults = FaultPolicy(sample_deaths=2, restarts=10)
    options: dict[str, Any] = {"worker_backend": "thread", "output": "numpy", "timeout": 0.1, "faults": faults}
    with Loader(dataset, batch_size=4, num_workers=2, **options) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        with pytest.raises(WorkerError, match="sample 13 ended 2 workers"):
            next(iterator)
        assert next(iterator).tolist() == [16, 17, 18, 19]
        dataset.go_on.set()


def test_close_leaves_a_stuck_thread_behind_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Within its bound; the thread ends when the user's code does."""
    dataset = HangsInThread()
    loader = Loader(dataset, batch_size=4, num_workers=1, worker_backend="thread", output="numpy")
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    assert wait_until(dataset.hung.is_set)
    began_s = time.monotonic()
    loader.close()
    assert time.monotonic() - began_s < 3.0
    assert "is still inside the dataset's code" in caplog.text
    dataset.go_on.set()
    assert np.concatenate(batches)[:, 0].tolist() == list(range(12))


class Local:
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


def test_auto_takes_threads_where_the_dataset_cannot_be_sent(caplog: pytest.LogCaptureFixture) -> None:
    """One line says which and why; where threads were not asked for and processes were, it is an error."""
    with Loader(Local(), batch_size=5, num_workers=2) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        assert loader.stats().worker_pids == ()
    assert [r.message for r in caplog.records if "auto" in r.message and "threads" in r.message and "lock" in r.message]
    with pytest.raises(ConfigError, match="dataset"):
        Loader(Local(), num_workers=2, worker_backend="process")


def test_any_callable_will_do_for_threads() -> None:
    """Nothing is pickled: a lambda collates, a closure initialises, each worker once."""
    started: list[int] = []
    with Loader(
        Local(),
        batch_size=5,
        num_workers=3,
        worker_backend="thread",
        output="numpy",
        collate_fn=lambda samples: np.array(samples) * 2,
        worker_init_fn=started.append,
    ) as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(0, 20, 2))
        assert wait_until(lambda: sorted(started) == [0, 1, 2])


class Built:
    """Notes how often it is built, and by whom it is asked."""

    count = 0

    def __init__(self) -> None:
        type(self).count += 1
        self.permutation = np.random.permutation(50)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return int(self.permutation[index]), info.id, threading.get_ident()


def test_threads_share_one_dataset_built_from_the_seed_and_leave_generators_alone() -> None:
    """One copy in memory; the training's own draws are what they would have been."""
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)
    Built.count = 0
    spec = FactorySpec(Built)
    with Loader(spec, batch_size=5, num_workers=3, worker_backend="thread", output="numpy") as loader:
        batches = list(loader)
    assert np.random.random() == expected
    assert Built.count == 1
    assert threading.get_ident() not in {ident for batch in batches for ident in batch[2].tolist()}
    with Loader(spec, batch_size=5, output="numpy") as loader:
        assert [batch[0].tolist() for batch in loader] == [batch[0].tolist() for batch in batches]


class Epochs:
    """One epoch at a time, whoever reads."""

    epoch = -1

    def __len__(self) -> int:
        return 10

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int]:
        before = self.epoch
        time.sleep(0.0005)
        return before, self.epoch


def test_epochs_of_a_shared_dataset_never_overlap() -> None:
    """Two iterators of two epochs over one object: each sample sees its own, from beginning to end."""
    with Loader(Epochs(), batch_size=2, num_workers=3, worker_backend="thread", output="numpy") as loader:
        for first, second in zip(iter(loader), iter(loader), strict=True):
            assert {*first[0].tolist(), *first[1].tolist()} == {0}
            assert {*second[0].tolist(), *second[1].tolist()} == {1}


class Exits(Local):
    def __getitem__(self, index: int) -> int:
        if index == 3 and threading.current_thread().name.startswith("ringloader") and not hasattr(self, "has_left"):
            self.has_left = True
            raise SystemExit(5)
        return index


def test_thread_that_leaves_by_sys_exit_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """As a process is; the program goes on."""
    with Loader(Exits(), batch_size=2, num_workers=2, worker_backend="thread", output="numpy") as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(10))
    assert "exited with code 5 while fetching sample 3 of batch 1" in caplog.text


def test_seed_per_sample_is_refused_for_threads() -> None:
    """It would seed the training's generators."""
    with pytest.raises(ConfigError, match="seed_per='sample'"):
        Loader(Local(), num_workers=1, worker_backend="thread", seed_per="sample")


_EXIT = """
import threading, time
import numpy as np
from ringloader import Loader

class Slow:
    def __len__(self): return 1000
    def __getitem__(self, index):
        time.sleep(0.01)
        return np.full(100, index)

if __name__ == "__main__":
    loader = Loader(Slow(), batch_size=4, num_workers=3, worker_backend="thread", output="numpy")
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(3)]
    print("leaving", flush=True)
"""


def test_program_ends_in_silence_with_threads_at_work(tmp_path: Path) -> None:
    """No traceback of a daemon thread, no abort, no wait."""
    began_s = time.monotonic()
    done = run(tmp_path, _EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")
    assert time.monotonic() - began_s < 10


def test_child_of_a_fork_does_not_use_the_parents_threads() -> None:
    """They do not exist there: ClosedError, not a hang."""
    with Loader(Local(), batch_size=5, num_workers=2, worker_backend="thread", output="numpy") as loader:
        iterator = iter(loader)
        next(iterator)
        pid = os.fork()
        if pid == 0:
            try:
                next(iterator)
            except BaseException as error:
                os._exit(0 if type(error).__name__ == "ClosedError" else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert next(iterator).tolist() == [5, 6, 7, 8, 9]


class ReadsAnother:
    """Each sample is what a loader of its own gives, read by threads."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        with Loader(Local(), batch_size=5, num_workers=1, worker_backend="thread", output="numpy") as loader:
            return np.concatenate(list(loader))


def test_dataset_read_inline_may_read_a_loader_of_threads() -> None:
    """Its threads don't wait for the generators that this thread has borrowed, and that waits for them."""
    with Loader(ReadsAnother(), batch_size=4, output="numpy") as loader:
        (found,) = loader
    assert found.shape == (4, len(Local()))


class Waits:
    """Its sample takes until it is told."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        self.begun.set()
        self.goes_on.wait(30)
        return index


def test_child_of_a_fork_reads_inline_while_a_thread_of_the_parent_did() -> None:
    """What that thread has borrowed is not borrowed in the child."""
    dataset = Waits()
    other = threading.Thread(target=lambda: list(Loader(dataset, output="numpy")))
    other.start()
    assert dataset.begun.wait(30)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if len(list(Loader(Local(), batch_size=5, output="numpy"))) == len(Local()) // 5 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    dataset.goes_on.set()
    other.join(30)


def _seeds(worker_id: int) -> None:
    np.random.seed(worker_id)


def test_init_function_that_seeds_does_not_seed_the_training() -> None:
    """What everybody writes in a `worker_init_fn` stays in the worker."""
    np.random.seed(7)
    expected = np.random.random(3).tolist()
    np.random.seed(7)
    with Loader(Local(), batch_size=5, num_workers=2, worker_backend="thread", worker_init_fn=_seeds) as loader:
        list(loader)
    assert np.random.random(3).tolist() == expected
