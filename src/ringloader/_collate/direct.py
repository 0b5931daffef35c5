"""Rows that are copied to the slot as soon as their sample is there.

Owns one leaf's rows in the slot until the batch is finished. A row of another shape is an error at once (numpy and torch would
broadcast it), a row of another dtype or type is reported, not cast. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringloader._collate.columns import refuse_shape
from ringloader._collate.containers import Rule, rule_of
from ringloader._collate.leaves import Written
from ringloader._collate.past_caches import row_copier
from ringloader._collate.structure import Keys
from ringloader._core import dtypes
from ringloader._core.layout import LeafType, leaf_type

# Turns a tensor of this dtype into an array, or returns None for any other value.
AsArray = Callable[[Any, str], np.ndarray | None]


class DirectRows:
    """One leaf's rows in the slot: `out` is an array over them with the batch as its first dimension."""

    __slots__ = ("_as_array", "_copy", "_leaf", "_out", "_shape", "offset", "row_nbytes")

    def __init__(self, out: np.ndarray, leaf: LeafType, offset: int, as_array: AsArray | None, batch_nbytes: int) -> None:
        self.offset = offset
        self.row_nbytes = out.nbytes // max(1, out.shape[0])
        self._out = out
        self._leaf = leaf
        self._shape = out.shape[1:]
        self._as_array = as_array
        self._copy = row_copier(out, batch_nbytes)

    def write_row(self, row: int, value: Any, path: str, keys: Keys) -> bool:
        """Copy a row; return False, having done nothing, if it is not of this leaf's type and dtype.

        Raises LayoutError for another shape.
        """
        # After a large row nothing is in the cache: each look at a tensor costs a microsecond, so there are few.
        array = value if self._as_array is None else self._as_array(value, self._leaf.dtype)
        if type(array) is not np.ndarray or array.dtype != self._out.dtype:
            return False
        if array.shape != self._shape:
            raise refuse_shape(path, keys, row, self._shape, array.shape)
        # With the ellipsis a row of no dimensions is a view, too.
        if self._copy is not None:
            self._copy(row, array)
        else:
            self._out[row, ...] = array
        return True

    def placed(self, num_rows: int) -> Written:
        """Return the first rows as a leaf."""
        shape = (num_rows, *self._shape)
        return Written(leaf_type(self._leaf.kind, self._leaf.dtype, len(shape)), shape)

    def recover(self, num_rows: int) -> Sequence[Any]:
        """Return copies of the first rows, as arrays or tensors of their own."""
        held = self._out[:num_rows].copy()
        rows = [held[row, ...] for row in range(num_rows)]
        if self._as_array is None:
            return rows
        from ringloader._collate import tensors

        return [tensors.from_array(row, self._leaf.dtype) for row in rows]


def direct_rows(first: Any, leaf: LeafType, shape: tuple[int, ...], slot: np.ndarray, offset: int) -> DirectRows:
    """Return the rows of a leaf of `shape` at `offset` of `slot`, the bytes of the batch; `first` is its first row."""
    out = np.ndarray(shape, dtypes.storage_of(leaf.dtype), slot, offset)
    if isinstance(first, np.ndarray):
        return DirectRows(out, leaf, offset, None, len(slot))
    from ringloader._collate import tensors

    return DirectRows(out, leaf, offset, tensors.try_as_array, len(slot))


def is_large(value: Any, least_nbytes: int) -> bool:
    """Return whether a value can be a row of its own, of so many bytes at least."""
    rule = rule_of(type(value))
    if rule is Rule.ARRAY:
        return bool(value.nbytes and value.nbytes >= least_nbytes)
    if rule is not Rule.TENSOR:
        return False
    from ringloader._collate import tensors

    return tensors.is_large(value, least_nbytes)
