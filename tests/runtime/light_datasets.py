"""Datasets of single test files, in a module that a worker imports without pytest, torch and the rest of those."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringloader import get_worker_info
from tests.runtime.sample_datasets import Numbers, first_time


class Scaled:
    """Samples depend on what was called before."""

    def __init__(self) -> None:
        self.factor = 1
        self.history: list[Any] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index * self.factor

    def scale(self, by: int, *, note: Any = None) -> list[Any]:
        self.factor *= by
        self.history.append(sorted(note) if isinstance(note, frozenset) else note)
        return [self.factor, *self.history]

    def leave(self) -> None:
        raise SystemExit(3)

    def fail_elsewhere(self, by: int) -> None:
        info = get_worker_info()
        assert info is not None
        self.factor = by
        if info.id == 1:
            raise ValueError("only here")

    def fail(self) -> None:
        raise ValueError("not today")

    def give_object(self) -> object:
        return object()


class Sentences:
    """Token rows of 1 to 40 tokens, a mask of the same length, a label."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        length = 1 + index * 7 % 40
        tokens = np.arange(index, index + length)
        return {"tokens": tokens, "mask": np.ones(length, np.bool_), "label": index, "text": f"s{index}"}


class LongRows(Sentences):
    """Rows so long that each one's end is filled by itself, beside a large leaf of one shape."""

    def __getitem__(self, index: int) -> Any:
        return np.full((3000 + index, 2), index, np.float32), np.full(9000, index, np.float32)


class Draws:
    """Draws of each batch, so that a batch that was made for another epoch shows."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(np.random.random())


class Noticing(Draws):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class OneBuffer:
    """Returns views of one buffer, larger and larger, so that batches have to wait for room."""

    def __init__(self) -> None:
        self.buffer = np.zeros(1 << 20, np.uint8)

    def __len__(self) -> int:
        return 200

    def __getitem__(self, i: int) -> Any:
        view = self.buffer[: 64 + i * i * 20]
        view[:] = i % 251
        return view


class BadEpoch(Numbers):
    """Cannot enter epoch 1."""

    def set_epoch(self, epoch: int) -> None:
        if epoch == 1:
            raise ValueError("boom in set_epoch")


class ForksAndReturns(Numbers):
    """Forks in a sample, and both sides go on."""

    def __init__(self, marks: str, width: int) -> None:
        super().__init__(60, width)
        self.marks = marks

    def __getitem__(self, i: int) -> Any:
        if i in (5, 13) and first_time(self.marks, str(i)):
            os.fork()
        return self.make(i)
