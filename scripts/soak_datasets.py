"""Datasets of the soak: their samples depend on keys and seeded draws alone, and trouble comes to whoever reads them on demand.

The injector asks for trouble by raising a count in a file that every worker has mapped; the first worker that notices claims it
by creating a file. What a sample holds does not depend on it. Importable by workers, without torch.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ringloader import ArraySpec, get_worker_info

# Trouble that code in a worker makes. The place in the list is the place of its count in the file.
KINDS = ("hang", "slow", "raise", "exit", "abort", "garbage", "torn", "print")
SIZE = 480
WIDTH = 96
SOAK_PID = "RINGLOADER_SOAK_PID"
_HANG_S = 3.0  # in a thread, which nobody can end
_SLOW_S = 0.15


class Control:
    """The file through which trouble is asked for: one int64 per loader and kind."""

    def __init__(self, folder: str, loader: int) -> None:
        self._folder = folder
        self._loader = loader
        with open(Path(folder, "control"), "r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(mapping).cast("q")[loader * len(KINDS) : (loader + 1) * len(KINDS)]
        self._seen = list(self._words)

    @staticmethod
    def create(folder: str, num_loaders: int) -> None:
        """Make the file, with nothing asked for."""
        Path(folder, "control").write_bytes(bytes(8 * num_loaders * len(KINDS)))

    def ask(self, kind: str) -> None:
        """Have the next worker of this loader that looks get into trouble."""
        self._words[KINDS.index(kind)] += 1

    def look(self) -> None:
        """Get into trouble, if any is asked for and nobody else takes it."""
        for place, number in enumerate(self._words):
            if number != self._seen[place]:
                self._seen[place] = number
                if self._claim(f"{KINDS[place]}-{self._loader}-{number}"):
                    _TROUBLE[KINDS[place]]()

    def _claim(self, name: str) -> bool:
        try:
            os.close(os.open(Path(self._folder, name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def count_claimed(folder: str) -> dict[str, int]:
    """How much trouble there was, by kind."""
    names = [name.split("-")[0] for name in os.listdir(folder) if "-" in name]
    return {kind: names.count(kind) for kind in KINDS}


def _in_process() -> bool:
    """In a worker process, whose end is not that of the soak."""
    return os.environ.get(SOAK_PID) != str(os.getpid())


def _hang() -> None:
    time.sleep(3600 if _in_process() else _HANG_S)


def _raise() -> None:
    raise OSError("the file server is away for a moment")


def _exit() -> None:
    sys.exit(3)


def _abort() -> None:
    if _in_process():
        os.kill(os.getpid(), random.Random(os.getpid()).choice((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)))


def _sockets() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)
        except OSError:
            pass


def _garbage(message: bytes = b"hello, I am no message " * 3) -> None:
    """Write into this worker's own pipe."""
    if _in_process():
        for fd in _sockets():
            with socket.socket(fileno=os.dup(fd)) as pipe:
                pipe.send(message)


def _torn() -> None:
    """Die in the middle of a message."""
    if _in_process():
        _garbage(b"\x52\x4c\x00\x00\xff\x00\x00\x00\x9b\x07")
        os.kill(os.getpid(), signal.SIGKILL)


def _print() -> None:
    """Say a lot on stdout, as a chatty library does."""
    if _in_process():
        os.write(1, b"." * 4096)


_TROUBLE = {
    "hang": _hang,
    "slow": lambda: time.sleep(_SLOW_S),
    "raise": _raise,
    "exit": _exit,
    "abort": _abort,
    "garbage": _garbage,
    "torn": _torn,
    "print": _print,
}


class Samples:
    """Rows of numbers with draws of all generators in them. `bad` samples always raise."""

    def __init__(self, folder: str, loader: int, bad: int = -1) -> None:
        self.control = Control(folder, loader)
        self.bad = bad

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> Any:
        row = np.full(WIDTH, i, np.float64)
        row[1:3] = random.random(), np.random.random()
        self.control.look()
        if i == self.bad:
            raise ValueError("this sample is never any good")
        row[3] = np.random.random()
        return {"row": row, "key": i, "text": f"sample {i}"}


class Together(Samples):
    """Whole batches at a time."""

    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [self[i] for i in keys]


class Written(Samples):
    """Batches that are written into the slot."""

    def batch_spec(self, n: int) -> Any:
        return {"row": ArraySpec((n, WIDTH), "float64"), "key": ArraySpec((n,), "int64")}

    def write_batch(self, indices: Any, out: Any) -> None:
        self.control.look()
        out["row"][...] = indices[:, None]
        out["row"][:, 1] = np.random.random(len(indices))
        out["key"][...] = indices


class Drawn(Samples):
    """Draws of its own generator alone, for threads."""

    def __getitem__(self, i: int) -> Any:
        info = get_worker_info()
        row = np.full(WIDTH, i, np.float64)
        row[1] = info.rng.random() if info is not None else 0.0
        self.control.look()
        return {"row": row, "key": i}


class Shared:
    """A plain dataset with an array of its own, which is pickled once and mapped by every worker."""

    def __init__(self, folder: str, loader: int) -> None:
        self.folder, self.loader = folder, loader
        self.rows = np.random.default_rng(5).random((SIZE, WIDTH))
        self.control: Control | None = None

    def __len__(self) -> int:
        return SIZE

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "control": None}

    def __getitem__(self, i: int) -> Any:
        if self.control is None:
            self.control = Control(self.folder, self.loader)
        self.control.look()
        return self.rows[i], i


class Stream:
    """A stream per worker; its iterator saves where it is."""

    def __init__(self, folder: str, loader: int) -> None:
        self.control = Control(folder, loader)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return _Reading(self.control, info.id, info.num_workers)


class _Reading:
    def __init__(self, control: Control, first: int, step: int) -> None:
        self.control, self.next, self.step = control, first, step

    def __iter__(self) -> _Reading:
        return self

    def __next__(self) -> Any:
        if self.next >= SIZE:
            raise StopIteration
        row = np.full(WIDTH, self.next, np.float64)
        row[1] = random.random()
        self.control.look()
        self.next += self.step
        return {"row": row, "key": self.next - self.step}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Replayed(Stream):
    """A stream that saves nothing, and is read again."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for i in itertools.count(info.id, info.num_workers):
            if i >= SIZE:
                return
            row = np.full(WIDTH, i, np.float64)
            row[1] = np.random.random()
            self.control.look()
            yield {"row": row, "key": i}


def collate(samples: list[Any]) -> Any:
    """A function of the user's own."""
    rows = np.stack([sample["row"] for sample in samples])
    return {"row": rows, "key": np.array([sample["key"] for sample in samples]), "sum": rows.sum(0)}
