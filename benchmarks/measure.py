"""One measurement in a fresh process: `python -m benchmarks.measure '{"kind": ...}'` prints a JSON object.

Owns how each contender is built and timed. One thread for torch in this process: with more, the consumer's arithmetic would
take the workers' cores in some contenders and not in others. The import of a library is never part of a time unless it says
so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import mmap
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import Workload, find_workload, pad_with_torch

# As many slots as a worker has batches in flight by default: the copies go to memory that left the cache as a ring's slots do.
_NUM_SLOTS = 2
# Segments of loaders, by what the kernel calls them in smaps: our ring (/dev/shm or memfd) and torch's shared storages.
_SHARED_NAMES = ("/dev/shm/", "/memfd:ringloader", "/torch_")


@dataclass(frozen=True)
class Job:
    """What to measure.

    contender: a key of the tables below. prefetch_factor: 0 = the loader's own default. seconds: the least time to count for.
    num_batches: per epoch, 0 = the workload's own.
    """

    kind: str
    contender: str
    workload: str
    num_workers: int
    prefetch_factor: int = 0
    samples: str = "numpy"
    consume: str = "none"
    seconds: float = 1.5
    num_batches: int = 0


def measure_rate(job: Job) -> dict[str, float]:
    """Batches per second, of a loader or of a physical limit."""
    workload = find_workload(job.workload, job.num_batches)
    if job.contender in _LIMITS:
        return {"rate": _LIMITS[job.contender](job, workload)}
    consume = _CONSUMERS[job.consume]
    with _LOADERS[job.contender](job, workload) as loader:
        return {"rate": _rate(loader, consume, job.seconds)}


def measure_start(job: Job) -> dict[str, float]:
    """Seconds from making the loader to its first batch, and the memory of its workers.

    That is PSS without shared segments, divided by their number; a process that workers are split off counts with them.
    """
    began_s = time.perf_counter()
    importlib.import_module("torch.utils.data")
    torch_s = time.perf_counter()
    _import_ringloader()
    imported_s = time.perf_counter()
    workload = find_workload(job.workload, job.num_batches)
    began_loader_s = time.perf_counter()
    with _LOADERS[job.contender](job, workload) as loader:
        batches = iter(loader)
        next(batches)
        first_s = time.perf_counter() - began_loader_s
        pids = _worker_pids(loader)
        nbytes = sum(private_nbytes(pid) for pid in {*pids, *helpers_of(loader)}) / len(pids)
    return {
        "first_s": first_s,
        "worker_mib": nbytes / 2**20,
        "import_torch_s": torch_s - began_s,
        "import_ringloader_s": imported_s - torch_s,
    }


def measure_epoch(job: Job) -> dict[str, float]:
    """Seconds from `iter` to the first batch of a later epoch (2 to 6, the median), and seconds to make one batch inline."""
    workload = find_workload(job.workload, job.num_batches)
    make = _LOADERS[job.contender]
    firsts = []
    with make(job, workload) as loader:
        for _ in range(6):
            began_s = time.perf_counter()
            batches = iter(loader)
            next(batches)
            firsts.append(time.perf_counter() - began_s)
            for _batch in batches:
                pass
    inline = Job(**{**vars(job), "num_workers": 0})
    with make(inline, workload) as loader:
        batches = iter(loader)
        times = [_time_of(batches) for _ in range(workload.num_batches)]
    first_s, batch_s = statistics.median(firsts[1:]), statistics.median(times)
    return {"first_s": first_s, "batch_s": batch_s, "overhead_s": first_s - batch_s}


def private_nbytes(pid: int) -> int:
    """A process's PSS without the segments that loaders share; pages of libraries count by their share."""
    total_kib = 0
    is_counted = True
    with open(f"/proc/{pid}/smaps") as lines:
        for line in lines:
            field, _, rest = line.partition(" ")
            if not field.endswith(":"):
                is_counted = not any(name in rest for name in _SHARED_NAMES)
            elif field == "Pss:" and is_counted:
                total_kib += int(rest.split()[0])
    return total_kib * 1024


# -- contenders


@contextlib.contextmanager
def _ringloader(job: Job, workload: Workload, *, in_place: bool = False) -> Iterator[Iterable[Any]]:
    _import_ringloader()
    from ringloader import Loader, pad_collate

    with Loader(
        workload.in_place_spec() if in_place else workload.spec(job.samples),
        batch_size=workload.batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        prefetch_factor=job.prefetch_factor or None,
        collate_fn=pad_collate() if workload.is_padded else None,
    ) as loader:
        yield loader


def _ringloader_in_place(job: Job, workload: Workload) -> contextlib.AbstractContextManager[Iterable[Any]]:
    return _ringloader(job, workload, in_place=True)


@contextlib.contextmanager
def _dataloader(job: Job, workload: Workload, start_method: str = "fork") -> Iterator[Iterable[Any]]:
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    options: dict[str, Any] = {}
    if job.num_workers:
        options = {
            "persistent_workers": True,
            "multiprocessing_context": start_method,
            "prefetch_factor": job.prefetch_factor or None,
        }
    if workload.is_padded:
        options["collate_fn"] = pad_with_torch
    dataset: Any = workload.make(job.samples)
    yield DataLoader(dataset, batch_size=workload.batch_size, shuffle=True, num_workers=job.num_workers, **options)


def _dataloader_spawn(job: Job, workload: Workload) -> contextlib.AbstractContextManager[Iterable[Any]]:
    return _dataloader(job, workload, "spawn")


class _SpdlEpochs:
    """SPDL's threads with torch's collation: a new pipeline each epoch, as its users make them."""

    def __init__(self, job: Job, workload: Workload) -> None:
        self._job = job
        self._dataset = workload.make(job.samples)
        self._num_samples, self._batch_size = workload.num_samples, workload.batch_size
        self._is_padded = workload.is_padded

    def __iter__(self) -> Iterator[Any]:
        builder = importlib.import_module("spdl.pipeline").PipelineBuilder()
        order = np.random.default_rng(0).permutation(self._num_samples).tolist()
        batches = [order[start : start + self._batch_size] for start in range(0, self._num_samples, self._batch_size)]
        builder = builder.add_source(batches).pipe(self._make_batch, concurrency=self._job.num_workers)
        pipeline = builder.add_sink(self._job.prefetch_factor or 2).build(num_threads=self._job.num_workers)
        with pipeline.auto_stop():
            yield from pipeline

    def _make_batch(self, indices: list[int]) -> Any:
        from torch.utils.data import default_collate

        collate = pad_with_torch if self._is_padded else default_collate
        return collate([self._dataset[index] for index in indices])


@contextlib.contextmanager
def _spdl(job: Job, workload: Workload) -> Iterator[Iterable[Any]]:
    import torch

    torch.set_num_threads(1)
    yield _SpdlEpochs(job, workload)


def _import_ringloader() -> None:
    import torch

    import ringloader

    _ = ringloader.Loader  # public names are imported when they are first used
    torch.set_num_threads(1)


# -- physical limits


def _getitem_limit(job: Job, workload: Workload) -> float:
    def body(start: Callable[[], object]) -> float:
        dataset = workload.make(job.samples)
        order = np.random.default_rng(os.getpid()).permutation(workload.num_samples).tolist()
        batches = [order[first : first + workload.batch_size] for first in range(0, len(order), workload.batch_size)]

        def make(number: int) -> None:
            for index in batches[number % len(batches)]:
                dataset[index]

        return _repeat(make, start, job.seconds)

    return _in_processes(job.num_workers, body)


def _memcpy_limit(job: Job, workload: Workload) -> float:
    """The better of copying row by row and copying whole blocks; half of the time for each."""
    return max(_copy_rate(job, workload, by_row) for by_row in (True, False))


def row_nbytes(workload: Workload) -> int:
    """Bytes of one sample's arrays."""
    dataset = replace(workload, num_batches=1).make("numpy")
    return sum(np.asarray(leaf).nbytes for leaf in _leaves(dataset[0]))


def _copy_rate(job: Job, workload: Workload, by_row: bool) -> float:
    dataset = workload.make("numpy")
    nbytes, batch_size = row_nbytes(workload), workload.batch_size
    num_blocks = max(1, dataset.nbytes // (nbytes * batch_size))

    def body(start: Callable[[], object]) -> float:
        rows = np.ones((num_blocks * batch_size, nbytes), np.uint8)
        mapping = mmap.mmap(-1, _NUM_SLOTS * batch_size * nbytes, flags=mmap.MAP_SHARED)
        slots: np.ndarray[Any, Any] = np.frombuffer(mapping, np.uint8).reshape(_NUM_SLOTS, batch_size, nbytes)
        slots[:] = 1  # populated: no page faults while the clock runs

        def copy_rows(number: int) -> None:
            out, first = slots[number % _NUM_SLOTS], number % num_blocks * batch_size
            for j in range(batch_size):
                out[j] = rows[first + j]

        def copy_block(number: int) -> None:
            first = number % num_blocks * batch_size
            slots[number % _NUM_SLOTS] = rows[first : first + batch_size]

        return _repeat(copy_rows if by_row else copy_block, start, job.seconds / 2)

    return _in_processes(job.num_workers, body)


def _repeat(make: Callable[[int], None], start: Callable[[], object], seconds: float) -> float:
    """Calls per second; the clock is read so seldom that it costs nothing."""
    make(0)
    make(1)
    start()
    began_s = time.perf_counter()
    num_calls, step, elapsed_s = 0, 1, 0.0
    while elapsed_s < seconds:
        for number in range(num_calls, num_calls + step):
            make(number)
        num_calls += step
        elapsed_s = time.perf_counter() - began_s
        step = max(1, int(num_calls / elapsed_s * 0.02))
    return num_calls / elapsed_s


def _in_processes(num_processes: int, body: Callable[[Callable[[], object]], float]) -> float:
    """Run `body` in so many processes at once and add up what they return."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(num_processes), context.SimpleQueue()

    def main() -> None:
        results.put(body(functools.partial(barrier.wait, 60)))

    processes = [context.Process(target=main) for _ in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"a measuring process ended with {[process.exitcode for process in processes]}")
    rates: list[float] = [results.get() for _ in processes]
    return sum(rates)


# -- consumers


def _ignore(batch: Any) -> None:
    pass


def _touch(batch: Any) -> None:
    """Read every byte of a batch."""
    for leaf in _leaves(batch):
        leaf.sum()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for child in value:
            yield from _leaves(child)
    else:
        yield value


def _rate(loader: Iterable[Any], consume: Callable[[Any], None], seconds: float) -> float:
    """Batches per second over whole epochs, after one that is not counted."""
    for batch in loader:
        consume(batch)
    began_s = time.perf_counter()
    num_batches, elapsed_s = 0, 0.0
    while elapsed_s < seconds:
        for batch in loader:
            consume(batch)
            num_batches += 1
        elapsed_s = time.perf_counter() - began_s
    return num_batches / elapsed_s


def _time_of(batches: Iterator[Any]) -> float:
    began_s = time.perf_counter()
    next(batches)
    return time.perf_counter() - began_s


def helpers_of(loader: Any) -> set[int]:
    """Processes that a loader of ours has beside its workers: what they are split off."""
    if not hasattr(loader, "stats"):
        return set()
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def _worker_pids(loader: Any) -> list[int]:
    if hasattr(loader, "stats"):
        return list(loader.stats().worker_pids)
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


_LOADERS: dict[str, Callable[[Job, Workload], contextlib.AbstractContextManager[Iterable[Any]]]] = {
    "ringloader": _ringloader,
    "ringloader in place": _ringloader_in_place,
    "DataLoader": _dataloader,
    "DataLoader spawn": _dataloader_spawn,
    "SPDL threads": _spdl,
}
_CONSUMERS = {"none": _ignore, "sum": _touch}
_LIMITS = {"memcpy": _memcpy_limit, "memcpy past caches": _memcpy_limit, "getitem": _getitem_limit}
_KINDS = {"rate": measure_rate, "start": measure_start, "epoch": measure_epoch}


if __name__ == "__main__":
    asked = Job(**json.loads(sys.argv[1]))
    json.dump(_KINDS[asked.kind](asked), sys.stdout)
