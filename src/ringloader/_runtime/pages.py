"""Files in this process's memory: where they lie, and what size of pages is behind them.

Owns alignment and huge pages. Shared memory comes in small pages unless the machine was set up otherwise, and pays twice:
every page faults in every process, and a copy spends a fifth of its time on translating addresses. MADV_COLLAPSE makes one
huge page of an extent whatever the setting, `deny` excepted; with memory at hand, and one small page in the extent so far, in
a tenth of the time that all its small pages would take. Best effort throughout: without it there are small pages and the same
bytes. Source: madvise(2), Linux 6.1 and later. Must not know segments.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import time
from typing import Any

import numpy as np

# What the kernel calls them; mmap.madvise passes numbers through.
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_EXTENT_FILE = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"
# Where memory is in pieces the kernel moves pages about to make a huge one. Small pages for an extent take 1 ms; a new virtual
# machine, which gets its memory from the host only now, 6.
_SLOW_S = 0.02
_BROKEN: list[mmap.mmap] = []


class Mapping:
    """`nbytes` of a file: bytes of `memory` from `start` on. Unmapped when the last array or view of it is gone."""

    __slots__ = ("memory", "nbytes", "start")

    def __init__(self, memory: mmap.mmap, start: int, nbytes: int) -> None:
        self.memory = memory
        self.start = start
        self.nbytes = nbytes

    def array(self, nbytes: int, offset: int = 0) -> np.ndarray[Any, Any]:
        """Return a range as a new uint8 array, whose base is `memory`. Raises ValueError for one that is not all there."""
        if offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of a mapping of {self.nbytes}")
        return np.frombuffer(self.memory, np.uint8, nbytes, self.start + offset)

    def view(self) -> memoryview:
        return memoryview(self.memory)[self.start : self.start + self.nbytes]

    def populate(self, offset: int, nbytes: int) -> None:
        """Make the pages of a range present in this process, so that writing to them does not fault one by one."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self.memory.madvise(_MADV_POPULATE_WRITE, self.start + start, offset + nbytes - start)
        except OSError:
            pass  # an older kernel: pages fault in as they are written


def map_file(fd: int, nbytes: int, *, shared: bool = True) -> Mapping:
    """Map the first bytes of a file to read and write them, without touching its pages. Raises OSError, ValueError.

    Written bytes are everybody's when `shared`, else this process's own.
    """
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    extent = extent_nbytes()
    if extent and nbytes >= extent:
        if os.fstat(fd).st_size < nbytes:
            raise ValueError(f"{nbytes} bytes of a file of {os.fstat(fd).st_size} cannot be mapped")
        try:
            return _map_aligned(fd, nbytes, flags, extent)
        except OSError:
            pass  # a limit on address space, which this takes a little more of
    return Mapping(mmap.mmap(fd, nbytes, flags=flags, prot=_READ_WRITE), 0, nbytes)


def _map_aligned(fd: int, nbytes: int, flags: int, extent: int) -> Mapping:
    """Lay a mapping over the aligned part of one that is too large, of nothing. That one owns the addresses: when it goes,
    both do."""
    if _is_locked():
        raise OSError(errno.EAGAIN, "what is mapped is locked, and would all be there before the file is laid over it")
    area = mmap.mmap(-1, nbytes + extent, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, prot=_READ_WRITE)
    address = _address_of(area)
    start = -address % extent
    if _libc().mmap(address + start, nbytes, _READ_WRITE, flags | _MAP_FIXED, fd, 0) == _MAP_FAILED:
        number = ctypes.get_errno()
        # Kept for ever: part of it may be gone, and where it was somebody else's memory may lie when it is unmapped.
        _BROKEN.append(area)
        raise OSError(number, os.strerror(number))
    return Mapping(area, start, nbytes)


class HugePages:
    """Asks for huge pages while a file is reserved, until the kernel refuses or takes long."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self._extent = extent_nbytes()
        self._mapping: Mapping | None = None
        self._is_on = 0 < self._extent <= nbytes
        self._nbytes = nbytes

    def ask(self, start: int, nbytes: int) -> None:
        """Make huge pages of the whole extents of a range. Raises OSError when there is no room for one page of each."""
        if not self._is_on:
            return
        first, end = -(-start // self._extent), (start + nbytes) // self._extent
        if first >= end:
            return
        for number in range(first, end):
            # The last one, so that the file reaches to the end of its extent.
            os.posix_fallocate(self._fd, (number + 1) * self._extent - mmap.PAGESIZE, mmap.PAGESIZE)
        try:
            if self._mapping is None:
                self._mapping = _map_aligned(self._fd, self._nbytes, mmap.MAP_SHARED, self._extent)
        except OSError:
            self._is_on = False
            return
        place = _address_of(self._mapping.memory) + self._mapping.start
        for number in range(first, end):
            begun_s = time.monotonic()
            # Not by `mmap.madvise`, which keeps the interpreter's lock.
            result = _libc().madvise(place + number * self._extent, self._extent, _MADV_COLLAPSE)
            if result or time.monotonic() - begun_s > _SLOW_S:
                self._is_on = False
                return

    def close(self) -> None:
        """Let go of the file, also where an exception's traceback keeps this object."""
        self._mapping, self._is_on = None, False


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _is_locked() -> bool:
    """Whether this process locks its memory, and perhaps what it maps from now on (mlockall(2))."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return any(line.startswith("VmLck:") and line.split()[1] != "0" for line in file)
    except OSError:
        return False


@functools.cache
def extent_nbytes() -> int:
    """What one huge page holds, in bytes; 0 where there are none, or `RINGLOADER_HUGE_PAGES` is 0."""
    try:
        with open(_EXTENT_FILE, encoding="ascii") as file:
            return int(file.read()) if os.environ.get("RINGLOADER_HUGE_PAGES") != "0" else 0
    except (OSError, ValueError):
        return 0


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return libc
