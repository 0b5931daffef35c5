"""Every call into CUDA, behind one interface.

Owns the translation of torch's CUDA calls and of the runtime's error codes. All of it is for the consumer's thread alone, on
the device that is current there: a call from another thread would make a context on device 0, or break a graph that is being
captured. Only `is_active` may be called anywhere: it reads a flag of torch's. torch is never imported from here; where nobody
has imported it, there is no CUDA. Tests put a fake behind the same interface.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any, Protocol

from ringloader._runtime.locking import holding

logger = logging.getLogger("ringloader")

# What the runtime calls them (driver_types.h): the ones that tell of page-locking, and of nothing else.
_ERROR_NAMES = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    304: "cudaErrorOperatingSystem",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    713: "cudaErrorHostMemoryNotRegistered",
    801: "cudaErrorNotSupported",
}
# cudaErrorStreamCapture...: a graph is being captured, perhaps by another thread.
_CAPTURE_ERRORS = range(900, 909)
_CAPTURED_EVENT = 907
_CAPTURED_WORDS = "last recorded in a capturing stream"
# Portable: page-locked for every device of the process, not only for the one that is current.
_HOST_REGISTER_PORTABLE = 1

Stream = Any
Event = Any
Tensor = Any


class CudaError(Exception):
    """A call of the runtime failed; the text is the error's name and number."""


class CaptureError(Exception):
    """A graph is being captured somewhere in the process: what was asked for is to be asked again later."""


class DeviceError(Exception):
    """A batch could not be copied to its device; the cause is torch's own error."""


class Copy(Protocol):
    """A batch on its way to a device."""

    def arrive(self) -> None:
        """Have the stream that is current now wait for the copy."""

    def seconds(self) -> float | None:
        """How long the copy took on the device; None while it runs."""


class Copier(Protocol):
    """Copies batches to one device on a stream of its own, each after what the user's stream had to do before.

    So a copy that is over tells that the device has come that far.
    """

    stream: Stream

    def throttle(self) -> None:
        """Wait until at most one copy is under way. Memory on the device is bounded by this, and so is the ring."""

    def prune(self) -> None:
        """Let go of copies that are over and that nobody waits for any more."""

    def start(self, build: Callable[[Callable[[Tensor], Tensor]], Any]) -> tuple[Any, Copy]:
        """Call `build` with a function that gives a tensor its place on the device; return what it gives, and its copy.

        Nothing is copied before `build` has returned. Raises DeviceError, or what `build` raises.
        """


class Cuda(Protocol):
    """What the ring needs of CUDA."""

    def num_devices(self) -> int:
        """How many devices there are. Makes no context."""

    def is_active(self) -> bool:
        """This process uses CUDA already. For any thread."""

    def is_capturing(self) -> bool:
        """The current stream is recording a graph, into which nothing of ours may come."""

    def register(self, address: int, nbytes: int, device: str | None) -> None:
        """Page-lock a mapping in place, from a device or from the one that is current. Raises CudaError, after which no error
        lingers in the runtime."""

    def unregister(self, address: int) -> None:
        """Undo `register`; an error is of no use to anybody any more."""

    def streams(self) -> list[Stream]:
        """The stream that is current on each device with a context."""

    def identity(self, stream: Stream) -> Hashable:
        """What tells one stream from another."""

    def record(self, stream: Stream) -> Event:
        """Mark the present end of a stream, with an event that `recycle` gave back if there is one."""

    def is_complete(self, event: Event) -> bool:
        """Everything before the mark is done. Raises CaptureError for a mark that went into a graph: it has to be set anew."""

    def recycle(self, event: Event) -> None:
        """Keep an event for the next `record`."""

    def pinned_copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into page-locked memory of torch's own; into ordinary memory while a graph is captured."""

    def copier(self, device: str) -> Copier:
        """Return what copies to a device, which must be there."""


class TorchCuda:
    """CUDA as torch gives it."""

    def __init__(self) -> None:
        self._contexts: set[int] = set()  # devices known to have one: it stays
        self._events: dict[Any, list[Event]] = {}  # by device; an event belongs to the device that first recorded it
        self._copiers: dict[int, TorchCopier] = {}
        self._has_warned = False

    def num_devices(self) -> int:
        torch = sys.modules.get("torch")
        return int(torch.cuda.device_count()) if torch is not None and torch.cuda.is_available() else 0

    def is_active(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def is_capturing(self) -> bool:
        return self.is_active() and bool(_torch().cuda.is_current_stream_capturing())

    def register(self, address: int, nbytes: int, device: str | None) -> None:
        cuda = _torch().cuda
        # Not from device 0 for the sake of another: that would make a context there.
        with cuda.device(_torch().device(device)) if device is not None else nullcontext():
            code = int(cuda.cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))
        if code:
            self._consume_error()
            raise CudaError(f"{_ERROR_NAMES.get(code, 'CUDA error')} ({code})")

    def unregister(self, address: int) -> None:
        try:
            code = int(_torch().cuda.cudart().cudaHostUnregister(address))
        except RuntimeError:
            return
        if code:
            self._consume_error()

    def _consume_error(self) -> None:
        """Take the error out of the runtime, or the user's next kernel launch would be told of it."""
        try:
            # torch loads the runtime's library for everybody; where it did not, a launch of our own takes the blame.
            ctypes.CDLL(None).cudaGetLastError()
            return
        except (AttributeError, OSError):
            pass
        try:
            _torch().empty(1, device="cuda").fill_(0)
        except RuntimeError:
            pass

    def streams(self) -> list[Stream]:
        cuda = _torch().cuda
        has_context = getattr(_torch()._C, "_cuda_hasPrimaryContext", None)
        if has_context is None:
            return [cuda.current_stream()]
        # Not the current device as such: a mark on its stream would make a context there.
        for device in range(cuda.device_count()):
            if device not in self._contexts and has_context(device):
                self._contexts.add(device)
        return [cuda.current_stream(device) for device in list(self._contexts)]

    def identity(self, stream: Stream) -> Hashable:
        return (stream.device, stream.cuda_stream)

    def record(self, stream: Stream) -> Event:
        pool = self._events.get(stream.device)
        event = pool.pop() if pool else _torch().cuda.Event()
        try:
            event.record(stream)
        except RuntimeError as error:
            if _is_of_capture(error):
                raise CaptureError from None
            # The user destroyed the stream, and what it was doing may still run; or the context is broken.
            self._wait_for(stream.device)
            return None
        return (stream.device, event)

    def _wait_for(self, device: Any) -> None:
        try:
            _torch().cuda.synchronize(device)
        except RuntimeError:
            pass  # broken: nothing is copied any more, and the user hears of it by their own next call

    def is_complete(self, event: Event) -> bool:
        if event is None:
            return True
        try:
            return bool(event[1].query())
        except RuntimeError as error:
            if getattr(error, "error_code", None) == _CAPTURED_EVENT or _CAPTURED_WORDS in str(error):
                raise CaptureError from None
            return not _is_of_capture(error)  # else the context is broken, and nothing is copied any more

    def recycle(self, event: Event) -> None:
        if event is not None:
            self._events.setdefault(event[0], []).append(event[1])

    def pinned_copy(self, tensor: Tensor) -> Tensor:
        if self.is_capturing():
            return tensor.clone()
        try:
            return _torch().empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        except RuntimeError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("pin_memory: none is left for small leaves, which are delivered unpinned: %s", error)
            return tensor.clone()

    def copier(self, device: str) -> Copier:
        torch = _torch()
        found = torch.device(device)
        index = torch.cuda.current_device() if found.index is None else found.index
        # One for the process, with one stream.
        if index not in self._copiers:
            self._copiers[index] = TorchCopier(torch, index)
        return self._copiers[index]


class TorchCopier:
    """Copies to one device of torch's.

    The memory of a batch is allocated for the stream that is current when its copy is started, and the copy waits for what that
    stream has been given by then: the memory may have been in use there. The stream that is current when the batch arrives
    waits for the copy; where it is another one, torch is told that it reads the memory, too. What is given up before it arrives
    is kept here until its copy is over. For threads of the user's, any number.
    """

    def __init__(self, torch: Any, index: int) -> None:
        self._torch = torch
        self._device = torch.device("cuda", index)
        self.stream = torch.cuda.Stream(self._device)
        self._lock = threading.RLock()
        self._running: list[_TorchCopy] = []
        self._spare: list[tuple[Event, Event, Event]] = []
        self._user_streams: dict[int, Stream] = {}  # the last one of each thread

    def start(self, build: Callable[[Callable[[Tensor], Tensor]], Any]) -> tuple[Any, Copy]:
        torch, me = self._torch, threading.get_ident()
        user_stream = self._leave_own_stream(me)
        pairs: list[tuple[Tensor, Tensor]] = []

        def place(tensor: Tensor) -> Tensor:
            try:
                target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            except RuntimeError as error:
                raise DeviceError from error
            pairs.append((target, tensor))
            return target

        # First all memory, then the mark: another thread may give back, on the same stream, what this one is given in between.
        value = build(place)
        copy = holding(self._lock, self._begin, user_stream, me)
        copy.run(pairs)
        return value, copy

    def _begin(self, user_stream: Stream, me: int) -> _TorchCopy:
        self._mend(me)
        self._prune()
        copy = _TorchCopy(self, self._spare.pop() if self._spare else self._events(), user_stream, me)
        self._running.append(copy)
        return copy

    def _leave_own_stream(self, me: int) -> Stream:
        """Return the user's stream. An interrupt inside torch may have left this thread on ours: put the user's back."""
        stream = self.current_stream()
        if stream == self.stream:
            stream = self._user_streams.get(me) or self._torch.cuda.default_stream(self._device)
            self._torch.cuda.set_stream(stream)
        self._user_streams[me] = stream
        return stream

    def _mend(self, me: int) -> None:
        """A copy of this thread's that an interrupt has left without its mark gets it now."""
        for copy in self._running:
            if copy.thread == me and not copy.is_recorded:
                copy.record_end()

    def throttle(self) -> None:
        self.prune()
        for copy in [copy for copy in self._running if copy.is_recorded][:-1]:
            copy.wait()

    def prune(self) -> None:
        holding(self._lock, self._prune)

    def _prune(self) -> None:
        self._running = [copy for copy in self._running if not copy.is_over()]

    def _events(self) -> tuple[Event, Event, Event]:
        # Blocking: a thread that waits for the device leaves its core to the workers.
        timed = (self._torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        return (self._torch.cuda.Event(), *timed)

    def current_stream(self) -> Stream:
        return self._torch.cuda.current_stream(self._device)

    def on_stream(self) -> Any:
        """Make our stream the current one for a while."""
        # As a context manager of its own a stream is code of C, which no signal breaks into.
        return self.stream if hasattr(self.stream, "__enter__") else self._torch.cuda.stream(self.stream)

    def recycle(self, events: tuple[Event, Event, Event]) -> None:
        holding(self._lock, self._spare.append, events)


class _TorchCopy:
    """The copy of one batch. `targets`: its memory on the device, until it has arrived."""

    def __init__(self, copier: TorchCopier, events: tuple[Event, Event, Event], user_stream: Stream, thread: int) -> None:
        self.targets: list[Tensor] = []
        self.thread = thread
        self.is_recorded = False
        self._copier = copier
        self._events: tuple[Event, Event, Event] | None = events
        self._user_stream = user_stream
        self._took_s: float | None = None

    def run(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Queue the copies, each from the second of a pair to the first. Raises DeviceError."""
        assert self._events is not None
        stream, (reached, began, _) = self._copier.stream, self._events
        self.targets = [target for target, _ in pairs]
        try:
            reached.record(self._user_stream)
            stream.wait_event(reached)
            began.record(stream)
            # All leaves of a batch lie in one slot. Out of memory that is not page-locked the copy would hold this thread up.
            is_pinned = not pairs or pairs[0][1].is_pinned()
            with self._copier.on_stream():
                for target, source in pairs:
                    target.copy_(source if is_pinned else CUDA.pinned_copy(source), non_blocking=True)
        except RuntimeError as error:
            raise DeviceError from error
        finally:
            self.record_end()

    def record_end(self) -> None:
        """Mark the end of what was queued."""
        if self._events is not None:
            self._events[2].record(self._copier.stream)
        self.is_recorded = True

    def arrive(self) -> None:
        current = self._copier.current_stream()
        if self._events is not None:
            current.wait_event(self._events[2])
        if current != self._user_stream:
            for target in self.targets:
                target.record_stream(current)
        self.targets = []

    def is_over(self) -> bool:
        events = self._events
        if events is None:
            return True
        try:
            return self.is_recorded and bool(events[2].query())
        except RuntimeError as error:
            return not _is_of_capture(error)  # else the context is broken, and nothing is copied any more

    def wait(self) -> None:
        events = self._events
        if events is not None:
            events[2].synchronize()

    def seconds(self) -> float | None:
        events = self._events
        if events is not None and self.is_over():
            try:
                self._took_s = events[1].elapsed_time(events[2]) / 1e3
            except RuntimeError:
                self._took_s = 0.0  # it was never begun
            self._events = None
            self._copier.recycle(events)
        return self._took_s


def _is_of_capture(error: RuntimeError) -> bool:
    code = getattr(error, "error_code", None)
    return code in _CAPTURE_ERRORS or (code is None and "captur" in str(error).lower())


def _torch() -> Any:
    return sys.modules["torch"]


CUDA: Cuda = TorchCuda()
