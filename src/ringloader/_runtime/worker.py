"""The main program of a worker process.

Owns its life: take the handshake, build the dataset, answer Fills one after the other, leave when told, when the pipe ends or
with its parent. First acts: die with the thread that started it, unblock signals. It answers before it looks for more, and
reads everything that waits before it begins a Fill, so a Cancel overtakes. stdout and stderr are the user's. Must import
light: no torch unless the user's code does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import socket
import sys
from collections import deque
from typing import Any

import numpy as np

from ringloader._core import messages as msg
from ringloader._core import protocol
from ringloader._core.digests import attribute_digests
from ringloader._runtime import forking, status
from ringloader._runtime.filler import Filler
from ringloader._runtime.lacks import translate
from ringloader._runtime.pages import Mapping, map_file
from ringloader._runtime.pipe import BlockingPipe, Closed
from ringloader._runtime.seeding import LateImports, Seeder
from ringloader._runtime.status import DUMP_SIGNAL, StatusPage
from ringloader._runtime.words import LAST_WORDS, format_traceback, run_user_code, safe_text, type_name
from ringloader._runtime.worker_info import TORCH_MODULE, WorkerInfo, set_worker_info, tell_torch
from ringloader._specs import handles
from ringloader.errors import ProtocolError

_PR_SET_PDEATHSIG = 1


def main(fd: int, setup_fd: int = -1, fds: tuple[int, ...] = ()) -> None:
    """Run a worker on the socket `fd` until it is not needed any more.

    `setup_fd`: a file with the first message, which came with `fds`, for one that has begun again.
    """
    _tie_to_parent()
    # Closed by us, not by the end of the interpreter, which would warn of it under -W error or -X dev.
    with socket.socket(fileno=fd) as sock:
        try:
            worker = _Worker(BlockingPipe(sock), fd)
            if setup_fd >= 0:
                worker.resume(setup_fd, fds)
            worker.run()
        except Closed:
            pass  # the parent is gone or has let go of us: nobody is left to tell
        except SystemExit as left:
            worker.explain("", left)
            raise
        except Exception as error:
            # What this process cannot go on after: no descriptors, no memory, a message that is none. The parent tells.
            worker.explain(f"{LAST_WORDS}{type_name(error)}: {safe_text(error)}\n", error)
            sys.exit(1)


def _tie_to_parent() -> None:
    """Die with the parent, however it dies, and take signals as a fresh process does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class _Worker:
    """One incarnation."""

    def __init__(self, pipe: BlockingPipe, fd: int) -> None:
        self._pipe = pipe
        self._fd = fd
        self._pid = os.getpid()
        self._inbox: deque[tuple[msg.Message, list[int]]] = deque()
        self._segments: dict[int, Mapping] = {}
        self._populated: dict[tuple[int, int], int] = {}
        self._page: StatusPage | None = None

    def explain(self, words: str, error: BaseException | None = None) -> None:
        """This process is going to end: leave word of why, and where."""
        if self._page is not None and os.getpid() == self._pid:
            self._page.write_trace(words + (format_traceback(error) if error is not None else ""))

    def resume(self, setup_fd: int, fds: tuple[int, ...]) -> None:
        """Take up what this process was told before it began again."""
        with open(setup_fd, "rb") as file:
            ((setup, _),) = protocol.Decoder().feed(file.read())
        for each in (self._fd, *fds):
            os.set_inheritable(each, False)
        self._inbox.append((setup, list(fds)))

    def _begin_again(self, setup: msg.Setup, fds: list[int]) -> None:
        """Become a fresh interpreter, on the same socket: what failed to import may have to come before torch.

        Returns where that cannot be done.
        """
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        try:
            setup_fd = os.memfd_create("ringloader-setup", 0)
            with open(setup_fd, "wb", closefd=False) as file:
                file.write(protocol.encode(setup, len(fds)))
            os.lseek(setup_fd, 0, os.SEEK_SET)
            for each in (self._fd, *fds):
                os.set_inheritable(each, True)
            arguments = f"{self._fd}, {setup_fd}, {tuple(fds)}"
            program = f"import sys; sys.path.append({root!r}); from ringloader._runtime.worker import main; main({arguments})"
            if self._page is not None:
                self._page.stage(status.STARTING)  # from here on it heeds no signals
            os.execv(sys.executable, [*sys.orig_argv[:-1], program])
        except OSError:
            if self._page is not None:
                self._page.stage(status.IMPORTING)

    def run(self) -> None:
        setup, fds = self._next()
        if not isinstance(setup, msg.Setup) or setup.version != msg.PROTOCOL_VERSION:
            raise ProtocolError(f"the first message must be a Setup of version {msg.PROTOCOL_VERSION}, got {setup!r:.100}")
        if os.getppid() != setup.parent_pid:
            raise Closed  # it died before we were tied to it
        page = self._page = StatusPage(fds[0])
        self._catch_faults(fds[0])
        built = self._build(setup, fds[0], fds[1:], page)
        if built is None:
            return
        self._filler, facts = built
        page.stage(status.IDLE)
        self._pipe.send(msg.Ready(msg.PROTOCOL_VERSION, facts))
        self._serve()

    def _catch_faults(self, page_fd: int) -> None:
        """Have Python stacks written behind the status page: on a fatal signal, and when the parent asks before a kill."""
        # The bare descriptor, open until the very end: a file object would be closed, with a warning, before faults are over.
        os.lseek(page_fd, status.TRACE_OFFSET, os.SEEK_SET)
        faulthandler.enable(page_fd, all_threads=True)
        os.register_at_fork(after_in_child=faulthandler.disable)
        faulthandler.register(DUMP_SIGNAL, page_fd, all_threads=True)

    def _build(
        self, setup: msg.Setup, page_fd: int, payload: list[int], page: StatusPage
    ) -> tuple[Filler, dict[str, object]] | None:
        try:
            return run_user_code(_build, setup, payload, page)
        except BaseException as error:
            if isinstance(error, SystemExit):
                raise
            stage = page.view().stage
            if forking.has_torch and stage == status.STAGES[status.IMPORTING] and not self._inbox:
                self._begin_again(setup, [page_fd, *payload])
            text = format_traceback(error)
            self._pipe.send(msg.StartFailed(msg.PROTOCOL_VERSION, stage, type_name(error), safe_text(error), text))
            return None

    def _serve(self) -> None:
        while True:
            message, fds = self._next()
            if isinstance(message, msg.Fill):
                self._fill(message, fds)
                if self._filler.is_tainted:
                    self.explain(f"{LAST_WORDS}write_batch kept memory of a slot, which ends with this process\n")
                    return  # its views end with this process; another one goes on
            elif isinstance(message, msg.DropSegment):
                self._drop(message.segment_id)
            elif isinstance(message, msg.Cancel):
                self._filler.cancel(message.session_id, message.batch_id)
            elif isinstance(message, msg.Call):
                self._call(message)
            elif isinstance(message, msg.DropSession):
                self._filler.drop_session(message.session_id)
            elif isinstance(message, msg.Stop):
                return
            else:
                raise ProtocolError(f"a worker got a {type(message).__name__} message")

    def _call(self, call: msg.Call) -> None:
        if self._page is not None:
            self._page.stage(status.CALLING)
        answer = self._filler.call(call)
        if self._page is not None:
            self._page.stage(status.IDLE)
        try:
            self._pipe.send(answer)
        except ProtocolError as error:
            self._pipe.send(msg.Called(call.call_id, "ProtocolError", str(error), "", b""))

    def _next(self) -> tuple[msg.Message, list[int]]:
        """The next message; everything that waits is read first, and a Cancel takes its Fill out of the queue."""
        found = self._pipe.receive(wait=not self._inbox)
        for message, fds in found:
            if isinstance(message, msg.Cancel) and self._cancel_queued(message):
                continue
            self._inbox.append((message, fds))
        return self._inbox.popleft() if self._inbox else self._next()

    def _cancel_queued(self, cancel: msg.Cancel) -> bool:
        for entry in self._inbox:
            fill, fds = entry
            if isinstance(fill, msg.Fill) and fill.serial == cancel.serial:
                self._map(fill, fds)  # its descriptors are ours to keep: later Fills count on them
                self._inbox.remove(entry)
                self._filler.cancel(cancel.session_id, cancel.batch_id)
                self._pipe.send(msg.Cancelled(fill.serial, fill.generation))
                return True
        return False

    def _fill(self, fill: msg.Fill, fds: list[int]) -> None:
        self._map(fill, fds)
        answer = self._filler.fill(fill, self._slot(fill))
        if os.getpid() != self._pid:
            os._exit(0)  # a fork of the dataset's that returned from it: the answer is the other's to give
        try:
            if self._filler.preface is not None:
                self._pipe.send(self._filler.preface)
            self._pipe.send(answer)
        except ProtocolError as error:
            # Too large to travel: the strings of a batch, most likely.
            self._pipe.send(msg.Failed(fill.serial, fill.generation, "layout", -1, "ProtocolError", str(error), "", {}))
        self._filler.done(made=isinstance(answer, msg.Filled))

    def _map(self, fill: msg.Fill, fds: list[int]) -> None:
        for (segment_id, nbytes), fd in zip(fill.attach, fds, strict=True):
            mapping = self._segments[segment_id] = translate(map_file, fd, nbytes)
            # A child that the dataset forks and that comes back from it by mistake must not write into slots.
            mapping.memory.madvise(mmap.MADV_DONTFORK)
            os.close(fd)

    def _slot(self, fill: msg.Fill) -> np.ndarray[Any, Any] | None:
        if fill.slot_id == msg.NO_SLOT or not fill.capacity:
            return None
        mapping = self._segments[fill.segment_id]
        place = (fill.segment_id, fill.offset)
        if place not in self._populated:
            self._populated[place] = fill.capacity
            if self._page is not None:
                self._page.stage(status.POPULATING)
            mapping.populate(fill.offset, fill.capacity)
        return mapping.array(fill.capacity, fill.offset)

    def _drop(self, segment_id: int) -> None:
        self._segments.pop(segment_id, None)
        for place in [place for place in self._populated if place[0] == segment_id]:
            del self._populated[place]


def _build(setup: msg.Setup, payload: list[int], page: StatusPage) -> tuple[Filler, dict[str, object]]:
    from ringloader._runtime.building import (
        build_collator,
        build_dataset,
        check_built,
        describe,
        import_target,
        prepare,
        retry_from_wire,
        run_init,
        user_files,
    )

    settings: dict[str, Any] = setup.settings
    seeder = Seeder(settings["seed"])
    page.stage(status.IMPORTING)
    prepare(settings)
    num_handles = len(settings["handles"])
    handles.receive(settings["handles"], payload[len(payload) - num_handles :])
    sys.meta_path.insert(0, LateImports(seeder, {TORCH_MODULE: tell_torch}))
    info = WorkerInfo(setup.worker_id, settings["num_workers"], settings["seed"], settings["rank"], settings["world_size"])
    set_worker_info(info)
    _tell_torch()  # the main script may have imported it already
    seeder.for_build()
    import_target(settings)
    page.stage(status.BUILDING)
    dataset = info.dataset = build_dataset(settings, payload)
    check_built(dataset)
    _tell_torch()
    collator = build_collator(settings)
    page.stage(status.INIT)
    run_init(settings, setup.worker_id)
    facts = {**describe(dataset), "files": user_files()}
    filler: Filler
    if facts["iterable"]:
        from ringloader._runtime.stream_filler import StreamFiller

        facts["digests"] = {}  # each worker may have its own part
        size, drop_last = settings["batch_size"] or None, settings["drop_last"]
        filler = StreamFiller(
            dataset, collator, seeder, info, page, seed_per=settings["seed_per"], batch_size=size, drop_last=drop_last
        )
    else:
        facts["digests"] = attribute_digests(dataset)
        retry = retry_from_wire(settings["retry"])
        filler = Filler(dataset, collator, seeder, info, page, seed_per=settings["seed_per"], retry=retry)
    return filler, facts


def _tell_torch() -> None:
    module = sys.modules.get(TORCH_MODULE)
    if module is not None:
        tell_torch(module)
