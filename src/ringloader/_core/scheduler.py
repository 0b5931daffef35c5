"""The core: sessions, workers and slots put together; events in, commands out.

Owns the order of all decisions; `room.py` decides about slots, `supervision.py` about workers. The shell calls the methods
below with facts and the time, then `dispatch`, then carries out the commands of `outbox`, removing each only once it is done.
The outbox is part of the state, so an interrupt between deciding and acting loses nothing; one in the middle of deciding is
repaired by `recover`, which rebuilds all lists from what cannot be half done: the batches pulled, the leases alive and the
segments that exist. Must not touch a descriptor, a process, a thread or a clock.

Who may die when, and what then frees the others:
- a worker in a Fill: `WorkerExited` returns its slots and batches; until it is reaped its slots stay FILLING, because a killed
  process may still be inside a memcpy. One that cannot be reaped has its slots QUARANTINED and is replaced.
- a worker after its answer: the answer is handled before the exit, and counts.
- the consumer between two steps: `recover`.
- everything: nothing has a name, descriptors close, memory goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.batch_keys import Keys
from ringloader._core.policy import PoolPolicy
from ringloader._core.room import Room, writer_mark
from ringloader._core.session import Batch, BatchState, Fault, Session
from ringloader._core.slots import SlotEvent, SlotState, Survivors
from ringloader._core.supervision import Observe, Supervision
from ringloader._core.workers import LOOK_S, Worker, WorkerState
from ringloader.errors import InternalError

# What it takes to wake a worker, and to have it share a core with others.
_WAKE_NS = 100_000
# Batches that take more than this are prefetched as many as the user says. Of quicker ones a worker holds as many as keep it
# busy for so long: the training process, which is woken for each, then finds several at once.
_AHEAD_NS = 2_000_000
# But all workers together not more than caches hold, and nobody misses.
_AHEAD_NBYTES = 32 << 20
# Quick batches on one worker at a time. Should they turn slow, so many are made one after the other.
_MAX_QUICK_FILLS = 4


class Scheduler:
    """Decides which batch goes to which worker and slot, and what follows from every fault."""

    def __init__(self, policy: PoolPolicy) -> None:
        self.policy = policy
        self.sessions: dict[int, Session] = {}
        self.outbox: deque[ev.Command] = deque()
        self.room = Room(self.outbox, policy.num_in_flight + policy.num_copied)
        self.slots = self.room.slots
        self.supervision = Supervision(policy, self.sessions, self.room, self.outbox)
        self.workers = self.supervision.workers
        self.num_stale = 0
        self.num_retried = 0
        self._usual_nbytes: int | None = None  # the slot size that the last session had learned; the next begins with it
        self._next_serial = 1
        self._on_fact: dict[type, Callable[[Any], None]] = {
            ev.SegmentAdded: self.room.added,
            ev.SegmentRefused: self.room.refused,
            ev.SlotReleased: self.room.released,
            ev.SlotCompleted: self.room.completed,
        }
        self._answers: dict[type, Callable[[Worker, Any, msg.Fill, Batch | None], None]] = {
            msg.Filled: self._on_filled,
            msg.NeedRoom: self._on_need_room,
            msg.Failed: self._on_failed,
            msg.Cancelled: self._on_cancelled,
            msg.Ended: self._on_ended,
        }

    # --- what the shell tells -------------------------------------------------------------------------------------------

    def start(self, now_s: float) -> None:
        """Start every worker that was not started."""
        for worker in self.workers.all:
            if worker.state is WorkerState.STOPPED:
                self.supervision.start(worker, now_s)

    def stop(self) -> None:
        """No worker is to be started or asked any more."""
        for worker in self.workers.everyone():
            worker.state = WorkerState.STOPPED
        self.outbox.clear()

    def open_session(self, session: Session) -> None:
        # A newcomer starts level with the least served, or it would own every worker until it had caught up.
        session.busy_ns = min((other.busy_ns for other in self.sessions.values()), default=0)
        known = [other.slot_nbytes for other in self.sessions.values() if other.slot_nbytes is not None]
        session.slot_nbytes = max(known, default=self._usual_nbytes)
        if not session.is_early:
            for other in self.sessions.values():
                self._shed(other)
        self.sessions[session.session_id] = session

    def close_session(self, session_id: int) -> None:
        """Forget a session: ready slots are free now, Fills on their way are cancelled."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        self._usual_nbytes = session.slot_nbytes or self._usual_nbytes
        for batch in session.batches.values():
            if batch.state is BatchState.READY:
                self.room.revoke(batch.slot_id)
            elif batch.state is BatchState.ISSUED:
                self._cancel(session_id, batch)
            elif batch.sticky_worker >= 0:
                self._drop_stash(session_id, batch)
        if session.streams is not None:
            self.outbox.append(ev.DropSession(session_id))
        self.room.refusal = None

    def submit(self, session_id: int, batch_id: int, keys: Keys) -> None:
        """The sampler gave the next batch."""
        session = self.sessions[session_id]
        batch = session.submit(batch_id, keys)
        if batch is not None and self.supervision.blame.deadly:
            self.supervision.blame.meet(session, batch)

    def hand_over(self, session: Session, batch: Batch) -> None:
        """The user gets the batch: its slot is leased until `SlotReleased`."""
        session.hand_over(batch)
        if batch.filled is not None and batch.slot_id != msg.NO_SLOT:
            self.slots.apply(self.slots.by_id[batch.slot_id], SlotEvent.LEND)

    def handle(self, event: ev.Event, now_s: float) -> None:
        """Take one fact of the operating system."""
        take = self._on_fact.get(type(event))
        if take is not None:
            take(event)
        elif isinstance(event, ev.WorkerExited):
            self.supervision.exited(event, now_s)
        elif isinstance(event, ev.WorkerBroken):
            self.supervision.broken(event, now_s)
        else:
            raise InternalError(f"{type(event).__name__} is no fact")

    def receive(self, worker_id: int, incarnation: int, message: msg.FromWorker, now_s: float) -> None:
        """Take one message of a worker; one of an incarnation that is gone changes nothing."""
        worker = self.workers.get(worker_id, incarnation)
        if worker is None:
            self.num_stale += 1
            return
        kind = type(message)
        if kind in self._answers:
            self._on_answer(worker, message)
        elif kind is msg.Ready:
            self.supervision.ready(worker, message, now_s)  # type: ignore[arg-type]
        elif kind is msg.StartFailed:
            self.supervision.start_failed(worker, message)  # type: ignore[arg-type]
        elif kind is msg.Called:
            self.supervision.calls.answered(worker, message)  # type: ignore[arg-type]
        elif kind is msg.StreamState:
            self._note_state(worker, message)  # type: ignore[arg-type]
        else:
            self.supervision.broken(ev.WorkerBroken(worker_id, incarnation, f"sent a {kind.__name__} message"), now_s)

    def tick(self, now_s: float, observe: Observe) -> None:
        """Judge deadlines. Call only after every socket was drained: an answer already sent counts."""
        self.workers.look(now_s)
        for worker in self.workers.everyone():
            self.supervision.look_at(worker, observe, now_s)
        self.workers.plan_look(now_s)

    def retry_growth(self) -> None:
        """Ask for room once more: others may have given some back."""
        self.room.refusal = None

    def recover(
        self,
        leased: set[tuple[int, int]],
        copied: set[tuple[int, int]],
        unended: Collection[tuple[int, int]],
        segment_ids: set[int],
        now_s: float,
    ) -> None:
        """Start again after an interrupt in mid-decision. All workers are dead and reaped but for the `unended`, ids and
        incarnations; `leased` are the leases alive, `copied` those that have ended while copies may still run."""
        self.outbox.clear()
        written = {
            (fill.slot_id, fill.generation): writer_mark(*who)
            for who in unended
            if (worker := self.workers.get(*who)) is not None
            for _, fill in worker.fills.values()
        }
        writers = {writer_mark(*who) for who in unended}
        self.room.restart(Survivors(leased, copied, written, writers, segment_ids))
        for session in self.sessions.values():
            session.restart()
        self.workers.forget_others()
        for worker in self.workers.all:
            worker.fills.clear()
            if worker.state not in (WorkerState.GIVEN_UP, WorkerState.STOPPED):
                self.supervision.start(worker, now_s)
        self.workers.look_at_s = None

    def dispatch(self, now_s: float) -> None:
        """Issue what can be issued: consumers that wait first, then the session that has had the least worker time.

        Call after telling facts and before carrying out the outbox; once for any number of facts.
        """
        self.supervision.recycling.settle(now_s)
        sessions = [session for session in self.sessions.values() if session.oldest_waiting() is not None]
        if len(sessions) > 1:
            sessions.sort(key=lambda session: (session.is_early, not session.awaited, session.busy_ns))
        for session in sessions:
            while self._issue_next(session):
                pass
        look_at_s = self.workers.look_at_s
        if look_at_s is None or look_at_s > now_s + LOOK_S:
            self.workers.plan_look(now_s)  # what is planned may be the limit of a start, and far

    # --- what the shell asks --------------------------------------------------------------------------------------------

    @property
    def num_refilled(self) -> int:
        """Batches that had to be made again."""
        return self.supervision.num_refilled + self.room.num_revoked

    @property
    def wants_room(self) -> bool:
        """A batch waits for a slot, and the ring may not grow."""
        return self.room.refusal is not None and self.has_waiting

    @property
    def has_waiting(self) -> bool:
        """A batch that somebody waits for was not issued yet."""
        return any(s.oldest_waiting() is not None for s in self.sessions.values() if not s.is_early)

    def is_starved(self, session: Session) -> bool:
        """The session's oldest missing batch gets no slot before the user lets one go or the ring may grow."""
        return session.starved and self.room.refusal is not None

    def check(self) -> None:
        """Raise InternalError when an invariant is broken; for tests and debugging."""
        self.slots.check()
        filling = {s.slot_id for s in self.slots.by_id.values() if s.state in (SlotState.FILLING, SlotState.QUARANTINED)}
        named = [fill.slot_id for w in self.workers.everyone() for _, fill in w.fills.values() if fill.slot_id != msg.NO_SLOT]
        quarantined = {s.slot_id for s in self.slots.by_id.values() if s.state is SlotState.QUARANTINED}
        if len(named) != len(set(named)) or set(named) != filling - quarantined:
            raise InternalError(f"slots {sorted(filling)} are being filled, workers hold {sorted(named)}")
        ready = {s.slot_id for s in self.slots.by_id.values() if s.state is SlotState.READY}
        owned = [b.slot_id for s in self.sessions.values() for b in s.batches.values() if b.state is BatchState.READY]
        owned = [slot_id for slot_id in owned if slot_id != msg.NO_SLOT]
        if sorted(owned) != sorted(ready):
            raise InternalError(f"slots {sorted(ready)} are ready, sessions hold {sorted(owned)}")

    # --- answers of workers ---------------------------------------------------------------------------------------------

    def _on_answer(self, worker: Worker, message: Any) -> None:
        held = worker.fills.pop(message.serial, None)
        if held is None or held[1].generation != message.generation:
            if held is not None:
                worker.fills[message.serial] = held
            self.num_stale += 1
            return
        worker.is_learning = False  # a Fill to learn from is its worker's only one
        session_id, fill = held
        session = self.sessions.get(session_id)
        batch = session.batches.get(fill.batch_id) if session is not None else None
        self._answers[type(message)](worker, message, fill, batch)

    def _on_filled(self, worker: Worker, message: msg.Filled, fill: msg.Fill, batch: Batch | None) -> None:
        worker.num_filled += 1
        self.supervision.recycling.made(worker)
        if batch is None:
            self.num_stale += 1
            self.room.take_back(fill)
            return
        session = self.sessions[fill.session_id]
        if fill.slot_id != msg.NO_SLOT:
            slot = self.slots.by_id[fill.slot_id]
            self.slots.apply(slot, SlotEvent.FILLED)
            if message.nbytes == 0:
                # Nothing of this batch lives in memory: it needs no lease.
                self.slots.apply(slot, SlotEvent.REVOKE)
                batch.slot_id = msg.NO_SLOT
        if session.streams is not None:
            session.streams.made(batch.stream, batch.number)
        self.slots.learn(message.nbytes)
        session.took(message.fetch_ns + message.collate_ns)
        session.depth = self._depth_of(session)
        self.num_retried += message.num_retried
        session.ready(batch, message)

    def _on_need_room(self, worker: Worker, message: msg.NeedRoom, fill: msg.Fill, batch: Batch | None) -> None:
        self.room.take_back(fill)
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
        self.num_retried += message.facts.get("num_retried", 0)  # type: ignore[operator]
        self.room.take_back(fill)
        if batch is None:
            return
        session = self.sessions[fill.session_id]
        policy = self.policy.faults.on_bad_sample
        may_leave_out = message.kind == "sample" and message.sample >= 0 and policy != "raise"
        if may_leave_out and session.leave_out(batch, message.sample, replace=policy == "replace"):
            return
        session.fail(batch, Fault(message.kind, message.sample, worker.worker_id, message))

    def _on_cancelled(self, worker: Worker, message: msg.Cancelled, fill: msg.Fill, batch: Batch | None) -> None:
        self.room.take_back(fill)
        if batch is not None:
            self.sessions[fill.session_id].wait(batch)

    def _on_ended(self, worker: Worker, message: msg.Ended, fill: msg.Fill, batch: Batch | None) -> None:
        self.room.take_back(fill)
        if batch is None:
            return
        session = self.sessions[fill.session_id]
        assert session.streams is not None
        num_made = session.streams.num_made.get(batch.stream, 0)
        if message.failure:
            text = f"the stream of worker {batch.stream} has ended after it raised {message.failure}: its rest, if any, is lost"
            self.outbox.append(ev.Warn(text))
        elif message.num_batches < num_made:
            text = (
                f"the stream of worker {batch.stream} could not be read again: it gave {num_made} batches, and now ended after "
                f"{message.num_batches}; its rest is lost (a dataset that cannot be read again says so by can_replay = False)"
            )
            self.outbox.append(ev.Warn(text))
        self.room.end_stream(session, batch.stream, batch.number)

    def _note_state(self, worker: Worker, message: msg.StreamState) -> None:
        session_id, fill = worker.fills.get(message.serial, (-1, None))
        session = self.sessions.get(session_id)
        batch = session.batches.get(fill.batch_id) if session is not None and fill is not None else None
        if session is None or batch is None or session.streams is None or fill.generation != message.generation:  # type: ignore[union-attr]
            self.num_stale += 1
            return
        session.streams.note(batch.stream, batch.number + 1, message.state)

    # --- decisions ------------------------------------------------------------------------------------------------------

    def _cancel(self, session_id: int, batch: Batch) -> None:
        worker = self.workers.get(batch.worker_id, batch.incarnation)
        if worker is not None and batch.serial in worker.fills:
            running = next(iter(worker.fills))  # workers take Fills in order: the oldest is the one in progress
            self.outbox.append(
                ev.SendCancel(worker.worker_id, worker.incarnation, session_id, batch.batch_id, batch.serial, running)
            )

    def _shed(self, session: Session) -> None:
        """Take back what workers hold of a session beyond its share: it may have turned slow, and others would wait for it."""
        for worker in self.workers.all:
            held = [fill for session_id, fill in worker.fills.values() if session_id == session.session_id]
            for fill in held[self.policy.prefetch_factor :]:
                batch = session.batches.get(fill.batch_id)
                if batch is not None and batch.serial == fill.serial:
                    self._cancel(session.session_id, batch)

    def _drop_stash(self, session_id: int, batch: Batch) -> None:
        worker = self.workers.all[batch.sticky_worker]
        self.outbox.append(ev.SendCancel(worker.worker_id, worker.incarnation, session_id, batch.batch_id, -1, -1))

    def _forget_fill(self, worker: Worker, fill: msg.Fill) -> None:
        self.outbox.append(ev.SendCancel(worker.worker_id, worker.incarnation, fill.session_id, fill.batch_id, -1, -1))

    def _issue_next(self, session: Session) -> bool:
        batch = session.oldest_waiting()
        if batch is None:
            session.starved = False
            return False
        if session.streams is None:
            worker = self._worker_for(session, batch)
        else:
            batch, worker = self._stream_worker(session)
        if worker is None:
            return False
        need = batch.need_nbytes if batch.need_nbytes is not None else session.slot_nbytes
        if need is None and session.is_early:
            return False
        if need is None:
            # The size is learned from one sample set per worker; a second one would only have to be kept as well.
            if worker.fills:
                return False
            self._issue(session, batch, worker, None)
            worker.is_learning = True
            return True
        if need == 0:
            self._issue(session, batch, worker, None)
            return True
        if self.room.refusal is not None and self._has_its_share(session, batch):
            return False
        slot = self.slots.acquire(need, session.session_id)
        if slot is None:
            if session.is_early:
                return False
            num_more = self.num_ahead(session) - self.policy.num_in_flight
            return self._revoke_early() or self._revoke_deep(session) or self.room.want(session, batch, need, num_more)
        session.starved = False
        self._issue(session, batch, worker, slot)
        return True

    def _revoke_early(self) -> bool:
        """Where the ring may not grow, take back the slot of a batch that nobody has asked for yet; True when there was one."""
        if self.room.refusal is None:
            return False
        return any(session.is_early and self._revoke_youngest(session) for session in self.sessions.values())

    def _revoke_deep(self, needy: Session) -> bool:
        """The same of a session that was alone once, and has more batches made ahead than its share."""
        if self.room.refusal is None:
            return False
        others = [session for session in self.sessions.values() if session is not needy]
        return any(self._num_made(other) > self._share and self._revoke_youngest(other) for other in others)

    def _revoke_youngest(self, session: Session) -> bool:
        youngest = session.youngest_ready()
        if youngest is None:
            return False
        slot_id = youngest.slot_id
        session.wait(youngest)
        self.room.num_revoked += 1
        self.room.revoke(slot_id)
        return True

    @property
    def _share(self) -> int:
        # One more than are in flight: the one that is handed over next.
        return self.policy.num_in_flight + 1

    def _num_made(self, session: Session) -> int:
        return sum(1 for batch in session.batches.values() if batch.slot_id != msg.NO_SLOT)

    def _has_its_share(self, session: Session, batch: Batch) -> bool:
        # What was taken back from it is not to come again at once. Its oldest is never held back: the others wait for that one.
        if len(self.sessions) == 1 or len(session.batches) <= self._share or batch is session.oldest():
            return False
        return self._num_made(session) >= self._share

    def _worker_for(self, session: Session, batch: Batch) -> Worker | None:
        if batch.sticky_worker >= 0:
            # It keeps the samples. The Fill goes to it even when its queue is full: it costs no fetching.
            keeper = self.workers.all[batch.sticky_worker]
            if keeper.state is WorkerState.RUNNING:
                return keeper
            batch.sticky_worker = -1
        if session.in_order and 0 < session.usual_ns < _WAKE_NS:
            # One that will be done with all it was given before another could be woken is given more; and where there are
            # more processes than cores, each hinders the others more than it helps.
            max_fills = min(max(_WAKE_NS // session.usual_ns, 2), _MAX_QUICK_FILLS)
            return self.workers.choose_quick(session.session_id, max_fills)
        return self.workers.least_loaded(self._limit(session))

    def _depth_of(self, session: Session) -> int:
        """What a worker may hold of a session."""
        least, usual_ns = self.policy.prefetch_factor, session.usual_ns
        if session.max_depth <= least or usual_ns * least >= _AHEAD_NS or usual_ns < _WAKE_NS or self.room.num_refused:
            return least
        most = _AHEAD_NBYTES // (self.policy.num_workers * max(1, session.slot_nbytes or 0))
        return max(least, min(session.max_depth, _AHEAD_NS // usual_ns, most))

    def _limit(self, session: Session) -> int:
        # Beside others, a session with many batches on every worker would have them wait for ever.
        return session.depth if session.depth and len(self.sessions) == 1 else self.policy.prefetch_factor

    def num_ahead(self, session: Session) -> int:
        """Batches of a session that may be pulled and not yet handed over."""
        return self.policy.num_workers * self._limit(session)

    def _stream_worker(self, session: Session) -> tuple[Batch, Worker | None]:
        """The oldest batch whose worker can take it: each stream has one, and is not held up by others."""
        first = session.first_waiting()
        for batch in first:
            worker = self.workers.all[batch.stream % len(self.workers.all)]
            if worker.state is WorkerState.GIVEN_UP:
                left = [other for other in self.workers.all if other.state is not WorkerState.GIVEN_UP]
                if not left:
                    break
                worker = left[batch.stream % len(left)]
            is_keeper = batch.sticky_worker == worker.worker_id and worker.state is WorkerState.RUNNING
            if is_keeper or worker.is_available(self.policy.prefetch_factor):
                return batch, worker
        return first[0], None

    def _issue(self, session: Session, batch: Batch, worker: Worker, slot: Any) -> None:
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        keys = batch.keys
        packed = keys.packed
        if session.streams is not None:
            packed = session.streams.issue(keys, worker.worker_id, worker.incarnation)
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
            packed,
            batch.cuts,
            [],
        )
        batch.state, batch.serial, batch.slot_id = BatchState.ISSUED, serial, fill.slot_id
        batch.worker_id, batch.incarnation = worker.worker_id, worker.incarnation
        worker.fills[serial] = (session.session_id, fill)
        self.outbox.append(ev.SendFill(worker.worker_id, worker.incarnation, fill))
