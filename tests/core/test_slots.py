"""The slot table: states, generations, sizes."""

from __future__ import annotations

import pytest

from ringloader._core.slots import NEXT, SlotEvent, Slots, SlotState, Survivors
from ringloader._core.units import align_slot, in_words
from ringloader.errors import InternalError


def ring(*segments: tuple[int, int]) -> Slots:
    slots = Slots()
    for segment_id, (slot_nbytes, num_slots) in enumerate(segments):
        slots.add_segment(segment_id, slot_nbytes, num_slots)
    return slots


def test_acquire_takes_the_smallest_slot_that_fits_and_counts_its_generation() -> None:
    """Best fit, most recently used first; each use has a generation of its own."""
    slots = ring((4096, 1), (64, 2))
    first = slots.acquire(60, 0)
    assert first is not None
    assert (first.capacity, first.generation) == (64, 1)
    slots.apply(first, SlotEvent.RETURN)
    again = slots.acquire(60, 0)
    assert again is first
    assert again.generation == 2
    assert slots.acquire(65, 0).capacity == 4096  # type: ignore[union-attr]
    assert slots.acquire(65, 0) is None
    slots.check()


def test_table_has_no_way_from_leased_to_filling() -> None:
    """What the user can see is never handed to a writer: leased slots leave only by release."""
    ways = {event: state for (start, event), state in NEXT.items() if start is SlotState.LEASED}
    assert ways == {SlotEvent.RELEASE: SlotState.FREE, SlotEvent.RELEASE_PENDING: SlotState.PENDING}
    assert {start for (start, event) in NEXT if event is SlotEvent.ASSIGN} == {SlotState.FREE}


def test_slot_moved_where_the_table_does_not_go_is_an_internal_error() -> None:
    """A transition that is not in the table is our bug, named with slot, state and event."""
    slots = ring((64, 1))
    with pytest.raises(InternalError, match="slot 0 is free and cannot filled"):
        slots.apply(slots.by_id[0], SlotEvent.FILLED)


def test_p18_outlier_is_retired_and_its_segment_given_back() -> None:
    """One huge batch does not keep its slot once recent batches are small again."""
    slots = ring((64, 2), (64 << 20, 1))
    for _ in range(20):
        slots.learn(60)
    huge = slots.acquire(32 << 20, 0)
    assert huge is not None
    slots.apply(huge, SlotEvent.RETURN)
    assert slots.dropped == [1]
    assert slots.nbytes() == 128
    slots.check()


def test_growth_of_a_size_beyond_all_recent_ones_is_small() -> None:
    """Sizes that creep up bring single slots with headroom, a usual size a set that doubles."""
    slots = ring((4096, 4))
    assert slots.growth(4096, 6, exact=False) == (4096, 4)
    for _ in range(8):
        slots.learn(4000)
    assert slots.growth(8192, 6, exact=False) == (align_slot(9216), 1)
    assert slots.growth(8192, 6, exact=True) == (8192, 1)


def test_retire_unfit_gives_back_only_segments_nobody_uses() -> None:
    """Room for larger batches comes from segments whose slots are all free."""
    slots = ring((64, 2), (128, 1))
    held = slots.acquire(100, 0)
    assert held is not None
    assert slots.retire_unfit(4096)
    assert slots.dropped == [0]
    assert list(slots.segments) == [1]
    assert not slots.retire_unfit(4096)


def test_rebuild_keeps_leases_and_frees_the_rest_under_new_generations() -> None:
    """After an interrupt only what the user holds is taken as given; late answers find another generation."""
    slots = ring((64, 3))
    leased, filling = slots.acquire(8, 0), slots.acquire(8, 0)
    assert leased is not None
    assert filling is not None
    slots.apply(leased, SlotEvent.FILLED)
    generation = filling.generation
    slots.rebuild(Survivors(leased={(leased.slot_id, leased.generation)}, segment_ids={0}))
    assert leased.state is SlotState.LEASED
    assert filling.state is SlotState.FREE
    assert filling.generation > generation
    slots.check()


def test_rebuild_leaves_slots_alone_whose_writer_could_not_be_ended() -> None:
    """Nor does one come back that was lost before, until its writer is gone, too."""
    slots = ring((64, 3))
    writing, lost = slots.acquire(8, 0), slots.acquire(8, 0)
    assert writing is not None
    assert lost is not None
    slots.apply(lost, SlotEvent.WRITER_LOST)
    lost.session_id = -5
    written = {(writing.slot_id, writing.generation): -7}
    slots.rebuild(Survivors(written=written, writers={-5, -7}, segment_ids={0}))
    assert [writing.state, lost.state] == [SlotState.QUARANTINED] * 2
    assert [writing.session_id, lost.session_id] == [-7, -5]
    slots.check()
    slots.rebuild(Survivors(writers={-7}, segment_ids={0}))
    assert [writing.state, lost.state] == [SlotState.QUARANTINED, SlotState.FREE]
    slots.check()


@pytest.mark.parametrize(("nbytes", "aligned"), [(0, 64), (1, 64), (65, 128), (4095, 4096), (4097, 8192)])
def test_align_slot_rounds_tiny_ones_to_cache_lines_and_others_to_pages(nbytes: int, aligned: int) -> None:
    """Tiny slots share pages, others never do."""
    assert align_slot(nbytes) == aligned


def test_in_words_gives_a_unit() -> None:
    """Sizes in messages carry a unit a person reads."""
    assert [in_words(n) for n in (5, 2048, 3 << 20, 5 << 40)] == ["5 bytes", "2.0 KiB", "3.0 MiB", "5.0 TiB"]
