"""What a leaf of a batch is written from: rows of arrays, a whole array, or nothing more.

Owns the ways in which numpy joins rows, and refuses those that do not agree. What is written from tensors is in `tensors`. Must
not import torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from ringloader._core import dtypes
from ringloader._core.layout import LeafType, Node, leaf_type
from ringloader._kernels import join

_Casting = Literal["unsafe", "no"]


class Source(Protocol):
    """A leaf that is yet to be written: its type and final shape, and where its bytes come from.

    `joinable`: its rows, a list or tuple, where all that is to be done is to join them.
    """

    leaf: LeafType
    shape: tuple[int, ...]

    @property
    def joinable(self) -> Sequence[Any] | None: ...

    def write(self, slot: np.ndarray, offset: int) -> None:
        """Write the bytes at `offset`. Raises ValueError, TypeError or RuntimeError where rows do not agree."""

    def check(self) -> None:
        """Raise what `write` would, without writing."""


class Inline:
    """A leaf that travels in the message."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Subtree:
    """A leaf that turned out to be a tree of its own (only torch's own rules give this)."""

    __slots__ = ("node", "sources", "values")

    def __init__(self, node: Node, sources: list[Source], values: list[Any]) -> None:
        self.node = node
        self.sources = sources
        self.values = values


Outcome = Source | Inline | Subtree


class ArrayRows:
    """Arrays of one shape, joined along a new first dimension."""

    __slots__ = ("_cast", "_rows", "joinable", "leaf", "shape")

    def __init__(self, rows: Sequence[np.ndarray], dtype: str, cast: bool) -> None:
        self._rows = rows
        self._cast = cast
        self.joinable = None if cast else rows
        self.shape = (len(rows), *rows[0].shape)
        self.leaf = leaf_type("tensor", dtype, len(self.shape))

    def write(self, slot: np.ndarray, offset: int) -> None:
        casting: _Casting = "unsafe" if self._cast else "no"
        dtype = dtypes.storage_of(self.leaf.dtype)
        if len(self.shape) == 1:
            np.stack(self._rows, out=np.ndarray(self.shape, dtype, slot, offset), casting=casting)
        else:
            _join(self._rows, casting, self.shape, dtype, slot, offset)

    def check(self) -> None:
        if {row.shape for row in self._rows} != {self.shape[1:]}:
            raise ValueError("rows differ in shape")
        if not self._cast and {row.dtype for row in self._rows} != {self._rows[0].dtype}:
            raise ValueError("rows differ in dtype")


def _join(
    rows: Sequence[np.ndarray], casting: _Casting, shape: tuple[int, ...], dtype: np.dtype, slot: np.ndarray, offset: int
) -> None:
    """Join rows that have dimensions into an array of this shape. Raises ValueError or TypeError for rows that do not agree."""
    # Rows of one length that can be joined along their first dimension have one shape. A row loop takes three times longer.
    if set(map(len, rows)) != {shape[1]}:
        raise ValueError("rows differ in length")
    joined = (shape[0] * shape[1], *shape[2:])
    np.concatenate(rows, 0, np.ndarray(joined, dtype, slot, offset), dtype=None, casting=casting)


# Makes the rows of one leaf, given them, their dtype and whether they are to be cast.
RowsOf = Callable[[Sequence[Any], str, bool], Source]


class Run:
    """Leaves of one dtype and shape, which lie one behind the other: the rows of all of them are joined at once. Stands for the
    first; the others are `Written` with it."""

    __slots__ = ("_columns", "_rows_of", "leaf", "shape")
    joinable = None  # with others: it has more rows than they

    def __init__(self, columns: Sequence[Sequence[Any]], leaf: LeafType, shape: tuple[int, ...], rows_of: RowsOf) -> None:
        self._columns = columns
        self._rows_of = rows_of
        self.leaf = leaf
        self.shape = shape

    def write(self, slot: np.ndarray, offset: int) -> None:
        rows = list(itertools.chain.from_iterable(self._columns))
        if join is None:
            self._check_types()
            _join(rows, "no", (len(rows), *self.shape[1:]), dtypes.storage_of(self.leaf.dtype), slot, offset)
        elif join((rows,), slot, (offset,)):
            nbytes = dtypes.storage_of(self.leaf.dtype).itemsize * math.prod(self.shape)
            for number, part in enumerate(self._parts()):
                part.write(slot, offset + number * nbytes)

    def check(self) -> None:
        for part in self._parts():
            part.check()

    def _parts(self) -> list[Source]:
        self._check_types()
        return [self._rows_of(column, self.leaf.dtype, False) for column in self._columns]

    def _check_types(self) -> None:
        kind = type(self._columns[0][0])
        if any(set(map(type, column)) != {kind} for column in self._columns):
            raise TypeError("rows differ in type")


def write_all(sources: Sequence[Source], slot: np.ndarray, offsets: Sequence[int], sizes: Sequence[int]) -> None:
    """Write the leaves that have bytes. Raises as `Source.write` does."""
    left: Sequence[int] = [place for place, (_, size) in enumerate(zip(sources, sizes, strict=False)) if size]
    if join is not None:
        left = _join_together(join, sources, slot, offsets, left)
    for place in left:
        sources[place].write(slot, offsets[place])


def _join_together(
    join: Callable[..., list[int]], sources: Sequence[Source], slot: np.ndarray, offsets: Sequence[int], places: Sequence[int]
) -> list[int]:
    """Join the rows of all leaves at once, sample after sample; return the places of the leaves that are left."""
    joined, columns, left = [], [], []
    for place in places:
        rows = sources[place].joinable
        if rows is None:
            left.append(place)
        else:
            joined.append(place)
            columns.append(rows)
    if columns:
        left += [joined[found] for found in join(tuple(columns), slot, tuple([offsets[place] for place in joined]))]
    return left


class Written:
    """A leaf whose rows are in the slot already, or come there with those of another, where the layout wants them."""

    __slots__ = ("leaf", "shape")
    joinable = None

    def __init__(self, leaf: LeafType, shape: tuple[int, ...]) -> None:
        self.leaf = leaf
        self.shape = shape

    def write(self, slot: np.ndarray, offset: int) -> None:
        """Nothing is left to do."""

    def check(self) -> None:
        """Each row was checked, or is with the others."""


class WholeArray:
    """One array with all rows of the leaf."""

    __slots__ = ("_array", "leaf", "shape")
    joinable = None

    def __init__(self, array: np.ndarray, kind: str, dtype: str) -> None:
        self._array = array
        self.shape = array.shape
        self.leaf = leaf_type(kind, dtype, array.ndim)

    def write(self, slot: np.ndarray, offset: int) -> None:
        np.copyto(np.ndarray(self.shape, dtypes.storage_of(self.leaf.dtype), slot, offset), self._array, casting="no")

    def check(self) -> None:
        """An array agrees with itself."""
