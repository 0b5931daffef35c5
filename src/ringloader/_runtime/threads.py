"""The thread backend: workers that are threads of this process, over one dataset that they share.

Owns the threads of one loader, each with a queue of Fills and a status page. Same scheduler, ring and filler as worker
processes. A thread cannot be killed: one that has had its time is told to leave after its batch, left alone with its slots
until it does, and replaced at once. Only `get_worker_info().rng` is reproducible here, because the global generators are the
training's, too; a dataset that draws from those is named once. Must not wait for a worker while the pump's lock is held.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
import random
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from ringloader._core import messages as msg
from ringloader._core.events import Death, WorkerBroken, WorkerExited, WorkerView
from ringloader._runtime import segment as segments
from ringloader._runtime import status
from ringloader._runtime.as_worker import LENDING, AsWorker
from ringloader._runtime.building import check_built, describe
from ringloader._runtime.filler import Filler
from ringloader._runtime.pool import Fact
from ringloader._runtime.seeding import Seeder
from ringloader._runtime.segment import Segment
from ringloader._runtime.sources import LocalBuild
from ringloader._runtime.status import StatusPage
from ringloader._runtime.stream_filler import StreamFiller
from ringloader._runtime.words import format_traceback, safe_text, type_name
from ringloader._runtime.worker_info import WorkerInfo, set_thread_info

logger = logging.getLogger("ringloader")


# A Fill with the mapping of its segment, the end of something, or None: the end.
_Said = tuple[msg.Fill, mmap.mmap | None] | msg.Call | msg.Cancel | msg.DropSession | None
_RunCall = Callable[[msg.Call], msg.Called]


@dataclass(slots=True, eq=False)
class _Member:
    """One incarnation. What is said to it goes through `inbox`."""

    worker_id: int
    incarnation: int
    page: StatusPage
    inbox: SimpleQueue[_Said] = field(default_factory=SimpleQueue)
    taken_in: threading.Event = field(default_factory=threading.Event)  # the pool knows it, and hears what it says
    cancelled: set[int] = field(default_factory=set)  # serials of Fills that are not to be begun
    populated: set[tuple[int, int]] = field(default_factory=set)
    thread: threading.Thread | None = None
    is_leaving: bool = False  # it ends before the next Fill
    is_abandoned: bool = False  # nothing counts any more but that it has ended
    is_over: bool = False


class ThreadPool:
    """Worker threads behind the backend interface (see pump.py)."""

    is_inline = False
    shares_dataset = True
    kills_at_once = True  # which is a word to the thread, no wait
    needs_drain = False
    unreaped_s = 0.0  # there is nothing to wait for: a thread ends when the user's code does

    def __init__(self, build: LocalBuild, info: WorkerInfo, wake_fd: int) -> None:
        self._shared = _SharedDataset(build, info)
        self._wake_fd = wake_fd
        self._poll = select.epoll()
        self._poll.register(wake_fd, select.EPOLLIN)
        self._members: dict[int, _Member] = {}
        self._abandoned: list[_Member] = []
        self._said: deque[tuple[_Member, Fact]] = deque()
        # So that a thread that outlives the pool does not write to a descriptor that is somebody else's by then.
        self._bell = threading.Lock()
        self._is_closed = False

    # --- facts ----------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Block until something may have happened."""
        return self._poll.poll(-1 if timeout_s is None else max(0.0, timeout_s))

    def collect(self, ready: Iterable[tuple[int, int]]) -> list[Fact]:
        """Return what the threads have said, in order."""
        if ready:
            try:
                os.eventfd_read(self._wake_fd)
            except BlockingIOError:
                pass
        facts: list[Fact] = []
        while self._said:
            member, fact = self._said.popleft()
            if isinstance(fact, WorkerExited):
                self._remove(member)
            if isinstance(fact, WorkerExited) or not member.is_abandoned:
                facts.append(fact)
        return facts

    def drain(self) -> list[Fact]:
        return self.collect(())

    def observe(self, worker_id: int) -> WorkerView | None:
        member = self._members.get(worker_id)
        return member.page.view() if member is not None else None

    def _say(self, member: _Member, fact: Fact) -> None:
        """Called by the worker's thread."""
        self._said.append((member, fact))
        with self._bell:
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    def _remove(self, member: _Member) -> None:
        if self._members.get(member.worker_id) is member:
            del self._members[member.worker_id]
        if member in self._abandoned:
            self._abandoned.remove(member)
        member.page.close()

    # --- commands -------------------------------------------------------------------------------------------------------

    def start_worker(self, worker_id: int, incarnation: int) -> Callable[[bool], WorkerExited | None]:
        """Start a thread; the function returned takes it in, or lets it go where it is not wanted any more. Call that under the
        pump's lock."""
        page_fd = -1
        try:
            page_fd = StatusPage.create()
            member = _Member(worker_id, incarnation, StatusPage(page_fd))
            run = _Run(member, self._shared, self._say)
            member.thread = threading.Thread(target=run, name=f"ringloader-worker-{worker_id}", daemon=True)
            member.thread.start()
        except (OSError, RuntimeError) as error:
            death = Death(None, reason=str(error))
            return lambda is_wanted: WorkerExited(worker_id, incarnation, death)
        finally:
            if page_fd >= 0:
                os.close(page_fd)
        return lambda is_wanted: self._take_in(member, is_wanted=is_wanted)

    def _take_in(self, member: _Member, *, is_wanted: bool) -> None:
        if is_wanted:
            self._members[member.worker_id] = member
        else:
            member.is_abandoned = True
            self._abandoned.append(member)
            self._dismiss(member)
        member.taken_in.set()

    def send_fill(self, worker_id: int, incarnation: int, fill: msg.Fill, segment: Segment | None) -> WorkerBroken | None:
        member = self._current(worker_id, incarnation)
        if member is not None:
            # The mapping itself: the ring may have let go of its segment by the time a late thread gets to it.
            member.inbox.put((fill, segment.mapping if segment is not None else None))
        return None

    def send_call(self, worker_id: int, incarnation: int, call: msg.Call) -> WorkerBroken | None:
        member = self._current(worker_id, incarnation)
        if member is not None:
            member.inbox.put(call)
        return None

    def send_cancel(self, worker_id: int, incarnation: int, cancel: msg.Cancel, running: int) -> None:
        member = self._current(worker_id, incarnation)
        if member is not None:
            if cancel.serial == running >= 0:
                member.page.cancel(cancel.serial)
            elif cancel.serial >= 0:
                member.cancelled.add(cancel.serial)
            member.inbox.put(cancel)

    def drop_segment(self, segment_id: int) -> None:
        """Threads write through the ring's own mapping."""

    def drop_session(self, session_id: int) -> None:
        for member in self._members.values():
            member.inbox.put(msg.DropSession(session_id))

    def kill_worker(self, worker_id: int, incarnation: int, *, dump: bool) -> None:
        """Have a thread leave after its batch; it cannot be made to."""
        member = self._current(worker_id, incarnation)
        if member is not None:
            if dump:
                _write_stack(member)
            self._dismiss(member)

    def abandon_worker(self, worker_id: int, incarnation: int) -> None:
        """Go on without a thread that does not end."""
        member = self._current(worker_id, incarnation)
        if member is not None:
            self._abandon(member)

    def _abandon(self, member: _Member) -> None:
        member.is_abandoned = True
        self._abandoned.append(member)
        del self._members[member.worker_id]
        self._dismiss(member)
        self._shared.epochs.leave(member)

    @staticmethod
    def _dismiss(member: _Member) -> None:
        member.is_leaving = True
        member.page.cancel(member.page.view().serial)  # between two samples
        member.inbox.put(None)

    def kill_all(self) -> list[tuple[int, int]]:
        """Abandon every thread; return those that may still be writing."""
        for member in list(self._members.values()):
            self._abandon(member)
        return [(member.worker_id, member.incarnation) for member in self._abandoned]

    def stop(self, stop_s: float) -> None:
        """Have every thread leave, and wait for that a little."""
        members = [*self._members.values(), *self._abandoned]
        for member in members:
            self._dismiss(member)
        self._shared.epochs.wake()
        deadline_s = time.monotonic() + stop_s
        for member in members:
            assert member.thread is not None
            member.thread.join(max(0.0, deadline_s - time.monotonic()))
            if member.is_over:
                self._remove(member)
            elif not member.is_abandoned:
                logger.warning("%s is still inside the dataset's code after %.1f s; it is left behind", who(member), stop_s)
        self._shared.forget()

    def close(self) -> None:
        """Let go of the selector."""
        with self._bell:
            self._is_closed = True
        self._poll.close()

    def who(self, worker_id: int) -> str:
        """What the operating system calls a worker that runs."""
        return who(self._members[worker_id])

    def pids(self) -> list[int]:
        return []

    def _current(self, worker_id: int, incarnation: int) -> _Member | None:
        member = self._members.get(worker_id)
        return member if member is not None and member.incarnation == incarnation else None


def who(member: _Member) -> str:
    return f"thread {member.thread.native_id}" if member.thread is not None else "thread"


def _write_stack(member: _Member) -> None:
    """Put the thread's Python stack where a process would have left its own."""
    frames = sys._current_frames()
    frame = frames.get(member.thread.ident) if member.thread is not None and member.thread.ident is not None else None
    member.page.write_trace("".join(traceback.format_stack(frame)) if frame is not None else "")


class _SharedDataset:
    """The one dataset of all threads: the first that asks builds it."""

    def __init__(self, build: LocalBuild, info: WorkerInfo) -> None:
        self.build = build
        self.info = info  # what holds for every worker: seed, ranks, number of workers
        self.epochs = _Epochs()
        self.is_warned = False  # of a dataset that draws from the global generators
        self._lock = threading.Lock()
        self._built: list[Any] = []
        self._failure: BaseException | None = None

    def get(self, info: WorkerInfo, page: StatusPage) -> Any:
        """Return the dataset. Raises what its construction raised."""
        page.stage(status.BUILDING)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._built:
                seeder = Seeder(info.seed)
                try:
                    with LENDING, AsWorker(info, seeder):
                        seeder.for_build()
                        dataset = self.build.dataset()
                    check_built(dataset)
                except BaseException as error:
                    self._failure = error
                    raise
                self.epochs.dataset = dataset
                self._built.append(dataset)
            return self._built[0]

    def forget(self) -> None:
        """Nobody is to use the dataset any more."""
        self._built.clear()
        self._failure = None  # its traceback holds frames
        self.epochs.dataset = None


class _Epochs:
    """The epoch that the shared dataset is in. Batches of two epochs are never made at the same time."""

    def __init__(self) -> None:
        self.dataset: Any = None
        self._changed = threading.Condition()
        self._inside: dict[_Member, int] = {}
        self._caller: _Member | None = None  # who runs a method
        self._epoch: int | None = None

    def enter(self, member: _Member, epoch: int) -> bool:
        """Wait until no batch of another epoch is being made, nor a method called; returns whether this epoch is new."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        with self._changed:
            if set_epoch is None:
                self._wait(member, lambda: self._caller is not None)
                self._inside[member] = -1
                return False
            self._wait(member, lambda: self._caller is not None or any(other != epoch for other in self._inside.values()))
            is_new = self._epoch != epoch
            if is_new:
                set_epoch(epoch)
                self._epoch = epoch  # only now: if it failed, no batch of this epoch may pass
            self._inside[member] = epoch
        return is_new

    def _wait(self, member: _Member, is_busy: Callable[[], bool]) -> None:
        while not member.is_leaving and is_busy():
            self._changed.wait()
        if member.is_leaving:
            raise SystemExit(0)

    def call_once(self, member: _Member, call: msg.Call, done: dict[int, msg.Called], run: _RunCall) -> msg.Called:
        """Run a method between batches; whoever comes later, or after a restart, gets the same answer."""
        with self._changed:
            self._wait(member, lambda: self._caller is not None or bool(self._inside))
            if call.call_id in done:
                return done[call.call_id]
            self._caller = member
        try:
            answer = done[call.call_id] = run(call)
        finally:
            self.leave(member)
        return answer

    def wake(self) -> None:
        """Have whoever waits look whether it is to leave."""
        with self._changed:
            self._changed.notify_all()

    def leave(self, member: _Member) -> None:
        """The batch is made, or its thread is not waited for any more."""
        with self._changed:
            if self._caller is member:
                self._caller = None
            self._inside.pop(member, None)
            self._changed.notify_all()


class _InShared(Filler):
    """What differs where other threads read the same dataset."""

    epochs: _Epochs
    member: _Member
    ran: dict[int, msg.Called]

    def call(self, call: msg.Call) -> msg.Called:
        return self.epochs.call_once(self.member, call, self.ran, super().call)

    def _set_epoch(self, epoch: int) -> None:
        self._info.epoch = epoch
        self._doing = "set_epoch"
        if self.epochs.enter(self.member, epoch) and self._writer is not None:
            self._writer.forget()


class _SharedFiller(_InShared, Filler):
    """Samples of a dataset that others read, too."""


class _SharedStreamFiller(_InShared, StreamFiller):
    """A stream of its own, from a dataset that others iterate over, too."""


class _Unseeded(Seeder):
    """Leaves the global generators alone: they are not this thread's."""

    def for_position(self, epoch: int, position: int, place: int = 0) -> None:
        """Seed nothing."""


class _Run:
    """The main program of one thread."""

    def __init__(self, member: _Member, shared: _SharedDataset, say: Callable[[_Member, Fact], None]) -> None:
        self._member = member
        self._shared = shared
        self._say_fact = say

    def __call__(self) -> None:
        member = self._member
        member.taken_in.wait()
        returncode: int | None = 0
        try:
            filler = None if member.is_leaving else self._build()
            if filler is not None:
                self._serve(filler)
        except SystemExit as left:
            returncode = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException as error:
            reason = f"{type_name(error)}: {safe_text(error)}\n{format_traceback(error)}"
            self._say_fact(member, WorkerBroken(member.worker_id, member.incarnation, reason))
            returncode = None
        finally:
            set_thread_info(None)
            self._shared.epochs.leave(member)
            view = member.page.view()
            sample = view.sample if view.is_fetching else -1
            death = Death(returncode, view.serial, sample, view.stage, view.trace)
            self._say_fact(member, WorkerExited(member.worker_id, member.incarnation, death))
            member.is_over = True

    def _say(self, message: msg.FromWorker) -> None:
        self._say_fact(self._member, (self._member.worker_id, self._member.incarnation, message))

    def _build(self) -> _InShared | None:
        member, shared = self._member, self._shared
        info = dataclasses.replace(shared.info, id=member.worker_id)
        set_thread_info(info)
        try:
            dataset = info.dataset = shared.get(info, member.page)
            member.page.stage(status.INIT)
            with LENDING, AsWorker(info, Seeder(info.seed)):
                shared.build.init(member.worker_id)  # it may seed generators, as it would in a process of its own
            facts = {**describe(dataset), "digests": {}}
            info.is_consulted = False  # what was asked while the one dataset was built says nothing about its streams
            parts = (dataset, shared.build.collator(), _Unseeded(info.seed), info, member.page)
            filler: _InShared
            if facts["iterable"]:
                size, drop_last = shared.build.batch_size, shared.build.drop_last
                is_alone = info.num_workers == 1 and member.incarnation == 1  # one that was left alone may still read
                filler = _SharedStreamFiller(*parts, batch_size=size, drop_last=drop_last, is_alone=is_alone)
            else:
                filler = _SharedFiller(*parts)
            filler.epochs, filler.member, filler.ran = shared.epochs, member, shared.build.done
        except SystemExit:
            raise
        except BaseException as error:
            stage, text = member.page.view().stage, format_traceback(error)
            self._say(msg.StartFailed(msg.PROTOCOL_VERSION, stage, type_name(error), safe_text(error), text))
            return None
        member.page.stage(status.IDLE)
        self._say(msg.Ready(msg.PROTOCOL_VERSION, facts))
        return filler

    def _serve(self, filler: _InShared) -> None:
        member = self._member
        while (said := member.inbox.get()) is not None and not member.is_leaving:
            if isinstance(said, msg.Cancel):
                filler.cancel(said.session_id, said.batch_id)
                continue
            if isinstance(said, msg.Call):
                self._say(filler.call(said))
                continue
            if isinstance(said, msg.DropSession):
                filler.drop_session(said.session_id)
                continue
            fill, mapping = said
            if fill.serial in member.cancelled:
                member.cancelled.discard(fill.serial)
                self._say(msg.Cancelled(fill.serial, fill.generation))
                continue
            self._fill(filler, fill, mapping)

    def _fill(self, filler: _InShared, fill: msg.Fill, mapping: mmap.mmap | None) -> None:
        # While the first batch of an epoch is made its consumer waits for it, and does not draw.
        watch = fill.batch_id == 0 and not self._shared.is_warned
        before = _generators() if watch else None
        try:
            answer = filler.fill(fill, self._slot(fill, mapping))
        finally:
            self._shared.epochs.leave(self._member)
        if watch and _generators() != before and not self._shared.is_warned:
            self._shared.is_warned = True
            logger.warning(
                "the dataset draws from the global generators of random, numpy or torch, which threads share with the training "
                "and no seed can make reproducible: draw from ringloader.get_worker_info().rng, or use worker_backend='process'"
            )
        if filler.preface is not None:
            self._say(filler.preface)
        self._say(answer)
        filler.done(made=isinstance(answer, msg.Filled))

    def _slot(self, fill: msg.Fill, mapping: mmap.mmap | None) -> np.ndarray[Any, Any] | None:
        if mapping is None or fill.slot_id == msg.NO_SLOT or not fill.capacity:
            return None
        place = (fill.segment_id, fill.offset)
        if place not in self._member.populated:
            self._member.populated.add(place)
            self._member.page.stage(status.POPULATING)
            segments.populate(mapping, fill.offset, fill.capacity)
        return np.frombuffer(mapping, np.uint8, fill.capacity, fill.offset)


def _generators() -> tuple[Any, ...]:
    """The state of the global generators of those modules that are imported."""
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    legacy = numpy_random.get_state() if numpy_random is not None else ()
    return (
        random.getstate(),
        tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in legacy),
        torch.default_generator.get_state().numpy().tobytes() if torch is not None else b"",
    )
