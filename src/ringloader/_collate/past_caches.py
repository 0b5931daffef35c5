"""Copies of large rows that go past the caches.

A store to memory that is in no cache reads it first, so that a copy moves three bytes for each of its own. The processor has
stores that do not; but neither numpy nor the C library can be told to use them for one copy. glibc does above a size that holds
for the whole process, the user's own copies included, and those are worked on afterwards: with that size lowered, a dataset
that normalises a copy of an image made a quarter of its samples per second. So there is a program of our own for it, of a few
kinds of instructions, made where this processor can run it and the system lets a process have code of its own.

Owns that program and the choice of what it is used for: batches that are larger than what the caches hold. Measured with two
workers on an Intel Xeon, 64 rows of 588 KiB come at 20 GB/s for 13, and at 11 for 9 where the training process reads them;
batches below 10 MiB lose, for the training process would find them in the cache. Off: RINGLOADER_PAST_CACHES=0. Must import
light, and no torch. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (MOVNTDQ, SFENCE).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

# From 12 MiB on a batch gains where the training process reads it once; where it does twice, it loses nothing from here on.
LARGE_BATCH_NBYTES = 16 << 20
# A call costs two microseconds more than numpy's; smaller rows gain less than that.
LARGE_ROW_NBYTES = 64 << 10
# Four pages are copied side by side: the processor fetches ahead within a page alone.
_PAGE_NBYTES, _NUM_PAGES = 4096, 4
_BLOCK_NBYTES = _NUM_PAGES * _PAGE_NBYTES
_LINE_NBYTES = 64

Array = np.ndarray[Any, Any]
# Copies from an address to one that is a multiple of `_LINE_NBYTES`, so many bytes, a multiple of `_BLOCK_NBYTES` above 0.
_Program = Callable[[int, int, int], None]


def row_copier(out: Array, batch_nbytes: int) -> Callable[[int, Array], None] | None:
    """Return what copies a row to its place in `out`, which has the batch as its first dimension, past the caches; None where
    that is not better.

    Takes the place and an array, which need not lie in one piece. One of another dtype or shape is cast and spread as numpy
    does, or refused.
    """
    if batch_nbytes < LARGE_BATCH_NBYTES or out.nbytes < LARGE_ROW_NBYTES * len(out) or not out.flags.c_contiguous:
        return None
    program = _program()
    return None if program is None else _Rows(out, program).copy


class _Rows:
    """The rows of one leaf of a batch."""

    __slots__ = ("_address", "_bytes", "_nbytes", "_out", "_program")

    def __init__(self, out: Array, program: _Program) -> None:
        self._out = out
        self._program = program
        self._bytes = out.reshape(len(out), -1).view(np.uint8)
        self._nbytes = self._bytes.shape[1]
        self._address = out.ctypes.data

    def copy(self, place: int, row: Array) -> None:
        out, nbytes = self._out, self._nbytes
        if row.dtype != out.dtype or row.shape != out.shape[1:] or not row.flags.c_contiguous:
            out[place] = row
            return
        target, source = self._address + place * nbytes, row.ctypes.data
        start = -target % _LINE_NBYTES
        size = (nbytes - start) // _BLOCK_NBYTES * _BLOCK_NBYTES
        if size <= 0 or abs(target - source) < nbytes:
            out[place] = row  # one lies over the other
            return
        end = start + size
        if start or end < nbytes:
            written, read = self._bytes[place], row.reshape(-1).view(np.uint8)
            written[:start] = read[:start]
            written[end:] = read[end:]
        self._program(target + start, source + start, size)


@functools.cache
def _program() -> _Program | None:
    """Make the program, once per process; None where it cannot be."""
    is_known = os.uname().machine == "x86_64" and ctypes.sizeof(ctypes.c_void_p) == 8
    if os.environ.get("RINGLOADER_PAST_CACHES") == "0" or not is_known:
        return None
    code = _assemble()
    try:
        memory = mmap.mmap(-1, len(code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
        memory[:] = code
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # Never writable and executable at the same time. Hardened systems refuse either.
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), len(code), mmap.PROT_READ | mmap.PROT_EXEC):
            return None
    except (OSError, ValueError, AttributeError):
        return None
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    program: Any = prototype(address)
    program.memory = memory  # which is to live as long
    return program  # type: ignore[no-any-return]


def _assemble() -> bytes:
    """Return the program: rdi the target, rsi the source, rdx the bytes, as the System V ABI passes arguments."""
    places = [(page, part) for page in range(_NUM_PAGES) for part in range(_LINE_NBYTES // 16)]
    line = b"".join(_load(4 * page + part, page * _PAGE_NBYTES + 16 * part) for page, part in places)
    line += b"".join(_store(4 * page + part, page * _PAGE_NBYTES + 16 * part) for page, part in places)
    line += b"\x48\x83\xc6\x40"  # add rsi, 64
    line += b"\x48\x83\xc7\x40"  # add rdi, 64
    line += b"\xff\xc9"  # dec ecx
    block = b"\xb9" + (_PAGE_NBYTES // _LINE_NBYTES).to_bytes(4, "little")  # mov ecx, 64
    block += line + b"\x0f\x85" + _back(len(line) + 6)  # jnz to the line
    rest = (_BLOCK_NBYTES - _PAGE_NBYTES).to_bytes(4, "little")
    block += b"\x48\x81\xc6" + rest  # add rsi, 12288
    block += b"\x48\x81\xc7" + rest  # add rdi, 12288
    block += b"\x48\x81\xea" + _BLOCK_NBYTES.to_bytes(4, "little")  # sub rdx, 16384
    block += b"\x0f\x85" + _back(len(block) + 6)  # jnz to the block
    # endbr64, which processors want where a call may land; sfence, after which others see what was stored; ret
    return b"\xf3\x0f\x1e\xfa" + block + b"\x0f\xae\xf8" + b"\xc3"


def _load(register: int, offset: int) -> bytes:
    """Return `movdqu xmm<register>, [rsi + offset]`."""
    return b"\xf3" + _register_prefix(register) + b"\x0f\x6f" + _operands(register, 6, offset)


def _store(register: int, offset: int) -> bytes:
    """Return `movntdq [rdi + offset], xmm<register>`."""
    return b"\x66" + _register_prefix(register) + b"\x0f\xe7" + _operands(register, 7, offset)


def _register_prefix(register: int) -> bytes:
    return b"\x44" if register >= 8 else b""


def _operands(register: int, base: int, offset: int) -> bytes:
    return bytes([0x80 | (register & 7) << 3 | base]) + offset.to_bytes(4, "little")


def _back(nbytes: int) -> bytes:
    """Return the operand of a jump over so many bytes before the end of its instruction."""
    return (-nbytes).to_bytes(4, "little", signed=True)
