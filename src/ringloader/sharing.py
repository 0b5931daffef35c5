"""Data that all processes of a machine share: named arrays, and sequences of records.

Owns `SharedArrays`: how arrays lie in one piece of shared memory. It is written once by the process that makes it, sent to
workers by descriptor (a token on the wire), attached there without a copy, and freed with the last that uses it. With a name it
is one copy per machine, found by ranks and later runs.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from ringloader._core import dtypes
from ringloader._runtime import named
from ringloader._runtime.named import Leftover, leftovers
from ringloader._runtime.shared import BUILD_TIMEOUT_S, Array, Shared, reserve, told
from ringloader._specs import handles
from ringloader.arrays import as_array
from ringloader.errors import ConfigError
from ringloader.shared_records import SharedRecords

__all__ = ["Leftover", "SharedArrays", "SharedRecords", "leftovers", "remove_leftovers"]

_ALIGNMENT = 64
_CHUNK_NBYTES = 8 << 20


class SharedArrays(Shared, Mapping[str, Any]):
    """Named arrays in shared memory: `SharedArrays({"x": x, "y": y})`.

    Takes numpy arrays and CPU tensors, and copies each once. `shared["x"]` is a numpy array over the shared memory, of the same
    dtype and shape; for dtypes that numpy does not have (bfloat16, float8), a tensor. As an argument of a `FactorySpec`, or
    inside a dataset, it goes to workers by descriptor; there, and here, its arrays cannot be written to unless `writable`, with
    which every process sees what any of them writes. The memory is freed when the last process lets go of it.

    Raises ConfigError for what no tensor holds, and for arrays that do not fit into memory, with sizes.
    """

    KIND = "arrays"

    def __init__(self, arrays: Mapping[str, Any], *, writable: bool = False) -> None:
        if not isinstance(arrays, Mapping) or not arrays or not all(isinstance(name, str) for name in arrays):
            raise ConfigError(
                f"arrays is {arrays!r:.120}; give a dict of arrays by name", option="arrays", value=type(arrays).__qualname__
            )
        held = {name: as_array(value, name) for name, value in arrays.items()}
        self._make({name: (array.shape, dtype) for name, (array, dtype) in held.items()}, writable)
        for name, (source, _) in held.items():
            _write(self.fileno(), self._start + self._leaves[name][2], source)
        if not writable:
            self._freeze()

    @classmethod
    def empty(cls, layout: Mapping[str, tuple[Sequence[int], Any]], *, writable: bool = False) -> SharedArrays:
        """Return arrays of zeros to fill in place: `{"x": (shape, dtype)}`. Here they can be written to; in workers as said by
        `writable`. Raises ConfigError."""
        if not isinstance(layout, Mapping) or not layout or not all(isinstance(name, str) for name in layout):
            raise ConfigError(f"layout is {layout!r:.120}; give a dict of (shape, dtype)", option="layout", value=layout)
        made = cls.__new__(cls)
        made._make({name: _shape_and_dtype(name, given) for name, given in layout.items()}, writable)
        return made

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], length: int | None = None, *, progress: bool = False, writable: bool = False
    ) -> SharedArrays:
        """Return arrays whose rows are these: each a dict of arrays or numbers, of the same shapes and dtypes.

        `length`: how many there are, where `len(rows)` does not say. `progress` shows a bar (needs rich); else a line is logged
        now and then. Raises ConfigError for rows that differ, or another number of them.
        """
        if length is None:
            if not isinstance(rows, Sized):
                raise ConfigError("rows has no length; give length=", option="length", value=None)
            length = len(rows)
        iterator = iter(rows)
        first = next(iterator, None)
        if first is None or length < 1:
            raise ConfigError(f"there are no rows (length={length}); give one at least", option="rows", value=length)
        if not isinstance(first, Mapping):
            raise ConfigError(f"row 0 is a {type(first).__qualname__}; give dicts", option="rows", value=0)
        held = {name: as_array(_row_array(value), name) for name, value in first.items()}
        made = cls.empty({name: ((length, *array.shape), dtype) for name, (array, dtype) in held.items()}, writable=writable)
        views = {name: made._view(name) for name in held}
        count = 0
        for row in told(_chained(first, iterator), length, "rows", progress):
            if not isinstance(row, Mapping):
                raise ConfigError(f"row {count} is a {type(row).__qualname__}; give dicts", option="rows", value=count)
            if count >= length or row.keys() != held.keys():
                what = f"more than {length} rows" if count >= length else f"row {count} has the names {sorted(row)}"
                raise ConfigError(f"rows: {what}, and {sorted(held)} were expected", option="rows", value=count)
            for name, value in row.items():
                found, dtype = as_array(_row_array(value), name)
                if found.shape != held[name][0].shape or dtype != held[name][1]:
                    raise ConfigError(
                        f"row {count} has {name!r} of shape {list(found.shape)}, {dtype}, and row 0 of "
                        f"{list(held[name][0].shape)}, {held[name][1]}; give rows that are alike",
                        option="rows",
                        value=count,
                    )
                views[name][count] = found
            count += 1
        if count != length:
            raise ConfigError(f"there are {count} rows, and length={length} was given", option="length", value=length)
        if not writable:
            made._freeze()
        return made

    def __getitem__(self, name: str) -> Any:
        leaf = self._leaves[name]
        view = self._view(name)
        if not dtypes.is_torch_only(leaf[0]):
            return view
        from ringloader._collate import tensors

        return tensors.from_array(view if view.flags.writeable else handles.unguarded(view), leaf[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {dtype}{list(shape)}" for name, (dtype, shape, _) in self._leaves.items())
        return f"SharedArrays({parts})"

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def _make(self, layout: Mapping[str, tuple[tuple[int, ...], str]], writable: bool) -> None:
        leaves, offset = [], 0
        for name, (shape, dtype) in layout.items():
            leaves.append([name, dtype, list(shape), offset])
            nbytes = int(np.prod(shape, dtype=object)) * dtypes.storage_of(dtype).itemsize
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        facts = {"kind": self.KIND, "leaves": leaves, "version": "", "writable": writable}
        nbytes = _header_nbytes(facts) + offset
        descriptor = reserve(nbytes)
        try:
            named.write_header(descriptor.fd, nbytes, facts)
            super().__init__(descriptor, {**facts, "writable": True}, nbytes)
        except BaseException:
            descriptor.close()
            raise
        self._facts = facts
        self._take_up()

    def _take_up(self) -> None:
        self._leaves: dict[str, tuple[str, list[int], int]] = {
            name: (dtype, shape, offset) for name, dtype, shape, offset in self._facts["leaves"]
        }
        self._start = _header_nbytes(self._facts)

    def _view(self, name: str) -> Array:
        dtype, shape, offset = self._leaves[name]
        return np.ndarray(tuple(shape), dtypes.storage_of(dtype), self.memory(), self._start + offset)

    def _freeze(self) -> None:
        """From now on nothing is to be written here."""
        descriptor, self._descriptor = self._descriptor, None
        assert descriptor is not None
        self._descriptor = descriptor.dup()  # the old one closes with the old mapping
        self._map(shared=False)
        self._close_with_mapping(self._descriptor)

    @classmethod
    def _copy_of(cls, built: Any, *, writable: bool) -> SharedArrays:
        return cls(built, writable=writable)

    @classmethod
    def attach_or_build(
        cls,
        name: str,
        builder: Callable[[], Any],
        *,
        version: str = "",
        timeout_s: float = BUILD_TIMEOUT_S,
        writable: bool = False,
        layout: Mapping[str, tuple[Sequence[int], Any]] | None = None,
    ) -> SharedArrays:
        """As described above; `layout` is what the arrays have to be, by name: `{"x": (shape, dtype)}`."""
        expected = {leaf: _shape_and_dtype(leaf, given) for leaf, given in layout.items()} if layout is not None else {}
        return cls._attach_or_build(name, builder, version, timeout_s, writable, expected)

    @classmethod
    def _check_layout(cls, name: str, facts: dict[str, Any], expected: dict[str, Any]) -> None:
        found = {leaf: (tuple(shape), dtype) for leaf, dtype, shape, _ in facts["leaves"]}
        if expected and found != expected:
            raise ConfigError(
                f"{name!r} holds {found}, and {expected} is expected; remove it (ringloader.sharing.remove_leftovers), or use "
                "another name",
                option="layout",
                value=found,
            )


def remove_leftovers(*names: str) -> list[str]:
    """Remove the named segments of this user that nobody uses, or of these those; return the names of what was removed."""
    found = names or tuple(dict.fromkeys(one.name for one in leftovers() if not one.is_used))
    return [name for name in found if named.remove(name)]


def _header_nbytes(facts: dict[str, Any]) -> int:
    # The version is written later; a name is at most this long, and must not move the data.
    return named.data_offset({**facts, "version": "", "writable": False}) + named.PAGE_NBYTES


def _shape_and_dtype(name: str, given: Any) -> tuple[tuple[int, ...], str]:
    try:
        shape, dtype = given
        sizes = tuple(operator.index(size) for size in ((shape,) if hasattr(shape, "__index__") else shape))
        if isinstance(dtype, str) and dtypes.is_torch_only(dtype):
            return sizes, dtype
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(dtype, torch.dtype):
            known = str(dtype).removeprefix("torch.")
        else:
            known = dtypes.name_of(np.dtype(dtype)) or ""
        if not known or any(not 0 <= size < 1 << 48 for size in sizes):
            raise ValueError(f"no tensor has dtype {dtype} and shape {shape}")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"layout of {name!r} is {given!r:.100}: {error}; give (shape, dtype)", option="layout", value=name
        ) from error
    return sizes, known


def _row_array(value: Any) -> Any:
    torch = sys.modules.get("torch")
    return value if torch is not None and isinstance(value, torch.Tensor) else np.asarray(value)


def _write(fd: int, offset: int, source: Array) -> None:
    """Write an array's elements at a place of the memory.

    By write(2), piece by piece: twice as fast as through a new mapping, whose pages fault in one by one.
    """
    rows = source.reshape(1) if source.ndim == 0 else source
    step = max(1, len(rows) * _CHUNK_NBYTES // max(1, rows.nbytes))
    for start in range(0, len(rows), step):
        piece = np.ascontiguousarray(rows[start : start + step]).reshape(-1).view(np.uint8).data
        done = 0
        while done < len(piece):
            done += os.pwrite(fd, piece[done:], offset + done)
        offset += len(piece)


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
