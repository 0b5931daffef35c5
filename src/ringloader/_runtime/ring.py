"""The ring: segments of slots, and the leases of what the user holds.

Owns the segments of one loader and every lease on them. A lease ends when the last array or tensor over the slot is gone, which
Python tells through a weak reference to the slot's root array. Its callback may run on any thread, in the middle of anything,
so it is the append of a deque and nothing else: code of C, which neither a signal nor another thread can break into. (A
callback written in Python lost the release, and the KeyboardInterrupt with it, when Ctrl-C fell inside.) Closing a ring never
invalidates a view: each root keeps its segment mapped. A segment that is dropped while it is page-locked, or while a device may
read it, is retired: it stays mapped until `sweep`, on a thread that may call CUDA, finds that nobody reads it any more and
undoes the registration. Must not know sessions.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from ringloader._core.events import AddSegment, SegmentAdded, SegmentRefused
from ringloader._core.slots import Slot
from ringloader._core.units import MARKER
from ringloader._runtime import memory
from ringloader._runtime.cuda import Cuda, Stream
from ringloader._runtime.fences import Fences, Key
from ringloader._runtime.lacks import RoomError
from ringloader._runtime.locking import holding
from ringloader._runtime.pinning import Pins
from ringloader._runtime.segment import Segment
from ringloader.errors import InternalError

# How often the end of the interpreter looks whether copies are over.
_EXIT_LOOK_S = 0.001


class Lease(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a slot's root array; knows the slot, its generation and the leaves that were handed out.

    `key`: (slot id, generation). `streams`: what copies out of the slot may be queued on, as far as is known; `is_exact`: there
    are no others. `thread`: who was handed the batch; `ended_s`: when it was known that the lease is over.
    """

    __slots__ = ("ended_s", "is_exact", "key", "leaves", "nbytes", "segment_id", "streams", "thread")

    key: Key
    segment_id: int
    nbytes: int
    leaves: list[weakref.ref[Any]]
    streams: tuple[Stream, ...]
    is_exact: bool
    thread: int
    ended_s: float


class Ring:
    """Segments of slots with their leases; `limit` bounds the bytes of all rings of this process.

    `pin`: whether they are page-locked, see `Pins`.
    """

    def __init__(self, limit: int, cuda: Cuda, pin: str = "off", device: str | None = None) -> None:
        self.limit = limit
        self.cuda = cuda
        self.pins = Pins(cuda, pin, device)
        self.fences = Fences(cuda)
        self.ended: deque[Lease] = deque()  # leases that are over, until `forget`
        self.segments: dict[int, Segment] = {}
        self.leases: dict[Key, Lease] = {}
        self.retired: dict[int, Segment] = {}
        self._num_slots: dict[int, int] = {}
        self.marks_free = os.environ.get("RINGLOADER_DEBUG") == "1"  # reading a batch after its release is made visible
        self._next_segment_id = 0
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments.values())

    def add_segment(self, command: AddSegment) -> SegmentAdded | SegmentRefused:
        """Reserve a segment of as many of the slots asked for as there is room for."""
        size = command.slot_nbytes
        num_slots = memory.ACCOUNT.take(
            size, command.num_slots, least=command.least, limit=self.limit, own_nbytes=self.nbytes, forced=command.forced
        )
        if not num_slots:
            return SegmentRefused(size, memory.bound_sentence(size, command.least, self.limit), configured=True)
        while True:
            try:
                segment = Segment.create(size * num_slots)
                segment.map()
                break
            except RoomError as error:
                fewer = max(num_slots // 2, command.least)
                memory.ACCOUNT.give_back(size * (num_slots if fewer == num_slots else num_slots - fewer))
                if fewer == num_slots:
                    return SegmentRefused(size, str(error), configured=False)
                num_slots = fewer
            except BaseException:
                memory.ACCOUNT.give_back(size * num_slots)
                raise
        segment_id, self._next_segment_id = self._next_segment_id, self._next_segment_id + 1
        self._num_slots[segment_id] = num_slots
        self.segments[segment_id] = segment
        if self._is_closed:
            self.drop_segment(segment_id)  # while it was made
        return SegmentAdded(segment_id, size, num_slots)

    def drop_segment(self, segment_id: int) -> None:
        """Give a segment back; a second time changes nothing."""
        segment = self.segments.get(segment_id)
        if segment is None:
            return
        self.retired[segment_id] = segment
        del self.segments[segment_id]
        if not self.pins.holds(segment_id) and segment_id not in self._copied_segments():
            self.pins.forget(segment_id)
            self._unmap(segment_id)

    def _copied_segments(self) -> set[int]:
        """Segments that a device may be reading, or may yet be asked to: a ring is closed while batches are held."""
        leases = [*self.leases.values(), *self.fences.leases().values()]
        return {lease.segment_id for lease in leases if self.fences.needs(lease)}

    def _unmap(self, segment_id: int) -> None:
        """Let go of a retired segment. Its memory goes with its last view."""
        segment = self.retired.pop(segment_id, None)
        if segment is not None:
            self._num_slots.pop(segment_id, None)
            memory.ACCOUNT.give_back(segment.nbytes)
            segment.close()

    def settle(self) -> None:
        """Page-lock what is new and undo what is retired. Only on a thread that may call CUDA, outside the pump's lock."""
        self.pins.settle(self.segments, self._count)
        if self.retired:
            self.sweep()

    def is_unsettled(self) -> bool:
        """A segment is yet to be page-locked, and that can be done."""
        if not self.pins.is_on or all(map(self.pins.is_settled, list(self.segments))):
            return False
        return not self.pins.is_mine() and not self.cuda.is_capturing()

    def _count(self, segment_ids: Iterable[int]) -> int:
        return sum(self._num_slots.get(segment_id, 0) for segment_id in list(segment_ids))

    def sweep(self) -> None:
        """Unregister and unmap the retired segments that nobody reads any more. Only on a thread that may call CUDA."""
        if self.pins.is_mine() or self.cuda.is_capturing():
            return
        holding(self.pins.lock, self._sweep)

    def _sweep(self) -> None:
        busy = {lease.segment_id for lease in [*self.leases.values(), *self.fences.leases().values()]}
        for segment_id, segment in list(self.retired.items()):
            if segment_id not in busy:
                self.pins.unregister(segment_id, segment)
                self._unmap(segment_id)

    def linger(self) -> bool:
        """After the ring was closed: look at what has come free since; True while something is left to wait for."""
        while self.ended:
            lease = self.ended[0]
            if self.fences.needs(lease):
                self.fences.add(lease)
            self.forget(lease)
        self.fences.advance()
        self.sweep()
        return bool(self.retired)

    def leave(self, deadline_s: float) -> None:
        """The interpreter ends: wait a little for copies, then undo every registration that no copy needs."""
        for lease in list(self.leases.values()):
            self.fences.add(lease)  # still held, but by nobody who will copy any more
        while self.fences.is_waiting and not self.cuda.is_capturing() and time.monotonic() < deadline_s:
            self.fences.advance(of_all_threads=True)
            time.sleep(_EXIT_LOOK_S)
        self.leases.clear()
        self.sweep()

    def root(self, slot: Slot, nbytes: int) -> np.ndarray[Any, Any]:
        """Return the first `nbytes` of a slot as a new uint8 array: the one object that all views of this lease keep alive."""
        root = self.segments[slot.segment_id].mapping.array(nbytes, slot.offset)
        if isinstance(root.base, np.ndarray):
            # numpy collapses chains of arrays: views would then point past the root, and the lease would end under them.
            raise InternalError("the root of a lease must not be a view of an array")
        return root

    def lend(self, slot: Slot, root: np.ndarray[Any, Any], leaves: list[Any], streams: tuple[Stream, ...] = ()) -> None:
        """Note that views of `root` are about to reach the user, or that `streams` are about to read it."""
        lease = Lease(root, self.ended.append)
        lease.key, lease.segment_id, lease.nbytes = (slot.slot_id, slot.generation), slot.segment_id, root.nbytes
        lease.leaves = [weakref.ref(leaf) for leaf in leaves]
        lease.is_exact = bool(streams)
        lease.thread = threading.get_ident()
        lease.streams = streams or (tuple(self.cuda.streams()) if self.cuda.is_active() else ())
        self.leases[lease.key] = lease

    def forget(self, lease: Lease) -> None:
        """What the end of a lease leads to has been done: the first of `ended` goes."""
        self.leases.pop(lease.key, None)
        self.ended.popleft()

    def mark_free(self, slot: Slot) -> None:
        """Where `marks_free`: fill a slot that has become free with a marker."""
        if slot.segment_id in self.segments:
            self.segments[slot.segment_id].mapping.array(slot.capacity, slot.offset)[:] = MARKER

    def alive(self) -> set[Key]:
        """The leases whose memory somebody can still see."""
        return {key for key, lease in self.leases.items() if lease() is not None}

    def holders(self) -> list[str]:
        """Say which leaves hold how many slots, largest group first: for `RingFullError`."""
        counts: dict[str, int] = {}
        for lease in list(self.leases.values()):
            if lease() is None:
                continue
            held = [leaf for leaf in (ref() for ref in lease.leaves) if leaf is not None]
            what = " + ".join(_describe(leaf) for leaf in held[:4]) or "a view"
            counts[what] = counts.get(what, 0) + 1
        found = [f"{count} by {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1])]
        num_copied = len(self.fences.leases())
        return [*found, f"{num_copied} by copies to a device that are not known to be over"] if num_copied else found

    def find_lease(self, address: int, leaf: object = None) -> Lease | None:
        """Return the lease over the slot in which `address` lies; with `leaf`, only if it handed out that very object."""
        for lease in list(self.leases.values()):
            root = lease()
            if root is not None and root.ctypes.data <= address < root.ctypes.data + max(root.nbytes, 1):
                return lease if leaf is None or any(ref() is leaf for ref in lease.leaves) else None
        return None

    def close(self) -> None:
        """Give every segment back. Leases that are alive keep their mapping; page-locked segments wait for `linger`."""
        self._is_closed = True
        for segment_id in list(self.segments):
            self.drop_segment(segment_id)


def _describe(leaf: Any) -> str:
    nbytes = leaf.nbytes
    return f"a leaf of shape {tuple(leaf.shape)}, {str(leaf.dtype).removeprefix('torch.')}, {nbytes:,} bytes"
