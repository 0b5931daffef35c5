"""The ring: segments of slots, and the leases of what the user holds.

Owns the segments of one loader and every lease on them. A lease ends when the last array or tensor over the slot is gone, which
Python tells through a weak reference to the slot's root array. Its callback may run on any thread, in the middle of anything,
so it is the append of a deque and nothing else: code of C, which neither a signal nor another thread can break into. (A
callback written in Python lost the release, and the KeyboardInterrupt with it, when Ctrl-C fell inside.) Closing a ring never
invalidates a view: each root keeps its segment mapped. Must not know sessions.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from ringloader._core.events import AddSegment, SegmentAdded, SegmentRefused
from ringloader._core.slots import Slot
from ringloader._runtime import memory
from ringloader._runtime.segment import RoomError, Segment
from ringloader.errors import InternalError

# What RINGLOADER_DEBUG=1 fills a free slot with: a batch read after its release shows it.
MARKER = 0xAB


class Lease(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a slot's root array; knows the slot, its generation and the leaves that were handed out."""

    __slots__ = ("generation", "leaves", "nbytes", "slot_id")

    slot_id: int
    generation: int
    nbytes: int
    leaves: list[weakref.ref[Any]]


class Ring:
    """Segments of slots with their leases; `limit` bounds the bytes of all rings of this process."""

    def __init__(self, limit: int, *, debug: bool = False) -> None:
        self.limit = limit
        self.ended: deque[Lease] = deque()  # leases that are over, until `drain`
        self.segments: dict[int, Segment] = {}
        self.leases: dict[tuple[int, int], Lease] = {}
        self._debug = debug
        self._next_segment_id = 0

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
        self.segments[segment_id] = segment
        return SegmentAdded(segment_id, size, num_slots)

    def drop_segment(self, segment_id: int) -> None:
        """Give a segment back; a second time changes nothing."""
        segment = self.segments.pop(segment_id, None)
        if segment is not None:
            memory.ACCOUNT.give_back(segment.nbytes)
            segment.close()

    def root(self, slot: Slot, nbytes: int) -> np.ndarray[Any, Any]:
        """Return the first `nbytes` of a slot as a new uint8 array: the one object that all views of this lease keep alive."""
        root = np.frombuffer(self.segments[slot.segment_id].mapping, np.uint8, nbytes, slot.offset)
        if isinstance(root.base, np.ndarray):
            # numpy collapses chains of arrays: views would then point past the root, and the lease would end under them.
            raise InternalError("the root of a lease must not be a view of an array")
        return root

    def lend(self, slot: Slot, root: np.ndarray[Any, Any], leaves: list[Any]) -> None:
        """Note that views of `root` are about to reach the user."""
        lease = Lease(root, self.ended.append)
        lease.slot_id, lease.generation, lease.nbytes = slot.slot_id, slot.generation, root.nbytes
        lease.leaves = [weakref.ref(leaf) for leaf in leaves]
        self.leases[slot.slot_id, slot.generation] = lease

    def drain(self) -> list[tuple[int, int]]:
        """Return the (slot id, generation) of every lease that has ended since."""
        keys: list[tuple[int, int]] = []
        while self.ended:
            lease = self.ended.popleft()
            key = (lease.slot_id, lease.generation)
            self.leases.pop(key, None)
            keys.append(key)
        return keys

    def mark_free(self, slot: Slot) -> None:
        """In debug mode, make reading a batch after its release visible."""
        if self._debug and slot.segment_id in self.segments:
            np.frombuffer(self.segments[slot.segment_id].mapping, np.uint8, slot.capacity, slot.offset)[:] = MARKER

    def alive(self) -> set[tuple[int, int]]:
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
        return [f"{count} by {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1])]

    def find_lease(self, address: int, leaf: object) -> Lease | None:
        """Return the lease that handed out this very leaf, whose memory begins at `address`."""
        for lease in list(self.leases.values()):
            root = lease()
            if root is not None and root.ctypes.data <= address < root.ctypes.data + max(root.nbytes, 1):
                return lease if any(ref() is leaf for ref in lease.leaves) else None
        return None

    def close(self) -> None:
        """Give every segment back. Leases that are alive keep their mapping and end in silence."""
        for segment_id in list(self.segments):
            self.drop_segment(segment_id)


def _describe(leaf: Any) -> str:
    nbytes = leaf.nbytes
    return f"a leaf of shape {tuple(leaf.shape)}, {str(leaf.dtype).removeprefix('torch.')}, {nbytes:,} bytes"
