"""The inline backend: Fills carried out on the thread that asks for the next batch.

Owns the dataset of `num_workers=0` and puts the user's own random generators back after every batch. Same scheduler, same ring,
same filler as worker processes; nothing to start, kill or time out.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ringloader._core import messages as msg
from ringloader._core.events import WorkerBroken, WorkerExited
from ringloader._core.views import WorkerView
from ringloader._runtime.as_worker import as_worker
from ringloader._runtime.building import check_built, describe
from ringloader._runtime.filler import Filler
from ringloader._runtime.pool import Fact
from ringloader._runtime.seeding import Seeder
from ringloader._runtime.segment import Segment
from ringloader._runtime.sources import LocalBuild
from ringloader._runtime.status import STAGES, StatusPage
from ringloader._runtime.stream_filler import StreamFiller
from ringloader._runtime.words import format_traceback, run_user_code, safe_text, type_name
from ringloader._runtime.worker_info import WorkerInfo

_PAUSE_S = 0.02


@dataclass(slots=True, eq=False)
class _Entry:
    """A Fill, and what was answered once it is carried out."""

    fill: msg.Fill
    segment: Segment | None
    answers: tuple[msg.FromWorker, ...] | None = None


class InlinePool:
    """One worker that is this very thread, behind the backend interface (see pump.py).

    `build` makes dataset and collator and runs the user's init function; `facts` of the dataset are made from it.
    """

    is_inline = True
    shares_dataset = True
    kills_at_once = False
    needs_drain = False
    recycles = False
    unreaped_s = 0.0

    def __init__(self, build: LocalBuild, info: WorkerInfo, seed_per: str) -> None:
        self._build = build
        self._info = info
        self._seeder = Seeder(info.seed)
        self._seed_per = seed_per
        page_fd = StatusPage.create()
        self._page = StatusPage(page_fd)
        os.close(page_fd)
        self._queue: deque[_Entry] = deque()
        self._facts: deque[Fact] = deque()
        self._calls: deque[msg.Call] = deque()
        self._dropped: deque[int] = deque()  # sessions that are over
        self._filler: Filler | None = None
        self._incarnation = 0

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Carry out the oldest Fill, if the caller is willing to wait for it."""
        if self._calls and timeout_s != 0:
            self._call(self._calls[0])
        elif self._queue and self._queue[0].answers is None and timeout_s != 0:
            # The answer is kept with its Fill, in one step: an interrupt in the user's code leaves the Fill to be carried out
            # again, one after it does not, for the user may hold the slot by then.
            entry = self._queue[0]
            entry.answers = self._fill(entry.fill, entry.segment)
        elif timeout_s != 0 and not self._facts:
            # Nothing to do but to wait for another thread to let a batch go.
            time.sleep(_PAUSE_S if timeout_s is None else min(timeout_s, _PAUSE_S))
        return []

    def collect(self, ready: Iterable[tuple[int, int]]) -> list[Fact]:
        facts = list(self._facts)
        self._facts.clear()
        while self._queue and (answers := self._queue[0].answers) is not None:
            facts += [(0, self._incarnation, answer) for answer in answers]
            self._queue.popleft()
        return facts

    def drain(self) -> list[Fact]:
        return self.collect(())

    def observe(self, worker_id: int, incarnation: int) -> WorkerView | None:
        return None  # never late: it runs on the caller's own time

    def start_worker(self, worker_id: int, incarnation: int) -> Callable[[bool], WorkerExited | None]:
        """Build the dataset, on the caller's thread."""
        self._incarnation = incarnation
        answer = as_worker(self._info, self._seeder, self._built)
        self._facts.append((0, incarnation, answer))
        return lambda is_wanted: None

    def _built(self) -> msg.Ready | msg.StartFailed:
        self._seeder.for_build()
        try:
            dataset = run_user_code(self._build.dataset)
            collator = self._build.collator()
            run_user_code(self._build.init, 0)
            check_built(dataset)
            self._info.dataset = dataset
            facts = {**describe(dataset), "digests": {}}
            parts = (dataset, collator, self._seeder, self._info, self._page)
            options: dict[str, Any] = {"seed_per": self._seed_per, "catch": Exception, "defines_once": False}
            if facts["iterable"]:
                size, drop_last = self._build.batch_size, self._build.drop_last
                self._filler = StreamFiller(*parts, batch_size=size, drop_last=drop_last, **options)
            else:
                self._filler = Filler(*parts, retry=self._build.retry, **options)
        except Exception as error:
            stage = STAGES[2]
            return msg.StartFailed(msg.PROTOCOL_VERSION, stage, type_name(error), safe_text(error), format_traceback(error))
        return msg.Ready(msg.PROTOCOL_VERSION, facts)

    def _fill(self, fill: msg.Fill, segment: Segment | None) -> tuple[msg.FromWorker, ...]:
        filler = self._filler  # a signal handler in the user's code may close the loader meanwhile
        assert filler is not None
        slot = None
        if segment is not None and fill.capacity:
            slot = segment.mapping.array(fill.capacity, fill.offset)

        def carry_out() -> msg.FromWorker:
            while self._dropped:
                filler.drop_session(self._dropped.popleft())
            return filler.fill(fill, slot)

        answer = as_worker(self._info, self._seeder, carry_out)
        filler.done(made=isinstance(answer, msg.Filled))
        return (answer,) if filler.preface is None else (filler.preface, answer)

    def _call(self, call: msg.Call) -> None:
        assert self._filler is not None
        answer = self._build.done.get(call.call_id)
        if answer is None:
            try:
                answer = as_worker(self._info, self._seeder, self._filler.call, call)
                self._build.done[call.call_id] = answer
            except BaseException:
                self._calls.popleft()  # broken off: not to be begun again by the next `next`
                raise
        self._facts.append((0, self._incarnation, answer))
        if self._calls and self._calls[0] is call:
            self._calls.popleft()

    def send_fill(self, worker_id: int, incarnation: int, fill: msg.Fill, segment: Segment | None) -> WorkerBroken | None:
        self._queue.append(_Entry(fill, segment))
        return None

    def send_call(self, worker_id: int, incarnation: int, call: msg.Call) -> WorkerBroken | None:
        self._calls.append(call)
        return None

    def send_cancel(self, worker_id: int, incarnation: int, cancel: msg.Cancel, running: int) -> None:
        for entry in list(self._queue):
            fill = entry.fill
            if fill.serial == cancel.serial and entry.answers is None:
                self._queue.remove(entry)
                self._facts.append((0, self._incarnation, msg.Cancelled(fill.serial, fill.generation)))
        if self._filler is not None:
            self._filler.cancel(cancel.session_id, cancel.batch_id)

    def drop_segment(self, segment_id: int) -> None:
        pass

    def drop_session(self, session_id: int) -> None:
        # Later: ending a generator runs the user's code, and the pump's lock is held here.
        self._dropped.append(session_id)

    def kill_worker(self, worker_id: int, incarnation: int, *, dump: bool) -> None:
        raise AssertionError("an inline worker is never overdue")

    def stop_worker(self, worker_id: int, incarnation: int) -> None:
        raise AssertionError("an inline worker is never replaced")

    def abandon_worker(self, worker_id: int, incarnation: int) -> None:
        raise AssertionError("an inline worker is never overdue")

    def kill_all(self) -> list[tuple[int, int]]:
        self._queue.clear()
        self._calls.clear()
        self._facts.clear()
        return []

    def end_soon(self) -> None:
        pass

    def stop(self, stop_s: float) -> None:
        self.kill_all()
        self._filler = self._info.dataset = None

    def close(self) -> None:
        self._page.close()

    def who(self, worker_id: int, incarnation: int) -> str:
        return f"pid {os.getpid()}"

    def pids(self) -> list[int]:
        return []
