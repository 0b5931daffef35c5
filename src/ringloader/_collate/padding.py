"""Leaves whose rows differ in length, padded to the longest as they are written to the slot.

Owns what may differ (one dimension), where the padding goes and what it is. A leaf whose rows agree is collated as ever. Must
not import torch; tensors are handled by `tensors`, as in `columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringloader._collate.columns import Asker, check_tensor, refuse_array, refuse_dtypes
from ringloader._collate.containers import Rule, rule_of
from ringloader._collate.leaves import Source, WholeArray
from ringloader._collate.structure import Keys, Leaf
from ringloader._core import dtypes
from ringloader._core.layout import leaf_type

# Below this size of a row it is faster to fill the whole leaf first than each row's end.
_SMALL_ROW_NBYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Padding:
    """value: what is put beyond a row's end, or before its beginning (`side` "left"), along dimension `dim` of a sample's leaf.
    lengths: the batch comes with the rows' own lengths."""

    value: Any = 0
    side: str = "right"
    dim: int = 0
    lengths: bool = False

    def pad(self, values: Sequence[Any], leaf: Leaf, keys: Keys, asker: Asker) -> Source | None:
        """Return the padded rows of a leaf; None where rows agree, or differ in more than their length."""
        if any(getattr(value, "is_nested", False) for value in values):
            return None  # refused by name where all are
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) == 1 or any(len(shape) <= self.dim for shape in shapes):
            return None
        if len({(*shape[: self.dim], -1, *shape[self.dim + 1 :]) for shape in shapes}) > 1:
            return None
        is_array = rule_of(type(values[0])) is Rule.ARRAY
        rows, dtype = (_as_rows if is_array else _tensors_as_rows)(values, leaf, keys, asker)
        return PaddedRows(rows, dtype, self, self._as_stored(dtype, leaf, keys))

    def applies(self, source: Any) -> bool:
        """Whether rows of this leaf may differ in length."""
        return isinstance(source, PaddedRows) or (source.leaf.ndim >= self.dim + 2 and not isinstance(source, WholeArray))

    def lengths_of(self, source: Any) -> Source:
        """The rows' own lengths, `(batch,) int64`."""
        own = getattr(source, "lengths", None)
        if own is None:
            own = [source.shape[1 + self.dim]] * source.shape[0]
        return WholeArray(np.array(own, np.int64), "tensor", "int64")

    def _as_stored(self, dtype: str, leaf: Leaf, keys: Keys) -> Any:
        """The padding value in the bytes of a dtype. Raises LayoutError for one that the dtype does not hold."""
        try:
            if dtypes.is_torch_only(dtype):
                from ringloader._collate import tensors

                return tensors.stored_scalar(self.value, dtype)
            if isinstance(self.value, (complex, np.complexfloating)) and "complex" not in dtype:
                raise TypeError
            with np.errstate(invalid="ignore", over="ignore"):  # looked at below
                stored = np.array([self.value]).astype(dtypes.storage_of(dtype))[0]
            if stored.dtype.kind in "iub" and stored != self.value:
                raise ValueError
            if stored.dtype.kind in "fc" and np.isfinite(self.value) and not np.isfinite(stored):
                raise OverflowError
        except (OverflowError, ValueError, TypeError, RuntimeError) as error:
            words = f"is of dtype {dtype}, which cannot hold padding_value={self.value!r}: give a value that it can"
            raise keys.error(leaf.path, words, 0, dtype=dtype) from error
        return stored


class PaddedRows:
    """Arrays of several lengths along one dimension, joined along a new first one."""

    __slots__ = ("_padding", "_rows", "_stored", "leaf", "lengths", "shape")
    joinable = None

    def __init__(self, rows: Sequence[np.ndarray], dtype: str, padding: Padding, stored: Any) -> None:
        dim = padding.dim
        self._rows = rows
        self._padding = padding
        self._stored = stored
        self.lengths = [row.shape[dim] for row in rows]
        first = rows[0].shape
        self.shape = (len(rows), *first[:dim], max(self.lengths), *first[dim + 1 :])
        self.leaf = leaf_type("tensor", dtype, len(self.shape))

    def write(self, slot: np.ndarray, offset: int) -> None:
        """Write rows and padding."""
        out = np.ndarray(self.shape, dtypes.storage_of(self.leaf.dtype), slot, offset)
        longest = self.shape[1 + self._padding.dim]
        at_left = self._padding.side == "left"
        is_small = out.nbytes < _SMALL_ROW_NBYTES * len(self._rows)
        if is_small:
            out.fill(self._stored)
        before = (slice(None),) * self._padding.dim
        for target, row, length in zip(out, self._rows, self.lengths, strict=True):
            own = slice(longest - length, longest) if at_left else slice(length)
            target[(*before, own)] = row
            if not is_small and length < longest:
                target[(*before, slice(longest - length) if at_left else slice(length, longest))] = self._stored

    def check(self) -> None:
        """Rows were compared when they were gathered."""


def _as_rows(values: Sequence[Any], leaf: Leaf, keys: Keys, asker: Asker) -> tuple[Sequence[np.ndarray], str]:
    names: dict[str, None] = {}
    for row, value in enumerate(values):
        name = dtypes.name_of(value.dtype)
        if name is None:
            raise refuse_array(value, leaf.path, keys, row)
        names[name] = None
    common = dtypes.promote_all(names)
    if common is None:
        raise refuse_dtypes(leaf.path, keys, names, [dtypes.name_of(value.dtype) for value in values])
    return list(map(np.asarray, values)), common


def _tensors_as_rows(values: Sequence[Any], leaf: Leaf, keys: Keys, asker: Asker) -> tuple[Sequence[np.ndarray], str]:
    from ringloader._collate import tensors

    found = tensors.try_as_arrays(values)
    if found is not None:
        return found
    plain = [check_tensor(value, leaf.path, keys, row, asker) for row, value in enumerate(values)]
    names = tensors.dtype_names(plain)
    common = tensors.promote_all(names)
    if common is None:
        raise refuse_dtypes(leaf.path, keys, names, [tensors.dtype_name(value.dtype) for value in plain])
    return [tensors.as_array(tensors.cast(value, common)) for value in plain], common
