"""Reported cases around faults: workers that never answer, errors that cannot travel, limits on time, ends that must not
hang."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ringloader import ClosedError, ConfigError, FactorySpec, FaultPolicy, Loader, SampleError, WorkerError
from ringloader._runtime import engine as engine_module
from ringloader._runtime import memory
from tests.runtime import case_datasets as cases
from tests.runtime.conftest import UNIT_S, our_children, wait_until
from tests.runtime.running import is_alive, run
from tests.runtime.sample_datasets import Numbers, Truncated

ONE_DEATH = FaultPolicy(sample_deaths=1)
HABITS = ("sleep", "c", "deaf")


def test_b02_death_with_restarts_off_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The error has worker, pid, signal, batch and sample indices, and a hint that SIGKILL usually means out of memory."""
    spec = FactorySpec("tests.runtime.sample_datasets:AlwaysDies", 100)
    with Loader(spec, batch_size=4, num_workers=1, faults=FaultPolicy(restarts=0)) as loader:
        iterator = iter(loader)
        began_s = time.monotonic()
        assert [next(iterator)[1].tolist()[0] for _ in range(9)] == list(range(0, 36, 4))
        with pytest.raises(WorkerError) as caught:
            next(iterator)
        assert time.monotonic() - began_s < 2 * UNIT_S
    for part in ("worker 0", "pid ", "SIGKILL", "batch 9", "[36, 37, 38, 39]", "37", "out-of-memory"):
        assert part in str(caught.value), part


def test_b09_worker_that_never_answers_is_named_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    """`timeout` ends the wait: the error names worker, pid, batch and indices, the warning shows the line; close is prompt."""
    timeout_s = 1.0 * UNIT_S
    loader = Loader(FactorySpec(cases.Stuck, 32), batch_size=4, num_workers=2, timeout=timeout_s, faults=ONE_DEATH)
    iterator = iter(loader)
    pids = loader.stats().worker_pids
    began_s = time.monotonic()  # sample 9 is fetched ahead, so its time begins somewhere before its own `next`
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(WorkerError) as caught:
        next(iterator)
    assert 0.5 * timeout_s < time.monotonic() - began_s < timeout_s + 2 * UNIT_S
    assert caught.value.index == 9
    assert caught.value.indices == [8, 9, 10, 11]
    for part in ("batch 2", "[8, 9, 10, 11]", f"worker {caught.value.worker}", f"timeout={timeout_s:g}"):
        assert part in str(caught.value), part
    assert any(f"pid {pid}" in str(caught.value) for pid in loader.stats().worker_pids + pids)
    assert "case_datasets.py" in caplog.text
    assert "in make" in caplog.text
    assert [batch.tolist()[0] for batch in iterator] == [12, 16, 20, 24, 28]
    began_s = time.monotonic()
    loader.close()
    assert time.monotonic() - began_s < 5 * UNIT_S
    assert our_children() == []


def test_b09_hanging_batch_does_not_hold_up_an_older_one(tmp_path: Path) -> None:
    """What a worker keeps for want of room is not put behind a younger batch of that worker, which may take for ever."""
    spec = FactorySpec(cases.HangsBehind, 8, str(tmp_path))
    with Loader(spec, batch_size=1, num_workers=2, timeout=6.0 * UNIT_S) as loader:
        loader.start()
        engine = loader._engine
        assert engine is not None
        workers = engine.scheduler.workers.all
        assert wait_until(lambda: all(worker.state.value == "running" for worker in workers))
        iterator = iter(loader)
        began_s = time.monotonic()
        assert [next(iterator).tolist() for _ in range(3)] == [[0], [1], [2]]
        assert time.monotonic() - began_s < 3 * UNIT_S


def test_b09_without_a_timeout_a_line_says_what_is_awaited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiting is never silent: batch, worker, pid and stage are logged at a fixed period until the batch comes."""
    monkeypatch.setattr(engine_module, "_QUIET_S", 0.1)
    lines: list[str] = []

    class FreesTheWorker(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            if len(lines) == 3:
                os.kill(pid, signal.SIGKILL)

    logger, handler = logging.getLogger("ringloader"), FreesTheWorker()
    faults = FaultPolicy(sample_deaths=1, on_bad_sample="skip")
    with Loader(FactorySpec(cases.Stuck, 12), batch_size=4, num_workers=1, faults=faults) as loader:
        loader.start()
        pid = loader.stats().worker_pids[0]
        iterator = iter(loader)
        assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        logger.addHandler(handler)
        try:
            assert next(iterator).tolist() == [8, 10, 11]
        finally:
            logger.removeHandler(handler)
        assert loader.skipped == [9]
    for line in lines[:3]:
        for part in ("still waiting after", "batch 2", "worker 0", f"pid {pid}", "fetching sample 9", "begun"):
            assert part in line, part


def read_until(loader: Loader, iterator: Any, deadline_s: float) -> None:
    """Read on, epoch after epoch, until an error comes or the time is over."""
    list(iterator)
    while time.monotonic() < deadline_s:
        list(loader)


def test_b14_background_thread_that_fails_is_heard_from_next() -> None:
    """What ends our own thread comes out of `next`, type and text, within a second; three abandoned epochs do no harm."""
    loader = Loader(FactorySpec(Numbers, 64), batch_size=4, num_workers=2)
    for _ in range(3):
        assert next(iter(loader))[1].tolist() == [0, 1, 2, 3]

    def fail(*args: Any) -> None:
        raise LookupError("the thread's own trouble")

    iterator = iter(loader)
    engine = loader._engine
    assert engine is not None
    engine.backend.start_worker = fail
    os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(LookupError, match="the thread's own trouble"):
        read_until(loader, iterator, began_s + 5 * UNIT_S)
    assert time.monotonic() - began_s < 1.5 * UNIT_S
    loader.close()


def test_b21_exceptions_that_cannot_be_made_again_arrive_in_words() -> None:
    """Type, text, traceback, worker and index of any exception, without its class being needed on this side."""
    with Loader(FactorySpec(cases.Raises, 6), batch_size=1, num_workers=1) as loader:
        iterator = iter(loader)
        errors = []
        for _ in range(6):
            with pytest.raises(SampleError) as caught:
                next(iterator)
            errors.append(caught.value)
        assert list(iterator) == []
        assert loader.stats().num_restarts == 0
    expected = [("TwoArguments", "a=1 b=2")] * 2 + [("Explosive", "ValueError")] * 2 + [("Faraway", "from afar")] * 2
    for index, (error, (name, text)) in enumerate(zip(errors, expected, strict=True)):
        assert (error.index, error.batch, error.worker) == (index, index, 0)
        assert error.original_type.endswith(name)
        for part in (name, text, "in make", "case_datasets.py", "worker 0"):
            assert part in str(error), (index, part)
    assert errors[-1].original_type == "not_importable_here.Faraway"


def stuck_loader(habit: str, marks: Path) -> tuple[Loader, Any]:
    """A loader with a worker that will not come back, and its iterator."""
    loader = Loader(FactorySpec(cases.NeverEnding, 16, 8, habit, str(marks)), batch_size=1, num_workers=2)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(8)] == [[i] for i in range(8)]
    assert wait_until(lambda: any(name.startswith("stuck") for name in os.listdir(marks)))
    return loader, iterator


@pytest.mark.parametrize("habit", HABITS)
def test_b35_close_ends_workers_that_do_not_listen(habit: str, tmp_path: Path) -> None:
    """close() returns in 5 s while a worker sleeps for an hour, sits in C, or ignores SIGTERM; everything is given back."""
    loader, iterator = stuck_loader(habit, tmp_path)
    pids = loader.stats().worker_pids
    began_s = time.monotonic()
    loader.close()
    assert time.monotonic() - began_s < 5 * UNIT_S
    assert not any(is_alive(pid) for pid in pids)
    assert memory.ACCOUNT.nbytes == 0
    with pytest.raises(ClosedError):
        next(iterator)


@pytest.mark.parametrize("with_iterator", [True, False])
def test_b35_dropping_the_loader_ends_workers_that_do_not_listen(with_iterator: bool, tmp_path: Path) -> None:
    """`del loader` itself takes no time, and the workers are gone within 5 s."""
    loader, iterator = stuck_loader("deaf", tmp_path)
    pids = loader.stats().worker_pids
    if not with_iterator:
        del iterator
    began_s = time.monotonic()
    del loader
    iterator = None
    assert time.monotonic() - began_s < 1 * UNIT_S
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids), within_s=5)
    assert wait_until(lambda: memory.ACCOUNT.nbytes == 0)


LEAVES = """
import sys
from ringloader import FactorySpec, Loader
from tests.runtime.case_datasets import NeverEnding
from tests.runtime.conftest import wait_until
import os
if __name__ == "__main__":
    loader = Loader(FactorySpec(NeverEnding, 16, 8, sys.argv[1], sys.argv[2]), batch_size=1, num_workers=2, output="numpy")
    for k, batch in enumerate(loader):
        if k == 7:
            break
    assert wait_until(lambda: any(name.startswith("stuck") for name in os.listdir(sys.argv[2])))
    print(*loader.stats().worker_pids, flush=True)
"""


def test_b35_end_of_the_interpreter_does_not_wait_for_workers(tmp_path: Path) -> None:
    """A script that just ends, with deaf workers in mid-sample, is over within 5 s, in silence and without survivors."""
    marks = tmp_path / "marks"
    marks.mkdir()
    began_s = time.monotonic()
    done = run(tmp_path, LEAVES, "deaf", str(marks), within_s=10)
    assert time.monotonic() - began_s < 5 * UNIT_S
    assert (done.returncode, done.stderr) == (0, "")
    assert not any(is_alive(int(pid)) for pid in done.stdout.split())


@pytest.mark.parametrize("timeout", [-1, math.nan, math.inf, "abc", True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_b37_timeout_that_cannot_be_is_refused_by_name(timeout: Any, num_workers: int) -> None:
    """A wrong `timeout` is a ValueError that names option and value, at construction."""
    with pytest.raises(ValueError, match="timeout is ") as caught:
        Loader([1, 2, 3], timeout=timeout, num_workers=num_workers)
    assert isinstance(caught.value, ConfigError)
    assert repr(timeout) in str(caught.value)


def test_b37_timeout_without_workers_is_accepted() -> None:
    """Inline, where nobody could be killed, `timeout` changes nothing."""
    with Loader([1, 2, 3], batch_size=2, timeout=0.000001) as loader:
        assert [batch.tolist() for batch in loader] == [[1, 2], [3]]


def test_b37_only_a_workers_own_time_on_a_batch_counts() -> None:
    """Neither a slow constructor nor a long training step nor many batches in a queue trip `timeout`."""
    timeout_s = 0.4 * UNIT_S
    with Loader(FactorySpec(cases.SlowBuild, 12, 2 * timeout_s), batch_size=2, num_workers=1, timeout=timeout_s) as loader:
        got = []
        for k, batch in enumerate(loader):
            if k in (0, 3):
                time.sleep(2 * timeout_s)  # the training step
            got += batch.tolist()
        assert got == list(range(12))
        assert loader.stats().num_restarts == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_b21_iterator_goes_on_after_an_error(num_workers: int) -> None:
    """`except` around one `next` is enough: what follows comes in order, each batch once."""
    with Loader(FactorySpec(Truncated, 12), batch_size=4, num_workers=num_workers) as loader:
        iterator = iter(loader)
        assert next(iterator)[1].tolist() == [0, 1, 2, 3]
        with pytest.raises(SampleError):
            next(iterator)
        assert next(iterator)[1].tolist() == [8, 9, 10, 11]
        assert next(iterator, None) is None
