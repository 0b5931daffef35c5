"""The main program of a worker thread, over the dataset that all threads of a loader share.

Owns the one dataset, which epoch it is in, and what a thread does with what is said to it. Batches of two epochs are never made
at the same time, nor beside a call of a method. Only `get_worker_info().rng` is reproducible here, because the global
generators are the training's, too; a dataset that draws from those is named once. Must not know the pool's tables.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ringloader._core import messages as msg
from ringloader._core.events import Death, WorkerBroken, WorkerExited
from ringloader._runtime import status
from ringloader._runtime.as_worker import as_worker, is_borrowing
from ringloader._runtime.building import check_built, describe
from ringloader._runtime.filler import Filler
from ringloader._runtime.pages import Mapping
from ringloader._runtime.pool import Fact
from ringloader._runtime.seeding import Seeder
from ringloader._runtime.sources import LocalBuild
from ringloader._runtime.status import StatusPage
from ringloader._runtime.stream_filler import StreamFiller
from ringloader._runtime.words import format_traceback, run_user_code, safe_text, type_name
from ringloader._runtime.worker_info import WorkerInfo, set_thread_info

logger = logging.getLogger("ringloader")


P = ParamSpec("P")
T = TypeVar("T")
# A Fill with the mapping of its segment, the end of something, or None: the end.
_Said = tuple[msg.Fill, Mapping | None] | msg.Call | msg.Cancel | msg.DropSession | None
_RunCall = Callable[[msg.Call], msg.Called]


@dataclass(slots=True, eq=False)
class Member:
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


def write_stack(member: Member) -> None:
    """Put the thread's Python stack where a process would have left its own."""
    frames = sys._current_frames()
    frame = frames.get(member.thread.ident) if member.thread is not None and member.thread.ident is not None else None
    member.page.write_trace("".join(traceback.format_stack(frame)) if frame is not None else "")


def who(member: Member) -> str:
    return f"thread {member.thread.native_id}" if member.thread is not None else "thread"


class SharedDataset:
    """The one dataset of all threads: the first that asks builds it."""

    def __init__(self, build: LocalBuild, info: WorkerInfo) -> None:
        self.build = build
        self.info = info  # what holds for every worker: seed, ranks, number of workers
        self.epochs = _Epochs()
        self.is_warned = False  # of a dataset that draws from the global generators
        self._has_generators = is_borrowing()  # of a loader that is read by the dataset of another
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
                    dataset = self.run(info, seeder, self._make, seeder)
                    check_built(dataset)
                except BaseException as error:
                    self._failure = error
                    raise
                self.epochs.dataset = dataset
                self._built.append(dataset)
            return self._built[0]

    def run(self, info: WorkerInfo, seeder: Seeder, body: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what may draw from the global generators, or seed them."""
        if self._has_generators:
            return body(*args, **kwargs)
        return as_worker(info, seeder, body, *args, **kwargs)

    def _make(self, seeder: Seeder) -> Any:
        seeder.for_build()
        return run_user_code(self.build.dataset)

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
        self._inside: dict[Member, int] = {}
        self._caller: Member | None = None  # who runs a method
        self._epoch: int | None = None

    def enter(self, member: Member, epoch: int) -> bool:
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

    def _wait(self, member: Member, is_busy: Callable[[], bool]) -> None:
        while not member.is_leaving and is_busy():
            self._changed.wait()
        if member.is_leaving:
            raise SystemExit(0)

    def call_once(self, member: Member, call: msg.Call, done: dict[int, msg.Called], run: _RunCall) -> msg.Called:
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

    def leave(self, member: Member) -> None:
        """The batch is made, or its thread is not waited for any more."""
        with self._changed:
            if self._caller is member:
                self._caller = None
            self._inside.pop(member, None)
            self._changed.notify_all()


class _InShared(Filler):
    """What differs where other threads read the same dataset."""

    epochs: _Epochs
    member: Member
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

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Put nothing back."""


class Run:
    """The main program of one thread."""

    def __init__(self, member: Member, shared: SharedDataset, say: Callable[[Member, Fact], None]) -> None:
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
            death = Death(returncode, view.serial, view.blamed, view.stage, view.trace, num_samples=view.num_samples)
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
            # It may seed generators, as it would in a process of its own.
            shared.run(info, Seeder(info.seed), run_user_code, shared.build.init, member.worker_id)
            facts = {**describe(dataset), "digests": {}}
            info.is_consulted = False  # what was asked while the one dataset was built says nothing about its streams
            parts = (dataset, shared.build.collator(), _Unseeded(info.seed), info, member.page)
            filler: _InShared
            if facts["iterable"]:
                size, drop_last = shared.build.batch_size, shared.build.drop_last
                is_alone = info.num_workers == 1 and member.incarnation == 1  # one that was left alone may still read
                filler = _SharedStreamFiller(*parts, batch_size=size, drop_last=drop_last, is_alone=is_alone)
            else:
                filler = _SharedFiller(*parts, retry=shared.build.retry)
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

    def _fill(self, filler: _InShared, fill: msg.Fill, mapping: Mapping | None) -> None:
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

    def _slot(self, fill: msg.Fill, mapping: Mapping | None) -> np.ndarray[Any, Any] | None:
        if mapping is None or fill.slot_id == msg.NO_SLOT or not fill.capacity:
            return None
        place = (fill.segment_id, fill.offset)
        if place not in self._member.populated:
            self._member.populated.add(place)
            self._member.page.stage(status.POPULATING)
            mapping.populate(fill.offset, fill.capacity)
        return mapping.array(fill.capacity, fill.offset)


def _generators() -> tuple[Any, ...]:
    """The state of the global generators of those modules that are imported."""
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    legacy = numpy_random.get_state() if numpy_random is not None else ()
    return (
        random.getstate(),
        tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in legacy),
        torch.default_generator.get_state().numpy().tobytes() if torch is not None else b"",
    )
