"""A worker killed at each named point, twenty times: the bytes of the epoch are those of an undisturbed one."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ringloader import FactorySpec, FaultPolicy, Loader
from ringloader._core.slots import SlotState
from ringloader._runtime import process
from tests.runtime import kill_points
from tests.runtime.conftest import wait_until

_SIZE, _BATCH, _TIMES = 160, 4, 20
_PATIENT = FaultPolicy(restarts=1000, sample_deaths=1000, backoff_s=0.0)


def digest_of_epoch(loader: Loader) -> str:
    digest = hashlib.sha256()
    for batch in loader:
        digest.update(batch.numpy().tobytes())
    return digest.hexdigest()


def undisturbed() -> str:
    digest = hashlib.sha256()
    for i in range(_SIZE):
        digest.update(kill_points.row(i).tobytes())
    return digest.hexdigest()


def forget_sizes(loader: Loader) -> None:
    """Have the next epoch learn its slot size again, so that its first batches ask for room."""
    engine = loader._engine
    assert engine is not None
    loader._drop_early()
    engine.scheduler._usual_nbytes = None


def check_circulation(loader: Loader) -> None:
    """After the epoch every slot is free: none was lost with a worker."""
    engine = loader._engine
    assert engine is not None
    loader._drop_early()  # the next epoch, begun ahead of its time, holds slots by right

    def states() -> set[SlotState]:
        engine.pump.step(None)
        return {slot.state for slot in engine.scheduler.slots.by_id.values()}

    assert wait_until(lambda: states() == {SlotState.FREE}), states()
    engine.scheduler.check()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", kill_points.POINTS)
def test_b89_worker_killed_at_a_point_the_epoch_has_the_same_bytes(point: str, tmp_path: Path) -> None:
    """Whatever the worker was doing when it died, nothing is lost, repeated or torn, and no slot leaks."""
    spec = FactorySpec(kill_points.make, point, str(tmp_path), _TIMES, _SIZE)
    with Loader(spec, batch_size=_BATCH, num_workers=2, faults=_PATIENT) as loader:
        digests = [digest_of_epoch(loader)]
        while len(os.listdir(tmp_path)) < _TIMES and len(digests) < _TIMES:
            forget_sizes(loader)
            digests.append(digest_of_epoch(loader))
        assert set(digests) == {undisturbed()}
        assert len(os.listdir(tmp_path)) == _TIMES, "not every death took place"
        check_circulation(loader)
        assert loader.stats().num_restarts >= _TIMES - 2


@pytest.mark.timeout(120)
def test_worker_killed_before_it_imports_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that ends before it has said a word costs a restart and nothing else."""
    start = process.WorkerProcess.start
    killed: list[int] = []

    def start_and_kill(*args: Any) -> process.WorkerProcess:
        started = start(*args)
        if len(killed) < _TIMES:
            killed.append(started.pid)
            os.kill(started.pid, signal.SIGKILL)
        return started

    monkeypatch.setattr(process.WorkerProcess, "start", start_and_kill)
    spec = FactorySpec(kill_points.make, "never", str(tmp_path), 0, _SIZE)
    with Loader(spec, batch_size=_BATCH, num_workers=2, faults=_PATIENT) as loader:
        assert digest_of_epoch(loader) == undisturbed()
        assert len(killed) == _TIMES
        check_circulation(loader)
