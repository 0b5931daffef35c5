"""As much of torch.cuda as copies to a device need: streams that run in any order, events, and an allocator that gives memory
back to the stream it was made for as soon as its tensor is gone. The real `TorchCopier` runs on it.

A kernel is a function; what a stream has been given runs later, when `run` is called, in an order drawn from a seed that
respects events alone. A read of memory that somebody else writes to meanwhile shows as wrong values.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

WIDTH = 4


class Mark:
    """A place in a stream."""

    def __init__(self) -> None:
        self.is_passed = False


class SimStream:
    """A queue of kernels, marks and waits."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.queue: list[tuple[str, Any]] = []
        self.pool: list[np.ndarray[Any, Any]] = []  # memory made for this stream and given back
        gpu.streams.append(self)

    def launch(self, kernel: Callable[[], None]) -> None:
        self.queue.append(("kernel", kernel))

    def wait_event(self, event: SimEvent) -> None:
        if event.mark is not None:
            self.queue.append(("wait", event.mark))

    def __enter__(self) -> SimStream:
        self.gpu.enter(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.gpu.leave()

    def step(self) -> bool:
        """Do the next piece of work; False when there is none that may run."""
        if not self.queue:
            return False
        kind, what = self.queue[0]
        if kind == "wait" and not what.is_passed:
            return False
        self.queue.pop(0)
        if kind == "kernel":
            what()
        elif kind == "mark":
            what.is_passed = True
        return True


class SimEvent:
    def __init__(self, gpu: Gpu, **options: Any) -> None:
        self._gpu = gpu
        self.mark: Mark | None = None

    def record(self, stream: SimStream) -> None:
        self.mark = Mark()
        stream.queue.append(("mark", self.mark))

    def query(self) -> bool:
        return self.mark is None or self.mark.is_passed

    def synchronize(self) -> None:
        while not self.query():
            assert self._gpu.step(), "waiting for what will never happen"

    def elapsed_time(self, other: SimEvent) -> float:
        return 1.0


class SimTensor:
    """Memory on the device."""

    num_alive = 0

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._stream = gpu, gpu.current()
        self.memory = self._stream.pool.pop() if self._stream.pool else np.zeros(WIDTH)
        self._readers: list[SimStream] = []
        SimTensor.num_alive += 1

    def copy_(self, source: SimSource, *, non_blocking: bool) -> None:
        memory, values = self.memory, np.full(WIDTH, source.value)
        self._gpu.hook("copy")

        def copy() -> None:
            memory[:] = values

        self._gpu.current().launch(copy)

    def record_stream(self, stream: SimStream) -> None:
        self._readers.append(stream)

    def __del__(self) -> None:
        SimTensor.num_alive -= 1
        memory, pool = self.memory, self._stream.pool
        if not self._readers:
            pool.append(memory)
            return
        # As torch does: usable again once the other streams have come that far.
        left = [len(self._readers)]

        def passed() -> None:
            left[0] -= 1
            if not left[0]:
                pool.append(memory)

        for stream in self._readers:
            stream.launch(passed)


class SimSource:
    """A tensor on the host."""

    shape, dtype = (WIDTH,), None

    def __init__(self, value: float) -> None:
        self.value = value

    def is_pinned(self) -> bool:
        return True


class Gpu:
    """Stands in for the module `torch`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.streams: list[SimStream] = []
        self.default = SimStream(self)
        self.hook: Callable[[str], None] = lambda name: None
        self.is_full = False
        self._local = threading.local()
        self.cuda = self

    # --- torch.cuda -----------------------------------------------------------------------------------------------------

    def Stream(self, device: Any) -> SimStream:  # noqa: N802
        return SimStream(self)

    def Event(self, **options: Any) -> SimEvent:  # noqa: N802
        return SimEvent(self, **options)

    def device(self, *place: Any) -> Any:
        return place

    def current_stream(self, device: Any) -> SimStream:
        return self.current()

    def default_stream(self, device: Any) -> SimStream:
        return self.default

    def set_stream(self, stream: SimStream) -> None:
        self._local.stack = [stream]

    def empty(self, shape: Any, *, dtype: Any, device: Any) -> SimTensor:
        self.hook("empty")
        if self.is_full:
            raise RuntimeError("out of memory")
        return SimTensor(self)

    # --- for tests ------------------------------------------------------------------------------------------------------

    def current(self) -> SimStream:
        stack: list[SimStream] = getattr(self._local, "stack", [])
        return stack[-1] if stack else self.default

    def enter(self, stream: SimStream) -> None:
        self._local.stack = [*getattr(self._local, "stack", []), stream]

    def leave(self) -> None:
        self._local.stack = self._local.stack[:-1]

    @contextmanager
    def on(self, stream: SimStream) -> Iterator[None]:
        self.enter(stream)
        try:
            yield
        finally:
            self.leave()

    def step(self) -> bool:
        """Any stream that can does its next piece of work."""
        streams = list(self.streams)
        self.rng.shuffle(streams)
        return any(stream.step() for stream in streams)

    def run(self, count: int | None = None) -> None:
        """Do so many pieces of work, or all."""
        done = 0
        while (count is None or done < count) and self.step():
            done += 1
