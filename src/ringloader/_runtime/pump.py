"""The pump: facts in, decisions, commands out, for any number of threads.

Owns the one lock of a loader and the hand-over of the pump between threads.

Who pumps. Waiting for facts is done by one thread at a time, the leader: a consumer inside `next()`, or the watching thread
(watch.py) when no consumer has been there for a while. Others wait on a bell; whoever stops leading rings it. The lock is
held to change state, never while waiting, starting, reserving memory or in user code.

Interrupts. Each change of state runs between `is_dirty = True` and `is_dirty = False` under the lock. Whoever takes the lock
and finds the flag set knows that an exception broke into the middle: all workers are killed and every batch that is not with
the user is made again from what cannot be half done (scheduler.recover). The watching thread does that, as it does every
start and kill: signals never interrupt it, and workers die with the thread that started them.

Backend interface: `wait(timeout_s)` and `collect(ready)` give facts, `drain()` gives all there are; `start_worker`,
`kill_worker`, `stop_worker`, `abandon_worker`, `send_fill`, `send_call`, `send_cancel`, `drop_segment`, `drop_session`,
`kill_all`, `end_soon`, `stop`, `close`, `observe`, `who`, `pids`; `is_inline`, `shares_dataset`, `needs_drain`,
`kills_at_once`, `recycles`, `unreaped_s`.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.scheduler import Scheduler
from ringloader._core.slots import SlotState
from ringloader._core.workers import Worker
from ringloader._runtime.delivery import Delivery
from ringloader._runtime.locking import holding
from ringloader._runtime.ring import Ring
from ringloader.errors import InternalError, LoaderError

logger = logging.getLogger("ringloader")

# How often to look for released slots while a batch waits for one, and for the end of copies: neither can be waited for.
_ROOM_LOOK_S = 0.02
_COPY_LOOK_S = 0.001
_REPAIR_LOOK_S = 1.0
# How long past its time a leader is still counted on. Two at once do no harm: facts are taken in under the lock.
_OVERDUE_S = 1.0
_HISTORY = 50

Ready = list[tuple[int, int]]


class Pump:
    """Moves facts and commands between a scheduler and a backend."""

    def __init__(self, scheduler: Scheduler, backend: Any, ring: Ring, delivery: Delivery, wake_fd: int) -> None:
        self.scheduler = scheduler
        self.backend = backend
        self.ring = ring
        self.wake_fd = wake_fd
        # Re-entrant only so that it can tell its owner: a signal handler or a finalizer that runs while this thread holds it
        # must not change state in the middle of a change, and must not wait for itself either (`is_mine`).
        self.lock = threading.RLock()
        self.changed = Bell()
        self.thread_wanted = Doorbell()
        self.thread: threading.Thread | None = None  # the watching thread
        self.has_thread_ended = False  # by its own word: an interrupt inside `is_alive` has a thread counted as dead
        self.jobs: deque[ev.Command] = deque()  # starts and kills, for the watching thread
        self.abandoned: deque[Follower] = deque()  # sessions whose iterator is gone
        self.followers: dict[int, Follower] = {}
        self.leader = 0  # thread id, 0: nobody
        self.leader_until_s = math.inf  # when to stop counting on it
        self.last_pump_s = time.monotonic()
        self.is_dirty = False
        self.is_closed = False
        self.failure: BaseException | None = None  # what ended the watching thread
        self.num_recoveries = 0
        self._delivery = delivery
        self._has_news = False  # facts were taken in since the last change of state ended
        self._notes: deque[ev.Warn] = deque()
        self._history: deque[tuple[Any, ...]] = deque(maxlen=_HISTORY)  # the last facts, for an InternalError
        self._growth: ev.AddSegment | None = None
        self._grown: ev.SegmentAdded | ev.SegmentRefused | None = None

    def wait(self, timeout_s: float | None) -> Ready:
        """Wait for facts as the leader, or for whoever leads; returns what `step` is to collect."""
        me = threading.get_ident()
        try:
            timeout_s, waiter = holding(self.lock, self._take_lead, me, timeout_s)
            if waiter is not None:
                if timeout_s != 0.0:
                    waiter.acquire(timeout=-1 if timeout_s is None else timeout_s)
                return []
            return self._lead(timeout_s)
        finally:
            if self.leader == me:
                # First of all, and by no call: an interrupt in what follows must not leave a leader that does not lead.
                self.leader = 0
                holding(self.lock, self._step_down)

    def _take_lead(self, me: int, timeout_s: float | None) -> tuple[float | None, threading.Lock | None]:
        """Return how long to wait, and on what, if somebody else leads. Held: the lock."""
        now_s = time.monotonic()
        # A leader that is this very thread was interrupted before it could step down, and one that is long past its time may
        # be one that left that way.
        if self.leader not in (0, me) and now_s <= self.leader_until_s:
            self.kick()
            return timeout_s, self.changed.waiter()
        timeout_s = self._bounded(timeout_s)
        inline = self.backend.is_inline or timeout_s is None
        self.leader_until_s = math.inf if inline or self._growth else now_s + (timeout_s or 0.0) + _OVERDUE_S
        self.leader = me
        return timeout_s, None

    def _step_down(self) -> None:
        """Tell the others. Held: the lock."""
        self.last_pump_s = time.monotonic()
        self.changed.ring()

    def _lead(self, timeout_s: float | None) -> Ready:
        if self.backend.is_inline:
            self.run_jobs()
        grown = self._grow()
        try:
            ready: Ready = self.backend.wait(0.0 if grown and not self.backend.is_inline else timeout_s)
        except (OSError, ValueError):
            if self.is_closed:
                return []  # closed under us, by another thread or a signal handler
            raise
        return ready

    def _bounded(self, timeout_s: float | None) -> float | None:
        """How long the leader may sleep: not past the next look, and not at all when something waits here already."""
        if timeout_s != 0.0 and self.ring.fences.is_waiting and self.scheduler.has_waiting:
            timeout_s = _COPY_LOOK_S if timeout_s is None else min(timeout_s, _COPY_LOOK_S)
        if self.backend.is_inline:
            return timeout_s  # it works rather than waits, and 0 would have it put off its work
        if self.ring.ended or self.abandoned or self.is_dirty or self.is_closed:
            return 0.0
        if self.scheduler.wants_room and timeout_s != 0.0:
            # Nothing tells when the user lets a batch go: what could (a callback in Python) is not safe from signals.
            timeout_s = _ROOM_LOOK_S if timeout_s is None else min(timeout_s, _ROOM_LOOK_S)
        look_at_s = self.scheduler.workers.look_at_s
        if look_at_s is not None and timeout_s != 0.0:
            until_look_s = max(0.0, look_at_s - time.monotonic())
            return until_look_s if timeout_s is None else min(timeout_s, until_look_s)
        return timeout_s

    def _grow(self) -> bool:
        """Reserve the segment that was asked for, outside the lock: it may take long."""
        command = self._growth
        if command is None:
            return False
        if self._grown is None:  # else an interrupt came between the two, and it is there already
            self._grown = self.ring.add_segment(command)
        self._growth = None
        return True

    def step(self, ready: Ready | None, ask: Callable[[], Any] | None = None) -> Any:
        """Take in facts, decide, send; all under the lock. Returns what `ask` gives. `ready` None: look for facts here."""
        if self.lock._is_owned():  # type: ignore[attr-defined]  # `is_mine`, without the call
            raise LoaderError(
                "the loader was used from inside itself: by a signal handler or a finalizer that ran in its `next`"
            )
        while True:
            try:
                self.lock.acquire()  # as by `holding`, without the call
                if not self.is_dirty or self._repairs():
                    got = self._change(ready, ask)
                    break
                waiter = self.changed.waiter()
                self.kick()
                self.thread_wanted.ring()
            finally:
                try:
                    self.lock.release()
                except RuntimeError:
                    pass
            waiter.acquire(timeout=_REPAIR_LOOK_S)
            self._raise_if_dead()
        if self._notes:
            self._log_notes()
        return got

    @property
    def is_watched(self) -> bool:
        """There is a watching thread. One whose start was broken into by an interrupt is none."""
        return self.thread is not None and self.thread.ident is not None

    def is_mine(self) -> bool:
        """This thread holds the lock already: a signal handler or a finalizer asks."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return owned

    def _change(self, ready: Ready | None, ask: Callable[[], Any] | None) -> Any:
        """One change of state. Held: the lock. An exception in it leaves the mark for a repair."""
        now_s = time.monotonic()
        self.is_dirty = True
        try:
            if not self.is_closed:
                self._take_in(self.backend.wait(0.0) if ready is None else ready, now_s)
            got = ask() if ask is not None else None
            self.scheduler.dispatch(now_s)
            self._flush()
        except InternalError as error:
            error.facts["events"] = [_in_words(*fact) for fact in self._history]
            raise
        self.is_dirty = False
        if self._has_news:
            self._has_news = False
            if self.leader not in (0, threading.get_ident()):
                # Somebody else sleeps on descriptors that this thread has just emptied; it may be what they wait for.
                self.kick()
        return got

    def _take_in(self, ready: Ready, now_s: float) -> None:
        scheduler = self.scheduler
        for fact in self.backend.collect(ready):
            self._has_news = True
            self._tell(fact, now_s)
        if self.ring.ended:
            self._end_leases()
        if self.ring.fences.is_waiting and threading.current_thread() is not self.thread:
            for key in self.ring.fences.advance():
                scheduler.handle(ev.SlotCompleted(*key), now_s)
                if self.ring.marks_free:
                    self._mark_free(key)
                self._has_news = True
        while self.abandoned:
            self.drop_session(self.abandoned[0].session_id)
            self.abandoned.popleft()
        if self._grown is not None:
            grown, self._grown = self._grown, None
            scheduler.handle(grown, now_s)
            self._has_news = True
        look_at_s = scheduler.workers.look_at_s
        if (look_at_s is not None and now_s >= look_at_s) or self.backend.needs_drain:
            # An answer that was sent in time counts, so nobody is judged before everything is read.
            for fact in self.backend.drain():
                self._has_news = True
                self._tell(fact, now_s)
            scheduler.tick(now_s, self.backend.observe)

    def _tell(self, fact: Any, now_s: float) -> None:
        if type(fact) is not tuple:
            self._history.append((fact,))
            if isinstance(fact, ev.WorkerExited):
                self._delivery.forget(fact.worker_id, fact.incarnation)
            self.scheduler.handle(fact, now_s)
            return
        worker_id, incarnation, message = fact
        self._history.append((type(message), worker_id, incarnation))
        if type(message) is msg.Filled:
            message = self._delivery.define(worker_id, incarnation, message)
            if message is None:
                broken = ev.WorkerBroken(worker_id, incarnation, "it named a layout that it had not defined")
                self.scheduler.handle(broken, now_s)
                return
        self.scheduler.receive(worker_id, incarnation, message, now_s)

    def _end_leases(self) -> None:
        ring = self.ring
        while ring.ended:
            lease = ring.ended[0]
            is_pending = ring.fences.needs(lease)
            if is_pending:
                ring.fences.add(lease)
            self.scheduler.handle(ev.SlotReleased(*lease.key, is_pending), time.monotonic())
            if ring.marks_free:
                self._mark_free(lease.key)
            ring.forget(lease)

    def _mark_free(self, key: tuple[int, int]) -> None:
        slot = self.scheduler.slots.by_id.get(key[0])
        if slot is not None and slot.state is SlotState.FREE:
            self.ring.mark_free(slot)

    def _flush(self) -> None:
        """Carry out the outbox; a command is removed only once it is done or with those who will do it."""
        outbox = self.scheduler.outbox
        while outbox:
            self._carry_out(outbox[0])
            outbox.popleft()

    def _carry_out(self, command: ev.Command) -> None:
        kind = type(command)
        if kind is ev.SendFill:
            self._send_fill(command)  # type: ignore[arg-type]
        elif isinstance(command, ev.SendCancel):
            cancel = msg.Cancel(command.session_id, command.batch_id, command.serial)
            self.backend.send_cancel(command.worker_id, command.incarnation, cancel, command.running)
        elif isinstance(command, ev.AddSegment):
            self._growth = command
            self.kick()
        elif isinstance(command, ev.DropSegment):
            self.backend.drop_segment(command.segment_id)
            self.ring.drop_segment(command.segment_id)
        elif isinstance(command, ev.SendCall):
            broken = self.backend.send_call(command.worker_id, command.incarnation, command.call)
            if broken is not None:
                self.scheduler.handle(broken, time.monotonic())
        elif isinstance(command, ev.DropSession):
            self.backend.drop_session(command.session_id)
        elif isinstance(command, ev.StopWorker):
            self.backend.stop_worker(command.worker_id, command.incarnation)
        elif isinstance(command, ev.Warn):
            self._notes.append(command)
        elif isinstance(command, ev.KillWorker) and self.backend.kills_at_once:
            self.backend.kill_worker(command.worker_id, command.incarnation, dump=command.dump)
        else:
            self.jobs.append(command)
            self.kick()
            self.thread_wanted.ring()

    def _send_fill(self, command: ev.SendFill) -> None:
        fill = command.fill
        segment = self.ring.segments.get(fill.segment_id) if fill.slot_id != msg.NO_SLOT else None
        broken = self.backend.send_fill(command.worker_id, command.incarnation, fill, segment)
        if broken is not None:
            self.scheduler.handle(broken, time.monotonic())

    def repair(self) -> None:
        """An exception broke into a change of state: start again from facts. Held: the lock."""
        unended = self.backend.kill_all()
        alive = self.ring.alive() - {lease.key for lease in self.ring.ended}
        while self.ring.ended:
            lease = self.ring.ended[0]
            if self.ring.fences.needs(lease):
                self.ring.fences.add(lease)
            self.ring.forget(lease)
        self.jobs.clear()
        self._delivery.forget_all()
        self._growth = None
        grown, self._grown = self._grown, None
        if isinstance(grown, ev.SegmentAdded):
            self.ring.drop_segment(grown.segment_id)
        known = self.scheduler.slots.segments
        for segment_id in [one for one in self.ring.segments if one not in known]:
            self.ring.drop_segment(segment_id)
        self.num_recoveries += 1
        now_s = time.monotonic()
        self.scheduler.recover(alive, set(self.ring.fences.leases()), unended, set(self.ring.segments), now_s)
        self.scheduler.dispatch(now_s)
        self._flush()
        self.is_dirty = False
        self.changed.ring()

    def _repairs(self) -> bool:
        """Repair if that is for this thread to do; True when it is done. Held: the lock."""
        if self.is_watched and threading.current_thread() is not self.thread and not self.is_closed:
            return False
        self.repair()
        return True

    def _raise_if_dead(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.has_thread_ended and not self.is_closed:
            raise InternalError("the watching thread has ended")

    def run_jobs(self) -> None:
        """Start and kill processes, outside the lock; take the result in under it."""
        while self.jobs and not self.is_closed:
            command = self.jobs[0]
            if isinstance(command, ev.StartWorker):
                self._start_workers()
                continue
            if isinstance(command, ev.KillWorker):
                self.backend.kill_worker(command.worker_id, command.incarnation, dump=command.dump)
            elif isinstance(command, ev.AbandonWorker):
                self.backend.abandon_worker(command.worker_id, command.incarnation)
            holding(self.lock, self._job_done, command)

    def _job_done(self, command: ev.Command) -> None:
        """Forget a job. Held: the lock."""
        if self.jobs and self.jobs[0] is command:
            self.jobs.popleft()

    def _start_workers(self) -> None:
        """Start all that are to be started now, and take them in only then: none is busy before the others are known."""
        waiting = itertools.takewhile(lambda job: isinstance(job, ev.StartWorker), holding(self.lock, list, self.jobs))
        commands = [job for job in waiting if isinstance(job, ev.StartWorker)]
        started = []
        for command in commands:
            if self.is_closed:
                break  # none of these is wanted any more
            worker = self.scheduler.workers.get(command.worker_id, command.incarnation)
            if worker is not None:
                started.append((command, worker, self.backend.start_worker(command.worker_id, command.incarnation)))
        for command, worker, take_in in started:
            self._welcome(command, worker, take_in)
        for command in commands:
            holding(self.lock, self._job_done, command)

    def _welcome(self, command: ev.StartWorker, worker: Worker, take_in: Callable[[bool], Any]) -> None:
        def decide() -> None:
            self._has_news = True
            # A repair may have begun another incarnation while this one was being started.
            is_wanted = self.scheduler.workers.get(command.worker_id, command.incarnation) is not None
            failed = take_in(is_wanted)
            if not is_wanted:
                return
            if failed is None:
                worker.who = self.backend.who(command.worker_id, command.incarnation)
            else:
                self.scheduler.handle(failed, time.monotonic())

        self.step([], decide)

    def kick(self) -> None:
        """Wake whoever waits for facts."""
        if self.wake_fd >= 0:
            try:
                os.eventfd_write(self.wake_fd, 1)
            except (BlockingIOError, OSError):
                pass

    def _log_notes(self) -> None:
        while self._notes:
            try:
                note = self._notes.popleft()
            except IndexError:
                return
            logger.log(logging.WARNING if note.is_fault else logging.INFO, "%s", note.text)

    def drop_session(self, session_id: int) -> None:
        """Forget a session. Held: the lock."""
        self.scheduler.close_session(session_id)
        self.followers.pop(session_id, None)  # only now: an interrupt in between leaves it to be closed again


def _in_words(fact: Any, *worker: int) -> str:
    return f"{fact.__name__} of worker {worker[0]}.{worker[1]}" if worker else repr(fact)


class Follower(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to an iterator that knows its session."""

    __slots__ = ("session_id",)

    session_id: int


class Bell:
    """Wakes every thread that waits for it.

    In place of `threading.Condition`, whose methods are Python code: a KeyboardInterrupt inside its `__enter__` or `__exit__`
    leaves the lock held for ever. `waiter` and `ring` are called under the pump's lock, `acquire` on the waiter outside it.
    """

    def __init__(self) -> None:
        self._waiters: list[threading.Lock] = []

    def waiter(self) -> threading.Lock:
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        return waiter

    def ring(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()


class Doorbell:
    """Wakes one thread; rung while nobody waits, the next wait returns at once. `ring` is called under the pump's lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        if self._lock.locked():
            self._lock.release()

    def wait(self, timeout_s: float) -> None:
        self._lock.acquire(timeout=timeout_s)
