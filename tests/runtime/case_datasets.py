"""Datasets of the reported cases: importable, small, each with the habit that its case is named after."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.runtime.sample_datasets import Numbers, first_time

MEET_S = 20.0


class Filled(Numbers):
    """Sample i is an array of `nbytes` bytes that is full of i modulo 251."""

    def __init__(self, size: int, nbytes: int) -> None:
        super().__init__(size)
        self.nbytes = nbytes

    def make(self, i: int) -> Any:
        return np.full(self.nbytes, i % 251, np.uint8)


class OddShape(Numbers):
    """Sample 29 lacks a dimension."""

    def make(self, i: int) -> Any:
        return {"x": np.zeros((3, 8, 8) if i != 29 else (8, 8), np.float32), "y": i}


class GrowingShape(Numbers):
    """Every sample has another shape."""

    def make(self, i: int) -> Any:
        import torch

        return torch.from_numpy(np.zeros((3, 10 + i), np.float32))


class OnDevice(Numbers):
    """Samples from 3 on are not in host memory; the meta device stands in for CUDA."""

    def make(self, i: int) -> Any:
        import torch

        return {"x": torch.ones(2, device="cpu" if i < 3 else "meta")}


class TorchFacts(Numbers):
    """Sample: whether torch is loaded, and whether CUDA was initialised, in the worker."""

    def make(self, i: int) -> Any:
        torch = sys.modules.get("torch")
        return np.array([torch is not None, torch is not None and torch.cuda.is_initialized()])


class TorchFactsAfterUse(TorchFacts):
    def make(self, i: int) -> Any:
        import torch

        torch.ones(2).sum()
        return super().make(i)


class NoneSample(Numbers):
    """Sample 5 is None."""

    def make(self, i: int) -> Any:
        return None if i == 5 else {"x": np.ones(2, np.float32)}


class Constant(Numbers):
    """Every sample is the same object."""

    def __init__(self, size: int, value: Any) -> None:
        super().__init__(size)
        self.value = value

    def make(self, i: int) -> Any:
        return self.value


class TextArray(Constant):
    """Samples with an array that holds no numbers."""

    def __init__(self, size: int, kind: str) -> None:
        arrays = {
            "text": np.array(["ab", "cd"]),
            "object": np.array([b"x", None], dtype=object),
            "bytes": np.array([b"ab"]),
            "date": np.array(["2020-01-01"], "M8[D]"),
            "record": np.zeros(2, "i4,f4"),
            "scalar": np.str_("file.jpg"),
        }
        super().__init__(size, {"t": arrays[kind]})


class ReadOnly(Numbers):
    """Samples are arrays over immutable bytes."""

    def __init__(self, size: int = 8) -> None:
        super().__init__(size)
        self.raw = [bytes([i] * 4) for i in range(size)]

    def make(self, i: int) -> Any:
        return np.frombuffer(self.raw[i], np.uint8)


class Names(Numbers):
    """Many small Python objects, read one by one."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.names = [f"file_{i:09d}.jpg" for i in range(size)]

    def make(self, i: int) -> Any:
        return len(self.names[i])


class ManyLeaves(Numbers):
    """Samples of many small arrays."""

    def __init__(self, size: int, num_leaves: int) -> None:
        super().__init__(size)
        self.num_leaves = num_leaves

    def make(self, i: int) -> Any:
        return {f"k{j}": np.full(1, i, np.float32) for j in range(self.num_leaves)}


class Ids(Numbers):
    """Samples whose only array is the index."""

    def make(self, i: int) -> Any:
        return {"index": np.array([i, -i])}


class Stuck(Numbers):
    """Sample 9 waits for ever."""

    def make(self, i: int) -> Any:
        if i == 9:
            os.read(os.pipe()[0], 1)
        return i


class NeverEnding(Numbers):
    """From sample `at` on a worker is in a call that takes an hour; "deaf" also ignores SIGTERM, "c" is in C without a
    check."""

    def __init__(self, size: int, at: int, habit: str, marks: str) -> None:
        super().__init__(size)
        self.at, self.habit, self.marks = at, habit, marks

    def make(self, i: int) -> Any:
        if i >= self.at:
            if self.habit == "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            first_time(self.marks, f"stuck-{i}")
            if self.habit == "c":
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
                ctypes.CDLL(None).sleep(3600)
            time.sleep(3600)
        return i


class HangsBehind(Numbers):
    """Sample 1 is not made before another worker has begun sample 2; sample 3 never is."""

    def __init__(self, size: int, marks: str) -> None:
        super().__init__(size)
        self.marks = marks

    def make(self, i: int) -> Any:
        if i == 2:
            Path(self.marks, "begun").touch()
        deadline_s = time.monotonic() + 2.0
        while i == 1 and not Path(self.marks, "begun").exists() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        if i == 3:
            time.sleep(3600)
        return i


class SlowBuild(Numbers):
    """Takes its time in the constructor."""

    def __init__(self, size: int, build_s: float) -> None:
        super().__init__(size)
        time.sleep(build_s)

    def make(self, i: int) -> Any:
        return i


class Meets(Numbers):
    """Is built only where `num_workers` of its kind are being built at one time."""

    def __init__(self, size: int, folder: str, num_workers: int) -> None:
        super().__init__(size)
        Path(folder, str(os.getpid())).touch()
        deadline_s = time.monotonic() + MEET_S
        while len(os.listdir(folder)) < num_workers:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"only {len(os.listdir(folder))} workers came")
            time.sleep(0.01)

    def make(self, i: int) -> Any:
        return i


class Pid(Numbers):
    """Sample i is (i, pid of the process that made it)."""

    def make(self, i: int) -> Any:
        return np.array([i, os.getpid()])


class OpenFile(Numbers):
    """Reads 4-byte numbers through one handle that was opened in the constructor."""

    def __init__(self, path: str) -> None:
        super().__init__(os.path.getsize(path) // 4)
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115  (open for as long as the dataset)

    def make(self, i: int) -> Any:
        self.file.seek(4 * i)
        return int.from_bytes(self.file.read(4), "little")


class Epochs(Numbers):
    """Knows the epoch only from `set_epoch`; a worker dies at (epoch, sample) `dies_at`, once."""

    epoch = -1

    def __init__(self, size: int, marks: str = "", dies_at: tuple[int, int] = (-1, -1)) -> None:
        super().__init__(size)
        self.marks, self.dies_at = marks, tuple(dies_at)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def make(self, i: int) -> Any:
        if (self.epoch, i) == self.dies_at and first_time(self.marks, "died"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.epoch * 100 + i


class DrawsAll(Numbers):
    """Sample i is a draw from each of the three global generators; a worker dies at some samples, each once."""

    def __init__(self, size: int, marks: str = "", dies_at: list[int] | None = None) -> None:
        super().__init__(size)
        self.marks, self.dies_at = marks, dies_at or []

    def make(self, i: int) -> Any:
        import torch

        draws = [random.randrange(1 << 60), int(np.random.randint(1 << 60)), int(torch.randint(1 << 60, (1,)))]
        if i in self.dies_at and first_time(self.marks, str(i)):
            os.kill(os.getpid(), signal.SIGKILL)
        return np.array(draws)


class UnevenDraws(DrawsAll):
    """Draws, after a pause of random length that no seed decides."""

    def make(self, i: int) -> Any:
        time.sleep(os.urandom(1)[0] / 255 * 0.004)
        if i in self.dies_at and first_time(self.marks, str(i)):
            os.kill(os.getpid(), signal.SIGKILL)
        return np.array([i, random.randrange(1 << 60), int(np.random.randint(1 << 60))])


class TwoArguments(Exception):
    """Cannot be made again from its text."""

    def __init__(self, a: int, *, b: int) -> None:
        super().__init__(f"a={a} b={b}")


class Explosive(Exception):
    """Cannot be pickled, nor be put into words."""

    def __init__(self) -> None:
        self.lock = __import__("threading").Lock()

    def __str__(self) -> str:
        raise ValueError("boom")


class Raises(Numbers):
    """Raises what the training process cannot make again."""

    def make(self, i: int) -> Any:
        if i < 2:
            raise TwoArguments(1, b=2)
        if i < 4:
            raise Explosive
        raise type("Faraway", (Exception,), {"__module__": "not_importable_here"})("from afar")


class Multiplies(Numbers):
    """Large operations that use every thread pool there is."""

    def make(self, i: int) -> Any:
        import torch

        square = np.ones((600, 600), np.float32)
        products = (square @ square)[0, 0] + torch.from_numpy(square).mm(torch.ones(600, 600))[0, 0]
        return float(products + torch.ones(1 << 22).sum())


class ThreadFacts(Numbers):
    """Sample: torch's number of threads and the largest of any pool that threadpoolctl finds, after both were used."""

    def make(self, i: int) -> Any:
        import threadpoolctl
        import torch

        _ = np.ones((700, 700)) @ np.ones((700, 700)), torch.ones(700, 700) @ torch.ones(700, 700)
        pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
        return np.array([torch.get_num_threads(), max(pools), min(pools)])


class Pair(NamedTuple):
    x: Any
    y: Any


class Named(dict):  # type: ignore[type-arg]
    """A dict subclass with a method."""

    def first(self) -> Any:
        return next(iter(self.values()))


@dataclasses.dataclass
class Record:
    x: Any
    names: list[str]


def whole_batch_none(samples: list[Any]) -> None:
    return None


def without_none(samples: list[Any]) -> dict[str, Any]:
    import torch

    rows = [sample["x"] for sample in samples if sample is not None]
    return {"x": torch.from_numpy(np.stack(rows)), "meta": None}


def as_pair(samples: list[Any]) -> Pair:
    import torch

    return Pair(torch.tensor(samples), len(samples))


def as_tuple(samples: list[Any]) -> tuple[Any, ...]:
    import torch

    return (torch.tensor(samples), "name", [1, (2.5, None)], b"x", True)


def as_named(samples: list[Any]) -> Named:
    import torch

    return Named(x=torch.tensor(samples), deep=collections.OrderedDict(b=1, a=(torch.ones(1),)))


def as_default(samples: list[Any]) -> collections.defaultdict[str, Any]:
    import torch

    return collections.defaultdict(int, {"x": torch.tensor(samples)})


def as_record(samples: list[Any]) -> Record:
    import torch

    return Record(torch.tensor(samples), ["a", "b"])


def as_each_container(samples: list[Any]) -> dict[str, Any]:
    return {
        "pair": as_pair(samples),
        "tuple": as_tuple(samples),
        "named": as_named(samples),
        "default": as_default(samples),
        "record": as_record(samples),
    }


def hang_in_init(worker_id: int) -> None:
    time.sleep(3600)
