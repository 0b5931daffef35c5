"""The thread backend: workers that are threads of this process, over one dataset that they share.

Owns the threads of one loader (thread_worker.py), each with a queue of Fills and a status page. Same scheduler, ring and filler
as worker processes. A thread cannot be killed: one that has had its time is told to leave after its batch, left alone with its
slots until it does, and replaced at once. Must not wait for a worker while the pump's lock is held.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from ringloader._core import messages as msg
from ringloader._core.events import Death, WorkerBroken, WorkerExited
from ringloader._core.views import WorkerView
from ringloader._runtime.locking import holding
from ringloader._runtime.pool import Fact
from ringloader._runtime.segment import Segment
from ringloader._runtime.sources import LocalBuild
from ringloader._runtime.status import StatusPage
from ringloader._runtime.thread_worker import Member, Run, SharedDataset, who, write_stack
from ringloader._runtime.worker_info import WorkerInfo

logger = logging.getLogger("ringloader")


class ThreadPool:
    """Worker threads behind the backend interface (see pump.py)."""

    is_inline = False
    shares_dataset = True
    kills_at_once = True  # which is a word to the thread, no wait
    needs_drain = False
    recycles = False
    unreaped_s = 0.0  # there is nothing to wait for: a thread ends when the user's code does

    def __init__(self, build: LocalBuild, info: WorkerInfo, wake_fd: int) -> None:
        self._shared = SharedDataset(build, info)
        self._wake_fd = wake_fd
        self._poll = select.epoll()
        self._poll.register(wake_fd, select.EPOLLIN)
        self._members: dict[int, Member] = {}
        self._abandoned: list[Member] = []
        self._said: deque[tuple[Member, Fact]] = deque()
        # So that a thread that outlives the pool does not write to a descriptor that is somebody else's by then.
        self._bell = threading.RLock()
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

    def observe(self, worker_id: int, incarnation: int) -> WorkerView | None:
        member = self._current(worker_id, incarnation)
        return member.page.view() if member is not None else None

    def _say(self, member: Member, fact: Fact) -> None:
        """Called by the worker's thread."""
        self._said.append((member, fact))
        holding(self._bell, self._ring)

    def _ring(self) -> None:
        if not self._is_closed:
            os.eventfd_write(self._wake_fd, 1)

    def _remove(self, member: Member) -> None:
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
            member = Member(worker_id, incarnation, StatusPage(page_fd))
            run = Run(member, self._shared, self._say)
            member.thread = threading.Thread(target=run, name=f"ringloader-worker-{worker_id}", daemon=True)
            member.thread.start()
        except (OSError, RuntimeError) as error:
            death = Death(None, reason=str(error))
            return lambda is_wanted: WorkerExited(worker_id, incarnation, death)
        finally:
            if page_fd >= 0:
                os.close(page_fd)
        return lambda is_wanted: self._take_in(member, is_wanted=is_wanted)

    def _take_in(self, member: Member, *, is_wanted: bool) -> None:
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
                write_stack(member)
            self._dismiss(member)

    def stop_worker(self, worker_id: int, incarnation: int) -> None:
        raise AssertionError("a thread is never replaced by a successor")

    def abandon_worker(self, worker_id: int, incarnation: int) -> None:
        """Go on without a thread that does not end."""
        member = self._current(worker_id, incarnation)
        if member is not None:
            self._abandon(member)

    def _abandon(self, member: Member) -> None:
        member.is_abandoned = True
        self._abandoned.append(member)
        del self._members[member.worker_id]
        self._dismiss(member)
        self._shared.epochs.leave(member)

    @staticmethod
    def _dismiss(member: Member) -> None:
        member.is_leaving = True
        member.page.cancel(member.page.view().serial)  # between two samples
        member.inbox.put(None)

    def kill_all(self) -> list[tuple[int, int]]:
        """Abandon every thread; return those that may still be writing."""
        for member in list(self._members.values()):
            self._abandon(member)
        return [(member.worker_id, member.incarnation) for member in self._abandoned]

    def end_soon(self) -> None:
        pass

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
        holding(self._bell, setattr, self, "_is_closed", True)
        self._poll.close()

    def who(self, worker_id: int, incarnation: int) -> str:
        """What the operating system calls a worker that runs."""
        return who(self._members[worker_id])

    def pids(self) -> list[int]:
        return []

    def _current(self, worker_id: int, incarnation: int) -> Member | None:
        member = self._members.get(worker_id)
        return member if member is not None and member.incarnation == incarnation else None
