"""Which worker a batch goes to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.batch_keys import pack_keys
from ringloader._core.scheduler import Scheduler
from ringloader._core.session import BatchState, Session
from tests.core.deciding import filled, fills, scheduler, sent

QUICK_NS = 20_000
SLOW_NS = 10**7


def opened(core: Scheduler, session_id: int, took_ns: int, *, in_order: bool = True) -> Session:
    """A session of empty batches, each of which takes a worker so long."""
    session = Session(session_id, 0, in_order=in_order)
    core.open_session(session)
    session.slot_nbytes = 0
    session.took(took_ns)
    return session


def submit(core: Scheduler, session: Session, count: int) -> list[tuple[int, msg.Fill]]:
    """Hand in batches; returns who got which."""
    first = session.num_submitted
    for k in range(first, first + count):
        core.submit(session.session_id, k, pack_keys([k], k))
    return [(command.worker_id, command.fill) for command in fills(sent(core))]


def test_batches_are_spread_over_the_workers() -> None:
    """The least loaded gets the next; none more than its share."""
    core = scheduler(3)
    got = submit(core, opened(core, 0, SLOW_NS), 9)
    assert Counter(worker_id for worker_id, _ in got) == {0: 2, 1: 2, 2: 2}
    assert [worker_id for worker_id, _ in got[:3]] == [0, 1, 2]


def test_quick_batches_go_to_one_worker_that_is_awake() -> None:
    """Made before another could be woken; but never more than four, should they turn slow."""
    for took_ns, expected in ((QUICK_NS, {0: 4, 1: 2}), (40_000, {0: 2, 1: 2, 2: 2}), (1, {0: 4, 1: 2})):
        core = scheduler(3)
        got = submit(core, opened(core, 0, took_ns), 6)
        assert Counter(worker_id for worker_id, _ in got) == expected


def test_quick_batches_go_to_no_more_workers_than_have_a_core() -> None:
    """Beside the training process. What these have no room for waits until they have; slow ones go to all."""
    for num_beside, expected in ((1, {0: 2}), (2, {0: 2, 1: 2}), (3, {0: 2, 1: 2, 2: 2})):
        core = scheduler(4, num_beside)
        got = submit(core, opened(core, 0, 90_000), 8)
        assert Counter(worker_id for worker_id, _ in got) == expected
        worker_id, fill = got[0]
        core.receive(worker_id, 1, filled(fill, 90_000), 1.0)
        assert [command.worker_id for command in fills(sent(core))] == [worker_id]
        core = scheduler(4, num_beside)
        got = submit(core, opened(core, 0, SLOW_NS), 8)
        assert Counter(worker_id for worker_id, _ in got) == {0: 2, 1: 2, 2: 2, 3: 2}


def make(core: Scheduler, session: Session, times_ns: list[int]) -> None:
    """Have batches made, one after the other, that take so long."""
    for took_ns in times_ns:
        ((worker_id, fill),) = submit(core, session, 1)
        core.receive(worker_id, 1, filled(fill, took_ns), 1.0)


def is_packed(core: Scheduler, session: Session) -> bool:
    return {worker_id for worker_id, _ in submit(core, session, 4)} == {0}


def test_batches_that_turn_slow_are_spread_at_once() -> None:
    """One slow batch is enough; after some fifty quick ones they are packed again. One that was held up a little is none."""
    for times_ns, expected in (
        ([], True),
        ([10**6], True),
        ([SLOW_NS], False),
        ([SLOW_NS, *[QUICK_NS] * 20], False),
        ([SLOW_NS, *[QUICK_NS] * 80], True),
        ([QUICK_NS, *[QUICK_NS] * 7, SLOW_NS] * 9 + [QUICK_NS] * 7, False),  # a shard is opened for every ninth
    ):
        core = scheduler(2, 1)
        session = opened(core, 0, QUICK_NS)
        make(core, session, times_ns)
        assert is_packed(core, session) == expected, times_ns


def test_quick_batches_do_not_queue_behind_those_of_another_session() -> None:
    """Which may be slow."""
    core = scheduler(2)
    slow, quick = opened(core, 0, SLOW_NS), opened(core, 1, QUICK_NS)
    assert [worker_id for worker_id, _ in submit(core, slow, 1)] == [0]
    assert [worker_id for worker_id, _ in submit(core, quick, 2)] == [1, 1]


def test_batches_out_of_order_are_spread() -> None:
    """There a slow one holds up no other but those behind it in its worker."""
    core = scheduler(2)
    got = submit(core, opened(core, 0, QUICK_NS, in_order=False), 4)
    assert Counter(worker_id for worker_id, _ in got) == {0: 2, 1: 2}


def test_worker_that_leaves_or_has_died_gets_no_quick_batches() -> None:
    """One that drains is given nothing, one whose Fill only asks for a size neither."""
    for attribute in ("is_draining", "is_learning"):
        core = scheduler(2)
        session = opened(core, 0, QUICK_NS)
        submit(core, session, 1)
        setattr(core.workers.all[0], attribute, True)
        assert {worker_id for worker_id, _ in submit(core, session, 3)} == {1}


def deep(core: Scheduler, took_ns: int, *, nbytes: int = 0, max_depth: int = 8) -> Session:
    """A session that may have more batches in flight, and has had one made."""
    session = opened(core, 0, took_ns)
    session.max_depth = max_depth
    session.slot_nbytes = nbytes
    session.depth = core._depth_of(session)
    return session


def test_worker_holds_as_many_quick_batches_as_keep_it_busy() -> None:
    """Two milliseconds, but never more than eight batches, nor all together 32 MiB; those made before another could be woken
    are packed."""
    for took_ns, nbytes, expected in (
        (10**7, 0, 2),
        (10**6, 0, 2),
        (600_000, 0, 3),
        (400_000, 0, 5),
        (150_000, 0, 8),
        (150_000, 2 << 20, 5),
        (150_000, 40 << 20, 2),
        (90_000, 0, 2),
    ):
        core = scheduler(3)
        session = deep(core, took_ns, nbytes=nbytes)
        assert session.depth == expected
        assert core.num_ahead(session) == 3 * expected
    core = scheduler(3)
    got = submit(core, deep(core, 150_000, nbytes=0), 40)
    assert Counter(worker_id for worker_id, _ in got) == {0: 8, 1: 8, 2: 8}


def test_number_that_the_user_has_given_is_kept() -> None:
    """However quick batches are."""
    core = scheduler(3)
    session = deep(core, 150_000, max_depth=0)
    assert core.num_ahead(session) == 6
    got = submit(core, session, 40)
    assert Counter(worker_id for worker_id, _ in got) == {0: 2, 1: 2, 2: 2}


def test_session_beside_another_holds_no_more_than_its_share() -> None:
    """One with many batches on every worker would have the other wait for ever."""
    core = scheduler(2)
    quick = deep(core, 150_000)
    got = submit(core, quick, 16)
    assert len(got) == 16
    other = opened(core, 1, SLOW_NS)
    other.busy_ns = 0
    assert core.num_ahead(quick) == 4
    submit(core, quick, 8)
    assert submit(core, other, 4) == []
    given = []
    for worker_id, fill in got:
        core.receive(worker_id, 1, filled(fill, 150_000), 1.0)
        given += [command.fill.session_id for command in fills(sent(core))]
    assert given.count(1) >= 2
    core.close_session(1)
    assert core.num_ahead(quick) == 16


def test_ring_that_was_refused_room_holds_no_more_than_its_share() -> None:
    """What is there is enough for what the user has asked for, and others want memory too."""
    core = scheduler(2)
    session = deep(core, 150_000)
    core.room.refused(ev.SegmentRefused(4096, "no room", configured=True))
    ((worker_id, fill),) = submit(core, session, 1)
    core.receive(worker_id, 1, filled(fill, 150_000), 1.0)
    assert core.num_ahead(session) == 4


def test_session_whose_batches_turn_slow_is_not_deep_for_long() -> None:
    """One of ten milliseconds among many of 0.2 is enough."""
    core = scheduler(1)
    session = deep(core, 200_000)
    make(core, session, [200_000] * 20)
    assert core.num_ahead(session) == 8
    make(core, session, [10**8])
    assert core.num_ahead(session) == 2


def test_session_that_was_alone_gives_back_what_is_beyond_its_share() -> None:
    """To one that finds the ring full. It gets no more than its share either, while there are two, and all it wants after."""
    core = scheduler(2)
    quick = deep(core, 150_000, nbytes=4096)
    core.handle(ev.SegmentAdded(0, 4096, 16), 1.0)
    for worker_id, fill in submit(core, quick, 16):
        core.receive(worker_id, 1, replace(filled(fill, 150_000), nbytes=4096), 1.0)
    assert fills(sent(core)) == []
    other = opened(core, 1, SLOW_NS)
    other.slot_nbytes, other.awaited = 4096, True
    assert submit(core, other, 4) == []
    core.handle(ev.SegmentRefused(4096, "no room", configured=True), 1.0)
    assert [command.fill.session_id for command in fills(sent(core))] == [1, 1, 1, 1]
    ready = [batch.batch_id for batch in quick.batches.values() if batch.state is BatchState.READY]
    assert ready == list(range(12))
    assert fills(sent(core)) == []  # four of the first wait, and do not come before its share is less
    core.close_session(1)
    core.check()


def test_session_that_opens_waits_for_nobodys_queue() -> None:
    """What workers hold of another beyond its share, and have not begun, is taken back; it is made after all."""
    core = scheduler(2)
    quick = deep(core, 150_000)
    got = submit(core, quick, 16)
    core.open_session(Session(1, 0, in_order=True))
    cancels = [command for command in sent(core) if isinstance(command, ev.SendCancel)]
    assert sorted(command.batch_id for command in cancels) == list(range(4, 16))
    assert all(command.serial != command.running for command in cancels)
    fill_of = {fill.batch_id: (worker_id, fill) for worker_id, fill in got}
    for command in cancels:
        worker_id, fill = fill_of[command.batch_id]
        core.receive(worker_id, 1, msg.Cancelled(fill.serial, fill.generation), 1.0)
    assert fills(sent(core)) == []
    again = []
    for batch_id in range(4):
        worker_id, fill = fill_of[batch_id]
        core.receive(worker_id, 1, filled(fill, 150_000), 1.0)
        again += [command.fill.batch_id for command in fills(sent(core))]
    assert again == [4, 5, 6, 7]
    core.check()
