"""The scheduler under sequences of events that Hypothesis chooses, and shortens when one of them breaks something.

Beside the simulated pool (simulation.py), whose schedules are long and drawn from a seed: here every step is a choice, so that
a failure comes with the few steps that matter. At the end of each sequence the faults stop, and everything has to come: each
batch once and in order, every slot back, no worker told to stop and still there.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.batch_keys import pack_keys
from ringloader._core.policy import FaultPolicy, PoolPolicy
from ringloader._core.scheduler import Scheduler
from ringloader._core.session import Session
from ringloader._core.slots import SlotState
from ringloader._core.views import WorkerView
from ringloader._core.workers import WorkerState

_NBYTES = 64
_NUM_BATCHES = 6
_BATCH_SIZE = 4
# Enough for any sequence to come to its end.
_MAX_STEPS = 2000
Who = tuple[int, int]


class Pool(RuleBasedStateMachine):
    """A pool of processes and a consumer, in a dictionary each."""

    @initialize(
        num_workers=st.integers(1, 3),
        limit=st.sampled_from([None, 1, 2]),
        policy=st.sampled_from(["raise", "skip"]),
        sample_deaths=st.integers(1, 3),
    )
    def begin(self, num_workers: int, limit: int | None, policy: str, sample_deaths: int) -> None:
        self.now_s = 0.0
        faults = FaultPolicy(
            restarts=10_000, on_bad_sample=policy, sample_deaths=sample_deaths, max_batches_per_worker=limit, stall_s=None
        )
        self.core = Scheduler(PoolPolicy(num_workers, 2, 5.0, faults))
        self.session = Session(0, 0, in_order=True)
        self.queues: dict[Who, deque[msg.Fill]] = {}
        self.starting: list[Who] = []
        self.stopping: list[Who] = []
        self.killed: list[Who] = []
        self.asked: deque[ev.AddSegment] = deque()
        self.segments: dict[int, int] = {}
        self.memory: dict[int, Any] = {}  # slot id → what was written there last
        self.held: deque[tuple[tuple[int, int], int]] = deque()  # use of a slot, and the batch that was there
        self.delivered: list[int] = []
        self.act(lambda: self.core.open_session(self.session))
        self.act(lambda: self.core.start(self.now_s))

    # --- the shell ------------------------------------------------------------------------------------------------------

    def act(self, decide: Any) -> None:
        decide()
        self.core.dispatch(self.now_s)
        while self.core.outbox:
            self.carry_out(self.core.outbox.popleft())

    def carry_out(self, command: ev.Command) -> None:
        who = (getattr(command, "worker_id", -1), getattr(command, "incarnation", -1))
        if isinstance(command, ev.StartWorker):
            self.starting.append(who)
        elif isinstance(command, ev.KillWorker):
            self.killed.append(who)
        elif isinstance(command, ev.StopWorker):
            assert not self.queues[who], "told to stop with work to do"
            self.stopping.append(who)
        elif isinstance(command, ev.SendFill) and who in self.queues and who not in self.killed:
            assert who not in self.stopping, "work for one that was told to stop"
            self.queues[who].append(command.fill)
        elif isinstance(command, ev.AddSegment):
            self.asked.append(command)
        elif isinstance(command, ev.DropSegment):
            del self.segments[command.segment_id]

    def end(self, who: Who, death: ev.Death) -> None:
        for known in (self.starting, self.killed, self.stopping):
            if who in known:
                known.remove(who)
        self.queues.pop(who, None)
        self.act(lambda: self.core.handle(ev.WorkerExited(*who, death), self.now_s))

    def running(self) -> list[Who]:
        return [who for who in self.queues if who not in self.killed]

    def working(self) -> list[Who]:
        return [who for who in self.running() if self.queues[who]]

    # --- what happens ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def worker_is_ready(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(self.starting))
        self.starting.remove(who)
        self.queues[who] = deque()
        self.act(lambda: self.core.receive(*who, msg.Ready(1, {"length": 100}), self.now_s))

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def worker_does_not_start(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.starting)), ev.Death(None, reason="no descriptors"))

    @precondition(lambda self: self.working())
    @rule(data=st.data(), outcome=st.sampled_from(["filled", "filled", "filled", "failed", "need room"]))
    def worker_answers(self, data: st.DataObject, outcome: str) -> None:
        self.answer(data.draw(st.sampled_from(self.working())), outcome)

    def answer(self, who: Who, outcome: str) -> None:
        fill = self.queues[who].popleft()
        message: Any
        if fill.slot_id == msg.NO_SLOT:
            message = msg.NeedRoom(fill.serial, fill.generation, _NBYTES, True)
        elif outcome == "failed":
            message = msg.Failed(fill.serial, fill.generation, "sample", 0, "ValueError", "bad", "", {})
        elif outcome == "need room":
            message = msg.NeedRoom(fill.serial, fill.generation, _NBYTES, False)
        else:
            assert fill.slot_id not in [slot_id for (slot_id, _), _ in self.held], "written while somebody can see it"
            self.memory[fill.slot_id] = fill.batch_id
            message = msg.Filled(fill.serial, fill.generation, 0, b"", b"", b"", _NBYTES, _NBYTES, _BATCH_SIZE, 1, 1, 0)
        self.act(lambda: self.core.receive(*who, message, self.now_s))

    @precondition(lambda self: self.queues)
    @rule(data=st.data(), start=st.integers(-1, _BATCH_SIZE - 1), together=st.booleans(), is_oom=st.booleans())
    def worker_dies(self, data: st.DataObject, start: int, together: bool, is_oom: bool) -> None:
        who = data.draw(st.sampled_from(list(self.queues)))
        fill = self.queues[who][0] if self.queues[who] else None
        serial = -1 if fill is None else fill.serial
        if fill is None:
            start = -1
        else:
            start = min(start, len(fill.keys) // 8 - 1)
            self.memory[fill.slot_id] = "torn"
        num_samples = len(fill.keys) // 8 - start if fill is not None and together and start >= 0 else 1
        self.end(who, ev.Death(-9, serial, start, "fetching", num_samples=num_samples, is_oom=is_oom))

    @precondition(lambda self: self.stopping)
    @rule(data=st.data())
    def worker_stops(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.stopping)), ev.Death(0))

    @precondition(lambda self: self.asked)
    @rule(is_granted=st.booleans())
    def segment_comes(self, is_granted: bool) -> None:
        command = self.asked.popleft()
        event: Any = ev.SegmentRefused(command.slot_nbytes, "full", True)
        if is_granted:
            segment_id = len(self.segments) + 1000 * len(self.delivered) + sum(self.segments)
            self.segments[segment_id] = command.num_slots
            event = ev.SegmentAdded(segment_id, command.slot_nbytes, command.num_slots)
        self.act(lambda: self.core.handle(event, self.now_s))

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        """Fills that have been at work longer than `timeout` by then are overdue."""
        began_s, self.now_s = self.now_s, self.now_s + seconds

        def observe(worker_id: int, incarnation: int) -> WorkerView | None:
            queue = self.queues.get((worker_id, incarnation))
            return None if queue is None else WorkerView(queue[0].serial if queue else -1, 0, began_s, "fetching", True)

        self.core.workers.look_at_s = self.now_s  # in time: this process did run
        self.act(lambda: self.core.tick(self.now_s, observe))

    @precondition(lambda self: self.killed)
    @rule(data=st.data())
    def killed_worker_ends(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(self.killed))
        fill = self.queues[who][0] if self.queues.get(who) else None
        self.end(who, ev.Death(-9, -1 if fill is None else fill.serial, 0 if fill is not None else -1, "fetching"))

    @rule()
    def consumer_asks(self) -> None:
        session = self.session
        self.act(session.settle)
        while session.num_submitted < min(_NUM_BATCHES, session.num_delivered + 1 + self.core.policy.num_in_flight):
            batch_id = session.num_submitted
            keys = pack_keys([batch_id * _BATCH_SIZE + k for k in range(_BATCH_SIZE)], batch_id * _BATCH_SIZE)
            self.act(lambda: self.core.submit(0, batch_id, keys))  # noqa: B023
        session.ended = session.num_submitted == _NUM_BATCHES
        batch = session.head()
        if batch is None:
            return
        slot = self.core.slots.by_id.get(batch.slot_id) if batch.fault is None else None
        if slot is not None:
            assert self.memory[slot.slot_id] == batch.batch_id, "another batch lies in this slot"
            self.held.append(((slot.slot_id, slot.generation), batch.batch_id))
        self.delivered.append(batch.batch_id)
        self.act(lambda: self.core.hand_over(session, batch))
        session.arrived = True

    @precondition(lambda self: self.held)
    @rule(oldest=st.booleans())
    def consumer_lets_go(self, oldest: bool) -> None:
        key, _ = self.held.popleft() if oldest else self.held.pop()
        self.act(lambda: self.core.handle(ev.SlotReleased(*key), self.now_s))

    # --- what holds -----------------------------------------------------------------------------------------------------

    @invariant()
    def tables_agree(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        assert self.delivered == list(range(len(self.delivered)))
        for (slot_id, _), batch_id in self.held:
            assert self.memory[slot_id] == batch_id, "a batch changed while it was held"

    def teardown(self) -> None:
        """No faults any more: everything comes, and everything is given back."""
        if not hasattr(self, "core"):
            return
        for _ in range(_MAX_STEPS):
            self.advance()
            self.tables_agree()
            if self.is_over():
                break
        assert self.delivered == list(range(_NUM_BATCHES)), f"delivered {self.delivered}"
        assert not self.core.workers.retiring
        assert not self.core.workers.successors
        states = {slot.state for slot in self.core.slots.by_id.values()}
        assert states <= {SlotState.FREE, SlotState.RETIRED}, states

    def is_over(self) -> bool:
        workers = self.core.workers
        is_idle = not (self.starting or self.stopping or self.killed or self.held or self.asked or self.working())
        is_settled = all(worker.state is not WorkerState.BACKOFF for worker in workers.all) and not workers.retiring
        return is_idle and is_settled and not workers.successors and len(self.delivered) == _NUM_BATCHES

    def advance(self) -> None:
        """One turn of everybody, without a fault."""
        self.now_s += 1.0
        self.core.retry_growth()
        self.core.workers.look_at_s = self.now_s
        self.act(lambda: self.core.tick(self.now_s, lambda *_: None))
        for who in list(self.starting):
            self.starting.remove(who)
            self.queues[who] = deque()
            self.act(lambda: self.core.receive(*who, msg.Ready(1, {"length": 100}), self.now_s))  # noqa: B023
        for who in [*self.killed, *self.stopping]:
            self.end(who, ev.Death(0))
        for who in self.working():
            self.answer(who, "filled")
        while self.asked:
            self.segment_comes(is_granted=True)
        self.consumer_asks()
        while self.held:
            key, _ = self.held.popleft()
            self.act(lambda: self.core.handle(ev.SlotReleased(*key), self.now_s))  # noqa: B023


Pool.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPool = Pool.TestCase
