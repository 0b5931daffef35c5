"""What do faults cost: a killed worker, one a second, a killed training process, and the watching itself?

Method. Each measurement is a process of its own, all in turn within each round; given are the median and the range over the
rounds. `kill to next batch`: one worker that is killed while it is asked for batches; the time to the first batch that its
successor made, and apart from that what the successor spent on imports and on the dataset. `one kill per second`: two workers
on the arrays workload, four seconds with a kill each second and four without in turn, in the same process; given is the ratio.
`parent killed`: kill -9 of the training process; the time until no worker is left, whose workers were idle, asleep in
`__getitem__`, or in a C call that does not let go of the interpreter lock. `watching`: batches per second of the tiny workload
with all limits (`timeout`, `stall_s`, `max_worker_rss`) and with none, two seconds each in turn, and the share of one core that
the watching thread took.

    python -m benchmarks.bench_recovery --json recovery.json
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import turns
from benchmarks.workloads import find_workload

_ROOT = Path(__file__).resolve().parent.parent
_OFTEN = 1_000_000
_PHASE_S = 4.0
_NUM_KILLS = 12


class Told:
    """Rows that tell which process made them; idle, asleep, or in a C call that holds the interpreter lock, from row 64 on."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        if index >= 64 and self._kind == "asleep":
            time.sleep(60)
        if index >= 64 and self._kind == "in C":
            ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the lock, as a badly written extension does
        return np.array([index, os.getpid()])


@contextlib.contextmanager
def _loader(dataset: Any, **options: Any) -> Iterator[Any]:
    from ringloader import FaultPolicy, Loader

    faults = FaultPolicy(restarts=_OFTEN, sample_deaths=_OFTEN, **options.pop("faults", {}))
    with Loader(dataset, output="numpy", faults=faults, **options) as loader:
        yield loader


def measure_kill(quick: bool) -> dict[str, float]:
    """From SIGKILL to the first batch of the successor."""
    from ringloader import FactorySpec

    import_s = _time_of_build()
    times = []
    with _loader(FactorySpec(Told, "idle"), batch_size=32, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        for _ in range(3 if quick else _NUM_KILLS):
            (pid,) = loader.stats().worker_pids
            began_s = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while int(next(iterator)[0, 1]) == pid:
                pass  # made before it was killed
            times.append(time.perf_counter() - began_s)
    return {"median of 12, s": float(np.median(times)), "worst, s": max(times), "of it import and dataset, s": import_s}


def _time_of_build() -> float:
    """What a new interpreter spends on importing this module, numpy not counted, and on making the dataset."""
    source = (
        "import time, numpy; began_s = time.perf_counter(); from benchmarks.bench_recovery import Told; Told('idle'); "
        "print(time.perf_counter() - began_s)"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=_ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure_throughput(quick: bool) -> dict[str, float]:
    """Batches per second with a kill each second, and without."""
    workload = find_workload("arrays")
    rates: dict[bool, list[float]] = {True: [], False: []}
    options = {"batch_size": workload.batch_size, "shuffle": True, "num_workers": 2}
    with _loader(workload.spec("numpy"), **options) as loader:
        batches = _endless(loader)
        for _ in range(8):
            next(batches)
        for number in range(2 if quick else 6):
            is_disturbed = bool(number % 2)
            rates[is_disturbed].append(_rate(batches, loader, 1.0 if quick else _PHASE_S, is_disturbed=is_disturbed))
    calm, disturbed = float(np.median(rates[False])), float(np.median(rates[True]))
    return {"undisturbed, batches/s": calm, "one kill a second, batches/s": disturbed, "ratio": disturbed / calm}


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _rate(batches: Iterator[Any], loader: Any, seconds: float, *, is_disturbed: bool) -> float:
    end = threading.Event()

    def kill() -> None:
        number = 0
        while not end.wait(1.0 if number else 0.2):
            pids = loader.stats().worker_pids
            os.kill(pids[number % len(pids)], signal.SIGKILL)
            number += 1

    thread = threading.Thread(target=kill)
    if is_disturbed:
        thread.start()
    began_s = time.perf_counter()
    count = 0
    while time.perf_counter() - began_s < seconds:
        next(batches)
        count += 1
    rate = count / (time.perf_counter() - began_s)
    end.set()
    if is_disturbed:
        thread.join()
    return rate


_PARENT = """
import sys
from benchmarks.bench_recovery import Told
from ringloader import FactorySpec, Loader
loader = Loader(FactorySpec(Told, sys.argv[1]), batch_size=32, num_workers=2, prefetch_factor=2, output="numpy")
iterator = iter(loader)
next(iterator), next(iterator)
print(*loader.stats().worker_pids, flush=True)
import time
time.sleep(60)
"""


def measure_parent(quick: bool) -> dict[str, float]:
    """From SIGKILL of the training process to the end of its last worker."""
    found = {}
    for kind in ("idle", "asleep", "in C"):
        parent = subprocess.Popen([sys.executable, "-c", _PARENT, kind], cwd=_ROOT, stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        workers = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        time.sleep(0.3)  # until both are in what they are to be in
        began_s = time.perf_counter()
        parent.kill()
        for worker in workers:
            select.select([worker], [], [], 30.0)
            os.close(worker)
        found[f"{kind}, s"] = time.perf_counter() - began_s
        parent.wait()
        parent.stdout.close()
    return found


def measure_watching(quick: bool) -> dict[str, float]:
    """The tiny workload with every limit and with none."""
    workload = find_workload("tiny")
    options = {"batch_size": workload.batch_size, "shuffle": True, "num_workers": 2}
    limits = {"timeout": 60.0, "faults": {"stall_s": 60.0, "max_worker_rss": 1 << 40}}
    none = {"timeout": None, "faults": {"stall_s": None}}
    rates: dict[bool, list[float]] = {True: [], False: []}
    with (
        _loader(workload.spec("numpy"), **options, **limits) as watched,
        _loader(workload.spec("numpy"), **options, **none) as free,
    ):
        streams = {True: _endless(watched), False: _endless(free)}
        for batches in streams.values():
            for _ in range(200):
                next(batches)
        before_s, began_s = _thread_s(watched), time.perf_counter()
        for number in range(2 if quick else 10):
            is_watched = bool(number % 2)
            loader = watched if is_watched else free
            rates[is_watched].append(_rate(streams[is_watched], loader, 0.5 if quick else 2.0, is_disturbed=False))
        share = (_thread_s(watched) - before_s) / (time.perf_counter() - began_s)
    return {
        "with limits, batches/s": float(np.median(rates[True])),
        "without, batches/s": float(np.median(rates[False])),
        "ratio": float(np.median(rates[True]) / np.median(rates[False])),
        "watching thread, share of a core": share,
    }


def _thread_s(loader: Any) -> float:
    """Processor time of a loader's watching thread."""
    thread = loader._engine.pump.thread.native_id
    fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_MEASURES: dict[str, Callable[[bool], dict[str, float]]] = {
    "kill to next batch": measure_kill,
    "one kill per second": measure_throughput,
    "parent killed": measure_parent,
    "watching": measure_watching,
}

if __name__ == "__main__":
    sys.exit(turns.main("bench_recovery", "recovery", __doc__, _MEASURES))
