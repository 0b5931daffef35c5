"""Page-locked segments: which of a ring's mappings are registered with CUDA.

Owns the order register, use, unregister, unmap, once each, for every mapping. Registering may take a second for some GiB, so
it happens outside the pump's lock, on the consumer's thread, before the first batch out of a segment is handed over. A ring
that drops a segment asks here first: one that is registered, or about to be, is not unmapped but retired, until the consumer's
thread comes by again and nobody reads it any more.

Who may die when: a process that ends takes its registrations with it. A registration that fails leaves its segment as it was.
An address is noted before it is registered: after an interrupt in between nobody knows whether it is, so it is unregistered
first, which does no harm where it was not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from ringloader._core.units import in_words
from ringloader._runtime import memory
from ringloader._runtime.cuda import Cuda, CudaError
from ringloader._runtime.locking import holding
from ringloader._runtime.segment import Segment
from ringloader.errors import ConfigError

logger = logging.getLogger("ringloader")

# From this duration on it is said how long registering took.
_SLOW_S = 0.1


class Pins:
    """The page-locked segments of one ring. `mode`: "off"; "try", a failure is a warning; "require", it is an error. `device`:
    where batches go, None where that is not known."""

    def __init__(self, cuda: Cuda, mode: str, device: str | None = None) -> None:
        self._device = device
        self.is_on = mode != "off"
        self.nbytes = 0
        self._cuda = cuda
        self._is_required = mode == "require"
        self._marked: set[int] = set()  # segments that are registered or about to be
        self._addresses: dict[int, int] = {}  # of segments that may be registered
        self._registered: set[int] = set()
        self._charged: set[int] = set()  # segments that are in the account of page-locked bytes
        self._refused: set[int] = set()
        self._has_warned = False
        # Two consumers register one after the other: neither hands over a batch before its segment is settled. Re-entrant only
        # so that a signal handler on this very thread can tell.
        self.lock = threading.RLock()

    def is_mine(self) -> bool:
        """This thread is in the midst of registering already: a signal handler asks."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return owned

    def is_settled(self, segment_id: int) -> bool:
        """Batches out of this segment can be handed over: it is registered, or will not be."""
        return not self.is_on or segment_id in self._registered or segment_id in self._refused

    def holds(self, segment_id: int) -> bool:
        """The segment must not be unmapped before `unregister`. Any thread."""
        return segment_id in self._marked

    def settle(self, segments: dict[int, Segment], count: Callable[[Iterable[int]], int]) -> None:
        """Register what is new. The consumer's thread alone; `count` tells how many slots are in some segments.

        Raises ConfigError where page-locking is required and impossible.
        """
        if not self.is_on or all(map(self.is_settled, list(segments))) or self.is_mine():
            return
        holding(self.lock, self._settle, segments, count)

    def _settle(self, segments: dict[int, Segment], count: Callable[[Iterable[int]], int]) -> None:
        for segment_id, segment in list(segments.items()):
            if self.is_settled(segment_id) or self._cuda.is_capturing():
                continue
            self._marked.add(segment_id)
            if segment_id not in segments:  # dropped meanwhile
                self._marked.discard(segment_id)
                continue
            reason = self._register(segment_id, segment)
            if reason is not None:
                self._refused.add(segment_id)
                self._marked.discard(segment_id)
                self._complain(reason, count)

    def _register(self, segment_id: int, segment: Segment) -> str | None:
        """Register one segment; return why not, if not."""
        if segment_id not in self._charged:
            refusal = memory.PINNED.take(segment.nbytes)
            if refusal is not None:
                return refusal
            self._charged.add(segment_id)
        began_s = time.monotonic()
        address = int(segment.mapping.array(1).ctypes.data)
        if segment_id in self._addresses:
            self._cuda.unregister(address)
        self._addresses[segment_id] = address
        try:
            self._cuda.register(address, segment.nbytes, self._device)
        except CudaError as error:
            del self._addresses[segment_id]
            self._give_back(segment_id, segment)
            return (
                f"cudaHostRegister of {in_words(segment.nbytes)} failed: {error}; what is exhausted is page-locked memory of "
                "the host, not the GPU's (a limit of the driver, of the container or of WSL)"
            )
        self._registered.add(segment_id)
        self.nbytes += segment.nbytes
        took_s = time.monotonic() - began_s
        level = logging.INFO if took_s >= _SLOW_S else logging.DEBUG
        logger.log(level, "page-locked %s in %.2f s", in_words(segment.nbytes), took_s)
        return None

    def _complain(self, reason: str, count: Callable[[Iterable[int]], int]) -> None:
        if self._is_required:
            raise ConfigError(
                f"pin_memory='require', but {reason}; lower max_ring_bytes, or use pin_memory=True to go on without",
                option="pin_memory",
                value="require",
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "pin_memory: %s; %d slots of the ring are page-locked, %d are not, and batches in those are delivered unpinned",
                reason,
                count(self._registered),
                count(self._refused),
            )

    def unregister(self, segment_id: int, segment: Segment) -> None:
        """Undo the registration of a segment that nobody reads any more. The consumer's thread alone."""
        address = self._addresses.get(segment_id)
        if address is not None:
            self._cuda.unregister(address)
            del self._addresses[segment_id]
        if segment_id in self._registered:
            self._registered.discard(segment_id)
            self.nbytes -= segment.nbytes
        self._give_back(segment_id, segment)
        self._marked.discard(segment_id)
        self._refused.discard(segment_id)

    def _give_back(self, segment_id: int, segment: Segment) -> None:
        if segment_id in self._charged:
            self._charged.discard(segment_id)
            memory.PINNED.give_back(segment.nbytes)

    def forget(self, segment_id: int) -> None:
        """A segment that was never registered is gone."""
        self._refused.discard(segment_id)
