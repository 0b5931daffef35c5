"""Workers that die, hang and fail, with real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ringloader import FactoryError, FactorySpec, FaultPolicy, Loader, SampleError, WorkerError
from tests.runtime.conftest import wait_until
from tests.runtime.sample_datasets import AlwaysDies, DiesOnce, ExitsOnce, HangsOnce, Numbers, Truncated, first_time


def read(loader: Loader) -> list[Any]:
    """Every index of an epoch, and the type of each error in its place."""
    out: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            rows, indices = next(iterator)
        except StopIteration:
            return out
        except (SampleError, WorkerError) as error:
            out.append(type(error).__name__)
            continue
        assert (rows.numpy() == indices.numpy()[:, None]).all()
        out += indices.tolist()


@pytest.mark.parametrize("kind", [DiesOnce, ExitsOnce])
def test_worker_dies_in_a_sample_its_batches_come_once_in_order(kind: type, tmp_path: Path) -> None:
    """A worker that ends in the middle of a batch costs nothing but time."""
    with Loader(FactorySpec(kind, 200, 8, str(tmp_path), [17, 90, 91]), batch_size=10, num_workers=2) as loader:
        assert read(loader) == list(range(200))
        assert loader.stats().num_restarts == 3


def test_worker_hangs_is_killed_with_its_stack_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`timeout` ends a hanging worker; the warning shows the line it hung in."""
    spec = FactorySpec(HangsOnce, 60, 8, str(tmp_path), [17])
    with Loader(spec, batch_size=10, num_workers=2, timeout=0.5) as loader:
        assert read(loader) == list(range(60))
    assert "timeout=0.5" in caplog.text
    assert "time.sleep" in caplog.text or "in harm" in caplog.text


def test_worker_stopped_between_two_batches_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """It is given the next ones, and begins none: it has its time, as one that hangs in one."""
    # Long enough for the other one, which may have to wait for a core.
    with Loader(FactorySpec(Numbers, 400), batch_size=10, num_workers=2, timeout=1.5) as loader:
        iterator = iter(loader)
        out = next(iterator)[1].tolist()
        assert wait_until(lambda: len(loader.stats().worker_pids) == 2)
        workers = loader._engine.scheduler.workers  # type: ignore[union-attr]
        assert wait_until(lambda: not any(worker.fills for worker in workers.all))
        os.kill(loader.stats().worker_pids[0], signal.SIGSTOP)
        out += [i for _, indices in iterator for i in indices.tolist()]
        assert out == list(range(400))
        assert loader.stats().num_restarts == 1
    assert "did not begin the batch that it was given" in caplog.text


def test_worker_killed_from_outside_between_batches_is_replaced() -> None:
    """SIGKILL to an idle or busy worker: the same epoch, a new worker."""
    with Loader(FactorySpec(Numbers, 400), batch_size=10, num_workers=2) as loader:
        out: list[int] = []
        for k, (_, indices) in enumerate(loader):
            if k == 5:
                os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
            out += indices.tolist()
        assert out == list(range(400))
        assert read(loader) == list(range(400))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_b88_sample_fails_its_batch_is_an_error_and_the_iterator_goes_on(num_workers: int) -> None:
    """One bad sample costs its batch only; the error names index, batch, type and traceback."""
    with Loader(FactorySpec(Truncated, 12), batch_size=2, num_workers=num_workers) as loader:
        assert read(loader) == [0, 1, 2, 3, "SampleError", 6, 7, 8, 9, 10, 11]
        with pytest.raises(SampleError, match="image file is truncated") as caught:
            list(loader)
    error = caught.value
    assert (error.index, error.batch, error.original_type) == (5, 2, "OSError")
    assert "__getitem__" in str(error.__cause__)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("policy", "expected"), [("skip", [4]), ("replace", [4, 4])])
def test_bad_sample_policy_leaves_out_or_replaces(num_workers: int, policy: str, expected: list[int]) -> None:
    """skip: the batch is shorter; replace: another sample of it stands in; either way it is reported."""
    faults = FaultPolicy(on_bad_sample=policy)
    with Loader(FactorySpec(Truncated, 12), batch_size=2, num_workers=num_workers, faults=faults) as loader:
        assert read(loader) == [0, 1, 2, 3, *expected, 6, 7, 8, 9, 10, 11]
        assert loader.skipped == [5]


def test_b02_sample_kills_every_worker_is_named_and_the_epoch_goes_on() -> None:
    """After `sample_deaths` deaths the error names sample, batch and signal; everything else is delivered."""
    with Loader(FactorySpec(AlwaysDies, 60), batch_size=4, num_workers=2) as loader:
        assert read(loader) == [*range(36), "WorkerError", *range(40, 60)]
        with pytest.raises(WorkerError, match=r"sample 37 ended 1 worker .*SIGKILL") as caught:
            list(Loader(FactorySpec(AlwaysDies, 60), batch_size=4, num_workers=2, faults=FaultPolicy(sample_deaths=1)))
    assert caught.value.index == 37
    assert caught.value.indices == [36, 37, 38, 39]


def iterator_is_served(iterator: Any) -> bool:
    """True while batches come, False when the pool is lost."""
    try:
        next(iterator)
    except WorkerError as error:
        return "faults.restarts=0" not in str(error)
    return True


def test_restarts_used_up_raises_and_never_hangs() -> None:
    """With no restarts and a deadly sample the pool is lost; every further `next` says so."""
    with Loader(FactorySpec(AlwaysDies, 60), batch_size=4, num_workers=2, faults=FaultPolicy(restarts=0)) as loader:
        iterator = iter(loader)
        for _ in range(9):
            next(iterator)
        with pytest.raises(WorkerError, match="sample 37 ended 2 workers"):
            next(iterator)
        # What was made before the last death is still delivered, then every `next` says the same.
        while iterator_is_served(iterator):
            pass
        for _ in range(3):
            with pytest.raises(WorkerError, match=r"faults.restarts=0"):
                next(iterator)


def failing_collate(samples: list[Any]) -> Any:
    raise RuntimeError("cannot collate this")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collate_fn_raises_blames_no_sample_and_skips_none(num_workers: int) -> None:
    """An error of the collate_fn names it, not the last sample, and no policy leaves samples out for it."""
    with Loader(
        FactorySpec(Numbers, 8),
        batch_size=4,
        num_workers=num_workers,
        collate_fn=failing_collate,
        faults=FaultPolicy(on_bad_sample="skip"),
    ) as loader:
        with pytest.raises(SampleError, match="collate_fn raised RuntimeError: cannot collate this") as caught:
            list(loader)
        assert caught.value.index is None
        assert loader.skipped == []


def test_replaced_sample_of_a_batch_of_one_comes_from_the_batch_before() -> None:
    """replace holds the number of steps also where the batch has no other sample."""
    with Loader(FactorySpec(Truncated, 8), batch_size=1, num_workers=1, faults=FaultPolicy(on_bad_sample="replace")) as loader:
        assert read(loader) == [0, 1, 2, 3, 4, 4, 6, 7]


class DiffersByWorker(Numbers):
    """Has a length that depends on who builds it."""

    def __init__(self, marks: str) -> None:
        super().__init__(40 if first_time(marks, "first") else 41)


def test_p01_workers_that_build_different_datasets_are_refused_by_name(tmp_path: Path) -> None:
    """Another length is a FactoryError that names the usual causes; the odd worker delivers nothing."""
    with (
        Loader(FactorySpec(DiffersByWorker, str(tmp_path)), batch_size=4, num_workers=2) as loader,
        pytest.raises(FactoryError, match="built another dataset: length 4"),
    ):
        # Until the second worker has started as well.
        wait_until(lambda: not list(loader), 20)


def test_counts_go_on_over_epochs_without_persistent_workers() -> None:
    """persistent_workers=False: new workers each epoch, one set of counts."""
    with Loader(FactorySpec(Numbers, 40), batch_size=4, num_workers=1, persistent_workers=False) as loader:
        for epoch in (1, 2, 3):
            assert read(loader) == list(range(40))
            assert loader.stats().num_samples == 40 * epoch
            assert loader.stats().num_batches == 10 * epoch
            assert loader.stats().worker_pids == ()
