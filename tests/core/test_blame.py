"""Which sample ends workers: narrowed down, charged, left out, remembered."""

from __future__ import annotations

import numpy as np
import pytest

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.bad_samples import BadSamples
from ringloader._core.batch_keys import pack_keys
from ringloader._core.blame import cuts
from ringloader._core.policy import FaultPolicy, PoolPolicy
from ringloader._core.scheduler import Scheduler
from ringloader._core.session import Batch, BatchState, Session
from ringloader._core.workers import WorkerState


class OneWorker:
    """A scheduler with one worker and one batch of keys 100, 101, ... in it."""

    def __init__(self, num_samples: int = 100, **faults: object) -> None:
        self.core = Scheduler(PoolPolicy(1, 1, None, FaultPolicy(stall_s=None, backoff_s=0.0, **faults)))  # type: ignore[arg-type]
        self.session = Session(0, 0, in_order=True)
        self.core.open_session(self.session)
        self.core.start(0.0)
        self.core.submit(0, 0, pack_keys(list(range(100, 100 + num_samples)), 0))
        self.now_s = 0.0
        self.ready()

    @property
    def batch(self) -> Batch:
        return self.session.batches[0]

    @property
    def worker_state(self) -> WorkerState:
        return self.core.workers.all[0].state

    def ready(self) -> None:
        """The worker that is starting has built its dataset, and gets the batch."""
        self.now_s += 0.01
        self.core.tick(self.now_s, lambda *_: None)
        worker = self.core.workers.all[0]
        self.core.receive(0, worker.incarnation, msg.Ready(1, {"length": 1000}), self.now_s)
        self.core.dispatch(self.now_s)

    def die(self, start: int, num_samples: int, *, is_oom: bool = False) -> None:
        """It dies while it fetches so many samples in one call."""
        worker = self.core.workers.all[0]
        death = ev.Death(-9, self.batch.serial, start, "fetching", num_samples=num_samples, is_oom=is_oom)
        self.core.handle(ev.WorkerExited(0, worker.incarnation, death), self.now_s)
        self.core.dispatch(self.now_s)

    def cuts(self) -> list[int]:
        """Where the calls of the present Fill begin."""
        ((_, fill),) = self.core.workers.all[0].fills.values()
        return np.frombuffer(fill.cuts, np.int64).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("start", "stop", "num_samples"), [(0, 1, 1), (0, 16, 16), (0, 17, 17), (30, 40, 100), (99, 100, 100)])
def test_cuts_cover_the_batch_once_in_smaller_pieces(start: int, stop: int, num_samples: int) -> None:
    """Every place is in one piece; those of the range are far smaller than it, and single from 16 on."""
    begins = cuts(start, stop, num_samples)
    assert begins == sorted(set(begins))
    assert begins[0] == 0
    ends = [*begins[1:], num_samples]
    inside = [end - begin for begin, end in zip(begins, ends, strict=True) if start <= begin < stop]
    assert sum(inside) == stop - start
    assert max(inside) == (1 if stop - start <= 16 else 5)


def test_narrowing_takes_one_death_for_nobody_and_two_for_a_hundred_samples() -> None:
    """The same call again; then in pieces of ten; then sample by sample; then the sample is bad."""
    pool = OneWorker(restarts=9)
    pool.die(0, 100)
    pool.ready()
    assert pool.cuts() == []
    pool.die(0, 100)
    pool.ready()
    assert pool.cuts() == list(range(0, 100, 10))
    pool.die(70, 10)
    pool.ready()
    assert pool.cuts() == [0, *range(70, 80), 80]
    pool.die(77, 1)
    assert pool.batch.state is BatchState.FAILED
    assert pool.batch.fault is not None
    assert pool.batch.fault.sample == 77
    assert list(pool.core.supervision.blame.deadly) == [177]


def test_narrowing_death_is_not_charged_even_by_a_budget_that_is_used_up() -> None:
    """Two deaths in the whole call are charged; one that narrows is not, so that the sample is found and no worker lost."""
    pool = OneWorker(restarts=2, on_bad_sample="skip")
    for start, num_samples in ((0, 100), (0, 100), (70, 10)):
        pool.die(start, num_samples)
        assert pool.worker_state is not WorkerState.GIVEN_UP
        pool.ready()
    assert len(pool.core.workers.all[0].deaths) == 2
    pool.die(77, 1)
    assert pool.worker_state is not WorkerState.GIVEN_UP
    assert len(pool.core.workers.all[0].deaths) == 0, "charged for a sample that is left out"


def test_range_that_does_not_narrow_uses_the_budget_up() -> None:
    """Whoever kills workers at random places is no sample: there is an end to it."""
    pool = OneWorker(restarts=3)
    for start in (0, 0, 40, 10, 60, 30):
        if pool.worker_state is WorkerState.GIVEN_UP:
            break
        pool.die(start, 100 - start if not start else 10)
        pool.ready()
    assert pool.worker_state is WorkerState.GIVEN_UP


def test_left_out_sample_takes_the_cuts_along() -> None:
    """The batch that is left is fetched in one call again, with no suspicion on it."""
    pool = OneWorker(restarts=9, on_bad_sample="skip", sample_deaths=1)
    pool.die(0, 100)
    pool.ready()
    assert pool.cuts()
    pool.die(70, 10)
    pool.ready()
    pool.die(77, 1)
    pool.ready()
    assert pool.cuts() == []
    assert pool.batch.num_keys == 99
    assert 177 not in pool.batch.key_list()


def test_bad_samples_keep_the_last_keys_and_know_them_whatever_they_are() -> None:
    """Bounded; lists as keys, too; each once."""
    bad = BadSamples(limit=3)
    for key in (1, "a", [1, 2], 1, (3, "b")):
        bad.add(key)
    assert list(bad) == ["a", [1, 2], (3, "b")]
    assert [1, 2] in bad
    assert 1 not in bad
    assert bad.num_added == 4
    assert bad.since(2) == [[1, 2], (3, "b")]
    assert bad.since(4) == []


@pytest.mark.parametrize(("sample_deaths", "num_deaths"), [(1, 2), (3, 3), (5, 5)])
def test_whole_call_that_ends_workers_is_bad_after_as_many_deaths_as_a_sample(sample_deaths: int, num_deaths: int) -> None:
    """Once it was fetched in pieces; until then somebody may have killed them from outside. No worker is charged in the end."""
    pool = OneWorker(restarts=9, sample_deaths=sample_deaths)
    for k in range(num_deaths):
        assert pool.batch.state is not BatchState.FAILED, k
        pool.die(0, 100)
        if k + 1 < num_deaths:
            pool.ready()
    assert pool.batch.state is BatchState.FAILED
    assert pool.batch.fault is not None
    assert pool.batch.fault.sample == -1
    assert len(pool.core.workers.all[0].deaths) == 0


def test_death_that_was_not_charged_is_not_refunded() -> None:
    """Of several for want of memory at one time the first is charged; what another owes stays owed."""
    pool = OneWorker(restarts=9, on_bad_sample="skip", sample_deaths=2)
    pool.core.workers.died(pool.core.workers.all[0], 0.0, is_oom=True)  # in another batch
    pool.core.workers.all[0].state = WorkerState.RUNNING
    for _ in range(2):
        pool.die(77, 1, is_oom=True)
        pool.ready()
    assert list(pool.session.skipped) == [177]
    assert len(pool.core.workers.all[0].deaths) == 1
