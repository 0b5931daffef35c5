"""The engine: what a loader asks for, on top of a scheduler, a ring, a backend and the pump that joins them.

Owns sessions from a consumer's side: opening, waiting for a batch, what to do when none will ever come, closing. It does not
know its loader, only whether that is still there. Exceptions that are a batch's or the pool's are returned through the pump and
raised outside it: one raised inside would count as an interrupt.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ringloader._core.batch_keys import Keys
from ringloader._core.policy import PoolPolicy
from ringloader._core.scheduler import Scheduler
from ringloader._core.session import Session
from ringloader._core.streams import Streams
from ringloader._runtime import calls, lifetime, reports
from ringloader._runtime.delivery import Delivery
from ringloader._runtime.locking import holding
from ringloader._runtime.pool import STOP_S
from ringloader._runtime.pump import Follower, Pump, Ready
from ringloader._runtime.ring import Ring
from ringloader._runtime.watch import Watch
from ringloader._runtime.wrapping import Wrap
from ringloader.errors import ClosedError, ConfigError, FactoryError, LoaderError

logger = logging.getLogger("ringloader")

# One line when nothing has arrived for this long, and again at this interval.
_QUIET_S = 10.0
# How long a full ring may be waited for when other threads could let something go.
_FULL_WAIT_S = 10.0
# For a machine that hardly runs us: every step of stopping has a deadline of its own.
_JOIN_S = 10.0


class Claim:
    """Something to own a session until its iterator is there."""


class Engine:
    """Runs one loader's workers and ring for any number of sessions."""

    def __init__(self, policy: PoolPolicy, make_backend: Callable[[int], Any], ring: Ring, wrap: Wrap) -> None:
        wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.backend = make_backend(wake_fd)
        if policy.faults.recycles and not self.backend.recycles:
            logger.warning("faults.max_worker_rss and max_batches_per_worker apply to worker processes, and there are none")
        policy = dataclasses.replace(policy, unreaped_s=self.backend.unreaped_s, recycles=self.backend.recycles)
        self.scheduler = Scheduler(policy)
        self.ring = ring
        self.delivery = Delivery(self.scheduler, self.ring, wrap, is_inline=self.backend.is_inline)
        self.pump = Pump(self.scheduler, self.backend, self.ring, self.delivery, wake_fd)
        self.owner_pid = os.getpid()
        self._owner: weakref.ref[Any] | None = None
        self._close_posted = self._is_foreign = False
        self._stop_s = STOP_S
        self._next_session_id = 0
        lifetime.register(self)

    def start(self) -> None:
        """Start the workers, if they are not started."""
        self.check_usable()
        if not self.backend.is_inline:
            holding(self.pump.lock, self._be_watched)
        self.pump.step([], lambda: self.scheduler.start(time.monotonic()))

    def _be_watched(self) -> None:
        if not self.pump.is_watched:
            Watch(self.pump, self._is_over, lambda: self._shut(self._stop_s)).start()

    def belong_to(self, owner: Any) -> None:
        """Close once `owner` is gone."""
        self._owner = weakref.ref(owner)
        weakref.finalize(owner, self.post_close).atexit = False

    def dataset_facts(self) -> dict[str, Any]:
        """Wait until a worker has built the dataset and return its facts. Raises FactoryError when that fails."""
        self.start()
        got = self._until(lambda: self.scheduler.supervision.dataset_facts or self._hopeless(None), None)
        if isinstance(got, BaseException):
            raise got
        facts: dict[str, Any] = got
        return facts

    def call(self, method: str, arguments: bytes) -> list[Any]:
        """Run a method of every worker's dataset; return the results by worker id. Raises LoaderError for one that raised."""
        self.dataset_facts()
        made = self.scheduler.supervision.calls
        call_id: int = self.pump.step([], lambda: made.make(method, arguments))
        try:
            got = self._until(lambda: made.results(call_id) or self._hopeless(None), None)
        except BaseException:
            if self.backend.is_inline:
                made.forget(call_id)  # it was broken off on this very thread
            raise
        finally:
            made.give_up(call_id)
        if isinstance(got, BaseException):
            raise got
        return calls.results(method, got)

    def open_session(
        self,
        epoch: int,
        *,
        in_order: bool,
        streams: Streams | None = None,
        pull: Callable[[int], Keys | None] | None = None,
        is_early: bool = False,
        owner: object,
    ) -> Session:
        """Begin an iteration, which is closed once `owner` is gone; an early one is for when nothing else is to be done."""
        session_id, self._next_session_id = self._next_session_id, self._next_session_id + 1
        session = Session(session_id, epoch, in_order=in_order, streams=streams, pull=pull)
        session.is_early = is_early
        # Followed before it is open: an interrupt in between leaves nothing.
        self.follow(owner, session)
        self.pump.step([], lambda: self.scheduler.open_session(session))
        return session

    def submit_early(self, session: Session, batches: list[tuple[int, Keys]]) -> None:
        """Hand in batches of an epoch that nobody has asked for yet."""

        def submit() -> None:
            if session.session_id in self.scheduler.sessions:
                for batch_id, keys in batches:
                    self.scheduler.submit(session.session_id, batch_id, keys)

        self.pump.step([], submit)

    def follow(self, owner: object, session: Session) -> None:
        """Have the session closed once its owner is gone."""
        # The callback is the append of a deque: as with leases, Python code there could be broken into by a signal.
        follower = Follower(owner, self.pump.abandoned.append)
        follower.session_id = session.session_id
        self.pump.followers[session.session_id] = follower

    def close_session(self, session: Session) -> None:
        """End an iteration."""
        self.pump.step([], lambda: self.pump.drop_session(session.session_id))

    def next_batch(self, session: Session, batches: list[tuple[int, Keys]], *, ended: bool) -> Any:
        """Hand in what the sampler gave, then wait for the next batch and return it.

        Raises StopIteration at the end, or the error that takes a batch's place. Batches handed in twice change nothing.
        """
        self.check_usable()
        if lifetime.LINGERING:
            lifetime.sweep()

        def ask() -> Any:
            self._submit(session, batches, ended=ended)
            return self._take(session)

        got = self._until(ask, session)
        if isinstance(got, BaseException):
            try:
                raise got
            finally:
                # Or the error, its traceback and this frame hold each other, and with them the caller's last batch.
                del got
        return got[0]

    def try_next_batch(self, session: Session, batches: list[tuple[int, Keys]], *, ended: bool) -> Any:
        """Hand in what the sampler gave; return the next batch as a 1-tuple if it can be had at once, or what went wrong with
        it, else None."""
        self.check_usable()

        def ask() -> Any:
            self._submit(session, batches, ended=ended)
            batch = session.head()
            # What went wrong in a worker is told when its batch is due, and so is what went wrong with all of them.
            if batch is None or batch.fault is not None or self._hopeless(session) is not None or self.ring.is_unsettled():
                return None
            return self.delivery.deliver(session, batch)

        self._settle_ring()
        return self.pump.step(None, ask)

    def _submit(self, session: Session, batches: list[tuple[int, Keys]], *, ended: bool) -> None:
        """Under the lock."""
        session.settle()
        for batch_id, keys in batches:
            self.scheduler.submit(session.session_id, batch_id, keys)
        session.ended = session.ended or ended

    def throttle(self) -> None:
        """With a device: wait until it has come near enough that another copy may be started."""
        self.delivery.throttle()

    def record_stream(self, leaf: Any, address: int, stream: Any) -> bool:
        """Have the slot in which this leaf lies wait for a stream, too; False when there is none."""
        lease = None if self._is_foreign else self.ring.find_lease(address)
        if lease is not None:
            lease.streams = (*lease.streams, stream)
        return lease is not None

    def release(self, leaf: Any, address: int) -> bool:
        """Give back the slot that handed out this very leaf; False when there is none."""
        if self._is_foreign or self.pump.is_closed:
            return False

        lease = self.ring.find_lease(address, leaf)
        if lease is None:
            return False
        if not lease.is_exact and self.ring.fences.needs(lease) and not self.ring.cuda.is_capturing():
            lease.streams = (*lease.streams, *self.ring.cuda.streams())  # whoever lets go knows who reads
            lease.is_exact = True
        self.ring.ended.append(lease)
        if not self.pump.is_mine():
            self.pump.step([])
        return True

    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        pids: list[int] = self.backend.pids()
        return pids

    # --- waiting --------------------------------------------------------------------------------------------------------

    def _until(self, ask: Callable[[], Any], session: Session | None) -> Any:
        """Pump until `ask`, called under the lock, gives something true; return that."""
        ready: Ready | None = None
        began_s = quiet_s = time.monotonic()
        while True:
            if self.ring.pins.is_on or self.ring.retired:
                self._settle_ring()
            got = self.pump.step(ready, ask)
            if got:
                if session is not None:
                    session.awaited = False
                return got
            if self.ring.is_unsettled():
                ready = []
                continue
            now_s = time.monotonic()
            if session is not None:
                session.awaited = True
                if self.scheduler.is_starved(session):
                    self._make_room(session, now_s - began_s)
            if now_s - quiet_s >= _QUIET_S:
                quiet_s = now_s
                self._say_waiting(session, now_s - began_s)
            ready = self.pump.wait(quiet_s + _QUIET_S - now_s)

    def _settle_ring(self) -> None:
        try:
            self.ring.settle()
        except ConfigError:
            self.close()  # page-locking is required: nothing stays registered or reserved
            lifetime.sweep()
            raise

    def _take(self, session: Session) -> Any:
        """Under the lock: the session's next batch as a 1-tuple, an exception, or None when it must be waited for."""
        if self.scheduler.supervision.mismatch is not None or self.pump.is_closed:
            return self._hopeless(session)
        batch = session.head()
        if batch is not None:
            if self.ring.is_unsettled():
                return None  # this batch may lie in the segment that came meanwhile
            return self.delivery.deliver(session, batch)
        if session.finished():
            return StopIteration()
        return self._hopeless(session)

    def _hopeless(self, session: Session | None) -> BaseException | None:
        """The error that says why nothing will ever come."""
        supervision = self.scheduler.supervision
        if self.pump.failure is not None:
            return self.pump.failure
        if self.pump.is_closed:
            return ClosedError("the loader was closed")
        if supervision.mismatch is not None:
            return FactoryError(supervision.mismatch)
        if supervision.start_fault is not None:
            return reports.start_error(supervision.start_fault)
        if supervision.is_lost:
            return reports.lost_error(self.scheduler, None if session is None else session.oldest())
        return None

    def _make_room(self, session: Session, waited_s: float) -> None:
        """The ring is full of what the user holds: collect garbage, wait for other threads, then say so."""
        if not session.has_collected:
            session.has_collected = True
            gc.collect()
            self.pump.step([], self.scheduler.retry_growth)
            return
        num_own = 2 if self.pump.is_watched else 1
        if threading.active_count() > num_own and waited_s < _FULL_WAIT_S:
            return
        if self.ring.ended:
            return
        if self.ring.fences.is_waiting and (waited_s < _FULL_WAIT_S or not self.ring.fences.is_postponed()):
            return  # copies end by themselves, but while a graph is captured nobody can see them do
        error = holding(self.pump.lock, self._full_error, session)
        if error is not None:
            session.has_collected = False
            raise error

    def _full_error(self, session: Session) -> LoaderError | None:
        if not self.scheduler.is_starved(session):
            return None
        return reports.full_error(self.scheduler, session, self.ring.holders(), self.ring.limit)

    def _say_waiting(self, session: Session | None, waited_s: float) -> None:
        if session is None:
            everyone = self.scheduler.workers.everyone()
            stages = [self.backend.observe(worker.worker_id, worker.incarnation) for worker in everyone]
            words = ", ".join(view.stage for view in stages if view is not None)
            logger.warning("still waiting after %.0f s for the workers: %s", waited_s, words or "no process yet")
            return
        observe = self.backend.observe
        line = holding(self.pump.lock, reports.waiting_line, self.scheduler, session, observe, waited_s)
        logger.warning("%s", line)

    # --- ends -----------------------------------------------------------------------------------------------------------

    def close(self, stop_s: float = STOP_S) -> None:
        """End workers and thread, give memory back. Views that the user holds stay valid. A second call changes nothing."""
        if self._is_foreign:
            return
        pump = self.pump
        self._stop_s = stop_s
        self.backend.end_soon()
        if pump.is_mine():
            self._post_close()  # a signal handler inside `next`: the watching thread ends it, or inline the next call
            return
        holding(pump.lock, self._mark_closed)
        pump.kick()
        if not pump.is_watched:
            self._shut(stop_s)
        elif pump.thread is not None and pump.thread is not threading.current_thread():
            pump.thread.join(stop_s + _JOIN_S)

    def _mark_closed(self) -> None:
        self.pump.is_closed = True
        self.pump.changed.ring()
        self.pump.thread_wanted.ring()

    def post_close(self) -> None:
        """Have the engine closed by its own thread; safe in a finalizer, which may run on that very thread."""
        if os.getpid() == self.owner_pid and not self._is_foreign:
            self._post_close()
            if not (self.pump.is_watched or self.pump.is_mine()):
                self._shut(0.0)

    def _post_close(self) -> None:
        self._close_posted = True
        self.backend.end_soon()
        self.pump.kick()

    def disown(self) -> None:
        """In a forked child: this engine is the parent's. No lock of it may be taken, nothing sent."""
        self._is_foreign = True
        self.pump.wake_fd = -1

    def _is_over(self) -> bool:
        """Whether the watching thread has to end."""
        # The loader's finalizer tells at once; should a signal break into it, the look at the owner does.
        is_ownerless = self._owner is not None and self._owner() is None
        return self.pump.is_closed or self._close_posted or is_ownerless

    def _shut(self, stop_s: float) -> None:
        lock = self.pump.lock
        if holding(lock, self._begin_end):
            self.backend.stop(stop_s)
            holding(lock, self._let_go)

    def _begin_end(self) -> bool:
        """Nothing is begun any more; False where it has ended already. Held: the lock."""
        pump = self.pump
        if pump.wake_fd < 0:
            return False
        pump.is_closed = True
        self.scheduler.stop()
        pump.jobs.clear()
        return True

    def _let_go(self) -> None:
        """Give back memory and descriptors. Held: the lock."""
        pump = self.pump
        if pump.wake_fd < 0:
            return
        self.ring.close()
        if self.ring.retired:
            lifetime.LINGERING.append(self.ring)
        self.backend.close()
        wake_fd, pump.wake_fd = pump.wake_fd, -1
        os.close(wake_fd)
        pump.changed.ring()

    def check_usable(self) -> None:
        """Raise ClosedError when nothing can be asked of this engine."""
        if self._is_foreign or os.getpid() != self.owner_pid:
            owner = self.owner_pid
            raise ClosedError(f"the loader belongs to process {owner}; make a new one in this process", owner_pid=owner)
        if self._close_posted and not self.pump.is_watched:
            self._shut(0.0)
        if self.pump.is_closed or self._close_posted:
            if self.pump.failure is not None:
                raise self.pump.failure
            raise ClosedError("the loader was closed; make a new one")
