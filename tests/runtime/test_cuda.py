"""Page-locking, asynchronous copies and `device=`, on a fake of CUDA that holds us to a driver's rules."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringloader import ClosedError, ConfigError, FactorySpec, LayoutError, Loader, RingFullError, record_stream, release
from ringloader._core.batch_keys import pack_keys
from ringloader._core.slots import SlotState
from ringloader._runtime import cuda, lifetime, memory
from ringloader._runtime.ring import Ring
from tests.runtime.conftest import wait_until
from tests.runtime.fake_cuda import FakeCuda, FakeStream, is_mapped
from tests.runtime.sample_datasets import FailsAt, Nested, Numbers

_WIDTH = 8192  # 32 KiB a row: batches of whole pages
_SPEC = FactorySpec(Numbers, 48, _WIDTH)


@pytest.fixture
def make_fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeCuda]]:
    """Puts fakes in the place of CUDA; at the end none may have been called wrongly or be left with a registration."""
    made: list[FakeCuda] = []

    def make(**options: Any) -> FakeCuda:
        fake = FakeCuda(**options)
        made.append(fake)
        monkeypatch.setattr(cuda, "CUDA", fake)
        return fake

    yield make
    gc.collect()
    for fake in made:
        fake.finish()
    lifetime.sweep()
    for fake in made:
        assert fake.violations == []
        check_registrations(fake)
    assert memory.PINNED.nbytes == 0
    assert lifetime.LINGERING == []


def check_registrations(fake: FakeCuda) -> None:
    """Each address is registered and unregistered in turn, and in the end not registered."""
    state: dict[int, bool] = {}
    for number, call in enumerate(call for call in fake.calls if call[0] in ("register", "unregister")):
        if call[0] == "register" and number + 1 in fake._fail_at:
            continue
        assert state.get(call[1], False) == (call[0] == "unregister"), call
        state[call[1]] = call[0] == "register"
    assert not any(state.values())


def slot_states(loader: Loader) -> dict[SlotState, int]:
    counts: dict[SlotState, int] = {}
    for slot in loader._engine.scheduler.slots.by_id.values():  # type: ignore[union-attr]
        counts[slot.state] = counts.get(slot.state, 0) + 1
    return counts


def numbers_of(batch: Any) -> list[int]:
    rows, indices = batch
    assert (rows == indices[:, None]).all()
    return list(indices.tolist())


# --- page-locking --------------------------------------------------------------------------------------------------------


def test_pinned_rings_register_and_unregister_each_mapping_once(make_fake: Callable[..., FakeCuda]) -> None:
    """Five epochs and three loaders, releases from a second thread, a batch kept over the close: one pair per mapping."""
    fake = make_fake()
    kept: list[Any] = []
    num_segments = 0
    for number in range(3):
        with Loader(_SPEC, batch_size=4, num_workers=2, pin_memory=True) as loader:
            for _ in range(5):
                seen: list[int] = []
                for batch in loader:
                    assert fake.is_pinned(batch[0])
                    seen += numbers_of(batch)
                    other = threading.Thread(target=release, args=(batch,))
                    other.start()
                    other.join()
                assert seen == list(range(48))
            kept.append(next(iter(loader)))
            num_segments += loader.stats().num_segments
            assert loader.stats().pinned_nbytes == loader.stats().ring_nbytes
        assert numbers_of(kept[number]) == [0, 1, 2, 3]
    # What is kept is registered still; each goes with its batch, at the next call.
    addresses = [call[1] for call in fake.calls if call[0] == "register"]
    assert len(addresses) == num_segments
    assert len(fake.registered) == 3
    assert all(is_mapped(address) for address in fake.registered)
    kept.clear()
    fake.default.run()
    release(None)
    assert fake.registered == {}


def test_small_leaf_that_is_copied_out_lands_in_pinned_memory(make_fake: Callable[..., FakeCuda]) -> None:
    """Labels beside images leave the slot, and are page-locked like them."""
    fake = make_fake()
    with Loader(FactorySpec(Numbers, 8, 1 << 17), batch_size=4, num_workers=1, pin_memory=True) as loader:
        for rows, indices in loader:
            assert fake.is_pinned(rows)
            assert fake.is_pinned(indices)
        del rows, indices


def test_b84_registration_that_fails_leaves_that_segment_unpinned(
    make_fake: Callable[..., FakeCuda], caplog: pytest.LogCaptureFixture
) -> None:
    """The second segment cannot be page-locked: every batch arrives right, one warning counts the slots and names the cause."""
    fake = make_fake(fail_at=(2, 3))
    with caplog.at_level(logging.WARNING, "ringloader"), Loader(_SPEC, batch_size=4, num_workers=1, pin_memory=True) as loader:
        kept = list(loader)
        pinned = [fake.is_pinned(batch[0]) for batch in kept]
        assert [number for batch in kept for number in numbers_of(batch)] == list(range(48))
        engine = loader._engine
        assert engine is not None
        slots = engine.scheduler.slots.by_id
        segment_ids = {lease.segment_id for lease in engine.ring.leases.values()}
        assert len(segment_ids) >= 2
        for lease, is_pinned in zip(engine.ring.leases.values(), pinned, strict=True):
            assert is_pinned == (lease.segment_id in engine.ring.pins._addresses)
        num_pinned = sum(slot.segment_id in engine.ring.pins._addresses for slot in slots.values())
        assert 0 < num_pinned < len(slots)
        del kept, lease
    warnings = [record.message for record in caplog.records if "page-locked" in record.message]
    assert len(warnings) == 1
    assert "cudaErrorMemoryAllocation (2)" in warnings[0]
    assert "of the host, not the GPU's" in warnings[0]
    assert f"{num_pinned} slots of the ring are page-locked" in warnings[0]


def test_b84_required_registration_that_fails_raises_and_leaves_nothing(make_fake: Callable[..., FakeCuda]) -> None:
    """pin_memory="require": the error names the option, and everything is unregistered and given back."""
    fake = make_fake(fail_at=(2,))
    before = memory.ACCOUNT.nbytes
    loader = Loader(_SPEC, batch_size=4, num_workers=1, pin_memory="require")
    with pytest.raises(ConfigError, match=r"pin_memory='require', but cudaHostRegister .*cudaErrorMemoryAllocation \(2\)"):
        list(loader)
    gc.collect()
    release(None)
    assert fake.registered == {}
    assert memory.ACCOUNT.nbytes == before
    loader.close()


def test_b48_bound_on_page_locked_memory_refuses_with_numbers(
    make_fake: Callable[..., FakeCuda], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is over half of the memory is refused before CUDA is asked."""
    fake = make_fake()
    monkeypatch.setattr(memory, "available_nbytes", lambda: 1000)
    with Loader(_SPEC, batch_size=4, max_ring_bytes=1 << 28, pin_memory=True) as loader:
        monkeypatch.setattr("ringloader._runtime.segment.check_room", lambda nbytes: None)
        with caplog.at_level(logging.WARNING, "ringloader"):
            assert sum(len(numbers_of(batch)) for batch in loader) == 48
    assert not [call for call in fake.calls if call[0] == "register"]
    assert "would be page-locked" in caplog.text
    assert "half of the memory available" in caplog.text


def test_no_cuda_warns_once_and_require_refuses(
    make_fake: Callable[..., FakeCuda], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device pin_memory=True costs one line, "require" and `device` an error before anything starts."""
    make_fake(num_devices=0)
    monkeypatch.setattr("ringloader.loader._warned_unpinned", False)
    with caplog.at_level(logging.WARNING, "ringloader"):
        for _ in range(2):
            with Loader(_SPEC, batch_size=4, pin_memory=True) as loader:
                assert len(list(loader)) == 12
    assert caplog.text.count("sees no CUDA device") == 1
    with pytest.raises(ConfigError, match="pin_memory='require', but torch sees no CUDA device"):
        Loader(_SPEC, pin_memory="require")
    with pytest.raises(ConfigError, match="device is 'cuda', but torch sees 0 CUDA devices"):
        Loader(_SPEC, device="cuda")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "tpu"}, "device is 'tpu'; give 'cpu', 'cuda', 'cuda:N' or None"),
        ({"device": "cuda:3"}, "device is 'cuda:3', but torch sees 1 CUDA device;"),
        ({"device": "cuda", "output": "numpy"}, "device='cuda' needs tensors"),
        ({"pin_memory": True, "output": "numpy"}, "pin_memory=True needs tensors"),
        ({"pin_memory": "please"}, "pin_memory is 'please'; give True, False or 'require'"),
        ({"pin_memory": 1}, "pin_memory is 1; give True, False or 'require'"),
    ],
)
def test_options_that_cannot_work_are_refused(make_fake: Callable[..., FakeCuda], options: dict[str, Any], match: str) -> None:
    """Each names the option, its value and the remedy."""
    make_fake()
    with pytest.raises(ConfigError, match=match):
        Loader(_SPEC, **options)


def test_b14_three_abandoned_epochs_with_pinning_give_right_first_batches(make_fake: Callable[..., FakeCuda]) -> None:
    """`next(iter(loader))`, again and again."""
    make_fake()
    with Loader(_SPEC, batch_size=4, num_workers=2, pin_memory=True) as loader:
        for _ in range(3):
            assert numbers_of(next(iter(loader))) == [0, 1, 2, 3]


@pytest.mark.parametrize("goes_on", [False, True])
def test_interrupt_during_a_registration_leaves_nothing_registered(make_fake: Callable[..., FakeCuda], goes_on: bool) -> None:
    """Ctrl-C while CUDA page-locks: whether the loader goes on or is closed, the mapping is unregistered before it goes."""
    fake = make_fake()
    register = fake.register

    def interrupted(address: int, nbytes: int, device: str | None) -> None:
        fake.register = register  # type: ignore[method-assign]
        register(address, nbytes, device)
        raise KeyboardInterrupt

    fake.register = interrupted  # type: ignore[method-assign]
    with Loader(_SPEC, batch_size=4, pin_memory=True) as loader:
        iterator = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        if goes_on:
            assert [number for batch in iterator for number in numbers_of(batch)] == list(range(48))
    gc.collect()
    fake.finish()
    release(None)
    assert fake.registered == {}
    assert memory.PINNED.nbytes == 0


def test_interrupt_of_a_sweep_does_not_end_sweeping(
    make_fake: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one call left registered the next one undoes."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=4, pin_memory=True) as loader:
        kept = next(iter(loader))
    del kept
    linger = Ring.linger

    def interrupted(ring: Ring) -> bool:
        monkeypatch.setattr(Ring, "linger", linger)
        raise KeyboardInterrupt

    monkeypatch.setattr(Ring, "linger", interrupted)
    with pytest.raises(KeyboardInterrupt):
        release(None)
    release(None)
    assert fake.registered == {}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_close_during_a_registration_is_a_closed_error(make_fake: Callable[..., FakeCuda], num_workers: int) -> None:
    """A signal handler closes the loader while `next` page-locks: the error says so, and nothing is left."""
    fake = make_fake()
    register = fake.register
    loader = Loader(_SPEC, batch_size=4, num_workers=num_workers, pin_memory=True)

    def closing(address: int, nbytes: int, device: str | None) -> None:
        register(address, nbytes, device)
        loader.close()

    fake.register = closing  # type: ignore[method-assign]
    with pytest.raises(ClosedError):
        list(loader)


# --- reuse of slots ------------------------------------------------------------------------------------------------------


def test_b45_slot_waits_for_copies_on_the_stream_of_its_time(make_fake: Callable[..., FakeCuda]) -> None:
    """A batch is copied asynchronously and dropped: its slot is filled anew only when the copy has run."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=4, num_workers=2, pin_memory=True, max_ring_bytes=12 * 4 * 4 * _WIDTH) as loader:
        copies: list[tuple[list[int], list[bytes]]] = []
        for batch in loader:
            copies.append((batch[1].tolist(), fake.copy_later(batch[0])))
            del batch
            if len(fake.default.work) > 3:
                fake.default.run(1)
        fake.default.run()
    _check_copies(copies)


def test_b45_without_fences_the_check_fails(make_fake: Callable[..., FakeCuda]) -> None:
    """The proof that the test before can fail: with events that are always over, copies read other batches."""
    fake = make_fake()
    fake.ignores_fences = True
    copies: list[tuple[list[int], list[bytes]]] = []
    with Loader(_SPEC, batch_size=4, pin_memory=True) as loader:
        for batch in loader:
            copies.append((batch[1].tolist(), fake.copy_later(batch[0])))
            del batch
        fake.default.run()
    with pytest.raises(AssertionError):
        _check_copies(copies)


def _check_copies(copies: list[tuple[list[int], list[bytes]]]) -> None:
    """Named by their indices, not compared by `assert`: pytest would spend minutes on the difference of two long strings."""
    wrong = [indices for indices, found in copies if found != [np.repeat(np.array(indices, np.float32), _WIDTH).tobytes()]]
    assert not wrong


def test_stream_current_at_hand_over_counts_when_another_is_current_later(make_fake: Callable[..., FakeCuda]) -> None:
    """Copied inside `with stream`, dropped outside: the slot waits for the stream of the hand-over."""
    fake = make_fake()
    fake.used = True
    side = FakeStream(7)
    with Loader(_SPEC, batch_size=4) as loader:
        iterator = iter(loader)
        fake.use(side)
        batch = next(iterator)
        found = fake.copy_later(batch[0])
        fake.use(fake.default)
        del batch
        _ = next(iterator)
        assert slot_states(loader)[SlotState.PENDING] == 1
        side.run()
        _ = next(iterator)
        assert SlotState.PENDING not in slot_states(loader)
        _check_copies([([0, 1, 2, 3], found)])
        del _


def test_record_stream_has_a_slot_wait_for_a_stream_nobody_knew(make_fake: Callable[..., FakeCuda]) -> None:
    """A copy on a third stream: the user names it."""
    fake = make_fake()
    side = FakeStream(7)
    with Loader(_SPEC, batch_size=4) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        found = fake.copy_later(batch[0], side)
        record_stream(batch, side)
        del batch
        for _ in range(3):
            next(iterator)
        assert slot_states(loader)[SlotState.PENDING] == 1
        side.run()
        next(iterator)
        assert slot_states(loader).get(SlotState.PENDING, 0) <= 1
        _check_copies([([0, 1, 2, 3], found)])
    with pytest.raises(ConfigError, match="stream is 5; give a"):
        record_stream(None, 5)
    record_stream({"not": "ours"}, side)


def test_record_stream_takes_views_of_a_batch(make_fake: Callable[..., FakeCuda]) -> None:
    """A slice, a reshaped or a detached tensor name the slot as well as the batch does."""
    fake = make_fake()
    side = FakeStream(7)
    views: list[Callable[[Any], Any]] = [lambda t: t[1:], lambda t: t.view(-1), lambda t: t.detach(), lambda t: t.numpy()]
    for view in views:
        with Loader(_SPEC, batch_size=4) as loader:
            iterator = iter(loader)
            rows, _ = next(iterator)
            found = fake.copy_later(rows, side)
            record_stream([view(rows)], side)
            del rows, _
            for _ in range(4):
                next(iterator)
            side.run()
            _check_copies([([0, 1, 2, 3], found)])


def test_release_in_an_interrupted_step_comes_back(make_fake: Callable[..., FakeCuda]) -> None:
    """The tables are rebuilt while a released batch is still bound to a name: its slot is not taken for leased for ever."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        engine = loader._engine
        assert engine is not None
        pump = engine.pump
        end_leases = pump._end_leases

        def interrupted() -> None:
            pump._end_leases = end_leases  # type: ignore[method-assign]
            raise KeyboardInterrupt

        pump._end_leases = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            release(batch)
        pump.step(None)
        del batch
        for _ in iterator:
            fake.default.run()
        del _
        pump.step(None)
        assert SlotState.LEASED not in slot_states(loader)
        assert engine.ring.leases == {}


def test_nothing_is_called_while_a_graph_is_captured(make_fake: Callable[..., FakeCuda]) -> None:
    """Marks and registrations are put off; afterwards everything is caught up."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=4, pin_memory=True) as loader:
        iterator = iter(loader)
        first = next(iterator)
        fake.capturing = True
        del first
        for _ in range(3):
            _ = next(iterator)
        assert slot_states(loader)[SlotState.PENDING] == 3
        fake.capturing = False
        _ = next(iterator)
        _ = next(iterator)
        assert SlotState.PENDING not in slot_states(loader)
        del _


def test_close_while_a_graph_is_captured_unregisters_afterwards(make_fake: Callable[..., FakeCuda]) -> None:
    """Nothing is called then; the next call of the user's does it."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=4, pin_memory=True) as loader:
        next(iter(loader))
        fake.default.run()
        loader._engine.pump.step(None)  # type: ignore[union-attr]
        fake.capturing = True
    assert len(fake.registered) == 1
    fake.capturing = False
    release(None)
    assert fake.registered == {}


def test_segment_that_came_without_the_consumer_is_registered_before_hand_over(make_fake: Callable[..., FakeCuda]) -> None:
    """The watching thread grew the ring and had a batch made: it is not handed over before its segment is page-locked."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=4, num_workers=1, pin_memory=True) as loader:
        loader.start()
        engine = loader._engine
        assert engine is not None
        session = engine.open_session(0, in_order=True, owner=loader)
        keys = pack_keys([0, 1, 2, 3], 0)
        engine.pump.step([], lambda: engine._submit(session, [(0, keys)], ended=True))
        assert wait_until(lambda: session.head() is not None)
        assert fake.registered == {}
        assert engine.pump.step([], lambda: engine._take(session)) is None
        engine.ring.settle()
        (batch,) = engine.pump.step([], lambda: engine._take(session))
        assert fake.is_pinned(batch[0])
        assert numbers_of(batch) == [0, 1, 2, 3]
        del batch


def test_events_are_pooled(make_fake: Callable[..., FakeCuda]) -> None:
    """A thousand batches need a handful of events."""
    fake = make_fake()
    fake.used = True
    with Loader(FactorySpec(Numbers, 1000, _WIDTH), batch_size=1) as loader:
        for _ in loader:
            pass
    assert 0 < fake.num_events < 10


def test_ring_full_of_copies_waits_for_them(make_fake: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch) -> None:
    """No RingFullError while copies will end by themselves: another thread runs the device."""
    fake = make_fake()
    monkeypatch.setattr("ringloader._runtime.engine._FULL_WAIT_S", 0.0)
    with Loader(_SPEC, batch_size=4, num_workers=1, max_ring_bytes=4 * 4 * 4 * _WIDTH) as loader:
        copies = []
        for batch in loader:
            copies.append((batch[1].tolist(), fake.copy_later(batch[0])))
            del batch
            device = threading.Timer(0.05, fake.default.run)
            device.start()
        device.join()
        fake.default.run()
    _check_copies(copies)


def test_ring_full_while_a_graph_is_captured_is_an_error_in_the_end(
    make_fake: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can see copies end then, so it must not wait for ever."""
    fake = make_fake()
    fake.used = True
    monkeypatch.setattr("ringloader._runtime.engine._FULL_WAIT_S", 0.05)
    with Loader(_SPEC, batch_size=4, max_ring_bytes=2 * 4 * 4 * _WIDTH + 8192) as loader:
        iterator = iter(loader)
        next(iterator)
        fake.capturing = True
        with pytest.raises(RingFullError, match="1 by copies to a device that are not known to be over"):
            for _ in iterator:
                pass
        fake.capturing = False
        del _
        assert sum(1 for _ in iterator) > 0


def test_repair_after_an_interrupt_keeps_slots_that_are_copied_from(make_fake: Callable[..., FakeCuda]) -> None:
    """KeyboardInterrupt in the pump: the tables are rebuilt, and a slot with a copy under way is still not free."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        found = fake.copy_later(batch[0])
        engine = loader._engine
        assert engine is not None
        pump = engine.pump
        slot_id, generation = next(iter(engine.ring.leases))
        del batch
        _ = next(iterator)

        def interrupted() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pump.step([], interrupted)
        pump.step(None)
        slot = engine.scheduler.slots.by_id[slot_id]
        assert (slot.state, slot.generation) == (SlotState.PENDING, generation)
        seen = [number for one in iterator for number in numbers_of(one)]
        assert seen == list(range(8, 48))
        assert loader.stats().num_recoveries == 1
        assert slot_states(loader)[SlotState.PENDING] >= 1
        fake.default.run()
        pump.step(None)
        assert SlotState.PENDING not in slot_states(loader)
        del _
    _check_copies([([0, 1, 2, 3], found)])


# --- device= -------------------------------------------------------------------------------------------------------------


def test_device_batches_arrive_right_and_one_is_copied_ahead(make_fake: Callable[..., FakeCuda]) -> None:
    """Every value is right once the user's stream has run, slots come back by event, and the copy's time is counted."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=4, num_workers=2, device="cuda", pin_memory=True) as loader:
        for _ in range(2):
            seen: list[int] = []
            for batch in loader:
                fake.default.run()
                seen += numbers_of(batch)
            assert seen == list(range(48))
        assert loader.stats().copy_s == pytest.approx(24 * 0.001)
        assert loader.stats().num_batches == 24
        assert len(loader._copies) == 0
    assert fake.calls[0][0] == "register"


def test_device_keeps_at_most_two_batches_of_its_own(make_fake: Callable[..., FakeCuda]) -> None:
    """However slow the user: one handed over, one ahead."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=4, num_workers=2, device="cuda", pin_memory=False) as loader:
        iterator = iter(loader)
        for number in range(1, 6):
            batch = next(iterator)
            num_copied = sum(call[0] == "copy" for call in fake.calls) // 2
            assert number <= num_copied <= number + 1
        del batch
        fake.default.run()


def test_device_that_lags_behind_holds_the_loop_back(make_fake: Callable[..., FakeCuda]) -> None:
    """A loop that only queues work: copies under way, slots that wait for them and the ring stay few."""
    fake = make_fake()
    with Loader(FactorySpec(Numbers, 800, _WIDTH), batch_size=4, num_workers=1, device="cuda") as loader:
        batch = None
        for batch in loader:  # noqa: B007  # held as a training loop holds it
            fake.default.work.append(lambda: None)  # a training step
            under_way = [copy for copy in fake._copier.copies if not copy.is_over()]
            assert len(under_way) <= 2
            assert slot_states(loader).get(SlotState.PENDING, 0) <= 4
        assert loader.stats().num_slots <= 12
        del batch


def test_device_without_memory_is_its_own_error_and_loses_nothing(make_fake: Callable[..., FakeCuda]) -> None:
    """torch's OutOfMemoryError comes as it is; the batch is made again, and its slot waits for the leaf that was copied."""
    fake = make_fake()
    fake.full_at = (6,)
    seen: list[int] = []
    with Loader(_SPEC, batch_size=4, device="cuda") as loader:
        iterator = iter(loader)
        num_errors = 0
        while True:
            try:
                for batch in iterator:
                    fake.default.run()
                    seen += numbers_of(batch)
                break
            except torch.OutOfMemoryError:
                num_errors += 1
                assert num_errors < 3
        del batch
    assert num_errors == 1
    assert seen == list(range(48))


def test_device_failure_ahead_is_told_with_its_cause(make_fake: Callable[..., FakeCuda]) -> None:
    """pin_memory="require" fails while looking ahead: the batch in hand arrives, then the ConfigError."""
    make_fake(fail_at=(2, 3, 4, 5))
    with Loader(_SPEC, batch_size=4, num_workers=2, device="cuda", pin_memory="require") as loader:
        iterator: Any = iter(loader)
        assert len(next(iterator)[1]) == 4

        def fails(*args: Any, **options: Any) -> None:
            raise ConfigError("pin_memory='require', but no", option="pin_memory", value="require")

        loader._engine.try_next_batch = fails  # type: ignore[union-attr,method-assign]
        while iterator._failure is None:
            next(iterator)
        with pytest.raises(ConfigError, match="pin_memory='require'"):
            next(iterator)


def test_device_batch_after_close_is_a_closed_error(make_fake: Callable[..., FakeCuda]) -> None:
    """As on the host, although one was copied ahead."""
    make_fake()
    loader = Loader(_SPEC, batch_size=4, num_workers=1, device="cuda")
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(ClosedError):
        next(iterator)


def test_device_copies_are_counted_by_several_threads_at_once(make_fake: Callable[..., FakeCuda]) -> None:
    """Two consumers and `stats()`: no epoch ends with an error of the counting, no copy counts twice."""
    fake = make_fake()
    errors: list[BaseException] = []
    with Loader(_SPEC, batch_size=4, num_workers=1, device="cuda") as loader:

        def read() -> None:
            try:
                for _ in loader:
                    fake.default.run()
                    loader.stats()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fake.default.run()
        assert errors == []
        assert loader.stats().copy_s == pytest.approx(36 * 0.001)


def test_torch_errors_of_a_capture_elsewhere_mean_not_yet() -> None:
    """A graph that another thread captures makes queries and marks fail: nothing is taken for over, and it is tried again."""
    real = cuda.TorchCuda()

    class Failing:
        device = 0

        def __init__(self, code: int) -> None:
            self.code = code

        def query(self) -> bool:
            raise self._error()

        def record(self, stream: Any) -> None:
            raise self._error()

        def _error(self) -> RuntimeError:
            error = RuntimeError("CUDA error")
            error.error_code = self.code  # type: ignore[attr-defined]
            return error

    assert not real.is_complete((0, Failing(900)))
    assert real.is_complete((0, Failing(719)))
    real._events = {0: [Failing(906)]}
    with pytest.raises(cuda.CaptureError):
        real.record(Failing(0))


def test_device_pulls_the_sampler_by_the_number_of_next_calls(make_fake: Callable[..., FakeCuda]) -> None:
    """The batch ahead does not pull the sampler further: timing must not decide what a sampler sees."""
    fake = make_fake()
    pulled: list[int] = []

    class Sampler:
        def __iter__(self) -> Iterator[int]:
            for i in range(48):
                pulled.append(i)
                yield i

    with Loader(_SPEC, batch_size=4, num_workers=1, sampler=Sampler(), device="cuda", pin_memory=False) as loader:
        iterator = iter(loader)
        for number in range(1, 8):
            next(iterator)
            assert len(pulled) == 4 * (number + 2)
        fake.default.run()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_b34_types_are_the_same_on_the_host_pinned_and_on_the_device(
    make_fake: Callable[..., FakeCuda], num_workers: int
) -> None:
    """Containers at every level and leaves that are no tensors do not change."""
    fake = make_fake()
    shapes = []
    for options in ({}, {"pin_memory": True}, {"device": "cuda"}, {"device": "cpu"}):
        with Loader(FactorySpec(Nested, 4, _WIDTH), batch_size=2, num_workers=num_workers, **options) as loader:
            batch = next(iter(loader))
            fake.default.run()
            shapes.append(_types(batch))
            assert batch["pair"].rows[1, 5] == 1
            assert batch["ordered"]["text"] == ["t0", "t1"]
            del batch
    assert all(shape == shapes[0] for shape in shapes)


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), {key: _types(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [_types(child) for child in value]
    return type(value), value.dtype if isinstance(value, torch.Tensor) else value


def test_device_error_of_a_later_batch_comes_after_the_one_before(make_fake: Callable[..., FakeCuda]) -> None:
    """Looking ahead swallows no error and brings none forward."""
    fake = make_fake()
    with Loader(FactorySpec(FailsAt, 12, _WIDTH, 9), batch_size=4, num_workers=1, device="cuda") as loader:
        iterator = iter(loader)
        assert len(next(iterator)[1]) == 4
        assert wait_until(lambda: any(batch.fault for batch in iterator._session.batches.values()))
        assert len(next(iterator)[1]) == 4
        with pytest.raises(Exception, match="sample 9"):
            next(iterator)
        assert list(iterator) == []
        fake.default.run()


# --- random schedules ----------------------------------------------------------------------------------------------------

_STEPS = st.lists(
    st.sampled_from(
        [
            *["next", "next", "copy", "copy", "copy_aside", "drop", "drop", "drop_elsewhere", "release", "run_default"],
            *["run_aside", "capture", "end_capture", "use_aside", "use_default", "new_epoch", "reopen"],
        ]
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=_STEPS, pinned=st.booleans(), on_device=st.booleans())
def test_random_schedules_never_refill_a_slot_that_is_copied_from(
    make_fake: Callable[..., FakeCuda], steps: list[str], pinned: bool, on_device: bool
) -> None:
    """Hand-over, copies, releases from any thread, completions, captures and closes in any order: every copy reads its own
    batch, and in the end every slot is free."""
    _Schedule(make_fake(), pinned=pinned, on_device=on_device).run(steps)


class _Schedule:
    """One random run, inline: its worker writes into slots within `next`, so a slot freed too early shows at once."""

    def __init__(self, fake: FakeCuda, *, pinned: bool, on_device: bool) -> None:
        self.fake = fake
        self.options: dict[str, Any] = {"batch_size": 2, "pin_memory": pinned, "device": "cuda" if on_device else None}
        self.aside = FakeStream(7)
        self.held: list[Any] = []
        self.copies: list[tuple[list[int], list[bytes]]] = []
        self.open()

    def open(self) -> None:
        self.loader = Loader(FactorySpec(Numbers, 20, _WIDTH), **self.options)
        self.iterator = iter(self.loader)

    def run(self, steps: list[str]) -> None:
        for step in steps:
            getattr(self, step)()
        self.fake.capturing = False
        self.held.clear()
        self.fake.default.run()
        self.aside.run()
        self.fake.copy_stream.run()
        engine = self.loader._engine
        assert engine is not None
        engine.pump.step(None)
        engine.pump.step(None)
        engine.scheduler.check()
        assert set(slot_states(self.loader)) <= {SlotState.FREE, SlotState.READY}
        self.loader.close()
        _check_copies(self.copies)

    def next(self) -> None:
        if self.fake.capturing and (self.options["device"] or len(self.held) > 4):
            return
        batch = next(self.iterator, None)
        if batch is None:
            self.new_epoch()
            return
        if self.options["device"] is None:
            numbers_of(batch)
        self.held.append(batch)

    def copy(self, stream: FakeStream | None = None) -> None:
        if self.held and self.options["device"] is None:
            rows, indices = self.held[-1]
            self.copies.append((indices.tolist(), self.fake.copy_later(rows, stream)))

    def copy_aside(self) -> None:
        if self.held and self.options["device"] is None:
            record_stream(self.held[-1], self.aside)
            self.copy(self.aside)

    def drop(self) -> None:
        if self.held:
            del self.held[0]

    def drop_elsewhere(self) -> None:
        other = threading.Thread(target=self.drop)
        other.start()
        other.join()

    def release(self) -> None:
        if self.held:
            release(self.held.pop())

    def run_default(self) -> None:
        self.fake.default.run(1)

    def run_aside(self) -> None:
        self.aside.run(1)

    def capture(self) -> None:
        self.fake.capturing = True

    def end_capture(self) -> None:
        self.fake.capturing = False

    def use_aside(self) -> None:
        self.fake.use(self.aside)

    def use_default(self) -> None:
        self.fake.use(self.fake.default)

    def new_epoch(self) -> None:
        self.iterator = iter(self.loader)

    def reopen(self) -> None:
        self.loader.close()
        self.open()


# --- ends ----------------------------------------------------------------------------------------------------------------


def test_abandoned_pinned_loader_is_unregistered_by_the_next_call(make_fake: Callable[..., FakeCuda]) -> None:
    """Dropped without close: its own thread ends the workers and leaves CUDA to the next call of the user's."""
    fake = make_fake()
    loader = Loader(_SPEC, batch_size=4, num_workers=1, pin_memory=True)
    next(iter(loader))
    thread = loader._engine.pump.thread  # type: ignore[union-attr]
    assert thread is not None
    del loader
    gc.collect()
    thread.join(10)
    assert len(fake.registered) == 1
    with Loader(_SPEC, batch_size=4) as other:
        next(iter(other))
    assert fake.registered == {}


_AT_EXIT = """
import atexit, sys
from tests.runtime.fake_cuda import FakeCuda
from ringloader._runtime import cuda
fake = cuda.CUDA = FakeCuda()
atexit.register(lambda: print(len(fake.calls), fake.registered, fake.violations))
from ringloader import FactorySpec, Loader
from tests.runtime.sample_datasets import FailsAt, Nested, Numbers
loader = Loader(FactorySpec(Numbers, 48, 8192), batch_size=4, num_workers=1, pin_memory=True)
kept = [next(iter(loader)) for _ in range(2)]
found = fake.copy_later(kept[0][0])
{more}
"""


@pytest.mark.parametrize("more", ["", "fake.default.run()", "loader.close(); fake.default.run()"])
def test_exit_with_live_batches_undoes_registrations_in_silence(more: str) -> None:
    """The interpreter ends with an open loader, live batches and a copy under way."""
    script = _AT_EXIT.format(more=more)
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    is_running = not more
    assert ("{}" in done.stdout) != is_running
    assert done.stdout.strip().endswith("[]")


# --- what other threads and streams do -----------------------------------------------------------------------------------


def test_copy_is_waited_for_on_the_stream_of_its_own_thread(make_fake: Callable[..., FakeCuda]) -> None:
    """Another thread that reads the same loader says nothing about the streams of the one that was handed the batch."""
    fake = make_fake()
    side = FakeStream(7)
    with Loader(_SPEC, batch_size=4, pin_memory=True) as loader:
        iterator, others = iter(loader), iter(loader)
        rows, indices = next(iterator)
        fake.use(side)
        found = fake.copy_later(rows)
        del rows
        thread = threading.Thread(target=lambda: [next(others) for _ in range(3)] and None)
        thread.start()
        thread.join()
        held = [next(iterator) for _ in range(3)]
        side.run()
        _check_copies([(indices.tolist(), found)])
        del held
        fake.use(fake.default)


def test_slots_of_a_thread_that_is_gone_come_back_by_another(make_fake: Callable[..., FakeCuda]) -> None:
    """Nobody waits for a call that will never come."""
    make_fake()
    with Loader(_SPEC, batch_size=4, pin_memory=True) as loader:
        iterator = iter(loader)

        def take() -> None:
            next(iterator)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        next(iterator)
        next(iterator)
        assert SlotState.PENDING not in slot_states(loader)


def test_batch_that_cannot_be_rebuilt_is_an_error_in_its_place_on_a_device_too(make_fake: Callable[..., FakeCuda]) -> None:
    """Once, and the epoch goes on; also where it was met ahead of its turn."""
    fake = make_fake()
    spec = FactorySpec("tests.runtime.sample_datasets:OnlyInWorkers", 12)
    for device in (None, "cuda"):
        with Loader(spec, batch_size=2, num_workers=1, device=device) as loader:
            iterator, outcome = iter(loader), []
            for _ in range(12):
                try:
                    batch = next(iterator)
                    outcome.append("batch")
                    fake.finish()
                    del batch
                except StopIteration:
                    break
                except LayoutError:
                    outcome.append("error")
        assert outcome == ["batch", "error", "batch", "batch", "batch", "batch"], device


def test_batch_that_no_device_holds_is_given_up_after_three_tries(make_fake: Callable[..., FakeCuda]) -> None:
    """Each try is an error that the user sees, and errors that are kept keep no slot."""
    fake = make_fake()
    fake.full_at = tuple(range(3, 100))
    kept = []
    with Loader(_SPEC, batch_size=24, device="cuda", in_order=True) as loader:
        iterator = iter(loader)
        next(iterator)
        for _ in range(4):
            try:
                next(iterator)
            except StopIteration:
                break
            except torch.OutOfMemoryError as error:
                kept.append(error)
        assert len(kept) == 3
        fake.finish()
        loader._engine.pump.step([])  # type: ignore[union-attr]
        assert SlotState.LEASED not in slot_states(loader)


@pytest.mark.parametrize("way", ["closed", "capturing", "workers gone"])
def test_iterator_that_is_over_stays_over_on_a_device(make_fake: Callable[..., FakeCuda], way: str) -> None:
    """StopIteration whatever has become of its loader, as on the host."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=24, device="cuda", persistent_workers=way != "workers gone") as loader:
        iterator = iter(loader)
        assert len(list(iterator)) == 2
        if way == "closed":
            loader.close()
        fake.capturing = way == "capturing"
        with pytest.raises(StopIteration):
            next(iterator)
        fake.capturing = False


def test_stats_call_nothing_of_cuda(make_fake: Callable[..., FakeCuda]) -> None:
    """A thread that shows numbers may ask while another captures a graph."""
    fake = make_fake()
    with Loader(_SPEC, batch_size=4, device="cuda") as loader:
        iterator = iter(loader)
        next(iterator)
        fake.capturing = True
        loader.stats()
        fake.capturing = False
    assert fake.violations == []
