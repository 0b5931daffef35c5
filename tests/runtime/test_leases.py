"""What the user holds stays as it is, for as long as it is held, and nothing else is kept."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ringloader
from ringloader import FactorySpec, Loader, RingFullError
from tests.runtime.conftest import num_descriptors
from tests.runtime.sample_datasets import Numbers

KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda rows: rows[3:5],
    "row": lambda rows: rows[0],
    "view": lambda rows: rows.view(-1),
    "reshape": lambda rows: rows.reshape(2, -1),
    "numpy": lambda rows: rows.numpy(),
    "numpy slice": lambda rows: rows.numpy()[1:, 2:],
    "as_strided": lambda rows: rows.as_strided((2, 2), (8, 1)),
    "dlpack": lambda rows: np.from_dlpack(rows),
    "memoryview": lambda rows: memoryview(rows.numpy()),  # type: ignore[arg-type]
    "detach": lambda rows: rows.detach()[2],
    "autograd": lambda rows: (rows * torch.ones(1, requires_grad=True)).sum(),
    "cycle": lambda rows: _cycle(rows),
}


def _cycle(rows: torch.Tensor) -> list[Any]:
    cycle: list[Any] = [rows[1]]
    cycle.append(cycle)
    return cycle


def _bytes_of(kept: Any) -> bytes:
    if isinstance(kept, torch.Tensor) and kept.requires_grad:
        (saved,) = torch.autograd.grad(kept, _leaves_of(kept), retain_graph=True)
        return bytes(saved.numpy().tobytes())
    if isinstance(kept, list):
        kept = kept[0]
    return np.asarray(kept).tobytes()


def _leaves_of(result: torch.Tensor) -> list[torch.Tensor]:
    node: Any = result.grad_fn
    while not hasattr(node, "variable"):
        node = next(edge for edge, _ in node.next_functions if edge is not None)
    return [node.variable]


@pytest.mark.parametrize("kind", KINDS)
def test_p08_any_view_kept_is_unchanged_after_a_thousand_batches(kind: str) -> None:
    """One view of any kind keeps its slot from being filled again."""
    with Loader(FactorySpec(Numbers, 8 * 1010), batch_size=8, num_workers=1) as loader:
        iterator = iter(loader)
        rows, _ = next(iterator)
        rows, _ = next(iterator)
        kept = KINDS[kind](rows)
        before = _bytes_of(kept)
        del rows
        num_seen = 0
        for rows, _ in iterator:
            num_seen += int((rows.numpy() == rows.numpy()[:, :1]).all())
            del rows
        assert num_seen == 1008
        assert _bytes_of(kept) == before


def test_closure_in_another_thread_keeps_its_batch() -> None:
    """A thread that still reads a batch has it to itself."""
    with Loader(FactorySpec(Numbers, 8 * 300), batch_size=8, num_workers=1) as loader:
        iterator = iter(loader)
        rows, _ = next(iterator)
        go, results = threading.Event(), []

        def late(rows: torch.Tensor = rows) -> None:
            go.wait(30)
            results.append(rows.clone())

        thread = threading.Thread(target=late)
        thread.start()
        late.__defaults__ = None
        del rows
        for _ in iterator:
            pass
        go.set()
        thread.join()
        assert torch.equal(results[0][:, 0], torch.arange(8.0))


def test_numpy_output_views_keep_their_slot() -> None:
    """The same for output="numpy", where a user's slice points past the leaf to the root."""
    with Loader(FactorySpec(Numbers, 8 * 300), batch_size=8, num_workers=1, output="numpy") as loader:
        iterator = iter(loader)
        kept = next(iterator)[0][2:4, 1:]
        for _ in iterator:
            pass
        assert kept.tolist() == [[2.0] * 7, [3.0] * 7]


def test_each_large_leaf_lies_in_its_slot_with_a_storage_of_its_own() -> None:
    """data_ptr is inside the ring's mapping and storages have the leaf's size, so saving labels saves labels."""
    with Loader(FactorySpec(Numbers, 64, 8192), batch_size=8, num_workers=2) as loader:
        for rows, indices in loader:
            engine = loader._engine
            assert engine is not None
            ranges = [(segment.mapping.array(1).ctypes.data, segment.nbytes) for segment in engine.ring.segments.values()]
            assert any(start <= rows.data_ptr() < start + nbytes for start, nbytes in ranges)
            assert rows.untyped_storage().nbytes() == rows.nbytes
            # A small leaf beside one 64 times larger has been copied out, so that keeping it keeps no slot.
            assert not any(start <= indices.data_ptr() < start + nbytes for start, nbytes in ranges)
            assert indices.untyped_storage().nbytes() == indices.nbytes


def test_p11_labels_kept_from_every_batch_hold_no_slots() -> None:
    """The everyday `all_labels.append(labels)` costs the labels' bytes only."""
    with Loader(FactorySpec(Numbers, 8 * 200, 8192), batch_size=8, num_workers=2) as loader:
        labels = [indices for _, indices in loader]
        assert torch.equal(torch.cat(labels), torch.arange(1600))
        assert loader.stats().num_slots <= 6


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_p19_ring_of_two_slots_finishes(num_workers: int) -> None:
    """A for loop still holds batch k while it asks for k + 1: two slots are enough, whatever the prefetch depth."""
    row_nbytes = 8192 * 4
    spec = FactorySpec(Numbers, 8 * 40, 8192)
    room = 2 * (8 * row_nbytes + 4096)
    with Loader(spec, batch_size=8, num_workers=num_workers, max_ring_bytes=room) as loader:
        seen = [int(i) for _, indices in loader for i in indices]
        assert seen == list(range(320))
        assert loader.stats().num_slots == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_p19_ring_full_of_kept_batches_says_which_leaves_and_goes_on(num_workers: int) -> None:
    """RingFullError names leaves, sizes and slots; the iterator continues once something was let go."""
    room = 4 * (8 * 8192 * 4 + 4096)
    with Loader(FactorySpec(Numbers, 8 * 20, 8192), batch_size=8, num_workers=num_workers, max_ring_bytes=room) as loader:
        iterator = iter(loader)
        kept: list[torch.Tensor] = []
        with pytest.raises(RingFullError, match=r"held by batches you keep: 4 by a leaf of shape \(8, 8192\)") as caught:
            kept.extend(rows for rows, _ in iterator)
        assert caught.value.num_slots == 4
        assert [rows[0, 0].item() for rows in kept] == [0.0, 8.0, 16.0, 24.0]
        kept.clear()
        rest = [int(i) for _, indices in iterator for i in indices]
        assert rest == list(range(32, 160))


def test_ring_too_small_for_two_slots_is_refused_with_the_bytes_needed() -> None:
    """A bound that no loop could work with is an error that says what would do."""
    with (
        Loader(FactorySpec(Numbers, 64, 8192), batch_size=8, num_workers=1, max_ring_bytes=300_000) as loader,
        pytest.raises(ringloader.ConfigError, match="max_ring_bytes"),
    ):
        list(loader)


def test_release_gives_the_slot_back_and_is_harmless_otherwise() -> None:
    """release: at once, any number of times, on anything; a stale batch cannot release its successor."""
    room = 2 * (8 * 8192 * 4 + 4096)
    with Loader(FactorySpec(Numbers, 8 * 20, 8192), batch_size=8, num_workers=1, max_ring_bytes=room) as loader:
        kept = []
        for batch in loader:
            kept.append(batch)
            for old in kept[:-1]:
                ringloader.release(old)  # again and again: only the first time counts
            if len(kept) > 1:
                ringloader.release(kept[-1]) if len(kept) % 2 else None
        assert len(kept) == 20
        for thing in (None, 3, "x", {"a": [torch.ones(2)]}, np.ones(3), object(), torch.ones(2).to_sparse()):
            ringloader.release(thing)


def test_two_interleaved_iterators_are_each_right() -> None:
    """zip(loader, loader): both complete, in order, over one set of workers."""
    with Loader(FactorySpec(Numbers, 200), batch_size=8, num_workers=2) as loader:
        pairs = [(a[1].tolist(), b[1].tolist()) for a, b in zip(loader, loader, strict=True)]
        assert [i for a, _ in pairs for i in a] == list(range(200))
        assert all(a == b for a, b in pairs)


def test_b36_abandoned_iterators_leave_nothing_and_start_afresh() -> None:
    """200 times `next(iter(loader))`: batch 0 each time, no growth of descriptors, threads, slots or mappings."""
    with Loader(FactorySpec(Numbers, 400), batch_size=8, num_workers=2) as loader:
        pids = None
        for k in range(205):
            _, indices = next(iter(loader))
            assert indices.tolist() == list(range(8))
            if k == 5:
                pids, before = loader.stats().worker_pids, _footprint(loader)
        assert loader.stats().worker_pids == pids
        num_descriptors_after, num_segments = _footprint(loader)
        # Fills of the iterator before may still hold slots: a second segment may come, with two descriptors, but no third.
        assert num_segments <= 2
        assert num_descriptors_after <= before[0] + 2 * (num_segments - before[1])


def _footprint(loader: Loader) -> tuple[int, int]:
    return num_descriptors() + threading.active_count(), loader.stats().num_segments


def test_p04_batch_in_a_cycle_is_released_by_the_collector() -> None:
    """Garbage collection at any allocation, also inside `next`, ends leases without a deadlock."""
    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with Loader(FactorySpec(Numbers, 400), batch_size=8, num_workers=1) as loader:
            for rows, _ in loader:
                _cycle(rows)
            assert loader.stats().num_batches == 50
    finally:
        gc.set_threshold(*threshold)


def test_b54_views_outlive_loader_and_close() -> None:
    """After close and drop the values are still there; the mapping goes with the last view."""
    loader = Loader(FactorySpec(Numbers, 64, 8192), batch_size=8, num_workers=1)
    rows, _ = next(iter(loader))
    view = rows[3].numpy()
    loader.close()
    del loader
    gc.collect()
    assert (rows[:, 0] == torch.arange(8)).all()
    assert (view == 3).all()


def test_p23_fork_in_the_users_code_leaves_the_parent_alone() -> None:
    """A forked child may read batches and exit; it may not iterate, and says so. The parent goes on."""
    with Loader(FactorySpec(Numbers, 400), batch_size=8, num_workers=1) as loader:
        iterator = iter(loader)
        rows, _ = next(iterator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert (rows[:, 0] == torch.arange(8)).all()
                next(iterator)
            except ringloader.ClosedError:
                del rows
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        seen = [int(i) for _, indices in iterator for i in indices]
        assert seen == list(range(8, 400))
        assert (rows[:, 0] == torch.arange(8)).all()


def test_bytes_copied_equal_the_bytes_of_the_batches() -> None:
    """One copy from sample to slot: the counter says exactly the size of what was delivered."""
    with Loader(FactorySpec(Numbers, 64, 8192), batch_size=8, num_workers=2) as loader:
        list(loader)  # the first batches wait for slots, and are copied once more meanwhile
        before = loader.stats().copied_nbytes
        delivered = sum(rows.nbytes + indices.nbytes for rows, indices in loader)
        assert loader.stats().copied_nbytes - before == delivered


def test_debug_marker_shows_a_batch_read_after_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """RINGLOADER_DEBUG=1: a batch read after its release is full of the marker."""
    monkeypatch.setenv("RINGLOADER_DEBUG", "1")
    with Loader(FactorySpec(Numbers, 16, 8192), batch_size=8, num_workers=0) as loader:
        rows, _ = next(iter(loader))
        ringloader.release(rows)
        assert (rows.view(torch.uint8) == 0xAB).all()


def test_release_finds_the_slot_behind_any_mapping() -> None:
    """A UserDict is no dict; its batch can be given back all the same."""
    with Loader([UserDict(x=np.zeros(8192, np.float32))] * 8, batch_size=4) as loader:
        batch = next(iter(loader))
        assert type(batch) is UserDict
        engine = loader._engine
        assert engine is not None
        assert len(engine.ring.leases) == 1
        ringloader.release(batch)
        assert engine.ring.leases == {}
