"""What a leaf of a batch will be, before there is memory for it.

Owns the public `ArraySpec`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from ringloader._core import dtypes
from ringloader.errors import LayoutError

# More than any machine has; sizes beyond 64 bits would not even travel.
_MAX_NBYTES = 1 << 48


class ArraySpec:
    """Shape and dtype of one leaf: `ArraySpec((32, 3, 224, 224), "float32")`.

    `dtype` is numpy's, torch's, or the name of one. Where numpy has none ("bfloat16", "float8_e5m2") the leaf is written
    through an array of integers of the same size.

    Raises LayoutError for a negative size or a dtype that no tensor has.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        try:
            self.shape = tuple(map(operator.index, shape))
        except TypeError:
            raise LayoutError(f"ArraySpec has the shape {shape!r:.200}; give a tuple of ints", shape=shape) from None
        if any(size < 0 for size in self.shape):
            raise LayoutError(f"ArraySpec has the shape {self.shape}; sizes are at least 0", shape=self.shape)
        self.dtype = _name_of(dtype)
        if self.nbytes > _MAX_NBYTES:
            raise LayoutError(f"ArraySpec of shape {self.shape}, {self.dtype}, has {self.nbytes:,} bytes", nbytes=self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the leaf."""
        return math.prod(self.shape) * dtypes.storage_of(self.dtype).itemsize

    def __repr__(self) -> str:
        return f"ArraySpec({self.shape}, {self.dtype!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArraySpec) and (self.shape, self.dtype) == (other.shape, other.dtype)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))


def _name_of(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if dtypes.is_known(name):
        return name
    try:
        known = None if dtype is None else dtypes.name_of(dtypes.numpy_dtype(dtype))
    except TypeError:
        known = None
    if known is None:
        raise LayoutError(f"ArraySpec has the dtype {dtype!r}, which no tensor has", dtype=str(dtype))
    return known
