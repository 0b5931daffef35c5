"""Torch's datasets of tensors as ones that workers read without torch.

Owns which of torch's own classes are replaced on the way to worker processes, where nothing but speed and memory can tell: a
`TensorDataset`, and a `Subset` of one (what `random_split` gives). Importing torch costs a worker seconds and 150 MiB. Must not
import torch.
"""

from __future__ import annotations

import logging
import operator
import sys
from typing import Any

import numpy as np

from ringloader._core import dtypes
from ringloader._runtime.options import Options
from ringloader.arrays import ArrayDataset, all_within
from ringloader.collation import is_default

_log = logging.getLogger("ringloader")

Array = np.ndarray[Any, Any]


def without_torch(dataset: Any, options: Options) -> Any:
    """Return what process workers are to read in the place of `dataset`: the same samples, or `dataset` itself.

    User code that runs in the workers, to collate or at their start, is given the samples and the dataset that it expects; and
    where samples are read one by one there would be nothing to gain, for they are tensors.
    """
    is_batched = options.batch_size is not None or options.batch_sampler is not None
    collates = options.collate_fn is not None and not is_default(options.collate_fn)
    if not is_batched or collates or options.worker_init_fn is not None or options.seed_per == "sample":
        return dataset
    found = _replace(dataset)
    if found is None or (options.output == "numpy" and found.has_torch_only):
        return dataset
    _log.info("dataset: torch's %s is read as arrays, for which workers need no torch", type(dataset).__qualname__)
    return found


def _is_number(key: Any) -> bool:
    return type(key) is int or isinstance(key, np.integer)


def _replace(dataset: Any) -> TensorRows | SubsetRows | None:
    home = sys.modules.get("torch.utils.data")
    if home is None:
        return None
    if type(dataset) is home.TensorDataset and vars(dataset).keys() == {"tensors"}:
        tensors = dataset.tensors
        is_readable = bool(tensors) and all(map(_is_plain, tensors)) and len({len(tensor) for tensor in tensors}) == 1
        return TensorRows(*tensors) if is_readable else None
    if type(dataset) is home.Subset and vars(dataset).keys() == {"dataset", "indices"}:
        whole, places = _replace(dataset.dataset), _places(dataset.indices)
        return None if whole is None or places is None else SubsetRows(whole, places)
    return None


def _is_plain(tensor: Any) -> bool:
    from ringloader._collate import tensors

    # One that repeats its memory, or is cut from another, travels as torch pickles it: with strides.
    return tensors.is_plain(tensor) and tensor.dim() > 0 and tensor.is_contiguous() and not vars(tensor)


def _places(indices: Any) -> Array | range | None:
    """The indices of a `Subset`, where reading them once and for all is all that can be done with them."""
    kind = type(indices)
    if isinstance(indices, range):
        return indices
    if kind is sys.modules["torch"].Tensor and not indices.requires_grad and indices.is_cpu:
        indices, kind = indices.detach().numpy(), np.ndarray
    if kind in (list, tuple) and not all(map(_is_number, indices)):
        return None
    if kind not in (list, tuple, np.ndarray):
        return None
    try:
        places = np.asarray(indices)
    except (OverflowError, ValueError):
        return None
    return places.astype(np.int64) if places.ndim == 1 and places.dtype.kind in "iu" else None


class TensorRows(ArrayDataset):
    """The rows of tensors: samples are tuples of tensors, as `TensorDataset` gives them, and batches are written by numpy."""

    draws_nothing = True
    # Torch's class has none, and a state that was saved by inline workers must fit.
    fingerprint = None  # type: ignore[assignment]

    def __init__(self, *tensors: Any) -> None:
        super().__init__(*tensors)
        self.has_torch_only: bool = any(dtypes.is_torch_only(column.dtype) for column in self._columns)
        self._tensors: list[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tensors": None}

    def prepare_samples(self) -> None:
        """Import torch, for keys that are no numbers: those rows are read one by one, and are tensors."""
        self._held_tensors()

    def _held_tensors(self) -> list[Any]:
        if self._tensors is None:
            from ringloader._collate import tensors

            self._tensors = [tensors.from_array(column.array, column.dtype) for column in self._columns]
        return self._tensors

    def __getitem__(self, key: Any) -> Any:
        """Return the row of a key: whatever torch's indexing takes."""
        return tuple([tensor[key] for tensor in self._held_tensors()])

    write_batch = ArrayDataset.write_batch  # said by this class: it reads samples in another way than the one it inherits from


class SubsetRows:
    """Some rows of such a dataset, as torch's `Subset` picks them. places: int64, or a range."""

    draws_nothing = True

    def __init__(self, whole: TensorRows | SubsetRows, places: Array | range) -> None:
        self._whole = whole
        self._places = places
        self.has_torch_only: bool = whole.has_torch_only

    def __len__(self) -> int:
        return len(self._places)

    def prepare_samples(self) -> None:
        """Import torch."""
        self._whole.prepare_samples()

    def __getitem__(self, key: Any) -> Any:
        """Return the row of a number, or the rows of a slice or list, as torch's `Subset` does."""
        if isinstance(key, (slice, list)):
            picked = self._places[key] if isinstance(key, slice) else [self._places[one] for one in key]
            return self._whole[list(map(int, picked))]
        return self._whole[int(self._places[operator.index(key)])]

    def batch_spec(self, num_samples: int) -> Any:
        """Return what a batch of `num_samples` rows is made of."""
        return self._whole.batch_spec(num_samples)

    def write_batch(self, indices: Array, out: Any) -> None:
        """Write the rows `indices`, int64, into the arrays of `out`. Raises IndexError."""
        indices = all_within(indices, len(self._places))
        places = self._places
        self._whole.write_batch(places.start + places.step * indices if isinstance(places, range) else places[indices], out)
