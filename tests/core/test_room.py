"""Who gets room, in single decisions."""

from __future__ import annotations

from collections import deque

from ringloader._core import events as ev
from ringloader._core.batch_keys import pack_keys
from ringloader._core.messages import Filled
from ringloader._core.room import Room
from ringloader._core.session import Batch, Session
from ringloader._core.slots import SlotEvent, SlotState

_FILLED = Filled(1, 1, 0, b"", b"", b"", 60, 60, 2, 0, 0, 0)


def full_ring(*, in_order: bool) -> tuple[Room, Session, deque[ev.Command]]:
    """One slot, held by the younger of two batches, and no room for more."""
    outbox: deque[ev.Command] = deque()
    room, session = Room(outbox, 2), Session(0, 0, in_order=in_order)
    for k in range(2):
        session.submit(k, pack_keys([k], k))
    room.added(ev.SegmentAdded(0, 64, 1))
    slot = room.slots.acquire(60, 0)
    assert slot is not None
    room.slots.apply(slot, SlotEvent.FILLED)
    session.batches[1].slot_id = slot.slot_id
    session.ready(session.batches[1], _FILLED)
    assert not room.want(session, oldest(session), 60)
    outbox.clear()
    room.refused(ev.SegmentRefused(64, "full", True))
    return room, session, outbox


def oldest(session: Session) -> Batch:
    batch = session.oldest_waiting()
    assert batch is not None
    return batch


def test_p07_oldest_missing_batch_takes_the_slot_of_a_younger_ready_one() -> None:
    """In order, a ready batch that cannot be delivered yet gives way to the one that everybody waits for."""
    room, session, _ = full_ring(in_order=True)
    assert room.want(session, oldest(session), 60)
    assert room.slots.by_id[0].state is SlotState.FREE
    assert room.num_revoked == 1


def test_ready_batch_that_can_be_delivered_is_not_revoked() -> None:
    """Out of order it goes to the user as it is, and its slot comes back that way: nothing is made twice."""
    room, session, _ = full_ring(in_order=False)
    assert not room.want(session, oldest(session), 60)
    assert room.slots.by_id[0].state is SlotState.READY
    assert room.num_revoked == 0


def test_session_starves_only_when_nothing_is_left_to_try() -> None:
    """Starved: the bound said no, nothing is ready, nothing is being filled, the slots are with the user."""
    room, session, _ = full_ring(in_order=True)
    room.slots.apply(room.slots.by_id[0], SlotEvent.LEND)
    session.hand_over(session.batches[1])
    assert not room.want(session, oldest(session), 60)
    assert session.starved


def test_refused_headroom_is_asked_for_again_without() -> None:
    """A size beyond all recent ones is asked for with headroom first, and exactly when that is refused."""
    outbox: deque[ev.Command] = deque()
    room, session = Room(outbox, 2), Session(0, 0, in_order=True)
    session.submit(0, pack_keys([0], 0))
    room.added(ev.SegmentAdded(0, 4096, 2))
    room.slots.learn(4096)
    room.want(session, oldest(session), 16384)
    first = outbox.popleft()
    assert isinstance(first, ev.AddSegment)
    assert first.slot_nbytes > 16384
    room.refused(ev.SegmentRefused(first.slot_nbytes, "full", True))
    second = outbox.popleft()
    assert isinstance(second, ev.AddSegment)
    assert second.slot_nbytes == 16384
