"""Datasets for tests with workers: importable, small, and each with one habit."""

from __future__ import annotations

import collections
import os
import random
import signal
import sys
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np


class Numbers:
    """Sample i is (a row full of i, i)."""

    def __init__(self, size: int = 100, width: int = 8) -> None:
        self.size, self.width = size, width

    def __len__(self) -> int:
        return self.size

    def make(self, i: int) -> tuple[Any, int]:
        return np.full(self.width, i, np.float32), i

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


class Once(Numbers):
    """Does something to its worker at given samples, each once over all workers (marked by a file)."""

    def __init__(self, size: int, width: int, marks: str, at: list[int]) -> None:
        super().__init__(size, width)
        self.marks, self.at = marks, set(at)

    def __getitem__(self, i: int) -> Any:
        if i in self.at and first_time(self.marks, str(i)):
            self.harm(i)
        return self.make(i)

    def harm(self, i: int) -> None:
        raise NotImplementedError


class DiesOnce(Once):
    def harm(self, i: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class HangsOnce(Once):
    def harm(self, i: int) -> None:
        time.sleep(3600)


class ExitsOnce(Once):
    def harm(self, i: int) -> None:
        sys.exit(3)


class AlwaysDies(Numbers):
    """Sample 37 kills whoever reads it."""

    def __getitem__(self, i: int) -> Any:
        if i == 37:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.make(i)


class Truncated(Numbers):
    """Sample 5 cannot be read."""

    def __getitem__(self, i: int) -> Any:
        if i == 5:
            raise OSError("image file is truncated")
        return self.make(i)


class Draws:
    """Draws from every global generator, at build and per sample; splits in the factory."""

    def __init__(self, size: int = 64) -> None:
        order = list(range(size))
        random.shuffle(order)
        self.order = order
        self.offset = np.random.randint(1 << 30)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> Any:
        import torch

        draws = [random.randrange(1 << 30), int(np.random.randint(1 << 30)), int(torch.randint(1 << 30, (1,)))]
        return np.array([i, self.order[i], self.offset, *draws], np.int64)


def first_time(folder: str, name: str) -> bool:
    """True for the one caller, over all processes, who asks first."""
    try:
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Pair(NamedTuple):
    """A row and its number."""

    rows: Any
    index: Any


class Nested(Numbers):
    """Every container that has a place in a batch."""

    def __getitem__(self, i: int) -> Any:
        row = self.make(i)[0]
        return {"pair": Pair(row, i), "ordered": OrderedDict(text=f"t{i}", row=row), "tuple": (row, "x")}


class FailsAt(Numbers):
    """One sample raises."""

    def __init__(self, size: int, width: int, at: int) -> None:
        super().__init__(size, width)
        self.at = at

    def __getitem__(self, i: int) -> Any:
        if i == self.at:
            raise ValueError(f"no sample {i}")
        return self.make(i)


class Waits(Numbers):
    """Its first sample is not there before a file is."""

    def __init__(self, size: int, gate: str) -> None:
        super().__init__(size)
        self.gate = gate

    def __getitem__(self, i: int) -> Any:
        while i == 0 and not os.path.exists(self.gate):
            time.sleep(0.01)
        return self.make(i)


class OnlyInWorkers:
    """Its third sample is of a type that only a worker can import."""

    def __init__(self, size: int) -> None:
        import sys
        import types

        self.size = size
        module = sys.modules["only_in_workers"] = types.ModuleType("only_in_workers")
        self.kind = collections.namedtuple("Odd", "value")  # type: ignore[misc]
        self.kind.__module__ = "only_in_workers"
        module.Odd = self.kind  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        value = np.full(2, index)
        return self.kind(value) if index in (2, 3) else (value,)


class KernelSamples:
    """Samples of every kind that is joined by compiled loops, or just not."""

    def __init__(self, size: int, kind: str) -> None:
        self._kind = kind
        self._rows = np.random.default_rng(0).integers(0, 1 << 40, (size, 40))
        self._large = np.random.default_rng(1).integers(0, 1 << 40, (size, 9000)) if kind == "large" else self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        if self._kind in ("tensors", "tensor run"):
            import torch

            row = torch.from_numpy(row)
        if self._kind in ("run", "tensor run"):
            return {f"leaf{place}": row[8 * place : 8 * place + 8] for place in range(5)}
        if self._kind == "strides":
            return row[::2], row[:20], row[::-1]
        if self._kind == "windows":
            return row[:-1], row[1:]
        return (self._large[index], row[:3], index) if self._kind == "large" else (row, row[:3], index)

    def has_kernels(self) -> bool:
        """Whether this process may use them."""
        return sys.modules.get("ringloader._kernels.compiled") is not None
