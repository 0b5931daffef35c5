"""Faults between two steps, put there by hand: what an interrupt leaves half done is not done twice, and harms nobody."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import numpy as np
import posix_ipc
import pytest

from ringloader import InternalError, Loader
from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.batch_keys import Keys
from ringloader._core.room import Room
from ringloader._runtime import segment
from ringloader._runtime.process import WorkerProcess
from ringloader._runtime.status import IMPORTING, StatusPage
from ringloader._runtime.worker import _Worker
from ringloader.errors import ProtocolError
from tests.runtime.conftest import shm_names


def test_error_from_before_a_batch_says_nothing_about_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt after the hand-over, then an error that is no batch's: the batch that never arrived comes again."""
    with Loader(range(12), batch_size=4) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        next(iterator)
        iterator._session.arrived = False  # as an interrupt on the last step leaves it
        engine = loader._engine
        assert engine is not None

        def broken(*arguments: Any) -> None:
            raise InternalError("something else")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_until", broken)
            with pytest.raises(InternalError):
                next(iterator)
        assert [batch.tolist() for batch in iterator] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_fill_that_was_answered_inline_is_not_carried_out_again() -> None:
    """The user may hold its slot by then."""
    made: list[int] = []

    class Counts:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            made.append(index)
            return index

    with Loader(Counts(), batch_size=4) as loader:
        loader.start()
        engine = loader._running()
        session = engine.open_session(0, in_order=True, owner=loader)
        keys = Keys(np.arange(4).tobytes(), True, 0)
        engine.pump.step([], lambda: engine.scheduler.submit(session.session_id, 0, keys))
        for _ in range(3):  # as if what comes between were broken into each time
            engine.backend.wait(None)
        assert made == [0, 1, 2, 3]
        engine.close_session(session)


def a_process(page: StatusPage, signals: list[int]) -> WorkerProcess:
    process = object.__new__(WorkerProcess)
    process.page = page
    process.signal = signals.append  # type: ignore[method-assign,assignment]
    return process


def test_stack_of_a_worker_that_ends_meanwhile_is_not_waited_for() -> None:
    """Whoever noticed its end has closed the page; and one that has just begun is not sent a signal that would end it."""
    fd = StatusPage.create()
    page, signals = StatusPage(fd), list[int]()
    os.close(fd)
    a_process(page, signals).dump_stack()
    assert signals == []  # it is starting the interpreter still
    page.stage(IMPORTING)
    page.close()
    a_process(page, signals).dump_stack()


def test_slots_above_the_bound_are_counted_while_they_exist() -> None:
    """A ring that gives them back may make others, for weeks."""
    outbox: Any = deque()
    room = Room(outbox, 4)
    for segment_id in range(20):
        room._is_forced = True
        room.added(ev.SegmentAdded(segment_id, 64, 1))
        assert room._forced == {segment_id}
        room.slots.retire(next(iter(room.slots.by_id.values())))
        room._give_back()
    assert room._forced == set()


class FullPipe:
    """Refuses what is too large."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: msg.Called) -> None:
        if len(message.value) > 100:
            raise ProtocolError("a Called message is over the limit")
        self.sent.append(message)


class Calling:
    def call(self, call: msg.Call) -> msg.Called:
        return msg.Called(call.call_id, "", "", "", b"x" * 1000)


def test_result_of_a_call_that_is_too_large_is_an_error_of_the_call() -> None:
    """Not the end of the worker."""
    pipe = FullPipe()
    worker = _Worker(pipe, -1)  # type: ignore[arg-type]
    worker._filler = Calling()  # type: ignore[assignment]
    worker._call(msg.Call(5, "big", b""))
    assert [(answer.call_id, answer.error_type) for answer in pipe.sent] == [(5, "ProtocolError")]


@pytest.mark.parametrize("when", ["made", "unlinked"])
def test_interrupt_while_a_segment_gets_its_name_leaves_none(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Between making a name and taking it away there is no gap."""
    before = shm_names()
    with monkeypatch.context() as patch:
        if when == "made":

            class Interrupted(posix_ipc.SharedMemory):  # type: ignore[misc]
                def __init__(self, *arguments: Any, **options: Any) -> None:
                    super().__init__(*arguments, **options)
                    self.close_fd()
                    raise KeyboardInterrupt

            patch.setattr(posix_ipc, "SharedMemory", Interrupted)
        else:
            original, calls = posix_ipc.unlink_shared_memory, list[str]()

            def unlink(name: str) -> None:
                calls.append(name)
                if len(calls) == 1:
                    raise KeyboardInterrupt
                original(name)

            patch.setattr(posix_ipc, "unlink_shared_memory", unlink)
        with pytest.raises(KeyboardInterrupt):
            segment._open_shm(4096)
    assert shm_names() == before
