"""Datasets that every backend has to read alike: plain, failing, drawing, ragged, empty, huge, nested, streaming ones.

Each is a class without arguments, importable in a worker. `EXPECTED` says what an epoch gives beside batches.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ringloader import ArraySpec, Dataset, get_worker_info

SIZE = 22


class Mapped:
    """Map-style: `sample(i)` for SIZE indices."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)

    def sample(self, index: int) -> Any:
        raise NotImplementedError


class Numbers(Mapped):
    def sample(self, index: int) -> Any:
        return index, index / 4, bool(index % 3)


class Arrays(Mapped):
    def sample(self, index: int) -> Any:
        return np.full((3, 5), index, np.float32), np.uint8(index)


class Large(Mapped):
    """Rows that are copied as soon as they are there."""

    def sample(self, index: int) -> Any:
        return {"image": np.full((64, 96), index, np.float64), "label": index}


class Texts(Mapped):
    def sample(self, index: int) -> Any:
        return {"text": f"sample {index} ä\udcff"[: index + 1], "raw": bytes([index]), "id": index}


class Nested(Mapped):
    def sample(self, index: int) -> Any:
        return {"a": [index, (np.arange(index % 1 + 3), "x")], "b": {"c": collections.OrderedDict(d=np.float32(index))}}


class Point(NamedTuple):
    x: int
    y: Any


@dataclass
class Record:
    left: Any
    right: int


class Typed(Mapped):
    def sample(self, index: int) -> Any:
        return Point(index, Record(np.full(2, index, np.int16), -index))


class Promoted(Mapped):
    """A leaf whose dtype depends on the whole batch."""

    def sample(self, index: int) -> Any:
        return index if index % 5 else index + 0.5, np.full(2, index, np.int32 if index % 4 else np.int64)


class EmptyRows(Mapped):
    def sample(self, index: int) -> Any:
        return np.empty((0, 3), np.float32), index, np.array(index, np.int8)


class OneBuffer(Mapped):
    """Returns the same array each time, with other values in it."""

    def __init__(self) -> None:
        self.buffer = np.zeros(6, np.int64)

    def sample(self, index: int) -> Any:
        return np.copy(self.buffer + index)


class Strided(Mapped):
    def sample(self, index: int) -> Any:
        rows = np.arange(index, index + 24).reshape(4, 6)
        return rows[::-1, ::2], rows.T


class Ragged(Mapped):
    """Batches that do not fit together."""

    def sample(self, index: int) -> Any:
        return np.zeros(3 if index != 9 else 4)


class Nones(Mapped):
    """One sample that is None."""

    def sample(self, index: int) -> Any:
        return None if index == 6 else index


class Failing(Mapped):
    def sample(self, index: int) -> Any:
        if index in (5, 13):
            raise ValueError(f"sample {index} is broken")
        return index


class Interrupting(Mapped):
    """Raises what is no Exception."""

    def sample(self, index: int) -> Any:
        if index == 7:
            raise StopIteration(index)
        return index


class OutOfRange(Mapped):
    """Longer by its own account than it is."""

    def sample(self, index: int) -> Any:
        return list(range(SIZE - 3))[index]


class Unsendable(Mapped):
    def sample(self, index: int) -> Any:
        return object() if index == 4 else index


class DrawsOwn(Mapped):
    """Draws from the generator that is this sample's own."""

    def sample(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, info.rng.standard_normal(3), int(info.rng.integers(1 << 40))


class DrawsGlobal(Mapped):
    def sample(self, index: int) -> Any:
        return index, random.random(), np.random.standard_normal(2)


class Fetching(Mapped):
    """Samples are fetched together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if 8 in indices:
            raise KeyError(8)
        return [(index, np.full(4, index)) for index in indices]


class Writing:
    """Batches are written by the dataset."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return np.full(700, index, np.int32), np.int64(index)

    def batch_spec(self, size: int) -> Any:
        return ArraySpec((size, 700), "int32"), ArraySpec((size,), "int64")

    def write_batch(self, indices: np.ndarray, out: Any) -> None:
        if 17 in indices:
            raise OSError("a disk went away")
        out[0][:] = indices[:, None]
        out[1][:] = indices


class Epochs(Mapped):
    """Samples depend on the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample(self, index: int) -> Any:
        return index * 100 + self.epoch


class Empty(Mapped):
    def __len__(self) -> int:
        return 0


class Recorded(Dataset):
    """Rebuilt from its recorded spec."""

    def __init__(self, factor: int = 3) -> None:
        self.factor = factor

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return index * self.factor


class Stream:
    """Iterable, each worker its part."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, SIZE, info.num_workers):
            yield self.item(index)

    def item(self, index: int) -> Any:
        return index, np.full(3, index, np.float32)


class StreamDraws(Stream):
    def item(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, info.rng.random()


class StreamFails(Stream):
    def item(self, index: int) -> Any:
        if index == 11:
            raise ArithmeticError("no eleven")
        return index


class StreamGoesOn(Stream):
    """An iterator that can go on after an error."""

    def __iter__(self) -> Iterator[Any]:
        return _GoesOn()


class _GoesOn(Iterator[Any]):
    def __init__(self) -> None:
        info = get_worker_info()
        assert info is not None
        self.at, self.step = info.id - info.num_workers, info.num_workers

    def __next__(self) -> Any:
        self.at += self.step
        if self.at >= SIZE:
            raise StopIteration
        if self.at == 8:
            raise LookupError("no eight")
        return self.at


class StreamSaves(Stream):
    """Its iterator saves where it is."""

    def __iter__(self) -> Iterator[Any]:
        return _Saves()


class _Saves(Iterator[Any]):
    def __init__(self) -> None:
        info = get_worker_info()
        assert info is not None
        self.at, self.step = info.id - info.num_workers, info.num_workers

    def __next__(self) -> Any:
        self.at += self.step
        if self.at >= SIZE:
            raise StopIteration
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StreamEpochs(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def item(self, index: int) -> Any:
        return index * 100 + self.epoch


class StreamRagged(Stream):
    def item(self, index: int) -> Any:
        return np.zeros(3 if index != 9 else 4)


class StreamEmpty(Stream):
    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is not None
        return iter(())


class StreamShort(Stream):
    """Only the first worker has anything."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return iter(range(SIZE if info.id == 0 else 0))


MAPPED = (
    Numbers,
    Arrays,
    Large,
    Texts,
    Nested,
    Typed,
    Promoted,
    EmptyRows,
    OneBuffer,
    Strided,
    Ragged,
    Nones,
    Failing,
    Interrupting,
    OutOfRange,
    Unsendable,
    DrawsOwn,
    Fetching,
    Writing,
    Epochs,
    Empty,
    Recorded,
)
STREAMS = (
    Stream,
    StreamDraws,
    StreamFails,
    StreamGoesOn,
    StreamSaves,
    StreamEpochs,
    StreamRagged,
    StreamEmpty,
    StreamShort,
)


def collate_to_pairs(samples: list[Any]) -> Any:
    """A collate_fn that gives None, text and arrays."""
    return {"n": len(samples), "none": None, "all": np.array(samples[0])[None], "texts": [str(samples[0])]}
