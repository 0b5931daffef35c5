"""Memory-mapped arrays as what they are mapped from, so that their files are mapped anew and never sent.

Owns the question whether an array is a contiguous part of a file that can be found again. Must not read the file.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def source_of(array: Array) -> tuple[str, np.dtype[Any], int, list[int], str] | None:
    """Return the arguments of `map_file` for an array that is a contiguous part of one file, else None."""
    if type(array) is not np.memmap or array.filename is None or not array.size:
        return None
    is_c, is_f = array.flags.c_contiguous, array.flags.f_contiguous
    if array.mode == "c" or not (is_c or is_f):  # what was written to a private mapping is not in its file
        return None
    mapping = getattr(array, "_mmap", None)
    path = os.path.abspath(array.filename)
    if mapping is None:
        return None
    # A slice says the offset of what it was cut from: its own follows from where it lies in the mapping.
    mapped_from = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    start = array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
    if not _is_mapped_from(path, array.ctypes.data):
        return None
    shape = [int(size) for size in array.shape]
    return path, array.dtype, mapped_from + start, shape, "C" if is_c else "F"


def _is_mapped_from(path: str, address: int) -> bool:
    """Whether the file at a path is the very one that is mapped at an address: not replaced, removed or a descriptor's."""
    try:
        status = os.lstat(os.path.realpath(path)) if not path.startswith(("/proc/", "/dev/fd/")) else None
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        with open("/proc/self/maps") as lines:
            for line in lines:
                span, _, _, device, inode = line.split()[:5]
                low, high = (int(end, 16) for end in span.split("-"))
                if low <= address < high:
                    major, minor = (int(part, 16) for part in device.split(":"))
                    is_device = (os.major(status.st_dev), os.minor(status.st_dev)) == (major, minor)
                    # File systems exist that show another device number in one of the two places.
                    return int(inode) == status.st_ino and (is_device or " (deleted)" not in line)
    except (OSError, ValueError):
        pass
    return False


def map_file(path: str, dtype: Any, offset: int, shape: Sequence[int], order: str) -> Array:
    """Map a part of a file. It can be written to, and what is written stays in this process."""
    return np.memmap(path, dtype, "c", offset, tuple(shape), order)  # type: ignore[call-overload,no-any-return]
