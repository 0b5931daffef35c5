"""Datasets whose samples, calls and memory go wrong in the ways that a long run meets. Importable by workers, without torch."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ringloader import ArraySpec, get_worker_info
from tests.runtime.sample_datasets import Numbers, first_time


def draws() -> float:
    """One number of each global generator."""
    return random.random() + float(np.random.random())


class Together(Numbers):
    """Fetches whole batches; samples in `deadly` kill the worker, those in `bad` raise. Each row has a draw in it."""

    def __init__(self, size: int, deadly: Sequence[int] = (), bad: Sequence[int] = ()) -> None:
        super().__init__(size)
        self.deadly, self.bad = set(deadly), set(bad)

    def check(self, keys: Sequence[int]) -> None:
        if self.deadly.intersection(keys):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.bad.intersection(keys):
            raise ValueError(f"cannot read {sorted(self.bad.intersection(keys))}")

    def __getitems__(self, keys: list[int]) -> list[Any]:
        self.check(keys)
        return [(np.array([i, draws()]), i) for i in keys]


class TogetherOnce(Together):
    """The first call of all that holds one of `deadly` kills its worker, and none after."""

    def __init__(self, size: int, marks: str, deadly: Sequence[int]) -> None:
        super().__init__(size, deadly)
        self.marks = marks

    def check(self, keys: Sequence[int]) -> None:
        if self.deadly.intersection(keys) and first_time(self.marks, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)


class Written(Together):
    """The same, as batches written into the slot."""

    def batch_spec(self, n: int) -> Any:
        return ArraySpec((n, 2), "float64"), ArraySpec((n,), "int64")

    def write_batch(self, indices: Any, out: Any) -> None:
        self.check(indices.tolist())
        for row, i in enumerate(indices):
            out[0][row] = i, draws()
        out[1][...] = indices


class Flaky(Numbers):
    """Samples in `at` fail with OSError the first `times` times they are read, after drawing."""

    def __init__(self, size: int, marks: str, at: Sequence[int], times: int = 1) -> None:
        super().__init__(size)
        self.marks, self.at, self.times = marks, set(at), times

    def fail(self, i: int) -> None:
        if i in self.at and any(first_time(self.marks, f"{i}-{k}") for k in range(self.times)):
            raise OSError(f"stale file handle of {i}")

    def __getitem__(self, i: int) -> Any:
        first = draws()
        self.fail(i)
        return np.array([i, first, draws()]), i


class FlakyTogether(Flaky):
    """The same, whole batches at a time."""

    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [self[i] for i in keys]


class Grows(Numbers):
    """Keeps `nbytes` more with every sample. The row tells which process made it."""

    def __init__(self, size: int, nbytes: int) -> None:
        super().__init__(size)
        self.nbytes = nbytes
        self.kept: list[bytearray] = []

    def __getitem__(self, i: int) -> Any:
        self.kept.append(bytearray(b"x" * self.nbytes))
        return np.array([i, os.getpid()]), i


class Odd(ValueError):
    """An exception of the user's own."""


class FlakyOdd(Flaky):
    def fail(self, i: int) -> None:
        try:
            super().fail(i)
        except OSError as error:
            raise Odd(str(error)) from error


class Counted:
    """A stream of numbers, each worker every n-th; its iterator saves where it is, or nothing does."""

    def __init__(self, size: int, *, saves: bool) -> None:
        self.size, self.saves = size, saves

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return (
            _Counting(info.id, self.size, info.num_workers) if self.saves else iter(range(info.id, self.size, info.num_workers))
        )


class _Counting:
    def __init__(self, first: int, stop: int, step: int) -> None:
        self.next, self.stop, self.step = first, stop, step

    def __iter__(self) -> _Counting:
        return self

    def __next__(self) -> int:
        if self.next >= self.stop:
            raise StopIteration
        self.next += self.step
        return self.next - self.step

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class OnceOnly(Counted):
    """A stream that nobody can read twice, slow enough for a change to fall into it."""

    can_replay = False

    def __init__(self, size: int) -> None:
        super().__init__(size, saves=False)

    def __iter__(self) -> Iterator[int]:
        for i in super().__iter__():
            time.sleep(0.001)
            yield i


class Panic(BaseException):
    """What an extension written in another language may raise."""


class Panics(Together):
    """Sample `bad` raises what is no Exception."""

    def check(self, keys: Sequence[int]) -> None:
        if self.bad.intersection(keys):
            raise Panic("index out of bounds")


class WholeBatches(Together):
    """Cannot be asked for parts of a batch."""

    def check(self, keys: Sequence[int]) -> None:
        if len(keys) < 8:
            raise ValueError(f"8 samples at least, got {len(keys)}")
        if self.bad.intersection(keys):
            raise OSError("cannot read")


class LargeOnly(Together):
    """A large call with one of `deadly` in it ends the worker; no sample does alone."""

    def check(self, keys: Sequence[int]) -> None:
        if len(keys) >= 64 and self.deadly.intersection(keys):
            os.kill(os.getpid(), signal.SIGKILL)


class Innocent(Together):
    """Sample 17 fails for a moment, now and then; 21 always."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.num_reads = 0

    def check(self, keys: Sequence[int]) -> None:
        if 17 in keys:
            self.num_reads += 1
            if self.num_reads in (1, 3, 4, 5):
                raise OSError("stale file handle")
        if 21 in keys:
            raise ValueError("never any good")


class Named(Numbers):
    """Keys are texts; one of them ends its worker."""

    def __init__(self, names: Sequence[str], deadly: str) -> None:
        super().__init__(len(names))
        self.names, self.deadly = list(names), deadly

    def __getitem__(self, name: Any) -> Any:
        if name == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.names.index(name)


class Dies277(Numbers):
    """Sample 277 ends its worker."""

    def __getitem__(self, i: int) -> Any:
        if i == 277:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.make(i)
