"""Ctrl-C inside `next`, at two hundred points: the epoch completes, each batch once."""

from __future__ import annotations

import dis
import random
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from ringloader import ClosedError, FactorySpec, Loader, LoaderError, get_worker_info
from ringloader._runtime.engine import Engine
from ringloader._runtime.locking import holding
from ringloader.iterators import LoaderIterator
from tests.runtime.conftest import wait_until
from tests.runtime.sample_datasets import Numbers


@pytest.fixture
def interrupt() -> Iterator[Any]:
    """A timer whose signal raises KeyboardInterrupt, but only inside the package: the test's own code is no pump.

    Called with 0 it raises no more, not even for a signal that has come and is not handled yet.
    """
    is_armed = False

    def handler(_: int, frame: FrameType | None) -> None:
        while is_armed and frame is not None:
            if "/ringloader/" in frame.f_code.co_filename:
                raise KeyboardInterrupt
            frame = frame.f_back
        if is_armed:
            signal.setitimer(signal.ITIMER_REAL, 2e-5)

    def arm(delay_s: float) -> None:
        nonlocal is_armed
        is_armed = delay_s > 0
        signal.setitimer(signal.ITIMER_REAL, delay_s)

    before = signal.signal(signal.SIGALRM, handler)
    yield arm
    arm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("num_workers", "num_points"), [(0, 200), (1, 100), (2, 100)])
def test_p05_interrupt_in_the_pump_loses_and_repeats_nothing(num_workers: int, num_points: int, interrupt: Any) -> None:
    """KeyboardInterrupt at any moment inside `next`: go on with the same iterator and the epoch is whole."""
    draw = random.Random(num_workers)
    num_interrupts = 0
    with Loader(FactorySpec(Numbers, 60, 4), batch_size=4, num_workers=num_workers) as loader:
        list(loader)
        for _ in range(20 * num_points):
            if num_interrupts >= num_points:
                break  # in some epochs the timer is too late for any
            seen: list[int] = []
            iterator = iter(loader)
            interrupt(draw.uniform(1e-6, 2e-3))
            while True:
                try:
                    # A for loop: between its iterator's return and the loop variable no signal is handled.
                    for rows, indices in iterator:
                        assert (rows[:, 0] == indices).all()
                        seen += indices.tolist()
                except KeyboardInterrupt:
                    num_interrupts += 1
                    continue
                break
            interrupt(0)
            assert seen == list(range(60))
        engine = loader._engine
        assert engine is not None
        engine.pump.step(None)
        engine.scheduler.check()
    assert num_interrupts >= num_points


@pytest.mark.timeout(150)
def test_p05_interrupts_leave_the_users_generators_alone(interrupt: Any) -> None:
    """Inline the process's own generators are lent to the dataset for each batch: an interrupt never keeps them there."""
    draw = random.Random(0)
    torch.manual_seed(1)
    np.random.seed(1)
    numpy_random: Any = np.random
    own = numpy_random.get_bit_generator()
    with Loader(Drawing(), batch_size=2) as loader:
        iterator, before = iter(loader), _drawn()
        next(iterator)
        for _ in range(1000):
            try:
                interrupt(draw.uniform(1e-6, 3e-4))
                for _batch in iterator:
                    pass
                iterator = iter(loader)
            except KeyboardInterrupt:
                continue
            finally:
                interrupt(0)
                assert numpy_random.get_bit_generator() is own
                assert _drawn() == before
                assert get_worker_info() is None
                assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("ringloader")]


class Drawing:
    """Draws from every generator for each sample, and little else."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[float, float, torch.Tensor]:
        return random.random(), np.random.random(), torch.rand(1)


def _drawn() -> tuple[Any, ...]:
    """What the next draws of the user's would be."""
    return random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()


class _Interrupting:
    """A pump's lock that is interrupted as it is taken on the main thread, the `place`-th time from now on."""

    def __init__(self, lock: Any, *, has_it: bool) -> None:
        self._lock, self._has_it, self.place, self.num_taken = lock, has_it, 0, 0
        self.release, self._is_owned = lock.release, lock._is_owned

    def acquire(self) -> None:
        self.num_taken += threading.current_thread() is threading.main_thread()
        is_due = self.num_taken == self.place and threading.current_thread() is threading.main_thread()
        if not is_due or self._has_it:
            self._lock.acquire()
        if is_due:
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("has_it", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_p05_interrupt_wherever_the_lock_is_taken_leaves_no_leader(num_workers: int, has_it: bool) -> None:
    """Another thread could lead at once, the lock is free, and the epoch is whole."""
    with Loader(FactorySpec(Numbers, 16, 4), batch_size=4, num_workers=num_workers) as loader:
        list(loader)
        assert loader._engine is not None
        pump = loader._engine.pump
        pump.lock = lock = _Interrupting(pump.lock, has_it=has_it)  # type: ignore[assignment]
        num_interrupts, place = 0, 1
        while place < 60:
            seen: list[int] = []
            iterator = iter(loader)
            lock.place, lock.num_taken, was_interrupted = place, 0, False
            while True:
                try:
                    for _, indices in iterator:
                        seen += indices.tolist()
                except KeyboardInterrupt:
                    num_interrupts, was_interrupted = num_interrupts + 1, True
                    assert pump.leader != threading.get_ident()
                    assert not lock._is_owned()
                    continue
                break
            assert seen == list(range(16))
            lock.place = 0
            if not was_interrupted:
                break  # an epoch takes it less often
            place += 1
    assert num_interrupts >= 4  # each batch takes it once at least


def test_interrupt_as_an_epoch_ends_its_workers_leaves_a_loader_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `persistent_workers=False`, in the wait for workers to end: they end, and the next epoch has others."""

    def broken(_: Engine) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    loader = Loader(FactorySpec(Numbers, 8), batch_size=4, num_workers=1, persistent_workers=False)
    iterator = iter(loader)
    before = loader._engine
    assert before is not None
    monkeypatch.setattr(Engine, "close", broken)
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    assert wait_until(lambda: before.pump.wake_fd < 0)
    assert [indices.tolist() for _, indices in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.stats().num_batches == 4
    assert loader.stats().num_samples == 16


@pytest.mark.parametrize("num_workers", [0, 1])
def test_interrupt_as_an_epoch_begins_leaves_no_session(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its iterator was about to be made, or the session had only just been opened."""
    with Loader(FactorySpec(Numbers, 8), batch_size=4, num_workers=num_workers) as loader:
        list(loader)
        engine = loader._engine
        assert engine is not None
        scheduler = engine.scheduler
        with monkeypatch.context() as patch:
            patch.setattr(LoaderIterator, "__init__", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        engine.pump.step([])
        assert not [one for one in scheduler.sessions.values() if not one.is_early]

        loader._drop_early()  # or there is no session to be opened

        def opened(session: Any) -> None:
            scheduler.sessions[session.session_id] = session
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "open_session", opened)
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        assert [indices.tolist() for _, indices in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        engine.pump.step([])
        assert not [one for one in scheduler.sessions.values() if not one.is_early]


def test_interrupt_as_an_epoch_is_closed_has_it_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be closed is known until it is."""
    with Loader(FactorySpec(Numbers, 8), batch_size=4) as loader:
        iterator = iter(loader)
        engine = loader._engine
        assert engine is not None
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "close_session", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(iterator)
        del iterator
        engine.pump.step([])
        assert not engine.scheduler.sessions
        assert not engine.pump.followers


def _interrupted(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_started", [True, False])
def test_interrupt_as_the_watching_thread_is_started_leaves_one(is_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it was, another takes its place; after, it is the one."""
    start, threads = threading.Thread.start, []

    def broken(thread: threading.Thread) -> None:
        threads.append(thread)
        if is_started:
            start(thread)
        monkeypatch.setattr(threading.Thread, "start", start)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", broken)
    with Loader(FactorySpec(Numbers, 20), batch_size=4, num_workers=1, output="numpy") as loader:
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        assert [indices.tolist() for _, indices in loader] == np.arange(20).reshape(5, 4).tolist()
        assert loader._engine is not None
        assert (loader._engine.pump.thread is threads[0]) is is_started
        assert [thread.name for thread in threading.enumerate()].count("ringloader") == 1


def test_loader_whose_watching_thread_was_not_started_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt, and then nothing but the end: nothing is left."""

    def broken(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    loader = Loader(FactorySpec(Numbers, 20), batch_size=4, num_workers=1, output="numpy")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", broken)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    loader.close()
    with pytest.raises(ClosedError):
        iter(loader)


class _Broken:
    """A lock that is interrupted as it is taken: before or after."""

    def __init__(self, *, has_it: bool) -> None:
        self._lock, self._has_it = threading.RLock(), has_it

    def acquire(self) -> None:
        if self._has_it:
            self._lock.acquire()
        raise KeyboardInterrupt

    def release(self) -> None:
        self._lock.release()

    def is_free(self) -> bool:
        with ThreadPoolExecutor(1) as other:
            return other.submit(self._lock.acquire, blocking=False).result()


@pytest.mark.parametrize("has_it", [True, False])
def test_lock_is_free_after_an_interrupt_as_it_was_taken(has_it: bool) -> None:
    """Python 3.14 handles signals between a lock's `__enter__` and the body, and any Python while it waits for the lock."""
    lock = _Broken(has_it=has_it)
    with pytest.raises(KeyboardInterrupt):
        holding(lock, pytest.fail, "it was not taken")  # type: ignore[arg-type]
    assert lock.is_free()


def test_lock_of_another_thread_is_not_released_by_an_interrupt(interrupt: Any) -> None:
    """Whoever has it keeps it."""
    lock, has_it, goes_on = threading.RLock(), threading.Event(), threading.Event()

    def keep() -> bool:
        with lock:
            has_it.set()
            goes_on.wait(30)
            is_mine: bool = lock._is_owned()  # type: ignore[attr-defined]
            return is_mine

    with ThreadPoolExecutor(1) as other:
        kept = other.submit(keep)
        has_it.wait(30)
        interrupt(0.01)
        with pytest.raises(KeyboardInterrupt):
            holding(lock, pytest.fail, "another thread has it")
        goes_on.set()
        assert kept.result()
    assert holding(lock, int, "7") == 7


def test_p05_no_signal_is_handled_between_arrival_and_return() -> None:
    """Signals are handled after calls and at backward jumps: neither comes after a batch is marked as arrived."""
    code = list(dis.get_instructions(LoaderIterator.__next__))
    start = next(i for i, one in enumerate(code) if one.opname == "STORE_ATTR" and one.argval == "arrived")
    stop = next(i for i, one in enumerate(code) if i > start and one.opname == "RETURN_VALUE")
    between = [one.opname for one in code[start + 1 : stop]]
    assert not [name for name in between if name.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))], between


class _Sampler:
    """A generator, which an exception ends for good."""

    def __iter__(self) -> Iterator[int]:
        for i in range(40):
            if i == 21:
                raise KeyboardInterrupt
            yield i


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sampler_interrupted_is_an_error_later_never_a_short_epoch(num_workers: int) -> None:
    """A user's sampler that broke cannot go on: batches pulled before it arrive, then an error, not the end."""
    with Loader(FactorySpec(Numbers, 60, 4), batch_size=4, num_workers=num_workers, sampler=_Sampler()) as loader:
        seen: list[int] = []
        with pytest.raises(LoaderError, match="the sampler raised KeyboardInterrupt earlier"):
            _read_on(iter(loader), seen)
        assert seen == list(range(20))


def _read_on(iterator: Iterator[Any], seen: list[int]) -> None:
    """Read to the end, going on after interrupts."""
    while True:
        try:
            seen += next(iterator)[1].tolist()
        except KeyboardInterrupt:
            continue
