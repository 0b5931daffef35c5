"""Datasets that write whole batches, well and badly. Importable by workers, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringloader import ArraySpec


class Writes:
    """Numbers as rows of float32, as bfloat16, and a text beside them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("batches are written whole")

    def batch_spec(self, n: int) -> Any:
        return {"a": ArraySpec((n, 3), "float32"), "b": (ArraySpec((n,), "bfloat16"), "text")}

    def write_batch(self, indices: Any, out: Any) -> None:
        out["a"][...] = indices[:, None]
        # bfloat16 is the upper half of float32.
        out["b"][0][...] = indices.astype(np.float32).view(np.int32) >> 16


class One(Writes):
    """One leaf."""

    def batch_spec(self, n: int) -> Any:
        return [ArraySpec((n, 64), "int64")]


class CountsWrites(One):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.num_writes = 0

    def write_batch(self, indices: Any, out: Any) -> None:
        self.num_writes += 1
        out[0][...] = self.num_writes


class KeepsOut(One):
    def write_batch(self, indices: Any, out: Any) -> None:
        self.kept = out[0][1:]
        out[0][...] = 1


class Raises(One):
    def write_batch(self, indices: Any, out: Any) -> None:
        raise ValueError("cannot write")


class WrongShape(One):
    def write_batch(self, indices: Any, out: Any) -> None:
        out[0][...] = np.zeros((5, 5))


class NoSpec(One):
    def batch_spec(self, n: int) -> Any:
        return None


class MixedSpec(One):
    def batch_spec(self, n: int) -> Any:
        return [ArraySpec((n,), "int8"), np.zeros(3)]


class TextKeys(One):
    """Its keys are text, so that no batch of it can be written by numbers."""

    def __getitem__(self, key: Any) -> Any:
        return ord(key)


def square(i: int) -> int:
    return i * i
