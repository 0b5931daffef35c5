"""Datasets that bring about every message. Importable by workers, without torch."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.runtime.sample_datasets import Numbers


class At7(Numbers):
    """Something happens at sample 7."""

    def __getitem__(self, i: int) -> Any:
        return self.happen() if i == 7 else self.make(i)

    def happen(self) -> Any:
        raise NotImplementedError


class RaisesAt7(At7):
    def happen(self) -> Any:
        raise OSError("image file is truncated")


class KilledAt7(At7):
    def happen(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class SegfaultsAt7(At7):
    def happen(self) -> Any:
        ctypes.string_at(0)


class LosesItsFileAt7(At7):
    def happen(self) -> Any:
        with tempfile.TemporaryFile() as file:
            file.truncate(1 << 16)
            mapping = mmap.mmap(file.fileno(), 1 << 16, prot=mmap.PROT_READ)
            file.truncate(0)
            return mapping[100]


class ExitsAt7(At7):
    def happen(self) -> Any:
        sys.exit(3)


class LeavesAt7(At7):
    def happen(self) -> Any:
        os._exit(4)


class HangsAt7(At7):
    def happen(self) -> Any:
        time.sleep(3600)


class WaitsAt7(At7):
    """For a file, whose name is the dataset's."""

    def __init__(self, size: int, path: str) -> None:
        super().__init__(size)
        self.path = path

    def happen(self) -> Any:
        while not os.path.exists(self.path):
            time.sleep(0.01)
        return self.make(7)


class GarblesAt7(At7):
    def happen(self) -> Any:
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            if os.path.lexists(path) and os.readlink(path).startswith("socket:"):
                os.write(int(name), b"hello, I am no message")
        time.sleep(3600)


class RaggedAt7(At7):
    def happen(self) -> Any:
        return np.zeros(3, np.float32), 7


class HangsWhenBuilt(Numbers):
    def __init__(self) -> None:
        time.sleep(3600)


class FailsWhenBuilt(Numbers):
    def __init__(self) -> None:
        raise FileNotFoundError("no such folder: /data/train")


class DiesWhenBuilt(Numbers):
    def __init__(self) -> None:
        os._exit(5)


class Differs(Numbers):
    """Of another length in every process."""

    def __init__(self) -> None:
        super().__init__(10**9 + os.getpid())


class Lines:
    """A stream that ends its worker at number 7, and cannot be read again."""

    can_replay = False

    def __iter__(self) -> Iterator[int]:
        yield from range(7)
        os.kill(os.getpid(), signal.SIGKILL)
