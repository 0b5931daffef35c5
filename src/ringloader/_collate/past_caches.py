"""Copies of large rows that go past the caches.

A store to memory that is in no cache reads it first, so that a copy moves three bytes for each of its own. The processor has
stores that do not; but neither numpy nor the C library can be told to use them for one copy. glibc does above a size that holds
for the whole process, the user's own copies included, and those are worked on afterwards: with that size lowered, a dataset
that normalises a copy of an image made a quarter of its samples per second.

Owns the choice of what is copied so: batches that are larger than what the caches hold. Measured with two workers on an Intel
Xeon, 64 rows of 588 KiB come at 20 GB/s for 13, and at 11 for 9 where the training process reads them; batches below 10 MiB
lose, for the training process would find them in the cache. Off: RINGLOADER_PAST_CACHES=0. Must import light, and no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from ringloader._kernels import stream

# From 12 MiB on a batch gains where the training process reads it once; where it does twice, it loses nothing from here on.
LARGE_BATCH_NBYTES = 16 << 20
# One process on the same machine, 24 MiB a batch: rows of 16 KiB gain nothing (5.6 GB/s for 5.4), of 64 KiB a fifth (7.7 for
# 6.5), of 128 KiB half (10.2 for 6.6). Rows between, some of which would gain, were not tried with a process that reads them.
LARGE_ROW_NBYTES = 64 << 10

Array = np.ndarray[Any, Any]


def row_copier(out: Array, batch_nbytes: int) -> Callable[[int, Array], None] | None:
    """Return what copies a row to its place in `out`, which has the batch as its first dimension, past the caches; None where
    that is not better, or not to be had.

    Takes the place and an array, which need not lie in one piece. One of another dtype or shape is cast and spread as numpy
    does, or refused.
    """
    if stream is None or os.environ.get("RINGLOADER_PAST_CACHES") == "0":
        return None
    if batch_nbytes < LARGE_BATCH_NBYTES or out.nbytes < LARGE_ROW_NBYTES * len(out) or not out.flags.c_contiguous:
        return None
    return _Rows(out, stream).copy


class _Rows:
    """The rows of one leaf of a batch."""

    __slots__ = ("_out", "_stream")

    def __init__(self, out: Array, stream: Callable[[Array, int, Array], None]) -> None:
        self._out = out
        self._stream = stream

    def copy(self, place: int, row: Array) -> None:
        out = self._out
        if row.dtype == out.dtype and row.shape == out.shape[1:] and row.flags.c_contiguous and row.nbytes:
            self._stream(out, place, row)
        else:
            out[place] = row
