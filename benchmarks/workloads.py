"""The datasets that the benchmarks load, the same classes for every contender.

Each is built from a seed alone, so that any process can make the same one. Samples are numpy arrays, or tensors when
`samples="torch"`: a contender never gets another kind than its rivals do. Must not import torch unless tensors are asked for.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ringloader import ArrayDataset, Dataset, FactorySpec, TokenWindows

Array = np.ndarray[Any, Any]


class MapDataset(Protocol):
    """A map-style dataset that knows how much memory its samples are read from."""

    nbytes: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Arrays:
    """Rows `(3, 224, 224)` float32 of one array in memory, each met several times in an epoch.

    512 rows are 294 MiB: more than the last-level cache of one machine holds, so that rows come from memory as in training.
    """

    def __init__(self, num_samples: int, samples: str = "numpy", num_rows: int = 512) -> None:
        self._num_samples = num_samples
        self._rows = np.random.default_rng(0).random((num_rows, 3, 224, 224), dtype=np.float32)
        self._wrap = wrapper(samples)
        self.nbytes = self._rows.nbytes

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        return self._wrap(self._rows[index % len(self._rows)])


class Tokens:
    """Input and target windows of 512 int64 tokens, the target shifted by one, from one array of tokens."""

    WIDTH = 512
    STRIDE = 64

    def __init__(self, num_samples: int, samples: str = "numpy") -> None:
        self._num_samples = num_samples
        self._tokens = np.random.default_rng(0).integers(0, 50_000, num_samples * self.STRIDE + self.WIDTH + 1)
        self._wrap = wrapper(samples)
        self.nbytes = self._tokens.nbytes

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        start = index * self.STRIDE
        window = self._tokens[start : start + self.WIDTH + 1]
        return self._wrap(window[:-1]), self._wrap(window[1:])

    def in_place(self) -> Dataset:
        """The same windows, written into the ring whole."""
        return TokenWindows(self._tokens[: (self._num_samples - 1) * self.STRIDE + self.WIDTH + 1], self.WIDTH, self.STRIDE)


class Tiny:
    """8 float32 numbers and an int label."""

    def __init__(self, num_samples: int, samples: str = "numpy") -> None:
        rng = np.random.default_rng(0)
        self._points = rng.random((num_samples, 8), dtype=np.float32)
        self._labels = rng.integers(0, 10, num_samples).tolist()
        self._wrap = wrapper(samples)
        self.nbytes = self._points.nbytes

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._wrap(self._points[index]), self._labels[index]

    def in_place(self) -> Dataset:
        """The same rows, written into the ring whole."""
        return ArrayDataset(self._points, np.array(self._labels))


class Dict60:
    """A dict of 60 arrays of 4 float32."""

    def __init__(self, num_samples: int, samples: str = "numpy") -> None:
        self._fields = np.random.default_rng(0).random((num_samples, 60, 4), dtype=np.float32)
        self._names = [f"field{number:02d}" for number in range(60)]
        self._wrap = wrapper(samples)
        self.nbytes = self._fields.nbytes

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._fields[index]
        return {name: self._wrap(row[number]) for number, name in enumerate(self._names)}

    def in_place(self) -> Dataset:
        """The same rows, written into the ring whole."""
        return ArrayDataset({name: self._fields[:, number].copy() for number, name in enumerate(self._names)})


class Ragged:
    """Sentences of 16 to 256 int64 tokens, and a label; batches are padded to their longest."""

    def __init__(self, num_samples: int, samples: str = "numpy") -> None:
        rng = np.random.default_rng(0)
        lengths = rng.integers(16, 257, num_samples)
        self._ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        self._tokens = rng.integers(0, 50_000, self._ends[-1])
        self._labels = rng.integers(0, 2, num_samples).tolist()
        self._wrap = wrapper(samples)
        self.nbytes = self._tokens.nbytes

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._wrap(self._tokens[self._ends[index] : self._ends[index + 1]]), self._labels[index]


def pad_with_torch(samples: list[tuple[Any, int]]) -> Any:
    """What users of DataLoader write."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.as_tensor(tokens) for tokens, _ in samples]
    return pad_sequence(rows, batch_first=True), torch.tensor([label for _, label in samples])


class Jpeg:
    """JPEG files of 400 x 400 pixels in memory, decoded and resized to `(224, 224, 3)` uint8 with PIL."""

    def __init__(self, num_samples: int, samples: str = "numpy", num_files: int = 64) -> None:
        rng = np.random.default_rng(0)
        self._num_samples = num_samples
        self._files = [_smooth_jpeg(rng) for _ in range(num_files)]
        self._wrap = wrapper(samples)
        self.nbytes = sum(map(len, self._files))

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        image = Image.open(io.BytesIO(self._files[index % len(self._files)]))
        return self._wrap(np.array(image.resize((224, 224), Image.Resampling.BILINEAR)))


def _smooth_jpeg(rng: np.random.Generator) -> bytes:
    """Make a picture that compresses as photos do: coarse noise, smoothed, with a little grain."""
    from PIL import Image

    coarse = Image.fromarray(rng.integers(0, 256, (25, 25, 3), dtype=np.uint8))
    smooth = np.array(coarse.resize((400, 400), Image.Resampling.BICUBIC), dtype=np.int16)
    grainy = np.clip(smooth + rng.integers(-6, 7, smooth.shape, dtype=np.int16), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(grainy).save(file, "JPEG", quality=90)
    return file.getvalue()


def wrapper(samples: str) -> Callable[[Array], Any]:
    """What turns a dataset's array into the kind of sample asked for: "numpy" or "torch"."""
    if samples == "numpy":
        return _as_it_is
    import torch

    return torch.from_numpy


def _as_it_is(array: Array) -> Array:
    return array


@dataclass(frozen=True)
class Workload:
    """A dataset class with the batches that are made of it.

    num_batches: per epoch, so many that an epoch's start counts in the rate as little as in training. is_copied: samples lie in
    memory and a batch costs at least one copy of them. is_padded: rows differ in length, and batches are padded.
    """

    name: str
    dataset_class: type[Any]
    batch_size: int
    num_batches: int
    is_copied: bool = True
    is_padded: bool = False

    @property
    def num_samples(self) -> int:
        """Samples per epoch."""
        return self.batch_size * self.num_batches

    def make(self, samples: str) -> MapDataset:
        """Build the dataset here."""
        dataset: MapDataset = self.dataset_class(self.num_samples, samples)
        return dataset

    def spec(self, samples: str) -> FactorySpec:
        """Name the dataset for workers to build."""
        return FactorySpec(self.dataset_class, self.num_samples, samples)

    @property
    def has_in_place(self) -> bool:
        """There is a dataset of the same samples that writes batches by itself."""
        return hasattr(self.dataset_class, "in_place")

    def in_place_spec(self) -> FactorySpec:
        """Name that one."""
        return FactorySpec(_in_place, self.dataset_class, self.num_samples)


def _in_place(dataset_class: type[Any], num_samples: int) -> Dataset:
    dataset: Dataset = dataset_class(num_samples).in_place()
    return dataset


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("arrays", Arrays, batch_size=64, num_batches=120),
        Workload("tokens", Tokens, batch_size=256, num_batches=600),
        Workload("tiny", Tiny, batch_size=32, num_batches=1500),
        Workload("dict60", Dict60, batch_size=32, num_batches=300),
        Workload("ragged", Ragged, batch_size=64, num_batches=300, is_copied=False, is_padded=True),
        Workload("jpeg", Jpeg, batch_size=64, num_batches=32, is_copied=False),
    )
}
# For how long things take to start, where the data should take no time.
SMALL = Workload("small", Tiny, batch_size=32, num_batches=64)
SMALL_TORCH = "small torch"  # the same in a module that imports torch: torch_workloads.py


def find_workload(name: str, num_batches: int = 0) -> Workload:
    """Look a workload up; with `num_batches` above 0 its epochs are that long."""
    workloads = {**WORKLOADS, SMALL.name: SMALL}
    if name == SMALL_TORCH:
        from benchmarks import torch_workloads

        workloads[name] = torch_workloads.SMALL_TORCH
    workload = workloads[name]
    return replace(workload, num_batches=num_batches) if num_batches else workload
