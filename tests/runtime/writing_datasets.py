"""Datasets that write whole batches, well and badly. Importable by workers, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringloader import ArrayDataset, ArraySpec


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


class Changed(ArrayDataset):
    """Samples of its own."""

    def __getitem__(self, i: int) -> Any:
        return tuple(row + 100 for row in super().__getitem__(i))


class Fewer(ArrayDataset):
    """Every second row."""

    def __len__(self) -> int:
        return super().__len__() // 2


class Wrapped:
    """Passes everything on but the samples."""

    def __init__(self, *arrays: Any) -> None:
        self._inner = ArrayDataset(*arrays)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, i: int) -> Any:
        return (-self._inner[i][0],)


class KeepsAndFails(One):
    """Keeps `out` of its first batch and fails; writes into it while it makes later ones, which hold their own numbers."""

    kept: Any = None

    def write_batch(self, indices: Any, out: Any) -> None:
        if indices[0] == 0:
            self.kept = out[0]
            raise ValueError("kept")
        out[0][...] = indices[0] // 4
        if self.kept is not None:
            self.kept[...] = -7


class Replaces(One):
    def write_batch(self, indices: Any, out: Any) -> None:
        out[0] = np.zeros((len(indices), 64), np.int64)


class WritesLittle(One):
    def write_batch(self, indices: Any, out: Any) -> None:
        out[0][0] = 1


class Grows(One):
    """Its rows grow with the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def batch_spec(self, n: int) -> Any:
        return [ArraySpec((n, 2 + self.epoch), "int64")]

    def write_batch(self, indices: Any, out: Any) -> None:
        out[0][...] = 0


def square(i: int) -> int:
    return i * i


class Jitters(ArrayDataset):
    """Adds a number to the rows that it draws for each batch."""

    def write_batch(self, indices: Any, out: Any) -> None:
        super().write_batch(indices, out)
        out[0][...] += np.random.random()  # the global generator is what is tested


class ReplacesBesideNothing(Writes):
    """Beside a leaf of no bytes, puts an array of its own into `out`."""

    def batch_spec(self, n: int) -> Any:
        return [ArraySpec((n, 1), "float32"), ArraySpec((n, 0), "float32")]

    def write_batch(self, indices: Any, out: Any) -> None:
        out[0] = np.full((len(indices), 1), 7, np.float32)


class SaysItDraws(Jitters):
    """Says by itself that it draws."""

    draws_nothing = False

    def write_batch(self, indices: Any, out: Any) -> None:
        super().write_batch(indices, out)


class LargeRows:
    """Rows of 65,544 bytes and their numbers; `kind` "tensors" gives tensors."""

    def __init__(self, size: int, kind: str = "samples") -> None:
        self.rows = np.random.default_rng(0).integers(0, 1 << 30, (size, 16_386)).astype(np.int32)
        self.labels = np.arange(size)
        self._kind = kind

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self._kind == "tensors":
            import torch

            return torch.from_numpy(self.rows[index]), index
        return self.rows[index], index
