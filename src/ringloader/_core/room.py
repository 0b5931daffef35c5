"""Room for batches: when the ring grows, what is revoked or retired for want of it, who starves.

Owns the rule that room for the oldest missing batch of a session comes first: a free slot, a larger ring, segments that are too
small given back, the youngest ready batch revoked; only then does the session starve, and its user is told. Must not reserve
memory itself: it asks by `AddSegment` and hears `SegmentAdded` or `SegmentRefused`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.session import Batch, BatchState, Session
from ringloader._core.slots import SlotEvent, Slots, SlotState, Survivors
from ringloader._core.units import align_slot, in_words

# A session needs two slots: the user's loop variable still holds one batch while the next is asked for.
LEAST_SLOTS = 2


class Room:
    """The slots of a ring, and the one request for more that may be under way."""

    def __init__(self, outbox: deque[ev.Command], num_used: int) -> None:
        self.slots = Slots()
        self.refusal: ev.SegmentRefused | None = None
        self.num_refused = 0
        self.num_revoked = 0
        self._outbox = outbox
        self._num_wanted = num_used + LEAST_SLOTS
        self._growing = False
        self._is_forced = False  # what was asked for last, and perhaps refused, was above the bound
        self._forced: set[int] = set()  # segments above the bound, of one slot each
        self._asked_nbytes = 0  # what the segment asked for last has to hold

    def restart(self, survivors: Survivors) -> None:
        """Start again from facts alone."""
        self._growing, self._is_forced, self.refusal = False, False, None
        self._forced.intersection_update(survivors.segment_ids)
        self.slots.rebuild(survivors)

    def added(self, event: ev.SegmentAdded) -> None:
        """The segment asked for is there."""
        if self._is_forced:
            self._forced.add(event.segment_id)
        self._growing, self._is_forced, self.refusal = False, False, None
        self.slots.add_segment(event.segment_id, event.slot_nbytes, event.num_slots)

    def refused(self, event: ev.SegmentRefused) -> None:
        """There is no room; a request with headroom is made once more without."""
        self._growing, self.refusal = False, event
        self.num_refused += 1
        if event.slot_nbytes > align_slot(self._asked_nbytes):
            self._grow(self._asked_nbytes, exact=True)

    def released(self, event: ev.SlotReleased) -> None:
        """A lease has ended; one of an older generation changes nothing."""
        slot = self.slots.by_id.get(event.slot_id)
        if slot is not None and slot.generation == event.generation and slot.state is SlotState.LEASED:
            self.slots.apply(slot, SlotEvent.RELEASE_PENDING if event.pending else SlotEvent.RELEASE)
            self._give_back()

    def completed(self, event: ev.SlotCompleted) -> None:
        """The last copy from a released slot has ended."""
        slot = self.slots.by_id.get(event.slot_id)
        if slot is not None and slot.generation == event.generation and slot.state is SlotState.PENDING:
            self.slots.apply(slot, SlotEvent.COMPLETE)
            self._give_back()

    def take_back(self, fill: msg.Fill) -> None:
        """The writer is done with a slot, or gone."""
        slot = self.slots.by_id.get(fill.slot_id)
        if slot is not None and slot.generation == fill.generation and slot.state is SlotState.FILLING:
            self.slots.apply(slot, SlotEvent.RETURN)
            self._give_back()

    def revoke(self, slot_id: int) -> None:
        """A ready batch is not wanted, or not now."""
        slot = self.slots.by_id.get(slot_id)
        if slot is not None and slot.state is SlotState.READY:
            self.slots.apply(slot, SlotEvent.REVOKE)
            self._give_back()

    def end_stream(self, session: Session, stream: int, number: int) -> None:
        """A stream has no more than `number` batches: what was made of later ones is not wanted."""
        for batch in session.end_stream(stream, number):
            self.revoke(batch.slot_id)

    def _give_back(self) -> None:
        """Slots came free: drop the segments that went with them, and ask for room again if it was refused."""
        if self.slots.dropped:
            self._outbox.extend(ev.DropSegment(segment_id) for segment_id in self.slots.dropped)
            self._forced.difference_update(self.slots.dropped)
            self.slots.dropped.clear()
            self.refusal = None

    def quarantine(self, worker_id: int, incarnation: int, fills: Iterable[msg.Fill]) -> None:
        """The writer of these Fills cannot be reaped: it might still write."""
        for fill in fills:
            slot = self.slots.by_id.get(fill.slot_id)
            if slot is not None and slot.state is SlotState.FILLING:
                self.slots.apply(slot, SlotEvent.WRITER_LOST)
                slot.session_id = writer_mark(worker_id, incarnation)

    def unquarantine(self, event: ev.WorkerExited) -> None:
        """A process that was abandoned is gone after all: its slots are safe again."""
        for slot in list(self.slots.by_id.values()):
            if slot.state is SlotState.QUARANTINED and slot.session_id == writer_mark(event.worker_id, event.incarnation):
                self.slots.apply(slot, SlotEvent.RETURN)
        self._give_back()

    def want(self, session: Session, batch: Batch, need: int, num_more: int = 0) -> bool:
        """No free slot is large enough; True when one was found after all and the batch can be tried again.

        `num_more`: slots that will be used beyond what the policy says.
        """
        if self._growing:
            return False
        # A refusal stands for everything at least as large, until something is given back.
        if self.refusal is None or need < self._asked_nbytes or self.slots.retire_unfit(need):
            self._give_back()
            self._grow(need, num_more=num_more)
            return False
        if batch is not session.oldest():
            return False
        return self._room_for_oldest(session, need)

    def _room_for_oldest(self, session: Session, need: int) -> bool:
        """Room for the oldest missing batch comes first: revoke younger ready batches, youngest first, before giving up."""
        younger = session.youngest_ready()
        if younger is not None and session.streams is not None and session.in_order:
            # It would have to be read again from the beginning: a slot above the bound is cheaper. There are never more
            # of these than batches in flight, so that a ring that the user fills is still full some time.
            if len(self._forced) < self._num_wanted and not self._is_forced:
                self._grow(need, forced=True)
            else:
                session.starved = True
            return False
        if younger is not None and not session.in_order:
            return False  # it can be handed over as it is, and its slot comes back that way
        if younger is not None:
            slot_id = younger.slot_id
            session.wait(younger)
            self.num_revoked += 1
            self.revoke(slot_id)
            return True
        if any(batch.state is BatchState.ISSUED and batch.slot_id != msg.NO_SLOT for batch in session.batches.values()):
            return False  # a younger one is being filled: it is revoked when it is ready
        assert self.refusal is not None
        others_hold = any(s.session_id not in (-1, session.session_id) for s in self.slots.by_id.values())
        if others_hold and self.slots.held_by(session.session_id) < 2 and self.refusal.configured:
            self._grow(need, forced=True)
            session.starved = False  # it may have been, while it still held two
            return False
        session.starved = True
        return False

    def _grow(self, need: int, *, exact: bool = False, forced: bool = False, num_more: int = 0) -> None:
        slot_nbytes, num_slots = self.slots.growth(need, self._num_wanted + num_more, exact=exact or forced)
        fits = any(slot.capacity >= need for slot in self.slots.by_id.values())
        least = 1 if forced or fits else LEAST_SLOTS
        self._growing, self._is_forced, self._asked_nbytes = True, forced, need
        self._outbox.append(ev.AddSegment(slot_nbytes, 1 if forced else max(num_slots, least), least, forced))


def writer_mark(worker_id: int, incarnation: int) -> int:
    """Mark of the abandoned process that may still write into a quarantined slot: below any session id."""
    return -2 - (worker_id << 32 | incarnation)


def room_sentence(refusal: ev.SegmentRefused) -> str:
    """The refusal in words, with sizes."""
    return f"{refusal.reason} (a batch needs a slot of {in_words(refusal.slot_nbytes)})"
