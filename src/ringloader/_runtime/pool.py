"""Worker processes as a backend: facts of sockets and processes out, messages and signals in.

Owns the processes of one loader, one pipe and one status page each, and which segments each has mapped. It judges nothing:
what a death or an answer means is the scheduler's. Workers are started, killed and reaped in bulk by the watching thread,
because a worker dies with the thread that started it (parent-death signal). Must not call torch or user code.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ringloader._core import messages as msg
from ringloader._core.events import Death, WorkerBroken, WorkerExited
from ringloader._core.messages import Message
from ringloader._core.policy import UNREAPED_S
from ringloader._core.views import WorkerView
from ringloader._runtime.causes import OomCounts, likely_cause, start_failure
from ringloader._runtime.memory import private_nbytes
from ringloader._runtime.pipe import Closed, NonBlockingPipe
from ringloader._runtime.process import WorkerProcess
from ringloader._runtime.segment import Segment
from ringloader._runtime.status import StatusPage
from ringloader._runtime.template import Template
from ringloader.errors import ProtocolError

# Deadlines of a polite end: idle workers leave within milliseconds; one inside user code gets a chance, then no choice.
STOP_S = 1.0
_TERM_S = 0.5
_KILL_S = 1.0

Fact = tuple[int, int, Message] | WorkerExited | WorkerBroken


@dataclass(slots=True, eq=False)
class _Member:
    """One running incarnation."""

    worker_id: int
    incarnation: int
    process: WorkerProcess
    pipe: NonBlockingPipe
    mapped: set[int] = field(default_factory=set)  # segments this incarnation has got descriptors for
    is_closed: bool = False  # end of file was seen
    is_abandoned: bool = False  # SIGKILL did not end it; it is watched so that its slots come back if it ends after all
    waits_for_room: bool = False  # the selector also watches for writability


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told at its start, apart from who it is.

    `descriptors` go with it: of the pickled dataset, if there is one, and of what the dataset refers to in shared memory.
    `torch_origin`: the file of the torch that workers are going to import, "" where that is not known.
    """

    settings: dict[str, object]
    hash_seed: int
    descriptors: tuple[int, ...] = ()
    torch_origin: str = ""


class ProcessPool:
    """Worker processes behind the backend interface (see pump.py)."""

    is_inline = False
    shares_dataset = False
    kills_at_once = False
    unreaped_s = UNREAPED_S
    needs_drain = False  # some process has no pidfd, so its end shows only by looking
    recycles = True

    def __init__(self, settings: WorkerSettings, wake_fd: int, *, measures_memory: bool = False) -> None:
        self._measures_memory = measures_memory
        self._oom_counts = OomCounts()
        self._settings = settings
        self._template = Template(settings.hash_seed, settings.torch_origin, settings.settings["sys_path"])  # type: ignore[arg-type]
        self._wake_fd = wake_fd
        self._members: dict[tuple[int, int], _Member] = {}  # by worker id and incarnation
        self._by_fd: dict[int, _Member] = {}
        self._abandoned: list[_Member] = []
        self._poll = select.epoll()
        self._poll.register(wake_fd, select.EPOLLIN)

    # --- facts ----------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Block until something may have happened; return what the kernel said, for `collect`."""
        return self._poll.poll(-1 if timeout_s is None else max(0.0, timeout_s))

    def collect(self, ready: Iterable[tuple[int, int]]) -> list[Fact]:
        """Turn readiness into facts, in order."""
        facts: list[Fact] = []
        ended: list[_Member] = []
        for fd, events in ready:
            if fd == self._wake_fd:
                _drain_eventfd(fd)
                continue
            member = self._by_fd.get(fd)
            if member is None:
                continue
            if fd == member.process.pidfd:
                ended.append(member)
                continue
            if events & select.EPOLLOUT:
                member.pipe.flush()
                self._watch(member)
            if events & ~select.EPOLLOUT:
                facts += self._read(member)
        for member in ended:
            facts += self._end(member)
        return facts

    def drain(self) -> list[Fact]:
        """Read everything that has arrived, and notice every process that has ended."""
        facts: list[Fact] = []
        self._oom_counts.look()
        for member in list(self._members.values()):
            if not member.is_closed:
                facts += self._read(member, drain=True)
            if member.process.reap(wait=False):
                facts += self._end(member)
        for member in list(self._abandoned):
            if member.process.reap(wait=False):
                facts += self._end(member)
        return facts

    def observe(self, worker_id: int, incarnation: int) -> WorkerView | None:
        """What a worker is doing, None if it is not there."""
        member = self._members.get((worker_id, incarnation))
        if member is None:
            return None
        view = member.process.page.view()
        if self._measures_memory:
            return dataclasses.replace(view, private_nbytes=private_nbytes(member.process.pid))
        return view

    def _read(self, member: _Member, *, drain: bool = False) -> list[Fact]:
        facts: list[Fact] = []
        try:
            for message, fds in member.pipe.receive(drain=drain):
                for fd in fds:
                    os.close(fd)
                facts.append((member.worker_id, member.incarnation, message))
        except Closed:
            # The end of file alone proves nothing: a grandchild may hold the socket, and a death is told by the pidfd.
            self._unwatch(member.pipe.fileno())
            member.is_closed = True
        except ProtocolError as error:
            self._unwatch(member.pipe.fileno())
            member.is_closed = True
            facts.append(WorkerBroken(member.worker_id, member.incarnation, str(error)))
        return facts

    def _end(self, member: _Member) -> list[Fact]:
        """The process is gone: first what it still said, then its end."""
        if not member.process.reap(wait=False):
            return []
        facts: list[Fact] = [] if member.is_closed or member.is_abandoned else self._read(member, drain=True)
        view = member.process.page.view()
        code = member.process.returncode
        is_oom = self._oom_counts.have_grown() if code == -signal.SIGKILL else None
        death = Death(
            code,
            view.serial,
            view.blamed,
            view.stage,
            view.trace,
            num_samples=view.num_samples,
            cause=likely_cause(code, is_oom=is_oom, trace=view.trace),
            is_oom=bool(is_oom),
        )
        self._remove(member)
        return [*facts, WorkerExited(member.worker_id, member.incarnation, death)]

    # --- commands -------------------------------------------------------------------------------------------------------

    def start_worker(self, worker_id: int, incarnation: int) -> Callable[[bool], WorkerExited | None]:
        """Start a process, outside any lock; the function returned takes it in, or ends it where it is not wanted any more.
        Call that under the pump's lock."""
        page_fd = -1
        try:
            page_fd = StatusPage.create()
            page = StatusPage(page_fd)
            process = WorkerProcess.start(self._settings.hash_seed, page, self._template)
        except OSError as error:
            if page_fd >= 0:
                os.close(page_fd)
            death = Death(None, reason=start_failure(error))
            return lambda is_wanted: WorkerExited(worker_id, incarnation, death)
        member = _Member(worker_id, incarnation, process, NonBlockingPipe(process.sock))
        setup = msg.Setup(msg.PROTOCOL_VERSION, worker_id, incarnation, os.getpid(), self._settings.settings)
        member.pipe.send(setup, [page_fd, *self._settings.descriptors])
        os.close(page_fd)
        return lambda is_wanted: self._take_in(member, is_wanted=is_wanted)

    def _take_in(self, member: _Member, *, is_wanted: bool) -> None:
        if not is_wanted:
            member.process.kill()
            member.process.reap(wait=True)
            self._remove(member)
            return
        self._members[member.worker_id, member.incarnation] = member
        self._by_fd[member.pipe.fileno()] = member
        self._poll.register(member.pipe.fileno(), select.EPOLLIN)
        self._watch(member)
        if member.process.pidfd >= 0:
            self._by_fd[member.process.pidfd] = member
            self._poll.register(member.process.pidfd, select.EPOLLIN)
        else:
            self.needs_drain = True
            # A descriptor of its own: the thread may outlive the engine, whose number would be somebody else's by then.
            arguments = (member.process.pid, os.dup(self._wake_fd))
            threading.Thread(target=_wait_for, args=arguments, name="ringloader-wait", daemon=True).start()

    def send_fill(self, worker_id: int, incarnation: int, fill: msg.Fill, segment: Segment | None) -> WorkerBroken | None:
        """Send a Fill, with the segment's descriptor if this incarnation does not have it yet."""
        member = self._current(worker_id, incarnation)
        if member is None:
            return None
        fds = []
        if segment is not None and fill.segment_id not in member.mapped:
            fill.attach.append([fill.segment_id, segment.nbytes])
            fds.append(segment.fd)
            member.mapped.add(fill.segment_id)
        try:
            self._send(member, fill, fds)
        except ProtocolError as error:
            return WorkerBroken(worker_id, incarnation, str(error))
        return None

    def send_cancel(self, worker_id: int, incarnation: int, cancel: msg.Cancel, running: int) -> None:
        member = self._current(worker_id, incarnation)
        if member is not None:
            if cancel.serial == running >= 0:
                member.process.page.cancel(cancel.serial)
            self._send(member, cancel, [])

    def send_call(self, worker_id: int, incarnation: int, call: msg.Call) -> WorkerBroken | None:
        """Have a worker run a method of its dataset."""
        member = self._current(worker_id, incarnation)
        if member is None:
            return None
        try:
            self._send(member, call, [])
        except ProtocolError as error:
            return WorkerBroken(worker_id, incarnation, str(error))
        return None

    def drop_segment(self, segment_id: int) -> None:
        """Have every worker that mapped the segment unmap it."""
        for member in self._members.values():
            if segment_id in member.mapped:
                member.mapped.discard(segment_id)
                self._send(member, msg.DropSegment(segment_id), [])

    def drop_session(self, session_id: int) -> None:
        """Have every worker let go of a session's streams."""
        for member in self._members.values():
            self._send(member, msg.DropSession(session_id), [])

    def kill_worker(self, worker_id: int, incarnation: int, *, dump: bool) -> None:
        """Kill, after taking the stack if asked; may take half a second, so call it outside any lock."""
        member = self._current(worker_id, incarnation)
        if member is not None:
            if dump:
                member.process.dump_stack()
            member.process.kill()

    def stop_worker(self, worker_id: int, incarnation: int) -> None:
        """Tell a worker to leave after what it was told before."""
        member = self._current(worker_id, incarnation)
        if member is not None:
            self._send(member, msg.Stop(msg.PROTOCOL_VERSION), [])

    def abandon_worker(self, worker_id: int, incarnation: int) -> None:
        """Stop waiting for a process that cannot be reaped."""
        member = self._current(worker_id, incarnation)
        if member is not None:
            member.is_abandoned = True
            self._abandoned.append(member)
            self._unwatch(member.pipe.fileno())
            del self._members[worker_id, incarnation]

    def kill_all(self) -> list[tuple[int, int]]:
        """Kill and reap every worker, and forget what they had sent. Returns who could not be ended, and may still write."""
        members = list(self._members.values())
        for member in members:
            member.process.kill()
        deadline_s = time.monotonic() + _KILL_S
        self._reap_until(members, deadline_s)
        for member in members:
            if member.process.reap(wait=False):
                self._remove(member)
            else:
                self.abandon_worker(member.worker_id, member.incarnation)
        return [(member.worker_id, member.incarnation) for member in self._abandoned]

    def stop(self, stop_s: float) -> None:
        """End every worker: politely, then by SIGTERM, then by SIGKILL, each with a deadline."""
        members = list(self._members.values())
        for member in members:
            member.pipe.send(msg.Stop(msg.PROTOCOL_VERSION))
        self._template.close()  # while they leave
        for wait_s, number in ((stop_s, signal.SIGTERM), (min(_TERM_S, stop_s), signal.SIGKILL), (_KILL_S, 0)):
            if self._reap_until(members, time.monotonic() + wait_s) or not number:
                break
            for member in members:
                member.process.signal(number)
        # Those that could not be ended, too: nobody will ask for them again.
        self._reap_until(self._abandoned, time.monotonic())
        for member in [*members, *self._abandoned]:
            self._remove(member)

    def end_soon(self) -> None:
        """The loader is closed or gone: wait for nothing that only later workers would need."""
        self._template.is_ending = True

    def close(self) -> None:
        """Let go of the selector and of the template; workers must be gone."""
        self._poll.close()
        self._template.close()

    def who(self, worker_id: int, incarnation: int) -> str:
        """What the operating system calls a worker that runs."""
        return f"pid {self._members[worker_id, incarnation].process.pid}"

    def pids(self) -> list[int]:
        """Process ids of the workers that run now, by worker id."""
        return [member.process.pid for _, member in sorted(self._members.copy().items())]

    # --- details --------------------------------------------------------------------------------------------------------

    def _current(self, worker_id: int, incarnation: int) -> _Member | None:
        return self._members.get((worker_id, incarnation))

    def _send(self, member: _Member, message: Message, fds: list[int]) -> None:
        member.pipe.send(message, fds)
        if member.pipe.is_backed_up:
            self._watch(member)

    def _watch(self, member: _Member) -> None:
        """Watch for writability exactly while something waits to be sent."""
        backed_up = member.pipe.is_backed_up
        if backed_up != member.waits_for_room and not member.is_closed:
            member.waits_for_room = backed_up
            self._poll.modify(member.pipe.fileno(), select.EPOLLIN | (select.EPOLLOUT if backed_up else 0))

    def _unwatch(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            try:
                self._poll.unregister(fd)
            except OSError:
                pass  # closed already

    def _remove(self, member: _Member) -> None:
        self._unwatch(member.pipe.fileno())
        if member.process.pidfd >= 0:
            self._unwatch(member.process.pidfd)
        member.pipe.close()
        member.process.close()
        if member in self._abandoned:
            self._abandoned.remove(member)
        if self._current(member.worker_id, member.incarnation) is member:
            del self._members[member.worker_id, member.incarnation]

    @staticmethod
    def _reap_until(members: list[_Member], deadline_s: float) -> bool:
        """Reap what ends before the deadline; True when all have."""
        waiting = [member for member in members if not member.process.reap(wait=False)]
        poll = select.poll()
        for member in waiting:
            if member.process.pidfd >= 0:
                poll.register(member.process.pidfd, select.POLLIN)
        while waiting and time.monotonic() < deadline_s:
            # Without a pidfd there is nothing to wait on but time.
            step_s = deadline_s - time.monotonic() if all(m.process.pidfd >= 0 for m in waiting) else 0.01
            for fd, _ in poll.poll(max(0.0, step_s) * 1000):
                poll.unregister(fd)
            waiting = [member for member in waiting if not member.process.reap(wait=False)]
        return not waiting


def _wait_for(pid: int, wake_fd: int) -> None:
    """Where there is no pidfd: tell the selector when a process has ended, without collecting its status."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        pass
    os.eventfd_write(wake_fd, 1)
    os.close(wake_fd)


def _drain_eventfd(fd: int) -> None:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        pass
