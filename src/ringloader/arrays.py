"""Datasets over arrays, which write whole batches straight into the ring.

Owns how rows of an array get into a slot fastest, and how arrays reach workers: files are mapped by each worker anew, arrays in
memory go once, into one segment that all workers share. Must not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringloader._collate.past_caches import LARGE_ROW_NBYTES, row_copier
from ringloader._core import dtypes
from ringloader._core.array_spec import ArraySpec
from ringloader._core.blake2 import blake2b
from ringloader._kernels import take
from ringloader._specs import mapped
from ringloader._specs.handles import Shareable
from ringloader.datasets import Dataset
from ringloader.errors import ConfigError
from ringloader.factory import FactorySpec

__all__ = ["ArrayDataset", "TokenWindows", "tensor_dataset"]

Array = np.ndarray[Any, Any]

_GATHER_NBYTES = 128 << 10
# Rows that a fingerprint looks at, and the state of a loader with it.
_NUM_PRINTED = 8


class ArrayDataset(Dataset):
    """Rows of arrays of one length: sample i is row i of each.

    `ArrayDataset(x, y)` gives tuples, `ArrayDataset({"image": x, "label": y})` dicts, `ArrayDataset("folder")` dicts of what
    the folder's `.npy` files hold, by their names without the ending, mapped from the files and not read. A `SharedArrays` is
    taken as a dict is, and attached by workers. Batches are
    `(B, *shape of a row)` tensors: lists of them, or dicts. Arrays may be `np.memmap`s of whole files; torch tensors on the CPU
    are taken as arrays over the same memory.

    Raises ConfigError for arrays of unequal length, of no dimension, or of a dtype that no tensor has.
    """

    draws_nothing = True

    def __init__(self, *arrays: Any) -> None:
        self._shared = arrays[0] if len(arrays) == 1 and isinstance(arrays[0], Shareable) else None
        named = _open_arrays(arrays)
        self._names: tuple[str, ...] | None = tuple(named) if isinstance(named, dict) else None
        values = list(named.values()) if isinstance(named, dict) else named
        labels = list(self._names or map(str, range(len(values))))
        self._columns = [_Column(as_array(value, label), label) for value, label in zip(values, labels, strict=True)]
        lengths = {label: len(column.array) for label, column in zip(labels, self._columns, strict=True)}
        if len(set(lengths.values())) > 1:
            raise ConfigError(
                f"the arrays differ in length: {lengths}; give arrays of one length", option="arrays", value=lengths
            )
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        rows = [column.row(_within(index, self._length)) for column in self._columns]
        return tuple(rows) if self._names is None else dict(zip(self._names, rows, strict=True))

    def batch_spec(self, num_samples: int) -> Any:
        """Return what a batch of `num_samples` rows is made of."""
        specs = [ArraySpec((num_samples, *column.array.shape[1:]), column.dtype) for column in self._columns]
        return specs if self._names is None else dict(zip(self._names, specs, strict=True))

    def write_batch(self, indices: Array, out: Any) -> None:
        """Write the rows `indices`, int64, into the arrays of `out`."""
        places = all_within(indices, self._length)
        for column, target in zip(self._columns, out if self._names is None else out.values(), strict=True):
            column.write(places, target)

    def fingerprint(self) -> str:
        """Return what tells these arrays from others: their dtypes, shapes and a few rows."""
        return _fingerprint(self._columns)

    @property
    def process_spec(self) -> FactorySpec | None:
        """What maps the files anew, where all arrays are files, or attaches the `SharedArrays` that was given.

        Else None: arrays in memory are sent once, and shared by all workers.
        """
        if type(self) is ArrayDataset and self._shared is not None:
            return FactorySpec(ArrayDataset, self._shared)
        if type(self) is not ArrayDataset or any(column.source is None for column in self._columns):
            return None
        sources = [column.source for column in self._columns]
        if self._names is None:
            return FactorySpec(ArrayDataset, *sources)
        return FactorySpec(_from_named, list(self._names), *sources)


def _from_named(names: Sequence[str], *arrays: Array) -> ArrayDataset:
    return ArrayDataset(dict(zip(names, arrays, strict=True)))


def tensor_dataset(*tensors: Any) -> ArrayDataset:
    """Return the dataset of the rows of tensors, as `torch.utils.data.TensorDataset` is, with batches written in place.

    Tensors of any dtype that lives on the CPU, or arrays. Samples are rows as numpy arrays, batches lists of tensors.
    """
    return ArrayDataset(*tensors)


class TokenWindows(Dataset):
    """Windows of a long sequence of tokens.

    Sample i is `(tokens[s : s + length], tokens[s + 1 : s + length + 1])` with s = i * stride: input and target. With stride 1
    there are N - length windows. `tokens` is a 1-D array or tensor of integers, a memmap, or the path of a file:
    `.npy`, or flat numbers of `dtype`, mapped and not read. Batches are lists of two `(B, length)` tensors, input and target.

    Raises ConfigError for tokens that are no such sequence or too few for one window.
    """

    draws_nothing = True

    def __init__(self, tokens: Any, length: int, stride: int = 1, dtype: Any = None) -> None:
        for name, value in (("length", length), ("stride", stride)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; give an int of at least 1", option=name, value=value)
        array = _open_file(os.fspath(tokens), dtype) if isinstance(tokens, (str, os.PathLike)) else tokens
        self._column = _Column(as_array(array, "tokens"), "tokens")
        tokens = self._column.array
        if tokens.ndim != 1:
            raise ConfigError(f"tokens has {tokens.ndim} dimensions; give one sequence", option="tokens", value=tokens.shape)
        if len(tokens) <= length:
            raise ConfigError(
                f"tokens has {len(tokens)} numbers; a window of length={length} and its target need {length + 1}",
                option="tokens",
                value=len(tokens),
            )
        self._window, self._stride = length, stride
        self._tokens: Array | None = None  # once they are needed in one piece
        self._length = (len(tokens) - length - 1) // stride + 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        start = _within(index, self._length) * self._stride
        window = self._column.array[start : start + self._window + 1]
        return window[:-1], window[1:]

    def batch_spec(self, num_samples: int) -> Any:
        """Return what a batch of `num_samples` windows is made of."""
        return [ArraySpec((num_samples, self._window), self._column.dtype) for _ in range(2)]

    def write_batch(self, indices: Array, out: Any) -> None:
        """Write the windows `indices`, int64, into the two arrays of `out`."""
        places = all_within(indices, self._length)
        inputs, targets = out
        tokens = self._contiguous()
        if take is not None and all(_holds_rows(each, tokens.dtype, (len(places), self._window)) for each in out):
            itemsize = tokens.itemsize
            places = np.ascontiguousarray(places)
            take(tokens, self._stride * itemsize, self._window * itemsize, places, (inputs, targets), (0, itemsize))
        else:
            self._write_in_steps(tokens, places * self._stride, inputs, targets)

    def _write_in_steps(self, tokens: Array, starts: Array, inputs: Array, targets: Array) -> None:
        # A window and its target are one element of many bytes: numpy gathers those in a loop of C, into memory of its own. A
        # few at a time, or that memory would be in no cache when it is read again.
        dtype = np.dtype(("V", (self._window + 1) * tokens.itemsize))
        windows = np.ndarray((len(tokens) - self._window,), dtype, tokens, 0, (tokens.itemsize,))
        step = max(1, _GATHER_NBYTES // windows.itemsize)
        for first in range(0, len(starts), step):
            rows = windows[starts[first : first + step]].view(tokens.dtype).reshape(-1, self._window + 1)
            inputs[first : first + step] = rows[:, :-1]
            targets[first : first + step] = rows[:, 1:]

    def _contiguous(self) -> Array:
        if self._tokens is None:
            self._tokens = np.ascontiguousarray(self._column.array)
        return self._tokens

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tokens": None}

    def fingerprint(self) -> str:
        """Return what tells these windows from others."""
        return f"{_fingerprint([self._column])} {self._window} {self._stride}"

    @property
    def process_spec(self) -> FactorySpec | None:
        """What maps the file anew, where the tokens are a file; else None: tokens in memory are shared by all workers."""
        if type(self) is not TokenWindows or self._column.source is None:
            return None
        return FactorySpec(TokenWindows, self._column.source, self._window, self._stride)


class _Column:
    """One array, its dtype by torch's name, and how to find it again in another process."""

    def __init__(self, held: tuple[Array, str], label: str) -> None:
        self.array, self.dtype = held
        if self.array.ndim == 0:
            raise ConfigError(f"array {label} has no dimension, so it has no rows", option="arrays", value=label)
        self._label = label
        self.source = _mapped_source(self.array)
        self.array = np.asarray(self.array)  # views of a memmap cost a microsecond more each
        self._row_nbytes = self.array.nbytes // max(1, len(self.array))
        self._is_joined = self.array.flags.c_contiguous and self.array.flags.aligned

    def __reduce__(self) -> Any:
        # Contiguous arrays travel once for all workers; others would be copied into the pickle.
        held = np.ascontiguousarray(self.array) if self.source is None else self.source
        return _column_of, (held, self.dtype, self._label)

    def row(self, index: int) -> Any:
        row = self.array[index]
        if not dtypes.is_torch_only(self.dtype):
            return row
        from ringloader._collate import tensors

        return tensors.from_array(np.asarray(row), self.dtype)

    def write(self, places: Array, out: Array) -> None:
        """Write rows into `out`."""
        array = self.array
        first = int(places[0])
        if self._is_joined and int(places[-1]) - first == len(places) - 1 and (np.diff(places) == 1).all():
            self._write_each(out[None], [slice(first, first + len(places))])
        elif self._is_joined and self._row_nbytes < LARGE_ROW_NBYTES:
            # Of an array that is not contiguous take() would copy all of it first. The places are checked: clip costs no check.
            array.take(places, 0, out, "clip")
        else:
            self._write_each(out, places.tolist())

    def _write_each(self, out: Array, places: Sequence[int | slice]) -> None:
        copy = row_copier(out, out.nbytes) or out.__setitem__
        for row, place in enumerate(places):
            copy(row, self.array[place])


def _holds_rows(out: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Whether rows can be copied to `out` as they are: a class derived from ours may ask for others."""
    return out.dtype == dtype and out.shape == shape and out.flags.c_contiguous


def _fingerprint(columns: Sequence[_Column]) -> str:
    found = blake2b(digest_size=8)
    for column in columns:
        array = column.array
        found.update(f"{column.dtype} {array.shape} ".encode())
        for index in range(_NUM_PRINTED if len(array) else 0):
            found.update(np.ascontiguousarray(array[index * (len(array) - 1) // (_NUM_PRINTED - 1)]).tobytes()[:4096])
    return found.hexdigest()


def _column_of(held: Array | FactorySpec, dtype: str, label: str) -> _Column:
    return _Column((held.build() if isinstance(held, FactorySpec) else held, dtype), label)


def _within(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"index {index} of a dataset of {length} samples")
    return index + length if index < 0 else index


def all_within(indices: Array, length: int) -> Array:
    """Return the indices with those that count from the end as others. Raises IndexError."""
    # As unsigned numbers those below 0 are the largest: one look tells of both ends.
    indices = np.asarray(indices, np.int64)
    if len(indices) and int(np.maximum.reduce(indices.view(np.uint64))) < length:
        return indices
    for index in (int(indices.min()), int(indices.max())):
        _within(index, length)
    return np.where(indices < 0, indices + length, indices)


def _open_arrays(given: tuple[Any, ...]) -> dict[str, Any] | list[Any]:
    if len(given) == 1 and isinstance(given[0], (str, os.PathLike)):
        folder = Path(given[0])
        paths = sorted(folder.glob("*.npy"))
        if not paths:
            raise ConfigError(f"{folder} has no .npy files", option="arrays", value=str(folder))
        return {path.stem: _open_file(str(path), None) for path in paths}
    if len(given) == 1 and isinstance(given[0], Mapping):
        named = dict(given[0])
        if not named or not all(isinstance(name, str) for name in named):
            raise ConfigError(f"arrays have the names {list(named)!r}; give texts", option="arrays", value=list(named))
        return named
    if not given:
        raise ConfigError("no arrays were given; give one at least", option="arrays", value=())
    return list(given)


def _open_file(path: str, dtype: Any) -> Array:
    try:
        if path.endswith(".npy"):
            mapped: Array = np.load(path, mmap_mode="r", allow_pickle=False)
            if dtype is not None and mapped.dtype != np.dtype(dtype):
                raise ConfigError(f"{path} holds {mapped.dtype}, not {dtype}; leave dtype out", option="dtype", value=dtype)
            return mapped
        if dtype is None:
            raise ConfigError(f"{path} is no .npy file; say by dtype= what its numbers are", option="dtype", value=None)
        return np.memmap(path, np.dtype(dtype), "r")
    except (OSError, ValueError, EOFError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be mapped: {error}", option="arrays", value=path) from error


def as_array(value: Any, label: str) -> tuple[Array, str]:
    """Return an array over a value's memory and its dtype by torch's name."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        from ringloader._collate import tensors

        return tensors.held_array(value, label)
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        kind = type(value).__qualname__
        raise ConfigError(f"array {label} is a {kind}; give arrays or CPU tensors", option="arrays", value=kind)
    name = dtypes.name_of(value.dtype)
    if name is None:
        raise ConfigError(
            f"array {label} has dtype {value.dtype}, which no tensor has; convert it with .astype",
            option="arrays",
            value=str(value.dtype),
        )
    return value, name


def _mapped_source(array: Array) -> FactorySpec | None:
    """Return what maps the same part of the same file anew, for an array that is a contiguous part of one."""
    source = mapped.source_of(array)
    if source is None:
        return None
    path, dtype, *rest = source
    return FactorySpec(mapped.map_file, path, dtype.str, *rest)
