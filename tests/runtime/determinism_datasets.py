"""Datasets that would differ from worker to worker if they could."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from typing import Any

import numpy as np

from ringloader import get_worker_info
from tests.runtime.sample_datasets import first_time


def digest(loader: Any, epochs: int = 2) -> str:
    """SHA-256 over the bytes of all batches of some epochs."""
    found = hashlib.sha256()
    for _ in range(epochs):
        for batch in loader:
            found.update(np.ascontiguousarray(np.asarray(batch)).tobytes())
    return found.hexdigest()


class Draws:
    """Sample i holds i and draws from random, numpy and torch."""

    def __init__(self, folder: str) -> None:
        self.offset = random.randrange(1 << 30)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        draws = [random.randrange(1 << 30), int(np.random.randint(1 << 30)), self.draw_from_torch()]
        return np.array([i, self.offset, 0, *draws], np.int64)

    def draw_from_torch(self) -> int:
        import torch

        return int(torch.randint(1 << 30, (1,)))


class DrawsWithoutTorch(Draws):
    """The same but for torch, which takes a worker seconds to import."""

    def draw_from_torch(self) -> int:
        return 0


class SplitsInTheFactory(Draws):
    """Takes an unseeded half of its samples at build."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.order = list(range(80))
        random.shuffle(self.order)
        self.chosen = np.random.permutation(80)[:40]

    def __getitem__(self, i: int) -> Any:
        return np.array([i, self.order[i], self.chosen[i]], np.int64)


class ListsAFolder(Draws):
    """Reads its files in the order of the listing."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.paths = [os.path.join(folder, name) for name in os.listdir(folder)]

    def __getitem__(self, i: int) -> Any:
        with open(self.paths[i], "rb") as file:
            return np.frombuffer(file.read(1), np.uint8)


class ClassMap(Draws):
    """Numbers its classes in the order of a set."""

    def __init__(self) -> None:
        super().__init__("")
        self.classes = list({f"class {k}" for k in range(40)})

    def __getitem__(self, i: int) -> Any:
        return int(self.classes[i].split()[1])


class ImportsLate(Draws):
    """Imports torch in its samples, the first time in the middle of a batch."""

    def __init__(self) -> None:
        pass

    def __getitem__(self, i: int) -> Any:
        import torch

        return int(torch.randint(1 << 30, (1,)))


class Deadly:
    """Another dataset whose samples kill the worker, each once."""

    def __init__(self, dataset: Any, marks: str, at: list[int]) -> None:
        self.dataset, self.marks, self.at = dataset, marks, at

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        if i in self.at and first_time(self.marks, str(i)):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.dataset[i]


class OwnDraws:
    """Sample i draws three numbers from the generator that is its own, and looks for torch's worker info with torch late."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        info = get_worker_info()
        assert info is not None
        draws = [int(info.rng.integers(1 << 40)) for _ in range(3)]
        return np.array([i, *draws], np.int64)


class DrawsThenFails:
    """Sample 0 draws; sample 1 fails if it is bad."""

    def __init__(self, bad: bool) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Any:
        info = get_worker_info()
        assert info is not None
        if i and self.bad:
            raise ValueError("bad")
        return int(info.rng.integers(1 << 40))
