"""Slot life cycle as a table.

Owns which slots exist, what state each is in, and which batch size is usual. The training process owns every slot; a worker
only ever writes into the one its current Fill names, so a dead worker holds nothing. A generation counts the uses of a slot:
whatever names an older one is late and changes nothing. Must not touch memory.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ringloader._core.units import align_slot
from ringloader.errors import InternalError


class _Tag(enum.Enum):
    """An enum that is looked up by identity: Enum's own hash is a Python call, and a slot moves four times per batch."""

    __hash__ = object.__hash__


class SlotState(_Tag):
    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    LEASED = "leased"
    PENDING = "pending"  # released, but a copy from it may still run
    QUARANTINED = "quarantined"  # its writer was killed and is not yet reaped: it might still write
    RETIRED = "retired"


class SlotEvent(_Tag):
    ASSIGN = "assign"
    FILLED = "filled"
    RETURN = "return"
    WRITER_LOST = "writer lost"
    LEND = "lend"
    REVOKE = "revoke"
    RELEASE = "release"
    RELEASE_PENDING = "release pending"
    COMPLETE = "complete"
    RETIRE = "retire"


_S, _E = SlotState, SlotEvent
NEXT = {
    (_S.FREE, _E.ASSIGN): _S.FILLING,
    (_S.FREE, _E.RETIRE): _S.RETIRED,
    (_S.FILLING, _E.FILLED): _S.READY,
    (_S.FILLING, _E.RETURN): _S.FREE,
    (_S.FILLING, _E.WRITER_LOST): _S.QUARANTINED,
    (_S.QUARANTINED, _E.RETURN): _S.FREE,
    (_S.READY, _E.LEND): _S.LEASED,
    (_S.READY, _E.REVOKE): _S.FREE,
    (_S.LEASED, _E.RELEASE): _S.FREE,
    (_S.LEASED, _E.RELEASE_PENDING): _S.PENDING,
    (_S.PENDING, _E.COMPLETE): _S.FREE,
}
# How many recent batches say what size is usual, how far above it a slot may lie, and below what size nobody cares.
_RECENT_BATCHES = 64
_OUTLIER_FACTOR = 4
_OUTLIER_MIN_NBYTES = 1 << 20
# One more segment may be this large, or a quarter of what there is: segments stay few however far a ring grows.
_GROWTH_MIN_NBYTES = 256 << 20
_GROWTH_SHARE = 4


@dataclass(slots=True)
class Slot:
    """A range of a segment; `offset` and `capacity` in bytes."""

    slot_id: int
    segment_id: int
    offset: int
    capacity: int
    state: SlotState = SlotState.FREE
    generation: int = 0
    session_id: int = -1


@dataclass(frozen=True, slots=True)
class Survivors:
    """What an interrupted decision cannot have left half done. A use of a slot is its id and generation.

    leased: uses whose leases are alive. copied: uses that have ended while copies may still run. written: uses whose writer
    could not be ended, each with the mark of that writer. writers: the marks of all such. segment_ids: the segments that exist.
    """

    leased: Collection[tuple[int, int]] = frozenset()
    copied: Collection[tuple[int, int]] = frozenset()
    written: Mapping[tuple[int, int], int] = field(default_factory=dict)
    writers: Collection[int] = frozenset()
    segment_ids: Collection[int] = frozenset()


class Slots:
    """Every slot of one ring."""

    def __init__(self) -> None:
        self.by_id: dict[int, Slot] = {}
        self.segments: dict[int, list[Slot]] = {}
        self.segment_nbytes: dict[int, int] = {}
        self.dropped: list[int] = []  # segments whose last slot was retired, for the owner to give back
        self._free: dict[int, list[Slot]] = {}
        self._recent: deque[int] = deque(maxlen=_RECENT_BATCHES)
        self._next_slot_id = 0

    def add_segment(self, segment_id: int, slot_nbytes: int, num_slots: int) -> None:
        """Take in a new segment of equal slots."""
        slots = [Slot(self._next_slot_id + k, segment_id, k * slot_nbytes, slot_nbytes) for k in range(num_slots)]
        self._next_slot_id += num_slots
        self.segments[segment_id] = slots
        self.segment_nbytes[segment_id] = slot_nbytes * num_slots
        for slot in slots:
            self.by_id[slot.slot_id] = slot
        self._free.setdefault(slot_nbytes, []).extend(reversed(slots))

    def acquire(self, nbytes: int, session_id: int) -> Slot | None:
        """Assign the smallest free slot that holds `nbytes`, most recently used first; None when there is none."""
        best = 0
        for capacity, slots in self._free.items():
            if slots and capacity >= nbytes and (not best or capacity < best):
                best = capacity
        if not best:
            return None
        slot = self._free[best].pop()
        self._move(slot, SlotEvent.ASSIGN)
        slot.generation += 1
        slot.session_id = session_id
        return slot

    def apply(self, slot: Slot, event: SlotEvent) -> None:
        """Move a slot along the table; a slot that becomes free is usable at once, or retired when it is far too large."""
        self._move(slot, event)
        if slot.state is SlotState.FREE:
            slot.session_id = -1
            self._free[slot.capacity].append(slot)
            if slot.capacity > _OUTLIER_MIN_NBYTES and slot.capacity > self.outlier_nbytes():
                # With its siblings: one that is never used again would never come by here, and keep the whole segment.
                for sibling in [one for one in self.segments[slot.segment_id] if one.state is SlotState.FREE]:
                    self.retire(sibling)

    def retire(self, slot: Slot) -> None:
        """Take a free slot out of use; its segment goes with its last slot."""
        self._free[slot.capacity].remove(slot)
        self._move(slot, SlotEvent.RETIRE)
        siblings = self.segments[slot.segment_id]
        if all(sibling.state is SlotState.RETIRED for sibling in siblings):
            self._drop(slot.segment_id)

    def retire_unfit(self, nbytes: int) -> bool:
        """Retire every segment of nothing but free slots that are too small for `nbytes`; True when one was."""
        unfit = [
            slots
            for slots in self.segments.values()
            if slots[0].capacity < nbytes and all(s.state in (SlotState.FREE, SlotState.RETIRED) for s in slots)
        ]
        for slots in unfit:
            for slot in slots:
                if slot.state is SlotState.FREE:
                    self.retire(slot)
        return bool(unfit)

    def learn(self, nbytes: int) -> None:
        """Remember the size of a batch that was made."""
        self._recent.append(nbytes)

    def outlier_nbytes(self) -> int:
        """Capacity above which a slot is too large for what recent batches need."""
        if len(self._recent) < _RECENT_BATCHES // 4:
            return 1 << 62
        usual = sorted(self._recent)[len(self._recent) * 9 // 10]
        return max(_OUTLIER_FACTOR * usual, _OUTLIER_MIN_NBYTES)

    def growth(self, nbytes: int, num_wanted: int, *, exact: bool) -> tuple[int, int]:
        """Return (slot bytes, slots) of the next segment for batches of `nbytes`, when `num_wanted` would be used at once.

        A size beyond all recent ones gets few slots, a little larger unless `exact`: sizes that creep up should not bring a
        full set of slots for each new maximum.
        """
        if self._recent and nbytes > max(self._recent):
            return align_slot(nbytes if exact else nbytes + nbytes // 8), 1
        slot_nbytes = align_slot(nbytes)
        num_fitting = sum(1 for slot in self.by_id.values() if slot.capacity >= nbytes)
        most_nbytes = max(_GROWTH_MIN_NBYTES, self.nbytes() // _GROWTH_SHARE)
        num_slots = min(max(num_fitting, 1), max(1, most_nbytes // slot_nbytes))
        return slot_nbytes, max(num_slots, num_wanted - num_fitting)

    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.segment_nbytes.values())

    def num_free(self) -> int:
        return sum(len(slots) for slots in self._free.values())

    def held_by(self, session_id: int) -> int:
        """Slots that a session holds in any state."""
        return sum(1 for slot in self.by_id.values() if slot.session_id == session_id)

    def rebuild(self, survivors: Survivors) -> None:
        """Start again from facts alone."""
        # From the segments alone: an interrupt may have left the other tables half changed.
        self.segments = {known: slots for known, slots in self.segments.items() if known in survivors.segment_ids}
        self.by_id = {slot.slot_id: slot for slots in self.segments.values() for slot in slots}
        self.segment_nbytes = {known: sum(slot.capacity for slot in slots) for known, slots in self.segments.items()}
        self._next_slot_id = max([self._next_slot_id, *(slot_id + 1 for slot_id in self.by_id)])
        self.dropped.clear()
        self._free = {slot.capacity: [] for slot in self.by_id.values()}
        for slot in self.by_id.values():
            if (slot.slot_id, slot.generation) in survivors.leased:
                slot.state = SlotState.LEASED
            elif (slot.slot_id, slot.generation) in survivors.copied:
                slot.state = SlotState.PENDING
            elif (slot.slot_id, slot.generation) in survivors.written:
                slot.state, slot.session_id = SlotState.QUARANTINED, survivors.written[slot.slot_id, slot.generation]
            elif slot.state is SlotState.QUARANTINED and slot.session_id in survivors.writers:
                pass  # its writer was lost before
            elif slot.state is not SlotState.RETIRED:
                slot.state, slot.session_id = SlotState.FREE, -1
                slot.generation += 1
                self._free[slot.capacity].append(slot)

    def check(self) -> None:
        """Raise InternalError unless the free lists hold exactly the free slots, each once."""
        listed = [slot.slot_id for slots in self._free.values() for slot in slots]
        free = [slot.slot_id for slot in self.by_id.values() if slot.state is SlotState.FREE]
        if sorted(listed) != sorted(free):
            raise InternalError(f"free lists hold {sorted(listed)}, free slots are {sorted(free)}")

    def _move(self, slot: Slot, event: SlotEvent) -> None:
        state = NEXT.get((slot.state, event))
        if state is None:
            raise InternalError(f"slot {slot.slot_id} is {slot.state.value} and cannot {event.value}", slot_id=slot.slot_id)
        slot.state = state

    def _drop(self, segment_id: int) -> None:
        self._forget(segment_id)
        self.dropped.append(segment_id)

    def _forget(self, segment_id: int) -> None:
        for slot in self.segments.pop(segment_id):
            del self.by_id[slot.slot_id]
        del self.segment_nbytes[segment_id]
