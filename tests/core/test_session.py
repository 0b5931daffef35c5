"""Order, hand-over and bad samples of one iteration."""

from __future__ import annotations

from ringloader._core.batch_keys import pack_keys, unpack_keys
from ringloader._core.messages import Filled
from ringloader._core.session import BatchState, Session

_FILLED = Filled(1, 1, 0, b"", b"", b"", 10, 10, 2, 0, 0, 0)


def session(num_batches: int, *, in_order: bool = True) -> Session:
    made = Session(0, 0, in_order=in_order)
    for k in range(num_batches):
        made.submit(k, pack_keys([2 * k, 2 * k + 1], 2 * k))
    return made


def test_head_waits_for_the_oldest_in_order_and_not_otherwise() -> None:
    """in_order: a younger ready batch waits; else it goes first."""
    ordered, free = session(3), session(3, in_order=False)
    for one in (ordered, free):
        one.ready(one.batches[1], _FILLED)
    assert ordered.head() is None
    assert free.head() is free.batches[1]


def test_submit_twice_changes_nothing() -> None:
    """An interrupt between pulling and noting it makes the same batch come again: it is one batch."""
    one = session(2)
    one.submit(0, pack_keys([9, 9], 0))
    one.submit(1, pack_keys([9, 9], 0))
    assert one.batches[0].key_list() == [0, 1]
    assert one.num_submitted == 2


def test_batch_in_hand_is_counted_once_it_arrived_and_made_again_if_it_did_not() -> None:
    """settle: arrived means done with; otherwise the batch is the oldest again."""
    one = session(3)
    for arrived in (False, True):
        batch = one.batches[0]
        one.ready(batch, _FILLED)
        one.hand_over(batch)
        one.arrived = arrived
        one.settle()
        one.settle()
    assert one.num_delivered == 1
    assert list(one.batches) == [1, 2]


def test_restart_keeps_failed_batches_and_what_is_in_hand() -> None:
    """After a repair all batches are made again but those whose error is known, and the one the user may have."""
    one = session(4)
    one.ready(one.batches[0], _FILLED)
    one.hand_over(one.batches[0])
    one.ready(one.batches[2], _FILLED)
    one.batches[1].state = BatchState.ISSUED
    one.restart()
    assert one.in_hand is not None
    assert [batch.state for batch in one.batches.values()] == [BatchState.WAITING] * 3
    assert one.oldest_waiting() is one.batches[1]


def test_leave_out_skips_or_replaces_within_the_batch() -> None:
    """skip shortens; replace puts another good sample of the batch there; an all-bad batch is left to be an error."""
    skipping, replacing = session(1), session(1)
    assert skipping.leave_out(skipping.batches[0], 0, replace=False)
    assert skipping.batches[0].key_list() == [1]
    assert not skipping.leave_out(skipping.batches[0], 0, replace=False)
    assert replacing.leave_out(replacing.batches[0], 1, replace=True)
    assert replacing.batches[0].key_list() == [0, 0]
    assert list(replacing.skipped) == [1]


def test_keys_travel_as_they_are() -> None:
    """ints packed, everything else coded with its type."""
    for keys in ([1, 2, -5], [True, 1], ["a", b"b"], [(1, "x"), (2, None)], [2**70], [1.5]):
        back = unpack_keys(pack_keys(keys, 0))
        assert back == keys
        assert list(map(type, back)) == list(map(type, keys))
