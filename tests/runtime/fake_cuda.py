"""CUDA without a device: streams that run when told to, copies that read memory only then, calls that are remembered.

It holds callers to the rules a driver holds them to: register once, while mapped; unregister once, while mapped; nothing while
a graph is captured; no call from a thread of the loader's own. What breaks one is in `violations`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ringloader._runtime.cuda import Copy, CudaError, DeviceError

_OWN_THREADS = ("ringloader", "ringloader-exit", "ringloader-wait")


class FakeStream:
    """A queue of work."""

    def __init__(self, number: int, device: int = 0) -> None:
        self.cuda_stream = number
        self.device = device
        self.work: list[Callable[[], None]] = []
        self.num_done = 0
        self._running = threading.RLock()  # any thread may play the device, one at a time

    @property
    def num_queued(self) -> int:
        with self._running:
            return self.num_done + len(self.work)

    def run(self, count: int | None = None) -> None:
        """Do the oldest pieces of work, all by default."""
        with self._running:
            for _ in range(len(self.work) if count is None else min(count, len(self.work))):
                self.work[0]()
                self.num_done += 1
                del self.work[0]


class FakeEvent:
    """A mark in a stream."""

    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.position = 0


class FakeCuda:
    """Stands in for `TorchCuda`. `fail_at`: which calls of `register` fail, counted from 1."""

    def __init__(self, *, num_devices: int = 1, fail_at: tuple[int, ...] = ()) -> None:
        self.default = FakeStream(0)
        self.copy_stream = FakeStream(99)
        self.calls: list[tuple[Any, ...]] = []
        self.violations: list[str] = []
        self.registered: dict[int, int] = {}
        self.own_pinned: dict[int, int] = {}  # memory of torch's own allocator
        self.used = False  # the process has a context
        self.capturing = False
        self.ignores_fences = False  # as if no events were recorded: to show that the checks can fail
        self.num_events = 0
        self.num_device_copies = 0
        self.full_at: tuple[int, ...] = ()  # which copies to the device find no memory there, counted from 1
        self._copier = FakeCopier(self)
        self._local = threading.local()
        self._num_devices = num_devices
        self._fail_at = fail_at
        self._events: list[FakeEvent] = []

    # --- the interface --------------------------------------------------------------------------------------------------

    def num_devices(self) -> int:
        return self._num_devices

    def is_active(self) -> bool:
        return self.used

    def is_capturing(self) -> bool:
        return self.capturing

    def register(self, address: int, nbytes: int, device: str | None) -> None:
        self._check_call("register")
        self.calls.append(("register", address, nbytes))
        if sum(call[0] == "register" for call in self.calls) in self._fail_at:
            raise CudaError("cudaErrorMemoryAllocation (2)")
        if address in self.registered:
            self.violations.append("registered twice")
        if not is_mapped(address):
            self.violations.append("registered what is not mapped")
        self.registered[address] = nbytes
        self.used = True

    def unregister(self, address: int) -> None:
        self._check_call("unregister")
        self.calls.append(("unregister", address))
        if self.registered.pop(address, None) is None:
            self.violations.append("unregistered what was not registered")
        if not is_mapped(address):
            self.violations.append("unregistered after it was unmapped")

    def streams(self) -> list[FakeStream]:
        return [self.current()]

    def identity(self, stream: FakeStream) -> Hashable:
        return stream.cuda_stream

    def record(self, stream: FakeStream) -> FakeEvent:
        self._check_call("record")
        if self._events:
            event = self._events.pop()
        else:
            event = FakeEvent()
            self.num_events += 1
        event.stream, event.position = stream, stream.num_queued
        return event

    def is_complete(self, event: FakeEvent) -> bool:
        self._check_call("query")
        assert event.stream is not None
        return self.ignores_fences or event.stream.num_done >= event.position

    def recycle(self, event: FakeEvent) -> None:
        self._events.append(event)

    def pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        self.own_pinned[copied.data_ptr()] = copied.nbytes
        return copied

    def copier(self, device: str) -> FakeCopier:
        self.used = True
        return self._copier

    # --- for tests ------------------------------------------------------------------------------------------------------

    def current(self) -> FakeStream:
        stream: FakeStream = getattr(self._local, "stream", self.default)
        return stream

    def use(self, stream: FakeStream) -> None:
        """Make a stream this thread's current one."""
        self._local.stream = stream

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        ranges = {**self.registered, **self.own_pinned}
        return any(start <= address < start + nbytes for start, nbytes in ranges.items())

    def finish(self) -> None:
        """Run everything that is queued."""
        self.capturing = False
        self.copy_stream.run()
        self.default.run()

    def copy_later(self, tensor: torch.Tensor, stream: FakeStream | None = None) -> list[bytes]:
        """Queue an asynchronous copy, which keeps nothing alive; the list gets the bytes that are there when it runs."""
        self.used = True
        address, nbytes, found = tensor.data_ptr(), tensor.nbytes, []

        def copy() -> None:
            if not is_mapped(address):
                self.violations.append("a copy read what is not mapped any more")
                return
            found.append(ctypes.string_at(address, nbytes))

        (stream or self.current()).work.append(copy)
        return found

    def _check_call(self, name: str) -> None:
        if self.capturing:
            self.violations.append(f"{name} while a graph was captured")
        if threading.current_thread().name in _OWN_THREADS:
            self.violations.append(f"{name} on the thread {threading.current_thread().name}")


class FakeCopier:
    """Copies to a "device" that is host memory, when its stream runs, and that waits for the user's stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.stream = cuda.copy_stream
        self.alive: list[Any] = []
        self.copies: list[FakeCopy] = []

    def start(self, build: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> tuple[Any, Copy]:
        self.cuda._check_call("copy")
        user_stream = self.cuda.current()
        position = user_stream.num_queued
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def place(tensor: torch.Tensor) -> torch.Tensor:
            self.cuda.num_device_copies += 1
            if self.cuda.num_device_copies in self.cuda.full_at:
                raise DeviceError from torch.OutOfMemoryError("CUDA out of memory")
            pairs.append((torch.full_like(tensor, 0), tensor))
            return pairs[-1][0]

        def copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
            address, nbytes, goal = tensor.data_ptr(), tensor.nbytes, target.data_ptr()

            def piece() -> None:
                if not is_mapped(address):
                    self.cuda.violations.append("a copy read what is not mapped any more")
                    return
                ctypes.memmove(goal, address, nbytes)

            self.stream.work.append(piece)
            self.cuda.calls.append(("copy", address))
            self.alive.append(target)  # the device's memory outlives its tensor until the copy has run

        value = build(place)
        self.stream.work.append(lambda: user_stream.run(max(0, position - user_stream.num_done)))
        for pair in pairs:
            copy(*pair)
        self.copies.append(FakeCopy(self, self.stream.num_queued))
        return value, self.copies[-1]

    def throttle(self) -> None:
        """The device works while the host waits."""
        self.cuda._check_call("throttle")
        for copy in [copy for copy in self.copies if not copy.is_over()][:-1]:
            copy.wait()

    def prune(self) -> None:
        self.cuda._check_call("prune")


class FakeCopy:
    """One batch on its way."""

    def __init__(self, copier: FakeCopier, position: int) -> None:
        self._copier, self._position = copier, position

    def is_over(self) -> bool:
        return self._copier.stream.num_done >= self._position

    def wait(self) -> None:
        stream = self._copier.stream
        stream.run(max(0, self._position - stream.num_done))

    def arrive(self) -> None:
        """The current stream waits: whoever runs it has the copy done before."""
        self._copier.cuda._check_call("arrive")
        self._copier.cuda.calls.append(("arrive",))
        self._copier.cuda.current().work.append(self.wait)

    def seconds(self) -> float | None:
        self._copier.cuda._check_call("seconds")
        return 0.001 if self.is_over() else None


def is_mapped(address: int) -> bool:
    """Whether this process has a mapping there."""
    with open("/proc/self/maps", encoding="ascii") as file:
        for line in file:
            start, _, rest = line.partition("-")
            if int(start, 16) <= address < int(rest.partition(" ")[0], 16):
                return True
    return False
