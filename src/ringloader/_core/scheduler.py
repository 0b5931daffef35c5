"""The core: sessions, workers and slots put together; events in, commands out.

Owns every decision. The shell calls the methods below with facts and the time, then `dispatch`, then carries out the commands
of `outbox`, removing each only once it is done. The outbox is part of the state, so an interrupt between deciding and acting
loses nothing; one in the middle of deciding is repaired by `recover`, which rebuilds all lists from what cannot be half done:
the batches pulled, the leases alive and the segments that exist. Must not touch a descriptor, a process, a thread or a clock.

Who may die when, and what then frees the others:
- a worker in a Fill: `WorkerExited` returns its slots and batches; until it is reaped its slots stay FILLING, because a killed
  process may still be inside a memcpy. One that cannot be reaped has its slots QUARANTINED and is replaced.
- a worker after its answer: the answer is handled before the exit, and counts.
- the consumer between two steps: `recover`.
- everything: nothing has a name, descriptors close, memory goes.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from typing import Any

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.policy import PoolPolicy
from ringloader._core.session import Batch, BatchState, Fault, Session
from ringloader._core.slots import SlotEvent, Slots, SlotState
from ringloader._core.units import align_slot, in_words
from ringloader._core.workers import UNREAPED_S, Worker, Workers, WorkerState
from ringloader.errors import InternalError

# A session needs two slots: the user's loop variable still holds one batch while the next is asked for.
_LEAST_SLOTS = 2


class Scheduler:
    """Decides which batch goes to which worker and slot, and what follows from every fault."""

    def __init__(self, policy: PoolPolicy) -> None:
        self.policy = policy
        self.slots = Slots()
        self.workers = Workers(policy)
        self.sessions: dict[int, Session] = {}
        self.outbox: deque[ev.Command] = deque()
        self.dataset_facts: dict[str, Any] | None = None
        self.start_fault: msg.StartFailed | None = None  # no worker could start: nothing will ever come
        self.mismatch: str | None = None  # workers built different datasets
        self.refusal: ev.SegmentRefused | None = None
        self.num_stale = 0
        self.num_refilled = 0
        self._growing = False
        self._asked_nbytes = 0  # what the segment asked for last has to hold
        self._next_serial = 1
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            ev.WorkerExited: self._on_exited,
            ev.WorkerBroken: self._on_broken,
            ev.SegmentAdded: self._on_segment_added,
            ev.SegmentRefused: self._on_segment_refused,
            ev.SlotReleased: self._on_released,
            ev.SlotCompleted: self._on_completed,
        }
        self._answers: dict[type, Callable[[Worker, Any, msg.Fill, Batch | None], None]] = {
            msg.Filled: self._on_filled,
            msg.NeedRoom: self._on_need_room,
            msg.Failed: self._on_failed,
            msg.Cancelled: self._on_cancelled,
        }

    # --- what the shell tells -------------------------------------------------------------------------------------------

    def start(self, now_s: float) -> None:
        """Start every worker that was not started."""
        for worker in self.workers.all:
            if worker.state is WorkerState.STOPPED:
                self._start(worker, now_s)

    def stop(self) -> None:
        """No worker is to be started or asked any more."""
        for worker in self.workers.all:
            worker.state = WorkerState.STOPPED
        self.outbox.clear()

    def open_session(self, session: Session) -> None:
        # A newcomer starts level with the least served, or it would own every worker until it had caught up.
        session.busy_ns = min((other.busy_ns for other in self.sessions.values()), default=0)
        self.sessions[session.session_id] = session

    def close_session(self, session_id: int) -> None:
        """Forget a session: ready slots are free now, Fills on their way are cancelled."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for batch in session.batches.values():
            if batch.state is BatchState.READY:
                self._free(batch.slot_id)
            elif batch.state is BatchState.ISSUED:
                self._cancel(session_id, batch)
            elif batch.sticky_worker >= 0:
                self._drop_stash(session_id, batch)
        self.refusal = None

    def submit(self, session_id: int, batch_id: int, keys: ev.Keys) -> None:
        """The sampler gave the next batch."""
        self.sessions[session_id].submit(batch_id, keys)

    def hand_over(self, session: Session, batch: Batch) -> None:
        """The user gets the batch: its slot is leased until `SlotReleased`."""
        session.hand_over(batch)
        if batch.filled is not None and batch.slot_id != msg.NO_SLOT:
            self.slots.apply(self.slots.by_id[batch.slot_id], SlotEvent.LEND)

    def handle(self, event: ev.Event, now_s: float) -> None:
        """Take one fact of the operating system."""
        self._handlers[type(event)](event, now_s)

    def receive(self, worker_id: int, incarnation: int, message: msg.FromWorker, now_s: float) -> None:
        """Take one message of a worker; one of an incarnation that is gone changes nothing."""
        worker = self.workers.get(worker_id, incarnation)
        if worker is None or worker.state in (WorkerState.STOPPED, WorkerState.GIVEN_UP, WorkerState.BACKOFF):
            self.num_stale += 1
            return
        kind = type(message)
        if kind is msg.Ready:
            self._on_ready(worker, message, now_s)  # type: ignore[arg-type]
        elif kind is msg.StartFailed:
            self._on_start_failed(worker, message)  # type: ignore[arg-type]
        elif kind in self._answers:
            self._on_answer(worker, message)
        else:
            self._on_broken(ev.WorkerBroken(worker_id, incarnation, f"sent a {kind.__name__} message"), now_s)

    def tick(self, now_s: float, observe: Callable[[int], ev.WorkerView | None]) -> None:
        """Judge deadlines. Call only after every socket was drained: an answer already sent counts."""
        self.workers.look(now_s)
        for worker in self.workers.all:
            self._look_at(worker, observe, now_s)
        self.workers.plan_look(now_s)

    def retry_growth(self) -> None:
        """Ask for room once more: others may have given some back."""
        self.refusal = None

    def recover(self, leased: set[tuple[int, int]], segment_ids: set[int], now_s: float) -> None:
        """Start again after an interrupt in mid-decision. All workers are dead and reaped; `leased` are the leases alive."""
        self.outbox.clear()
        self._growing, self.refusal = False, None
        self.slots.rebuild(leased, segment_ids)
        for session in self.sessions.values():
            session.restart()
        for worker in self.workers.all:
            worker.fills.clear()
            if worker.state not in (WorkerState.GIVEN_UP, WorkerState.STOPPED):
                self._start(worker, now_s)
        self.workers.look_at_s = None

    def dispatch(self, now_s: float) -> None:
        """Issue what can be issued: consumers that wait first, then the session that has had the least worker time.

        Call after telling facts and before carrying out the outbox; once for any number of facts.
        """
        sessions = [session for session in self.sessions.values() if session.oldest_waiting() is not None]
        if len(sessions) > 1:
            sessions.sort(key=lambda session: (not session.awaited, session.busy_ns))
        for session in sessions:
            while self._issue_next(session):
                pass
        if self.workers.look_at_s is None:
            self.workers.plan_look(now_s)

    # --- what the shell asks --------------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """No worker is left."""
        return all(worker.state is WorkerState.GIVEN_UP for worker in self.workers.all)

    @property
    def wants_room(self) -> bool:
        """A batch waits for a slot, and the ring may not grow."""
        return self.refusal is not None and any(session.oldest_waiting() is not None for session in self.sessions.values())

    def is_starved(self, session: Session) -> bool:
        """The session's oldest missing batch gets no slot before the user lets one go or the ring may grow."""
        return session.starved and self.refusal is not None

    def check(self) -> None:
        """Raise InternalError when an invariant is broken; for tests and debugging."""
        self.slots.check()
        filling = {s.slot_id for s in self.slots.by_id.values() if s.state in (SlotState.FILLING, SlotState.QUARANTINED)}
        named = [fill.slot_id for w in self.workers.all for _, fill in w.fills.values() if fill.slot_id != msg.NO_SLOT]
        quarantined = {s.slot_id for s in self.slots.by_id.values() if s.state is SlotState.QUARANTINED}
        if len(named) != len(set(named)) or set(named) != filling - quarantined:
            raise InternalError(f"slots {sorted(filling)} are being filled, workers hold {sorted(named)}")
        ready = {s.slot_id for s in self.slots.by_id.values() if s.state is SlotState.READY}
        owned = [b.slot_id for s in self.sessions.values() for b in s.batches.values() if b.state is BatchState.READY]
        owned = [slot_id for slot_id in owned if slot_id != msg.NO_SLOT]
        if sorted(owned) != sorted(ready):
            raise InternalError(f"slots {sorted(ready)} are ready, sessions hold {sorted(owned)}")

    # --- answers of workers ---------------------------------------------------------------------------------------------

    def _on_ready(self, worker: Worker, message: msg.Ready, now_s: float) -> None:
        if worker.state is not WorkerState.STARTING:
            return
        facts = message.facts
        if self.dataset_facts is None:
            self.dataset_facts = facts
        else:
            self._compare(worker, facts)
        worker.state, worker.since_s = WorkerState.RUNNING, now_s

    def _compare(self, worker: Worker, facts: dict[str, Any]) -> None:
        """Rebuilt means rebuilt alike: hold a worker's dataset against the first one's."""
        first: dict[str, Any] = self.dataset_facts or {}
        for name in ("length", "fingerprint"):
            if facts.get(name) != first.get(name):
                self.mismatch = (
                    f"worker {worker.worker_id} (incarnation {worker.incarnation}) built another dataset: "
                    f"{name} {facts.get(name)!r} instead of {first.get(name)!r}; usual causes are an unseeded shuffle or split, "
                    "an unsorted directory listing, the order of a set, or files that changed since the first start"
                )
        digests, expected = facts.get("digests", {}), first.get("digests", {})
        differing = sorted(name for name in digests if name in expected and digests[name] != expected[name])
        if differing:
            names = ", ".join(repr(name) for name in differing[:5])
            self.outbox.append(
                ev.Warn(
                    f"the dataset of worker {worker.worker_id} differs from the first worker's in attribute {names}; "
                    "if samples depend on it, build it the same way everywhere (sorted listings, seeded draws)",
                    {"worker": worker.worker_id, "attributes": differing},
                )
            )

    def _on_start_failed(self, worker: Worker, message: msg.StartFailed) -> None:
        if worker.incarnation == 1 and worker.state is WorkerState.STARTING:
            self.start_fault = message
        worker.kill_reason = f"{message.stage} failed: {message.error_type}: {message.error}"

    def _on_answer(self, worker: Worker, message: Any) -> None:
        held = worker.fills.pop(message.serial, None)
        if held is None or held[1].generation != message.generation:
            if held is not None:
                worker.fills[message.serial] = held
            self.num_stale += 1
            return
        session_id, fill = held
        session = self.sessions.get(session_id)
        batch = session.batches.get(fill.batch_id) if session is not None else None
        if batch is not None and (batch.state is not BatchState.ISSUED or batch.serial != message.serial):
            batch = None
        self._answers[type(message)](worker, message, fill, batch)

    def _on_filled(self, worker: Worker, message: msg.Filled, fill: msg.Fill, batch: Batch | None) -> None:
        worker.num_filled += 1
        if batch is None:
            self.num_stale += 1
            self._return(fill)
            return
        session = self.sessions[fill.session_id]
        if fill.slot_id != msg.NO_SLOT:
            slot = self.slots.by_id[fill.slot_id]
            self.slots.apply(slot, SlotEvent.FILLED)
            if message.nbytes == 0:
                # Nothing of this batch lives in memory: it needs no lease.
                self.slots.apply(slot, SlotEvent.REVOKE)
                batch.slot_id = msg.NO_SLOT
        self.slots.learn(message.nbytes)
        session.busy_ns += message.fetch_ns + message.collate_ns
        session.ready(batch, message)

    def _on_need_room(self, worker: Worker, message: msg.NeedRoom, fill: msg.Fill, batch: Batch | None) -> None:
        self._return(fill)
        if batch is None:
            if message.kept:
                self._forget_fill(worker, fill)
            return
        session = self.sessions[fill.session_id]
        if session.slot_nbytes is None:
            session.slot_nbytes = message.nbytes
        session.wait(batch)
        batch.need_nbytes = message.nbytes
        batch.sticky_worker = worker.worker_id if message.kept else -1

    def _on_failed(self, worker: Worker, message: msg.Failed, fill: msg.Fill, batch: Batch | None) -> None:
        worker.num_filled += 1  # it works; its sample does not
        self._return(fill)
        if batch is None:
            return
        session = self.sessions[fill.session_id]
        policy = self.policy.faults.on_bad_sample
        may_leave_out = message.kind == "sample" and message.sample >= 0 and policy != "raise"
        if may_leave_out and session.leave_out(batch, message.sample, replace=policy == "replace"):
            return
        session.fail(batch, Fault(message.kind, message.sample, worker.worker_id, message))

    def _on_cancelled(self, worker: Worker, message: msg.Cancelled, fill: msg.Fill, batch: Batch | None) -> None:
        self._return(fill)
        if batch is not None:
            self.sessions[fill.session_id].wait(batch)

    # --- facts of the operating system ----------------------------------------------------------------------------------

    def _on_exited(self, event: ev.WorkerExited, now_s: float) -> None:
        worker = self.workers.get(event.worker_id, event.incarnation)
        if worker is None or worker.state in (WorkerState.STOPPED, WorkerState.GIVEN_UP, WorkerState.BACKOFF):
            self._unquarantine(event)
            return
        story = _story(worker, event.death)
        blamed = self._requeue(worker, event.death, story)
        if self.start_fault is not None and worker.incarnation == 1 and not worker.num_filled:
            worker.state = WorkerState.GIVEN_UP
            return
        worker.pid = -1
        restarts = self.workers.died(worker, now_s)
        if blamed is not None and event.death.sample >= 0:
            restarts = self._blame(worker, *blamed, event.death.sample, story, restarts=restarts)
        self._tell_death(worker, story, event.death, restarts=restarts)
        self.workers.plan_look(now_s)

    def _requeue(self, worker: Worker, death: ev.Death, story: str) -> tuple[Session, Batch] | None:
        """Take back every Fill of a dead worker; return the batch in progress."""
        blamed = None
        for serial, (session_id, fill) in list(worker.fills.items()):
            self._return(fill)
            session = self.sessions.get(session_id)
            batch = session.batches.get(fill.batch_id) if session is not None else None
            if session is None or batch is None or batch.serial != serial or batch.state is not BatchState.ISSUED:
                continue
            session.wait(batch)
            batch.last_exit = story
            self.num_refilled += 1
            if serial == death.serial:
                blamed = (session, batch)
        worker.fills.clear()
        for session in self.sessions.values():
            for batch in session.batches.values():
                if batch.sticky_worker == worker.worker_id:
                    batch.sticky_worker = -1
        return blamed

    def _blame(self, worker: Worker, session: Session, batch: Batch, sample: int, story: str, *, restarts: bool) -> bool:
        """Count a death against the sample in progress; after too many the sample is bad. Returns whether a restart is due."""
        faults = self.policy.faults
        batch.deaths[sample] = batch.deaths.get(sample, 0) + 1
        is_bad = batch.deaths[sample] >= faults.sample_deaths
        may_leave_out = is_bad and faults.on_bad_sample != "raise"
        if may_leave_out and session.leave_out(batch, sample, replace=faults.on_bad_sample == "replace"):
            self.workers.refund(worker)
            worker.state = WorkerState.BACKOFF
            return True
        if is_bad or self.is_lost:
            session.fail(batch, Fault("deaths", sample, worker.worker_id, None, story))
        return restarts

    def _tell_death(self, worker: Worker, story: str, death: ev.Death, *, restarts: bool) -> None:
        faults = self.policy.faults
        budget = f"{len(worker.deaths)} deaths within {faults.window_s:g} s, faults.restarts={faults.restarts}"
        if restarts:
            text = f"{story}; it is replaced and its batches are made again ({budget})"
        else:
            left = sum(w.state is not WorkerState.GIVEN_UP for w in self.workers.all)
            text = f"{story}; it is given up ({budget}), {left} of {len(self.workers.all)} workers are left"
        if death.trace:
            text += f"\nits stack:\n{death.trace}"
        self.outbox.append(ev.Warn(text, {"worker": worker.worker_id, "returncode": death.returncode}))

    def _unquarantine(self, event: ev.WorkerExited) -> None:
        """A process that was abandoned is gone after all: its slots are safe again."""
        for slot in list(self.slots.by_id.values()):
            if slot.state is SlotState.QUARANTINED and slot.session_id == _writer(event.worker_id, event.incarnation):
                self.slots.apply(slot, SlotEvent.RETURN)
        self._give_back()

    def _on_broken(self, event: ev.WorkerBroken, now_s: float) -> None:
        worker = self.workers.get(event.worker_id, event.incarnation)
        if worker is not None and worker.state in (WorkerState.STARTING, WorkerState.RUNNING):
            self._kill(worker, f"it broke the protocol: {event.reason}", now_s, dump=False)

    def _on_segment_added(self, event: ev.SegmentAdded, now_s: float) -> None:
        self._growing, self.refusal = False, None
        self.slots.add_segment(event.segment_id, event.slot_nbytes, event.num_slots)

    def _on_segment_refused(self, event: ev.SegmentRefused, now_s: float) -> None:
        self._growing, self.refusal = False, event
        if event.slot_nbytes > align_slot(self._asked_nbytes):
            self._grow(self._asked_nbytes, exact=True)

    def _on_released(self, event: ev.SlotReleased, now_s: float) -> None:
        slot = self.slots.by_id.get(event.slot_id)
        if slot is not None and slot.generation == event.generation and slot.state is SlotState.LEASED:
            self.slots.apply(slot, SlotEvent.RELEASE_PENDING if event.pending else SlotEvent.RELEASE)
            self._give_back()

    def _on_completed(self, event: ev.SlotCompleted, now_s: float) -> None:
        slot = self.slots.by_id.get(event.slot_id)
        if slot is not None and slot.generation == event.generation and slot.state is SlotState.PENDING:
            self.slots.apply(slot, SlotEvent.COMPLETE)
            self._give_back()

    def _look_at(self, worker: Worker, observe: Callable[[int], ev.WorkerView | None], now_s: float) -> None:
        if worker.state is WorkerState.BACKOFF and now_s >= worker.since_s:
            self._start(worker, now_s)
        elif worker.state is WorkerState.KILLED and now_s >= worker.since_s + UNREAPED_S:
            self._abandon(worker, now_s)
        elif worker.state is WorkerState.STARTING and self.workers.start_overdue(worker, now_s):
            view = observe(worker.worker_id)
            stage = view.stage if view is not None else "starting"
            limit_s = self.policy.faults.start_timeout_s
            self._kill(
                worker, f"it was not ready after {limit_s:g} s (faults.start_timeout_s), stage: {stage}", now_s, dump=True
            )
        elif worker.state is WorkerState.RUNNING and worker.fills:
            view = observe(worker.worker_id)
            reason = self.workers.overdue(worker, view, now_s) if view is not None else None
            if reason is not None:
                self._kill(worker, reason, now_s, dump=True)

    # --- decisions ------------------------------------------------------------------------------------------------------

    def _start(self, worker: Worker, now_s: float) -> None:
        self.outbox.append(ev.StartWorker(worker.worker_id, self.workers.start(worker, now_s)))
        self.workers.plan_look(now_s)

    def _kill(self, worker: Worker, reason: str, now_s: float, *, dump: bool) -> None:
        worker.state, worker.since_s, worker.kill_reason = WorkerState.KILLED, now_s, reason
        self.outbox.append(ev.KillWorker(worker.worker_id, worker.incarnation, dump))
        self.workers.plan_look(now_s)

    def _abandon(self, worker: Worker, now_s: float) -> None:
        """SIGKILL did not end it: leave its slots alone, make its batches elsewhere."""
        story = f"worker {worker.worker_id} (pid {worker.pid}) cannot be reaped after SIGKILL; it is abandoned with its slots"
        for _, fill in worker.fills.values():
            slot = self.slots.by_id.get(fill.slot_id)
            if slot is not None and slot.state is SlotState.FILLING:
                self.slots.apply(slot, SlotEvent.WRITER_LOST)
                slot.session_id = _writer(worker.worker_id, worker.incarnation)
        held = {serial: (session_id, _without_slot(fill)) for serial, (session_id, fill) in worker.fills.items()}
        worker.fills = held
        self._requeue(worker, ev.Death(None), story)
        self.outbox.append(ev.AbandonWorker(worker.worker_id, worker.incarnation))
        restarts = self.workers.died(worker, now_s)
        worker.pid = -1
        self._tell_death(worker, story, ev.Death(None), restarts=restarts)

    def _cancel(self, session_id: int, batch: Batch) -> None:
        worker = self.workers.get(batch.worker_id, batch.incarnation)
        if worker is not None and batch.serial in worker.fills:
            running = next(iter(worker.fills))  # workers take Fills in order: the oldest is the one in progress
            self.outbox.append(
                ev.SendCancel(worker.worker_id, worker.incarnation, session_id, batch.batch_id, batch.serial, running)
            )

    def _drop_stash(self, session_id: int, batch: Batch) -> None:
        worker = self.workers.all[batch.sticky_worker]
        self.outbox.append(ev.SendCancel(worker.worker_id, worker.incarnation, session_id, batch.batch_id, -1, -1))

    def _forget_fill(self, worker: Worker, fill: msg.Fill) -> None:
        self.outbox.append(ev.SendCancel(worker.worker_id, worker.incarnation, fill.session_id, fill.batch_id, -1, -1))

    def _return(self, fill: msg.Fill) -> None:
        """The writer is done with a slot, or gone."""
        slot = self.slots.by_id.get(fill.slot_id)
        if slot is not None and slot.generation == fill.generation and slot.state is SlotState.FILLING:
            self.slots.apply(slot, SlotEvent.RETURN)
            self._give_back()

    def _free(self, slot_id: int) -> None:
        slot = self.slots.by_id.get(slot_id)
        if slot is not None and slot.state is SlotState.READY:
            self.slots.apply(slot, SlotEvent.REVOKE)
            self._give_back()

    def _give_back(self) -> None:
        """Slots came free: drop the segments that went with them, and ask for room again if it was refused."""
        if self.slots.dropped:
            self.outbox.extend(ev.DropSegment(segment_id) for segment_id in self.slots.dropped)
            self.slots.dropped.clear()
            self.refusal = None

    def _issue_next(self, session: Session) -> bool:
        batch = session.oldest_waiting()
        if batch is None:
            session.starved = False
            return False
        worker = self._worker_for(batch)
        if worker is None:
            return False
        need = batch.need_nbytes if batch.need_nbytes is not None else session.slot_nbytes
        if need is None:
            # The size is learned from one sample set per worker; a second one would only have to be kept as well.
            if worker.fills:
                return False
            self._issue(session, batch, worker, None)
            return True
        if need == 0:
            self._issue(session, batch, worker, None)
            return True
        slot = self.slots.acquire(need, session.session_id)
        if slot is None:
            return self._want_room(session, batch, need)
        session.starved = False
        self._issue(session, batch, worker, slot)
        return True

    def _worker_for(self, batch: Batch) -> Worker | None:
        if batch.sticky_worker >= 0:
            # It keeps the samples. The Fill goes to it even when its queue is full: it costs no fetching.
            worker = self.workers.all[batch.sticky_worker]
            if worker.state is WorkerState.RUNNING:
                return worker
            batch.sticky_worker = -1
        return self.workers.least_loaded()

    def _issue(self, session: Session, batch: Batch, worker: Worker, slot: Any) -> None:
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        keys = batch.keys
        fill = msg.Fill(
            session.session_id,
            batch.batch_id,
            serial,
            slot.slot_id if slot is not None else msg.NO_SLOT,
            slot.generation if slot is not None else 0,
            slot.segment_id if slot is not None else -1,
            slot.offset if slot is not None else 0,
            slot.capacity if slot is not None else 0,
            session.epoch,
            keys.position,
            keys.int_keys,
            keys.packed,
            [],
        )
        batch.state, batch.serial, batch.slot_id = BatchState.ISSUED, serial, fill.slot_id
        batch.worker_id, batch.incarnation = worker.worker_id, worker.incarnation
        worker.fills[serial] = (session.session_id, fill)
        self.outbox.append(ev.SendFill(worker.worker_id, worker.incarnation, fill))

    # --- room -----------------------------------------------------------------------------------------------------------

    def _want_room(self, session: Session, batch: Batch, need: int) -> bool:
        """No free slot is large enough; True when one was found after all and the batch can be tried again."""
        if self._growing:
            return False
        # A refusal stands for everything at least as large, until something is given back.
        if self.refusal is None or need < self._asked_nbytes or self.slots.retire_unfit(need):
            self._give_back()
            self._grow(need)
            return False
        if batch is not session.oldest():
            return False
        return self._room_for_oldest(session, need)

    def _room_for_oldest(self, session: Session, need: int) -> bool:
        """Room for the oldest missing batch comes first: revoke younger ready batches, youngest first, before giving up."""
        younger = session.youngest_ready()
        if younger is not None and not session.in_order:
            return False  # it can be handed over as it is, and its slot comes back that way
        if younger is not None:
            slot_id = younger.slot_id
            session.wait(younger)
            self.num_refilled += 1
            self._free(slot_id)
            return True
        if any(batch.state is BatchState.ISSUED and batch.slot_id != msg.NO_SLOT for batch in session.batches.values()):
            return False  # a younger one is being filled: it is revoked when it is ready
        assert self.refusal is not None
        others_hold = any(s.session_id not in (-1, session.session_id) for s in self.slots.by_id.values())
        if others_hold and self.slots.held_by(session.session_id) < 2 and self.refusal.configured:
            self._grow(need, forced=True)
            return False
        session.starved = True
        return False

    def _grow(self, need: int, *, exact: bool = False, forced: bool = False) -> None:
        slot_nbytes, num_slots = self.slots.growth(need, self.policy.num_in_flight + _LEAST_SLOTS, exact=exact or forced)
        fits = any(slot.capacity >= need for slot in self.slots.by_id.values())
        least = 1 if forced or fits else _LEAST_SLOTS
        self._growing, self._asked_nbytes = True, need
        self.outbox.append(ev.AddSegment(slot_nbytes, 1 if forced else max(num_slots, least), least, forced))


def _writer(worker_id: int, incarnation: int) -> int:
    """Mark of the abandoned process that may still write into a quarantined slot: below any session id."""
    return -2 - (worker_id << 32 | incarnation)


def _without_slot(fill: msg.Fill) -> msg.Fill:
    return msg.Fill(
        fill.session_id,
        fill.batch_id,
        fill.serial,
        msg.NO_SLOT,
        0,
        -1,
        0,
        0,
        fill.epoch,
        fill.position,
        fill.int_keys,
        fill.keys,
        [],
    )


def _story(worker: Worker, death: ev.Death) -> str:
    """What happened to a worker, in one sentence."""
    who = f"worker {worker.worker_id} (pid {worker.pid}, incarnation {worker.incarnation})"
    if worker.kill_reason:
        return (
            f"{who} was killed: {worker.kill_reason}" if worker.state is WorkerState.KILLED else f"{who}: {worker.kill_reason}"
        )
    return f"{who} {describe_exit(death.returncode)}"


def describe_exit(returncode: int | None) -> str:
    """Return how a process ended, e.g. "was killed by SIGKILL (out of memory?)"."""
    if returncode is None:
        return "ended with an unknown status"
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hints = {
        signal.SIGKILL: " (the kernel's out-of-memory killer sends it; look at dmesg and the memory limit)",
        signal.SIGBUS: " (a memory-mapped file that was truncated, or a full disk under it)",
        signal.SIGSEGV: " (a fault in a compiled extension)",
    }
    return f"was killed by {name}{hints.get(-returncode, '')}"  # type: ignore[call-overload]


def room_sentence(refusal: ev.SegmentRefused) -> str:
    """The refusal in words, with sizes."""
    return f"{refusal.reason} (a batch needs a slot of {in_words(refusal.slot_nbytes)})"
