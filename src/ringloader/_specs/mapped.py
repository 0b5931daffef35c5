"""Memory-mapped arrays as what they are mapped from, so that their files are mapped anew and never sent.

Owns the question whether an array is a contiguous part of a file. Must not read the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def source_of(array: Array) -> tuple[str, str, int, list[int], str] | None:
    """Return the arguments of `map_file` for an array that is a contiguous part of one file, else None."""
    if not isinstance(array, np.memmap) or array.filename is None or not array.size:
        return None
    is_c, is_f = array.flags.c_contiguous, array.flags.f_contiguous
    if array.mode == "c" or not (is_c or is_f):  # what was written to a private mapping is not in its file
        return None
    mapping = getattr(array, "_mmap", None)
    if mapping is None:
        return None
    # A slice says the offset of what it was cut from: its own follows from where it lies in the mapping.
    mapped_from = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    start = array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
    shape = [int(size) for size in array.shape]
    return str(array.filename), array.dtype.str, mapped_from + start, shape, "C" if is_c else "F"


def map_file(path: str, dtype: str, offset: int, shape: Sequence[int], order: str) -> Array:
    """Map a part of a file, for reading."""
    return np.memmap(path, dtype, "r", offset, tuple(shape), order)  # type: ignore[call-overload,no-any-return]
