"""Iterable datasets for workers, without pytest."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ringloader import get_worker_info
from tests.runtime.sample_datasets import first_time


class Sharded:
    """`size` rows: index, draws of this batch, pid. Each worker takes every n-th."""

    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, self.size, info.num_workers):
            yield self.item(index)

    def item(self, index: int) -> Any:
        return index, random.random(), np.random.standard_normal(3)


class Unsharded:
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Marked(Unsharded):
    """Says that its streams differ by themselves."""

    is_sharded = True


class DiesAt(Sharded):
    """The worker is killed at some samples, each once."""

    def __init__(self, size: int, folder: str, indices: list[int]) -> None:
        super().__init__(size)
        self.folder, self.indices = folder, indices

    def item(self, index: int) -> Any:
        if index in self.indices and first_time(self.folder, str(index)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().item(index)


class AlwaysDiesAt(Sharded):
    def item(self, index: int) -> Any:
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().item(index)


class Shuffles(Sharded):
    """Draws its order when iteration begins, and from a buffer as it goes on."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        order = list(range(info.id, self.size, info.num_workers))
        random.shuffle(order)
        buffer: list[int] = []
        for index in order:
            buffer.append(index)
            if len(buffer) > 4:
                yield buffer.pop(random.randrange(len(buffer)))
        yield from buffer


class SavesItself(Sharded):
    """The dataset itself, not its iterator, saves where it is, and logs what it reads."""

    def __init__(self, size: int, folder: str) -> None:
        super().__init__(size)
        self.folder = folder
        self.at = -1

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        if self.at < 0:
            self.at = info.id
        while self.at < self.size:
            index = self.at
            with open(os.path.join(self.folder, f"log{info.id}"), "a") as log:
                log.write(f"{index}\n")
            if index == 31 and first_time(self.folder, str(index)):
                os.kill(os.getpid(), signal.SIGKILL)
            self.at += info.num_workers
            yield index
        self.at = -1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class SavesObjects(Sharded):
    """Its iterator's state holds what is no plain value: an array and a generator's state."""

    def __iter__(self) -> Iterator[Any]:
        return _SavesObjects(self.size)


class _SavesObjects(Iterator[Any]):
    def __init__(self, size: int) -> None:
        info = get_worker_info()
        assert info is not None
        self.step, self.size = info.num_workers, size
        self.at = np.array([info.id])
        self.rng = np.random.default_rng(info.id)

    def __next__(self) -> Any:
        at = int(self.at[0])
        if at >= self.size:
            raise StopIteration
        self.at += self.step
        return at, self.rng.random()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at.copy(), "rng": self.rng.bit_generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.rng = np.random.Generator(state["rng"])


class Source(Sharded):
    """Cannot be read again: what it gave is gone, as from a socket."""

    can_replay = False

    def __init__(self, size: int, folder: str) -> None:
        super().__init__(size)
        self.folder = folder

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        path = Path(self.folder, f"taken{info.id}")
        while True:
            index = int(path.read_text()) if path.exists() else info.id
            if index >= self.size:
                return
            path.write_text(str(index + info.num_workers))
            if index == 21:
                os.kill(os.getpid(), signal.SIGKILL)
            yield index


class Truncating(Sharded):
    """Says that it can be read again, and is shorter when it is."""

    def __init__(self, size: int, folder: str) -> None:
        super().__init__(size)
        self.folder = folder

    def __iter__(self) -> Iterator[int]:
        size = self.size if first_time(self.folder, "0") else 4
        for index in range(size):
            if index == 22:
                os.kill(os.getpid(), signal.SIGKILL)
            yield index


class Closes(Sharded):
    """Holds a resource while it is read."""

    def __init__(self, size: int, folder: str) -> None:
        super().__init__(size)
        self.folder = folder

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        path = Path(self.folder, f"open{info.id}.{time.monotonic_ns()}")
        path.touch()
        try:
            yield from range(info.id, self.size, info.num_workers)
        finally:
            path.unlink()


class NoticesEpochs(Sharded):
    """Gives the epoch that it was told before it was iterated, and dies once in epoch 1."""

    def __init__(self, size: int, folder: str) -> None:
        super().__init__(size)
        self.folder, self.epoch = folder, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        epoch = self.epoch
        for index in range(info.id, self.size, info.num_workers):
            if epoch == 1 and index == 9 and first_time(self.folder, str(index)):
                os.kill(os.getpid(), signal.SIGKILL)
            yield index, epoch, info.epoch


class Outgrows(Sharded):
    """Rows that become larger and larger: every few batches ask for another slot."""

    def item(self, index: int) -> Any:
        return np.full(1 + (index // 8) ** 2, index)


class HangsInThread:
    """One sample hangs once, until it is let go."""

    def __init__(self) -> None:
        self.go_on, self.hung, self.left = threading.Event(), threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 13 and not self.hung.is_set():
            self.hung.set()
            self.go_on.wait()
            self.left.set()
        return np.full(2000, index)


class SavesSlowly(Sharded):
    """Each sample takes its time, so that reading again takes longer than a batch may."""

    def item(self, index: int) -> Any:
        time.sleep(0.03)
        return index


class OddRow(Sharded):
    """One row of another shape; rows are large enough to be copied as soon as they are there."""

    def __init__(self, size: int, folder: str = "", dies_at: int = -1) -> None:
        super().__init__(size)
        self.folder, self.dies_at = folder, dies_at

    def item(self, index: int) -> Any:
        if index == self.dies_at and first_time(self.folder, str(index)):
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(5000 if index != 17 else 5001, index)


class OwnFile(Sharded):
    """Iterates over a file that is its own."""

    def __init__(self, path: str) -> None:
        super().__init__(0)
        self.file = open(path)  # noqa: SIM115  # for as long as the dataset lives

    def __iter__(self) -> Iterator[str]:
        assert get_worker_info() is not None
        self.file.seek(0)
        return self.file


class CannotBeOpened(Sharded):
    def __iter__(self) -> Iterator[Any]:
        raise FileNotFoundError("no such stream")


class LengthFails(Sharded):
    def __len__(self) -> int:
        raise NotImplementedError


class InterruptsReplay(Sharded):
    """Ctrl-C comes at a sample, each time `fuse` says so."""

    fuse = -1

    def item(self, index: int) -> Any:
        if index == type(self).fuse:
            type(self).fuse = -1
            raise KeyboardInterrupt
        return index


class Silent(Sharded):
    """Only the first stream has anything, and it has much."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(self.size if info.id == 0 else 0))
