"""Budget, backoff and deadlines on a virtual clock."""

from __future__ import annotations

import pytest

from ringloader._core.messages import Fill
from ringloader._core.policy import FaultPolicy, PoolPolicy
from ringloader._core.views import WorkerView
from ringloader._core.workers import Workers, WorkerState
from ringloader.errors import ConfigError

_FILL = Fill(0, 0, 7, 0, 1, 0, 0, 64, 0, 0, True, b"", b"", [])


def pool(timeout_s: float | None = None, **faults: object) -> Workers:
    workers = Workers(PoolPolicy(2, 2, timeout_s, FaultPolicy(**faults)))  # type: ignore[arg-type]
    for worker in workers.all:
        workers.start(worker, 0.0)
        worker.state = WorkerState.RUNNING
    return workers


def test_restarts_are_counted_within_the_window_only() -> None:
    """`restarts` deaths within `window_s` are replaced; one more gives the worker up; old ones do not count."""
    workers = pool(restarts=2, window_s=100.0)
    worker = workers.all[0]
    assert [workers.died(worker, at_s) for at_s in (0.0, 50.0, 120.0)] == [True, True, True]
    assert not workers.died(worker, 130.0)
    assert worker.state is WorkerState.GIVEN_UP
    assert workers.all[1].deaths == worker.deaths.__class__()


def test_backoff_doubles_only_while_nothing_is_made() -> None:
    """The first replacement starts at once; deaths without a batch in between wait longer and longer, up to the bound."""
    workers = pool(restarts=100, backoff_s=0.5, max_backoff_s=3.0)
    worker = workers.all[0]
    waits = []
    for _ in range(7):
        workers.died(worker, 10.0)
        waits.append(worker.since_s - 10.0)
    assert waits == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0, 3.0]
    worker.num_filled = 1
    workers.died(worker, 10.0)
    assert worker.since_s == 10.0


def test_overdue_is_judged_by_the_workers_own_page() -> None:
    """Time counts from when the worker began this Fill, never from when it was sent, and only while it is in it."""
    workers = pool(timeout_s=2.0)
    worker = workers.all[0]
    worker.fills[7] = (0, _FILL)
    assert workers.overdue(worker, WorkerView(-1, -1, 0.0, "idle"), 100.0) is None
    assert workers.overdue(worker, WorkerView(7, 0, 99.0, "fetching"), 100.9) is None
    assert "timeout=2" in (workers.overdue(worker, WorkerView(7, 0, 99.0, "fetching"), 101.1) or "")


def test_worker_that_begins_none_of_its_batches_is_overdue() -> None:
    """It sits idle, stopped perhaps, while it has one to make; what it does between two batches is not judged by that."""
    for limits, words in (({"timeout_s": 2.0}, "timeout=2"), ({"timeout_s": None, "stall_s": 2.0}, "faults.stall_s=2")):
        workers = pool(**limits)
        worker = workers.all[0]
        worker.fills[7] = (0, _FILL)
        idle, busy = WorkerView(-1, -1, 0.0, "idle"), WorkerView(-1, -1, 0.0, "populating memory")
        assert workers.overdue(worker, idle, 100.0) is None
        assert workers.overdue(worker, idle, 101.9) is None
        assert words in (workers.overdue(worker, idle, 102.1) or "")
        assert workers.overdue(worker, busy, 102.2) is None
        assert workers.overdue(worker, idle, 102.3) is None
        worker.fills = {8: (0, _FILL)}
        assert workers.overdue(worker, idle, 104.4) is None, "it has been given another"


def test_p10_time_in_which_we_did_not_run_is_excused() -> None:
    """A look that comes much later than planned means that everybody stood still: deadlines move by the gap."""
    workers = pool(timeout_s=2.0)
    worker = workers.all[0]
    worker.fills[7] = (0, _FILL)
    assert workers.overdue(worker, WorkerView(7, 0, 100.0, "fetching"), 100.1) is None
    workers.plan_look(100.1)
    assert workers.look_at_s == pytest.approx(100.35)
    workers.look(103.6)
    assert workers.overdue(worker, WorkerView(7, 0, 100.0, "fetching"), 103.6) is None
    assert workers.overdue(worker, WorkerView(7, 0, 100.0, "fetching"), 105.6) is not None


def test_stall_is_no_progress_within_one_sample() -> None:
    """A slow batch that advances is no stall; one sample that does not is."""
    workers = pool(stall_s=5.0)
    worker = workers.all[0]
    worker.fills[7] = (0, _FILL)
    for k in range(10):
        assert workers.overdue(worker, WorkerView(7, k, 0.0, "fetching"), 4.0 * k) is None
    assert "stall_s" in (workers.overdue(worker, WorkerView(7, 9, 0.0, "fetching"), 41.5) or "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("restarts", -1),
        ("restarts", True),
        ("sample_deaths", 0),
        ("window_s", float("nan")),
        ("backoff_s", "abc"),
        ("stall_s", 0),
        ("start_timeout_s", -2.0),
        ("on_bad_sample", "ignore"),
    ],
)
def test_fault_policy_refuses_values_that_cannot_be(name: str, value: object) -> None:
    """Each refusal names the option and the value."""
    with pytest.raises(ConfigError, match=f"faults.{name} is {value!r}"):
        FaultPolicy(**{name: value})  # type: ignore[arg-type]


def test_p10_batch_begun_just_before_we_stopped_is_excused_too() -> None:
    """The look before did not see it yet: the gap counts from when it began, and from then on it is judged as ever."""
    workers = pool(timeout_s=2.0)
    worker = workers.all[0]
    worker.fills[7] = (0, _FILL)
    workers.plan_look(9.9)
    workers.look(10.0)
    workers.plan_look(10.0)
    assert workers.look_at_s == 10.25
    workers.look(20.25)  # ten seconds late
    assert workers.overdue(worker, WorkerView(7, 0, 10.2, "fetching"), 20.25) is None
    workers.plan_look(20.25)
    workers.look(20.5)
    assert workers.overdue(worker, WorkerView(7, 0, 10.2, "fetching"), 22.1) is None
    assert "timeout=2" in (workers.overdue(worker, WorkerView(7, 0, 10.2, "fetching"), 22.3) or "")


def test_deaths_for_want_of_memory_at_one_time_are_one() -> None:
    """The kernel ends several workers at once: the first is charged; one that comes later, or dies otherwise, is again."""
    workers = pool()
    first, second = workers.all
    workers.died(first, 1.0, is_oom=True)
    workers.died(second, 1.5, is_oom=True)
    assert (len(first.deaths), len(second.deaths)) == (1, 0)
    workers.died(second, 1.6)
    assert len(second.deaths) == 1
    workers.died(second, 5.0, is_oom=True)
    assert len(second.deaths) == 2
