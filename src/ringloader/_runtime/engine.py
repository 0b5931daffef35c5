"""The engine: scheduler, ring and a backend put to work.

Owns the one lock of a loader, the hand-over of the pump between threads, and the thread that watches when nobody asks.

Who pumps. Waiting for facts is done by one thread at a time, the leader: a consumer inside `next()`, or the engine's own thread
when no consumer has been there for `_ABSENT_S`. Others wait on the condition; whoever stops leading notifies. The lock is
held to change state, never while waiting, starting, reserving memory or in user code.

Interrupts. Each change of state runs between `_dirty = True` and `_dirty = False` under the lock. Whoever takes the lock and
finds the flag set knows that an exception broke into the middle: all workers are killed and every batch that is not with the
user is made again from what cannot be half done (scheduler.recover). The engine's own thread does that, as it does every start
and kill: signals never interrupt it, and workers die with the thread that started them.

Backend interface: `wait(timeout_s)` and `collect(ready)` give facts, `drain()` gives all there are; `start_worker`,
`kill_worker`, `abandon_worker`, `send_fill`, `send_cancel`, `drop_segment`, `kill_all`, `stop`, `close`, `observe`, `pids`.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.layout import Layout, Placement
from ringloader._core.policy import PoolPolicy
from ringloader._core.scheduler import Scheduler
from ringloader._core.session import Batch, Session
from ringloader._core.slots import SlotState
from ringloader._runtime import reports
from ringloader._runtime.pool import STOP_S
from ringloader._runtime.ring import Ring
from ringloader.errors import ClosedError, FactoryError, InternalError

logger = logging.getLogger("ringloader")

# The engine's thread takes over when no consumer has pumped for this long: faults in a long training step are met in it.
_ABSENT_S = 0.1
# One line when nothing has arrived for this long, and again at this interval.
_QUIET_S = 10.0
# How long a full ring may be waited for when other threads could let something go.
_FULL_WAIT_S = 10.0
_EXIT_STOP_S = 0.3
# How often to look for released slots while a batch waits for one.
_ROOM_LOOK_S = 0.02
_REPAIR_LOOK_S = 1.0
# How often the idle thread looks whether its loader is still there.
_OWNER_LOOK_S = 1.0
_MAX_PLANS = 1024
_EMPTY = np.empty(0, np.uint8)

Wrap = Callable[[Layout, Placement, bytes, "np.ndarray[Any, Any]"], tuple[Any, list[Any]]]


class Engine:
    """Runs one loader's workers and ring for any number of sessions."""

    def __init__(self, policy: PoolPolicy, make_backend: Callable[[int], Any], ring_limit: int, wrap: Wrap) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.backend = make_backend(self.wake_fd)
        self.scheduler = Scheduler(policy)
        self.ring = Ring(ring_limit, debug=os.environ.get("RINGLOADER_DEBUG") == "1")
        self.copied_nbytes = self.num_samples = self.num_recoveries = 0
        self.owner_pid = os.getpid()
        self._wrap = wrap
        self._lock = threading.Lock()
        self._changed = _Bell()
        self._thread_wanted = _Bell()
        self._thread: threading.Thread | None = None
        self._jobs: deque[ev.Command] = deque()
        self._notes: deque[str] = deque()
        self._abandoned: deque[_Follower] = deque()  # sessions whose iterator is gone
        self._followers: dict[int, _Follower] = {}
        self._owner: weakref.ref[Any] | None = None
        self._growth: ev.AddSegment | None = None
        self._grown: ev.SegmentAdded | ev.SegmentRefused | None = None
        self._leader = 0  # thread id, 0: nobody
        self._last_pump_s = time.monotonic()
        self._dirty = False
        self._is_closed = self._close_posted = self._is_foreign = False
        self._failure: BaseException | None = None
        self._definitions: dict[tuple[int, int], OrderedDict[int, bytes]] = {}
        self._plans: OrderedDict[tuple[bytes, bytes], tuple[Layout, Placement]] = OrderedDict()
        self._next_session_id = 0
        _ENGINES.add(self)

    # --- for the loader -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers, if they are not started."""
        self._check_usable()
        with self._lock:
            if self._thread is None and not self.backend.is_inline:
                _register_exit_hook()
                self._thread = threading.Thread(target=self._watch, name="ringloader", daemon=True)
                self._thread.start()
        self._step((), lambda: self.scheduler.start(time.monotonic()))

    def belong_to(self, owner: Any) -> None:
        """Close once `owner` is gone."""
        self._owner = weakref.ref(owner)
        weakref.finalize(owner, self.post_close).atexit = False

    def dataset_facts(self) -> dict[str, Any]:
        """Wait until a worker has built the dataset and return its facts. Raises FactoryError when that fails."""
        self.start()
        got = self._until(lambda: self.scheduler.dataset_facts or self._hopeless(None), None)
        if isinstance(got, BaseException):
            raise got
        facts: dict[str, Any] = got
        return facts

    def open_session(self, epoch: int, *, in_order: bool) -> Session:
        session_id, self._next_session_id = self._next_session_id, self._next_session_id + 1
        session = Session(session_id, epoch, in_order=in_order)
        self._step((), lambda: self.scheduler.open_session(session))
        return session

    def follow(self, iterator: Any, session: Session) -> None:
        """Have the session closed once its iterator is gone."""
        # The callback is the append of a deque: as with leases, Python code there could be broken into by a signal.
        follower = _Follower(iterator, self._abandoned.append)
        follower.session_id = session.session_id
        self._followers[session.session_id] = follower

    def close_session(self, session: Session) -> None:
        self._step((), lambda: self._drop_session(session.session_id))

    def _drop_session(self, session_id: int) -> None:
        self._followers.pop(session_id, None)
        self.scheduler.close_session(session_id)

    def next_batch(self, session: Session, batches: list[tuple[int, ev.Keys]], *, ended: bool) -> Any:
        """Hand in what the sampler gave, then wait for the next batch and return it.

        Raises StopIteration at the end, or the error that takes a batch's place. Batches handed in twice change nothing.
        """
        self._check_usable()

        def ask() -> Any:
            session.settle()
            for batch_id, keys in batches:
                self.scheduler.submit(session.session_id, batch_id, keys)
            session.ended = session.ended or ended
            return self._take(session)

        got = self._until(ask, session)
        if isinstance(got, BaseException):
            try:
                raise got
            finally:
                # Or the error, its traceback and this frame hold each other, and with them the caller's last batch.
                del got
        return got[0]

    def release(self, leaf: Any, address: int) -> bool:
        """Give back the slot that handed out this very leaf; False when there is none."""
        if self._is_foreign or self._is_closed:
            return False
        found = False

        def decide() -> None:
            nonlocal found
            key = self.ring.find_lease(address, leaf)
            if key is not None:
                found = True
                self.ring.leases.pop(key)
                self._released(key)

        self._step((), decide)
        return found

    def pids(self) -> list[int]:
        with self._lock:
            pids: list[int] = self.backend.pids()
            return pids

    def close(self, stop_s: float = STOP_S) -> None:
        """End workers and thread, give memory back. Views that the user holds stay valid. A second call changes nothing."""
        if self._is_foreign:
            return
        with self._lock:
            self._is_closed = True
            self._changed.ring()
            self._thread_wanted.ring()
        self._kick()
        thread = self._thread
        if thread is None:
            self._shut(stop_s)
        elif thread is not threading.current_thread():
            self._stop_s = stop_s
            # Every step of stopping has its own deadline; this bound is for a machine that hardly runs us.
            thread.join(stop_s + 10.0)

    def post_close(self) -> None:
        """Have the engine closed by its own thread; safe in a finalizer, which may run on that very thread."""
        if os.getpid() == self.owner_pid and not self._is_foreign:
            self._close_posted = True
            self._kick()
            if self._thread is None:
                self._shut(0.0)

    # --- the consumer's side --------------------------------------------------------------------------------------------

    def _until(self, ask: Callable[[], Any], session: Session | None) -> Any:
        """Pump until `ask`, called under the lock, gives something true; return that."""
        ready: list[tuple[int, int]] | None = None
        began_s = quiet_s = time.monotonic()
        while True:
            got = self._step(ready, ask)
            if got:
                if session is not None:
                    session.awaited = False
                return got
            now_s = time.monotonic()
            if session is not None:
                session.awaited = True
                if self.scheduler.is_starved(session):
                    self._make_room(session, now_s - began_s)
            if now_s - quiet_s >= _QUIET_S:
                quiet_s = now_s
                self._say_waiting(session, now_s - began_s)
            ready = self._wait(quiet_s + _QUIET_S - now_s, session)

    def _take(self, session: Session) -> Any:
        """Under the lock: the session's next batch as a 1-tuple, an exception, or None when it must be waited for."""
        batch = session.head()
        if batch is not None:
            return self._deliver(session, batch)
        if session.finished():
            return StopIteration()
        return self._hopeless(session)

    def _deliver(self, session: Session, batch: Batch) -> Any:
        if batch.fault is not None:
            error = reports.batch_error(batch, batch.fault, inline=self.backend.is_inline)
            self.scheduler.hand_over(session, batch)
            return error
        filled = batch.filled
        assert filled is not None
        layout, placement = self._plan(filled)
        if batch.slot_id == msg.NO_SLOT:
            value, _ = self._wrap(layout, placement, filled.inline, _EMPTY)
        else:
            slot = self.scheduler.slots.by_id[batch.slot_id]
            root = self.ring.root(slot, filled.nbytes)
            value, leaves = self._wrap(layout, placement, filled.inline, root)
            self.ring.lend(slot, root, leaves)
        self.scheduler.hand_over(session, batch)
        self.copied_nbytes += filled.copied_nbytes
        self.num_samples += filled.num_samples
        return (value,)

    def _plan(self, filled: msg.Filled) -> tuple[Layout, Placement]:
        """Layout and placement of a batch, remembered by their bytes."""
        key = (filled.layout, filled.shapes)
        plan = self._plans.get(key)
        if plan is None:
            layout = Layout.from_wire(filled.layout)
            flat = np.frombuffer(filled.shapes, np.int64).tolist()
            shapes, start = [], 0
            for leaf in layout.leaves:
                shapes.append(tuple(flat[start : start + leaf.ndim]))
                start += leaf.ndim
            plan = self._plans[key] = (layout, layout.place(tuple(shapes)))
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return plan

    def _hopeless(self, session: Session | None) -> BaseException | None:
        """The error that says why nothing will ever come; returned, since an exception raised here would ask for a repair."""
        scheduler = self.scheduler
        if self._failure is not None:
            return self._failure
        if self._is_closed:
            return ClosedError("the loader was closed")
        if scheduler.mismatch is not None:
            return FactoryError(scheduler.mismatch)
        if scheduler.start_fault is not None:
            return reports.start_error(scheduler.start_fault)
        if scheduler.is_lost:
            return reports.lost_error(scheduler, None if session is None else session.oldest())
        return None

    def _make_room(self, session: Session, waited_s: float) -> None:
        """The ring is full of what the user holds: collect garbage, wait for other threads, then say so."""
        if not session.has_collected:
            session.has_collected = True
            gc.collect()
            self._step((), self.scheduler.retry_growth)
            return
        others = threading.active_count() - (1 if self._thread is None else 2)
        if others > 0 and waited_s < _FULL_WAIT_S:
            return
        if self.ring.ended:
            return
        with self._lock:
            if self.scheduler.is_starved(session):
                session.has_collected = False
                raise reports.full_error(self.scheduler, session, self.ring.holders(), self.ring.limit)

    def _say_waiting(self, session: Session | None, waited_s: float) -> None:
        if session is None:
            stages = [self.backend.observe(worker.worker_id) for worker in self.scheduler.workers.all]
            words = ", ".join(view.stage for view in stages if view is not None)
            logger.warning("still waiting after %.0f s for the workers to start: %s", waited_s, words or "no process yet")
            return
        with self._lock:
            line = reports.waiting_line(self.scheduler, session, self.backend.observe, waited_s)
        logger.warning("%s", line)

    # --- the pump -------------------------------------------------------------------------------------------------------

    def _wait(self, timeout_s: float | None, session: Session | None) -> list[tuple[int, int]]:
        """Wait for facts as the leader, or for whoever leads; returns what `_step` is to collect."""
        me = threading.get_ident()
        with self._lock:
            # A leader that is this very thread was interrupted before it could step down.
            follows = self._leader not in (0, me)
            if follows:
                self._kick()
                waiter = self._changed.waiter()
            else:
                self._leader = me
                timeout_s = self._bounded(timeout_s)
        if follows:
            if timeout_s != 0.0:
                waiter.acquire(timeout=-1 if timeout_s is None else timeout_s)
            return []
        try:
            if self.backend.is_inline:
                self._run_jobs()
            grown = self._grow()
            ready: list[tuple[int, int]] = self.backend.wait(0.0 if grown and not self.backend.is_inline else timeout_s)
            return ready
        finally:
            with self._lock:
                self._leader = 0
                self._last_pump_s = time.monotonic()
                self._changed.ring()

    def _bounded(self, timeout_s: float | None) -> float | None:
        """How long the leader may sleep: not past the next look, and not at all when something waits here already."""
        if self.ring.ended or self._abandoned or self._dirty or self._is_closed:
            return 0.0 if not self.backend.is_inline else timeout_s
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
        self._grown = self.ring.add_segment(command)
        self._growth = None
        return True

    def _step(self, ready: list[tuple[int, int]] | tuple[()] | None, ask: Callable[[], Any] | None = None) -> Any:
        """Take in facts, decide, send; all under the lock. Returns what `ask` gives. `ready` None: look for facts here."""
        while True:
            with self._lock:
                if not self._dirty or self._repairs():
                    got = self._change(ready, ask)
                    break
                waiter = self._changed.waiter()
                self._kick()
                self._thread_wanted.ring()
            waiter.acquire(timeout=_REPAIR_LOOK_S)
            self._raise_if_dead()
        if self._notes:
            self._log_notes()
        return got

    def _change(self, ready: list[tuple[int, int]] | tuple[()] | None, ask: Callable[[], Any] | None) -> Any:
        """One change of state. Held: the lock. An exception in it leaves the mark for a repair."""
        now_s = time.monotonic()
        self._dirty = True
        if not self._is_closed:
            self._take_in(self.backend.wait(0.0) if ready is None else ready, now_s)
        got = ask() if ask is not None else None
        self.scheduler.dispatch(now_s)
        self._flush()
        self._dirty = False
        return got

    def _take_in(self, ready: Iterable[tuple[int, int]], now_s: float) -> None:
        scheduler = self.scheduler
        for fact in self.backend.collect(ready):
            self._tell(fact, now_s)
        if self.ring.ended:
            for key in self.ring.drain():
                self._released(key)
        while self._abandoned:
            self._drop_session(self._abandoned[0].session_id)
            self._abandoned.popleft()
        if self._grown is not None:
            grown, self._grown = self._grown, None
            scheduler.handle(grown, now_s)
        look_at_s = scheduler.workers.look_at_s
        if (look_at_s is not None and now_s >= look_at_s) or self.backend.needs_drain:
            # An answer that was sent in time counts, so nobody is judged before everything is read.
            for fact in self.backend.drain():
                self._tell(fact, now_s)
            scheduler.tick(now_s, self.backend.observe)

    def _tell(self, fact: Any, now_s: float) -> None:
        if type(fact) is not tuple:
            if isinstance(fact, ev.WorkerExited):
                self._definitions.pop((fact.worker_id, fact.incarnation), None)
            self.scheduler.handle(fact, now_s)
            return
        worker_id, incarnation, message = fact
        if type(message) is msg.Filled:
            message = self._with_definition(worker_id, incarnation, message)
            if message is None:
                broken = ev.WorkerBroken(worker_id, incarnation, "it named a layout that it had not defined")
                self.scheduler.handle(broken, now_s)
                return
        self.scheduler.receive(worker_id, incarnation, message, now_s)

    def _with_definition(self, worker_id: int, incarnation: int, filled: msg.Filled) -> msg.Filled | None:
        """Put the layout's definition, sent once per incarnation, back into the message."""
        known = self._definitions.setdefault((worker_id, incarnation), OrderedDict())
        if filled.layout:
            known[filled.layout_id] = filled.layout
            if len(known) > _MAX_PLANS:
                known.popitem(last=False)
            return filled
        definition = known.get(filled.layout_id)
        if definition is None:
            return None
        known.move_to_end(filled.layout_id)
        return msg.Filled(
            filled.serial,
            filled.generation,
            filled.layout_id,
            definition,
            filled.shapes,
            filled.inline,
            filled.nbytes,
            filled.copied_nbytes,
            filled.num_samples,
            filled.fetch_ns,
            filled.collate_ns,
        )

    def _released(self, key: tuple[int, int]) -> None:
        slot_id, generation = key
        self.scheduler.handle(ev.SlotReleased(slot_id, generation), time.monotonic())
        slot = self.scheduler.slots.by_id.get(slot_id)
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
            self._kick()
        elif isinstance(command, ev.DropSegment):
            self.backend.drop_segment(command.segment_id)
            self.ring.drop_segment(command.segment_id)
        elif isinstance(command, ev.Warn):
            self._notes.append(command.text)
        else:
            self._jobs.append(command)
            self._kick()
            self._thread_wanted.ring()

    def _send_fill(self, command: ev.SendFill) -> None:
        fill = command.fill
        segment = self.ring.segments.get(fill.segment_id) if fill.slot_id != msg.NO_SLOT else None
        broken = self.backend.send_fill(command.worker_id, command.incarnation, fill, segment)
        if broken is not None:
            self.scheduler.handle(broken, time.monotonic())

    def _repair(self) -> None:
        """An exception broke into a change of state: start again from facts. Held: the lock."""
        self.backend.kill_all()
        self.ring.drain()
        self._jobs.clear()
        self._definitions.clear()
        self._growth = None
        grown, self._grown = self._grown, None
        if isinstance(grown, ev.SegmentAdded):
            self.ring.drop_segment(grown.segment_id)
        known = self.scheduler.slots.segments
        for segment_id in [one for one in self.ring.segments if one not in known]:
            self.ring.drop_segment(segment_id)
        self.num_recoveries += 1
        now_s = time.monotonic()
        self.scheduler.recover(self.ring.alive(), set(self.ring.segments), now_s)
        self.scheduler.dispatch(now_s)
        self._flush()
        self._dirty = False
        self._changed.ring()

    def _repairs(self) -> bool:
        """Repair if that is for this thread to do; True when it is done. Held: the lock."""
        if self._thread is not None and threading.current_thread() is not self._thread and not self._is_closed:
            return False
        self._repair()
        return True

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._thread is not None and not self._thread.is_alive() and not self._is_closed:
            raise InternalError("the engine's thread has ended")

    # --- the engine's own thread ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Main of the thread: start, kill, repair; pump while nobody else does."""
        try:
            while not self._is_closed and not self._close_posted:
                self._watch_once()
        except BaseException as error:
            self._failure = error
        finally:
            self._shut(self.__dict__.get("_stop_s", STOP_S))
            with self._lock:
                self._changed.ring()

    def _watch_once(self) -> None:
        with self._lock:
            if self._dirty:
                self._repair()
            absent_s = time.monotonic() - self._last_pump_s
            idle = self._leader == 0 and absent_s >= _ABSENT_S
            waiter = self._thread_wanted.waiter()
            # The finalizer of the loader tells at once; should a signal break into it, this does.
            self._close_posted = self._close_posted or (self._owner is not None and self._owner() is None)
            is_wanted = bool(self._jobs) or self._is_closed or self._close_posted
            pause_s = _ABSENT_S if self._leader else _ABSENT_S - absent_s
        if is_wanted:
            self._run_jobs()
        elif idle:
            self._step(self._wait(_OWNER_LOOK_S, None))
        else:
            waiter.acquire(timeout=max(0.001, pause_s))

    def _run_jobs(self) -> None:
        """Start and kill processes, outside the lock; take the result in under it."""
        while self._jobs and not self._is_closed:
            command = self._jobs[0]
            if isinstance(command, ev.StartWorker):
                self._start_worker(command)
            elif isinstance(command, ev.KillWorker):
                self.backend.kill_worker(command.worker_id, command.incarnation, dump=command.dump)
            elif isinstance(command, ev.AbandonWorker):
                self.backend.abandon_worker(command.worker_id, command.incarnation)
            with self._lock:
                if self._jobs and self._jobs[0] is command:
                    self._jobs.popleft()

    def _start_worker(self, command: ev.StartWorker) -> None:
        worker = self.scheduler.workers.get(command.worker_id, command.incarnation)
        if worker is None:
            return
        take_in = self.backend.start_worker(command.worker_id, command.incarnation)

        def decide() -> None:
            failed = take_in()
            if failed is None:
                worker.pid = self.backend.pid(command.worker_id)
            else:
                self.scheduler.handle(failed, time.monotonic())

        self._step((), decide)

    def _kick(self) -> None:
        """Wake whoever waits for facts."""
        if self.wake_fd >= 0:
            try:
                os.eventfd_write(self.wake_fd, 1)
            except (BlockingIOError, OSError):
                pass

    def _log_notes(self) -> None:
        while self._notes:
            try:
                text = self._notes.popleft()
            except IndexError:
                return
            logger.warning("%s", text)

    # --- ends -----------------------------------------------------------------------------------------------------------

    def _shut(self, stop_s: float) -> None:
        with self._lock:
            if self.wake_fd < 0:
                return
            self._is_closed = True
            self.scheduler.stop()
            self._jobs.clear()
        self.backend.stop(stop_s)
        with self._lock:
            self.ring.close()
            self.backend.close()
            wake_fd, self.wake_fd = self.wake_fd, -1
            os.close(wake_fd)
            self._changed.ring()

    def _check_usable(self) -> None:
        if self._is_foreign or os.getpid() != self.owner_pid:
            owner = self.owner_pid
            raise ClosedError(f"the loader belongs to process {owner}; make a new one in this process", owner_pid=owner)
        if self._is_closed:
            if self._failure is not None:
                raise self._failure
            raise ClosedError("the loader was closed; make a new one")

    def disown(self) -> None:
        """In a forked child: this engine is the parent's. No lock of it may be taken, nothing sent."""
        self._is_foreign = True
        self.wake_fd = -1


class _Follower(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to an iterator that knows its session."""

    __slots__ = ("session_id",)

    session_id: int


class _Bell:
    """Wakes every thread that waits for it.

    In place of `threading.Condition`, whose methods are Python code: a KeyboardInterrupt inside its `__enter__` or `__exit__`
    leaves the lock held for ever. `waiter` and `ring` are called under the engine's lock, `acquire` on the waiter outside it.
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


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
_exit_hook_registered = False


def _register_exit_hook() -> None:
    global _exit_hook_registered
    if not _exit_hook_registered:
        _exit_hook_registered = True
        atexit.register(_close_all)


def _close_all() -> None:
    """At interpreter exit: no thread of ours may run into the teardown, no worker may stay."""
    engines = list(_ENGINES)
    closers = [threading.Thread(target=engine.close, args=(_EXIT_STOP_S,), daemon=True) for engine in engines[1:]]
    for closer in closers:
        closer.start()
    for engine in engines[:1]:
        engine.close(_EXIT_STOP_S)
    for closer in closers:
        closer.join()


def _disown_all() -> None:
    for engine in list(_ENGINES):
        engine.disown()


os.register_at_fork(after_in_child=_disown_all)
