"""Datasets over shared data. Importable by workers, without torch."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringloader import SharedArrays, SharedRecords


class Over:
    """Rows of shared arrays and records, and what can be done to them in a worker."""

    def __init__(self, arrays: SharedArrays, records: SharedRecords | None = None) -> None:
        self.x = arrays["x"]
        self.arrays, self.records = arrays, records

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        record = None if self.records is None else self.records[i]["n"]
        return {"x": self.x[i], "y": self.arrays["y"][i], "n": -1 if record is None else record, "pid": os.getpid()}


class Writes(Over):
    """Writes into its row before it returns it."""

    def __getitem__(self, i: int) -> Any:
        try:
            self.arrays["x"][i] = i + 1000
        except ValueError:
            return 0
        return 1


class OwnArray:
    """A plain class with an array of its own, in which workers write."""

    def __init__(self, size: int) -> None:
        self.rows = np.zeros((size, 4096), np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        self.rows[i] += 1
        return self.rows[i, :4].copy()


class OwnMemmap:
    """A plain class with a memory-mapped file."""

    def __init__(self, path: str) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        kept = isinstance(self.rows, np.memmap) and self.rows.filename is not None
        return self.rows[i], int(kept)


class Get:
    """One array, as it is in the worker: its values, its dtype, its flags."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> Any:
        array = self.array
        return {"bytes": np.frombuffer(array.tobytes(), np.uint8), "dtype": str(array.dtype), "kind": type(array).__name__}


class InPlace:
    """Changes its rows in place, as transforms do."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        import torch

        row = self.rows[i] if isinstance(self.rows, torch.Tensor) else torch.from_numpy(self.rows[i])
        return row.add_(1).clone()


class Many:
    """Very many views of one object."""

    def __init__(self, views: list[Any]) -> None:
        self.views = views

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return len(os.listdir("/proc/self/fd")), sum(int(view[0]) for view in self.views)
