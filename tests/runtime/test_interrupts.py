"""Ctrl-C inside `next`, at two hundred points: the epoch completes, each batch once."""

from __future__ import annotations

import dis
import random
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from ringloader import FactorySpec, Loader, LoaderError
from ringloader.iterators import LoaderIterator
from tests.runtime.sample_datasets import Numbers


@pytest.fixture
def interrupt() -> Iterator[Any]:
    """A timer whose signal raises KeyboardInterrupt, but only inside the package: the test's own code is no pump."""

    def handler(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if "/ringloader/" in frame.f_code.co_filename:
                raise KeyboardInterrupt
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 2e-5)

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda delay_s: signal.setitimer(signal.ITIMER_REAL, delay_s)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("num_workers", "num_points"), [(0, 200), (1, 100), (2, 100)])
def test_p05_interrupt_in_the_pump_loses_and_repeats_nothing(num_workers: int, num_points: int, interrupt: Any) -> None:
    """KeyboardInterrupt at any moment inside `next`: go on with the same iterator and the epoch is whole."""
    draw = random.Random(num_workers)
    num_interrupts = 0
    with Loader(FactorySpec(Numbers, 60, 4), batch_size=4, num_workers=num_workers) as loader:
        list(loader)
        for _ in range(num_points):
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
    assert num_interrupts > num_points // 2


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
