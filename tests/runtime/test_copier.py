"""Copies to a device by the real copier, on simulated streams and a simulated allocator."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ringloader._runtime.cuda import CaptureError, DeviceError, TorchCopier, TorchCuda
from ringloader._runtime.fences import Fences
from tests.runtime.simulated_torch import Gpu, SimSource, SimStream, SimTensor

_NO_TYPES: dict[str, Any] = {}


class Trainer:
    """A loop as `DeviceIterator` and its user run it: one batch ahead, each read by kernels on the stream that is current."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.copier = TorchCopier(gpu, 0)
        self.seen: list[tuple[int, np.ndarray[Any, Any]]] = []
        self._ahead: Any = None
        self._number = 0

    def start(self) -> tuple[int, Any, Any]:
        self.copier.throttle()
        number, self._number = self._number, self._number + 1
        return (number, *self.copier.start(lambda place: place(SimSource(number))))

    def step(self, stream: SimStream) -> None:
        with self.gpu.on(stream):
            number, tensor, copy = self._ahead or self.start()
            self._ahead = self.start()
            copy.arrive()
            memory = tensor.memory
            for _ in range(3):
                self.gpu.current().launch(lambda: self.seen.append((number, memory.copy())))
        self.gpu.run(self.gpu.rng.randrange(8))

    def wrong(self) -> int:
        self.gpu.run()
        return sum(bool((found != number).any()) for number, found in self.seen)


@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_batches_are_read_whole_whatever_stream_is_current(num_streams: int) -> None:
    """Memory of the batch ahead was made for the stream of the call before; the one that reads it may be another."""
    for seed in range(30):
        gpu = Gpu(seed)
        trainer = Trainer(gpu)
        streams = [gpu.default, *(SimStream(gpu) for _ in range(num_streams - 1))]
        for number in range(40):
            trainer.step(streams[number % num_streams])
        assert trainer.wrong() == 0, seed
        assert len(trainer.seen) == 120


def test_without_a_word_to_the_allocator_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that the test before can."""
    monkeypatch.setattr(SimTensor, "record_stream", lambda self, stream: None)
    gpu = Gpu(1)
    trainer = Trainer(gpu)
    streams = [gpu.default, SimStream(gpu)]
    for number in range(40):
        trainer.step(streams[number % 2])
    assert trainer.wrong() > 0


def test_memory_given_back_by_another_thread_is_not_written_to_before_its_reader() -> None:
    """While our leaves are placed, a thread on the same stream queues a kernel and lets its tensor go: our copy waits."""
    gpu = Gpu(0)
    copier = TorchCopier(gpu, 0)
    read: list[float] = []
    calls: list[str] = []

    def other(name: str) -> None:
        calls.append(name)
        if calls.count("empty") != 2 or name != "empty":
            return
        gpu.hook = lambda name: None
        theirs = SimTensor(gpu)
        memory = theirs.memory
        memory[:] = 7
        gpu.current().launch(lambda: read.append(memory[0]))

    gpu.hook = other
    copier.start(lambda place: (place(SimSource(1)), place(SimSource(2))))
    while copier.stream.step():
        pass
    gpu.run()
    assert read == [7]


def test_copiers_of_two_threads_wait_each_for_its_own_stream() -> None:
    """One starts a copy in the midst of the other's: neither takes the other's mark."""
    gpu = Gpu(0)
    copier = TorchCopier(gpu, 0)
    ours, theirs = SimStream(gpu), SimStream(gpu)
    order: list[str] = []

    def start_theirs() -> None:
        with gpu.on(theirs):
            copier.start(lambda place: place(SimSource(2)))

    def meanwhile(name: str) -> None:
        if name == "copy":
            gpu.hook = lambda name: None
            thread = threading.Thread(target=start_theirs)
            thread.start()
            thread.join()

    ours.launch(lambda: order.append("ours"))
    gpu.hook = meanwhile
    with gpu.on(ours):
        copier.start(lambda place: place(SimSource(1)))
    copier.stream.launch(lambda: order.append("copied"))
    while copier.stream.step() or theirs.step():
        pass
    assert order == []
    gpu.run()
    assert order == ["ours", "copied"]


@pytest.mark.parametrize("point", ["empty", "copy"])
def test_interrupted_copy_holds_nothing_and_the_next_ones_are_right(point: str) -> None:
    """Ctrl-C while memory is placed, or in the midst of a copy."""
    gpu = Gpu(3)
    trainer = Trainer(gpu)

    def interrupt(name: str) -> None:
        if name == point:
            gpu.hook = lambda name: None
            raise KeyboardInterrupt

    for number in range(20):
        if number % 5 == 2:
            gpu.hook = interrupt
            with pytest.raises(KeyboardInterrupt):
                trainer.start()
        trainer.step(gpu.default)
    assert trainer.wrong() == 0
    trainer._ahead = None
    trainer.copier.prune()
    assert trainer.copier._running == []


def test_copy_without_its_mark_is_mended_by_the_next_of_its_thread() -> None:
    """An interrupt before the mark is set must not keep a batch on the device for ever."""
    gpu = Gpu(0)
    copier = TorchCopier(gpu, 0)
    lost: Any
    _, lost = copier.start(lambda place: place(SimSource(1)))
    lost.is_recorded = False
    assert lost in copier._running
    copier.start(lambda place: place(SimSource(2)))
    gpu.run()
    copier.prune()
    assert copier._running == []


def test_thread_that_was_left_on_the_copy_stream_is_put_back() -> None:
    """An interrupt inside torch may leave it there; the user's kernels would run beside the default stream, unordered."""
    gpu = Gpu(0)
    copier = TorchCopier(gpu, 0)
    users = SimStream(gpu)
    gpu.set_stream(users)
    copier.start(lambda place: place(SimSource(1)))
    gpu.set_stream(copier.stream)
    copier.start(lambda place: place(SimSource(2)))
    assert gpu.current() is users


def test_device_without_room_is_told_from_a_batch_that_cannot_be_rebuilt() -> None:
    """And nothing has been copied, nothing is kept."""
    gpu = Gpu(0)
    copier = TorchCopier(gpu, 0)
    gpu.is_full = True
    with pytest.raises(DeviceError) as caught:
        copier.start(lambda place: place(SimSource(1)))
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(KeyError):
        copier.start(lambda place: _NO_TYPES["no such type"])
    assert copier._running == []
    assert copier.stream.queue == []


def test_abandoned_copy_leaves_the_device_when_it_is_over() -> None:
    """Not only when another one is started."""
    gpu = Gpu(0)
    copier = TorchCopier(gpu, 0)
    before = SimTensor.num_alive
    value, copy = copier.start(lambda place: place(SimSource(1)))
    del value, copy
    copier.prune()
    assert SimTensor.num_alive == before + 1  # it is still being written to
    gpu.run()
    copier.prune()
    assert SimTensor.num_alive == before


class CapturedEvent:
    """An event that went into a graph."""

    def query(self) -> bool:
        error = RuntimeError("CUDA error: operation not permitted on an event last recorded in a capturing stream")
        raise error


def test_mark_that_went_into_a_graph_is_set_anew() -> None:
    """The runtime will never say that it is passed: the slot would be waited for for ever."""
    with pytest.raises(CaptureError):
        TorchCuda().is_complete((0, CapturedEvent()))


class ScriptedCuda:
    """Its first mark goes into a graph, the second is passed."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def is_active(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def streams(self) -> list[int]:
        return [0]

    def identity(self, stream: int) -> int:
        return stream

    def record(self, stream: int) -> int:
        self.num_recorded += 1
        return self.num_recorded

    def is_complete(self, event: int) -> bool:
        if event == 1:
            raise CaptureError
        return True

    def recycle(self, event: int) -> None:
        """Kept by nobody."""


class EndedLease:
    key, streams, is_exact = (3, 1), (), False

    def __init__(self, thread: int) -> None:
        self.thread, self.ended_s = thread, 0.0


def test_slot_whose_mark_went_into_a_graph_comes_back() -> None:
    """By its second mark."""
    fences = Fences(ScriptedCuda())  # type: ignore[arg-type]
    fences.add(EndedLease(threading.get_ident()))
    assert fences.advance() == []
    assert fences.advance() == [(3, 1)]
    assert not fences.is_waiting
