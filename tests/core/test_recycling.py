"""Healthy workers that give way, decision by decision."""

from __future__ import annotations

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.batch_keys import pack_keys
from ringloader._core.session import Session
from ringloader._core.streams import Streams, stream_keys
from ringloader._core.views import WorkerView
from ringloader._core.workers import STOP_S, WorkerState
from tests.core.deciding import filled, fills, scheduler, sent


def test_one_worker_changes_at_a_time() -> None:
    """Three that are due: the next begins when the last has gone."""
    core = scheduler(3, max_batches_per_worker=1)
    for worker in core.workers.all:
        worker.num_filled = 1
        core.supervision.recycling.made(worker)
    (start,) = [command for command in sent(core) if isinstance(command, ev.StartWorker)]
    assert (start.worker_id, start.incarnation) == (0, 2)
    core.receive(0, 2, msg.Ready(1, {"length": 100}), 1.0)
    assert [type(command) for command in sent(core)] == [ev.Warn, ev.StopWorker]
    assert not sent(core)
    core.handle(ev.WorkerExited(0, 1, ev.Death(0)), 1.0)
    assert sent(core) == [ev.StartWorker(1, 2)]


def test_worker_that_was_told_to_stop_and_does_not_is_killed() -> None:
    """It has `STOP_S`; its successor works meanwhile."""
    core = scheduler(max_batches_per_worker=1)
    core.workers.all[0].due = "it is time"
    sent(core)
    core.receive(0, 2, msg.Ready(1, {"length": 100}), 1.0)
    sent(core)
    core.workers.look_at_s = 1.0 + STOP_S
    core.tick(1.0 + STOP_S, lambda *_: None)
    assert ev.KillWorker(0, 1, True) in core.outbox
    assert core.workers.all[0].state is WorkerState.RUNNING
    core.handle(ev.WorkerExited(0, 1, ev.Death(-9)), 12.0)
    assert not core.workers.retiring
    assert not core.workers.all[0].deaths


def test_stream_is_given_over_only_when_nothing_of_it_is_on_its_way() -> None:
    """The worker that drains gets no more batches; the successor gets the next, from the saved state."""
    core = scheduler(max_batches_per_worker=1)
    streams = Streams(1, num_kept=4)
    session = Session(0, 0, in_order=True, streams=streams, pull=lambda k: stream_keys(0, k, k))
    core.open_session(session)
    for number in range(2):
        core.submit(0, number, stream_keys(0, number, number))
    (first,) = fills(sent(core))  # its size is to be learned
    core.receive(0, 1, msg.StreamState(first.fill.serial, first.fill.generation, b"after 1"), 1.0)
    core.receive(0, 1, filled(first.fill), 1.0)
    commands = sent(core)
    (second,) = fills(commands)
    assert any(isinstance(command, ev.StartWorker) for command in commands)
    core.receive(0, 2, msg.Ready(1, {"length": 100}), 1.0)
    core.submit(0, 2, stream_keys(0, 2, 2))
    assert not fills(sent(core)), "the old one drains, the new one has to wait"
    core.receive(0, 1, msg.StreamState(second.fill.serial, second.fill.generation, b"after 2"), 1.0)
    core.receive(0, 1, filled(second.fill), 1.0)
    commands = sent(core)
    (third,) = fills(commands)
    assert (third.worker_id, third.incarnation) == (0, 2)
    assert b"after 2" in third.fill.keys
    assert ev.StopWorker(0, 1) in commands


def test_stream_without_a_state_keeps_its_worker() -> None:
    """A successor would have to read it from the beginning."""
    core = scheduler(max_batches_per_worker=1)
    session = Session(0, 0, in_order=True, streams=Streams(1), pull=lambda k: stream_keys(0, k, k))
    core.open_session(session)
    core.submit(0, 0, stream_keys(0, 0, 0))
    (first,) = fills(sent(core))
    core.receive(0, 1, filled(first.fill), 1.0)
    assert not any(isinstance(command, ev.StartWorker) for command in sent(core))
    core.close_session(0)
    assert any(isinstance(command, ev.StartWorker) for command in sent(core))


def test_limit_that_is_reached_at_once_is_said_to_be_low_and_not_heeded_for_a_while() -> None:
    """A worker that is larger than its limit from the start must not be replaced again and again."""
    core = scheduler(max_worker_rss=1 << 20)
    worker = core.workers.all[0]
    view = WorkerView(-1, -1, 0.0, "idle", private_nbytes=2 << 20)
    core.supervision.recycling.look_at(worker, view)
    sent(core)
    core.receive(0, 2, msg.Ready(1, {"length": 100}), 1.0)
    (warning,) = [command for command in sent(core) if isinstance(command, ev.Warn)]
    assert warning.is_fault
    assert "raise it" in warning.text
    core.handle(ev.WorkerExited(0, 1, ev.Death(0)), 1.0)
    core.supervision.recycling.look_at(core.workers.all[0], view)
    assert not sent(core)
    core.dispatch(100.0)
    assert any(isinstance(command, ev.StartWorker) for command in core.outbox)


def test_keys_of_map_style_batches_go_to_the_successor_at_once() -> None:
    """The worker finishes what it has; everything new is the successor's, and nobody waits."""
    core = scheduler(max_batches_per_worker=1)
    core.open_session(Session(0, 0, in_order=True))
    for k in range(4):
        core.submit(0, k, pack_keys([k], k))
    (first,) = fills(sent(core))
    core.receive(0, 1, filled(first.fill), 1.0)
    second, third = fills(sent(core))
    core.receive(0, 2, msg.Ready(1, {"length": 100}), 1.0)
    commands = sent(core)
    assert [(fill.worker_id, fill.incarnation) for fill in fills(commands)] == [(0, 2)]
    assert not any(isinstance(command, ev.StopWorker) for command in commands), "it still has batches to make"
    for fill in (second, third):
        assert ev.StopWorker(0, 1) not in sent(core)
        core.receive(0, 1, filled(fill.fill), 1.0)
    assert ev.StopWorker(0, 1) in sent(core)


def test_worker_with_a_call_to_answer_is_not_told_to_stop() -> None:
    """A method may take minutes: it is not cut off, nor run again."""
    core = scheduler(max_batches_per_worker=1)
    core.workers.all[0].due = "it is time"
    sent(core)
    call_id = core.supervision.calls.make("prepare", b"")
    core.receive(0, 2, msg.Ready(1, {"length": 100}), 1.0)
    assert not any(isinstance(command, ev.StopWorker) for command in sent(core))
    core.receive(0, 1, msg.Called(call_id, "", "", "", b""), 50.0)
    assert any(isinstance(command, ev.StopWorker) for command in sent(core))


def test_successor_that_hangs_while_it_builds_is_given_up_and_said() -> None:
    """Nobody waits for it, so it has a limit even where workers have none."""
    core = scheduler(max_batches_per_worker=1)
    core.workers.all[0].due = "it is time"
    sent(core)
    core.workers.plan_look(1.0)
    assert core.workers.look_at_s is not None
    core.tick(core.workers.look_at_s, lambda *_: None)
    assert any(isinstance(command, ev.KillWorker) for command in core.outbox)
    core.handle(ev.WorkerExited(0, 2, ev.Death(-9)), 700.0)
    assert any(isinstance(command, ev.Warn) and "which goes on" in command.text for command in core.outbox)
    assert core.workers.all[0].state is WorkerState.RUNNING


def test_backoffs_of_a_thousand_fruitless_starts_have_a_bound() -> None:
    """No number grows beyond what a float holds."""
    core = scheduler(restarts=10**6, max_batches_per_worker=1)
    worker = core.workers.all[0]
    for _ in range(1100):
        core.workers.died(worker, 1.0)
        worker.state = WorkerState.RUNNING
    worker.num_spared = 5000
    worker.due = "it is time"
    sent(core)
    core.handle(ev.WorkerExited(0, 2, ev.Death(-9)), 1.0)
    assert worker.spared_until_s <= 601.0
