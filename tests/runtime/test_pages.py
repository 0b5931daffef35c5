"""Huge pages behind shared memory: there where the kernel has them, and nothing but speed lost where it has not."""

from __future__ import annotations

import mmap
import os
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringloader import ArrayDataset, Loader, SharedArrays
from ringloader._runtime import pages, segment
from ringloader._runtime.lacks import RoomError
from ringloader._runtime.segment import Segment

PAGE = mmap.PAGESIZE


def mappings() -> int:
    """Mappings of segments in this process."""
    return sum("ringloader" in line or "/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines())


def huge_nbytes(address: int) -> int:
    """How much of the mapping at an address this process sees through huge pages (smaps of proc(5))."""
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)[1:]:
        if int(part.partition("-")[0], 16) == address:
            return sum(int(found) << 10 for found in re.findall(r"^(?:ShmemPmdMapped|FilePmdMapped): +(\d+) kB", part, re.M))
    raise AssertionError(f"no mapping begins at {address:x}")


@pytest.fixture(scope="module")
def extent() -> int:
    """Bytes of a huge page, on a machine that makes one when asked."""
    nbytes = pages.extent_nbytes()
    if not nbytes:
        pytest.skip("this machine has no huge pages")
    piece = Segment.create(nbytes)
    mapping = piece.map()
    mapping.array(1)[0] = 1
    found = huge_nbytes(mapping.array(1).ctypes.data)
    piece.close()
    if not found:
        pytest.skip("this kernel makes no huge pages of shared memory")
    return nbytes


@pytest.fixture(params=["huge", "refused", "none"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a segment that is no whole number of huge pages: as the machine has them, refused by it, and unknown to it."""
    nbytes = 3 * (pages.extent_nbytes() or 2 << 20) + 5 * PAGE + 17
    if request.param == "refused":
        monkeypatch.setattr(pages, "_MADV_COLLAPSE", 9999)
    if request.param == "none":
        monkeypatch.setattr(pages, "extent_nbytes", lambda: 0)
    return nbytes


def test_segments_are_of_huge_pages_but_for_their_tails(extent: int) -> None:
    """Made, mapped and mapped again: each sees whole extents through one page, aligned, with the tail in small ones."""
    piece = Segment.create(5 * extent + 3 * PAGE)
    again = segment.map_shared(piece.fd, piece.nbytes)
    for mapping in (piece.map(), again):
        mapping.populate(0, mapping.nbytes)
        address = mapping.array(1).ctypes.data
        assert address % extent == 0
        assert huge_nbytes(address) == 5 * extent
    assert os.fstat(piece.fd).st_blocks * 512 == piece.nbytes
    piece.close()


def test_rings_and_datasets_are_of_huge_pages(extent: int) -> None:
    """What a loader lends and what it sends lie in them, in the trainer and in the worker."""
    rows = np.arange(4 * extent // 8).reshape(-1, 1024)
    with Loader(ArrayDataset(rows), batch_size=len(rows) // 2, num_workers=1, output="numpy") as loader:
        assert np.concatenate(list(loader)).tobytes() == rows.tobytes()
        engine = loader._engine
        assert engine is not None
        (ring,) = engine.ring.segments.values()
        assert huge_nbytes(ring.mapping.array(1).ctypes.data) >= 2 * extent
        (pid,) = loader.stats().worker_pids
        parts = re.findall(r"^(?:ShmemPmdMapped|FilePmdMapped): +(\d+) kB", Path(f"/proc/{pid}/smaps").read_text(), re.M)
        found = sorted((int(part) << 10 for part in parts), reverse=True)
        assert found[0] >= 4 * extent  # the dataset, or the ring's slots
        assert found[1] >= 2 * extent


def test_bytes_are_the_same_whatever_the_pages(size: int) -> None:
    """Every byte from the first to the last is zero, reserved, can be written, and is seen by whoever maps it."""
    piece = Segment.create(size)
    mapping, again = piece.map(), segment.map_shared(piece.fd, size)
    private = pages.map_file(piece.fd, size, shared=False)
    assert os.fstat(piece.fd).st_blocks * 512 == -(-size // PAGE) * PAGE
    assert not again.array(size).any()
    values = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    mapping.array(size)[:] = values
    for other in (again, private):
        assert other.array(size).tobytes() == values.tobytes()
        assert other.view() == values.data
        assert other.array(17, size - 17).tolist() == values[-17:].tolist()
    private.array(size)[:] = 0  # its own from here on
    assert mapping.array(size).tobytes() == values.tobytes()
    piece.close()


def test_shared_arrays_that_grow_past_an_extent_are_whole(size: int) -> None:
    """Made, filled and read again by another mapping."""
    with SharedArrays({"x": np.arange(size // 8)}) as made:
        assert made["x"].tobytes() == np.arange(size // 8).tobytes()


def test_reservation_asks_no_more_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that moves memory about for each huge page is asked once; all the memory is there all the same."""
    extent = pages.extent_nbytes() or 2 << 20
    monkeypatch.setattr(pages, "extent_nbytes", lambda: extent)
    monkeypatch.setattr(segment, "_STEP_NBYTES", 2 * extent)
    clock = iter(range(1000))
    monkeypatch.setattr("ringloader._runtime.pages.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    asked: list[int] = []

    def madvise(address: int, nbytes: int, option: int) -> int:
        asked.append(nbytes)
        return 0

    real = pages._libc()
    monkeypatch.setattr(pages, "_libc", lambda: SimpleNamespace(mmap=real.mmap, madvise=madvise))
    piece = Segment.create(6 * extent)
    assert asked == [extent]
    assert os.fstat(piece.fd).st_blocks * 512 == piece.nbytes
    piece.close()


def test_reservation_that_fails_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps the exception, as a notebook does, keeps its traceback, but nothing of the file."""
    extent = pages.extent_nbytes() or 2 << 20
    before, limits = mappings(), resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(segment, "_STEP_NBYTES", extent)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * extent, limits[1]))
    try:
        with pytest.raises(RoomError, match="ulimit -f") as caught:
            Segment.create(4 * extent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert mappings() == before
    assert caught.value.__traceback__ is not None


def test_range_past_the_end_is_refused(size: int) -> None:
    """What lies behind a mapping is nobody's, and is neither read nor written by mistake."""
    piece = Segment.create(size)
    with pytest.raises(ValueError, match="of a mapping of"):
        piece.map().array(100, size - 99)
    piece.close()


def test_memory_that_is_locked_is_mapped_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlockall(MCL_FUTURE) would have the room for an aligned mapping filled before the file is laid over it."""
    monkeypatch.setattr(pages, "_is_locked", lambda: True)
    piece = Segment.create(3 * (pages.extent_nbytes() or 2 << 20))
    assert piece.map().start == 0
    assert not piece.map().array(piece.nbytes).any()
    piece.close()


def test_file_that_is_too_short_is_not_mapped(tmp_path: Path) -> None:
    """Nobody gets a mapping whose end is a bus error."""
    with (tmp_path / "short").open("w+b") as file:
        file.truncate(2 * (pages.extent_nbytes() or 2 << 20))
        nbytes = os.fstat(file.fileno()).st_size
        with pytest.raises(ValueError, match=r"cannot be mapped|greater than file size"):
            pages.map_file(file.fileno(), nbytes + 1)


def test_address_space_that_is_short_by_the_alignment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for the mapping alone it is mapped as it comes."""

    def no_room(*arguments: object) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pages, "_map_aligned", no_room)
    piece = Segment.create(3 * (pages.extent_nbytes() or 2 << 20))
    assert not piece.map().array(piece.nbytes).any()
    piece.close()


def test_huge_pages_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """`RINGLOADER_HUGE_PAGES=0` is heeded, other values are not."""
    real = pages.extent_nbytes()
    for value, expected in (("0", 0), ("1", real)):
        monkeypatch.setenv("RINGLOADER_HUGE_PAGES", value)
        pages.extent_nbytes.cache_clear()
        assert pages.extent_nbytes() == expected
    monkeypatch.undo()
    pages.extent_nbytes.cache_clear()
