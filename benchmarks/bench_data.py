"""What do very long epochs, resuming and seeding cost, beside torch's DataLoader?

Method. Each number is measured in a process of its own, all in turn within each round; given are the median and the range over
the rounds. Workers are warm: the loader has read a batch of an epoch before. `first batch`: from `iter` to the first batch of a
shuffled epoch over a dataset of N samples that costs nothing, one worker; `memory`: what the training process has grown by from
the loader's making to that batch, at its peak. DataLoader draws N = 10^8, a tenth: at 10^9 its permutation alone would take
tens of GB. `resume`: from `load_state_dict` to the first batch, at batch 10^6 of N = 10^9, and the same at the beginning.
DataLoader has no state; what its users do instead, skipping batches, is extrapolated from 1,000 of them. `seeding`: one call in
a worker that has imported torch.

    python -m benchmarks.bench_data --json data.json
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import turns

_BILLION = 10**9
_DATALOADER_SIZE = 10**8
_BATCH_SIZE = 32
_RESUME_BATCH = 10**6
_NUM_SKIPPED = 1000


class Huge:
    """`size` samples that are their own index."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def measure_ringloader(quick: bool) -> dict[str, float]:
    """Epochs over 10^9 samples, and resuming in one."""
    import torch  # noqa: F401  # part of no time here

    from ringloader import FactorySpec, Loader

    options: dict[str, Any] = {"batch_size": _BATCH_SIZE, "shuffle": True, "num_workers": 1}
    with Loader(FactorySpec(Huge, 1000), **options) as loader:
        next(iter(loader))  # imports and the rest of what happens once in a process
    before = _peak_nbytes()
    with Loader(FactorySpec(Huge, _BILLION), **options) as loader:
        next(iter(loader))
        first_s = _time_of(lambda: next(iter(loader)))
        grown = _peak_nbytes() - before
        state = loader.state_dict()
        resumed = {**state, "position": _RESUME_BATCH * _BATCH_SIZE}
        times = []
        for saved in ({**state, "position": 0}, resumed):

            def go_on(saved: dict[str, Any] = saved) -> None:
                loader.load_state_dict(saved)
                next(iter(loader))

            times.append(_time_of(go_on))
    return {
        "first batch of an epoch, N = 10^9, ms": first_s * 1e3,
        "memory of the training process, N = 10^9, MB": grown / 1e6,
        "resume at batch 0, ms": times[0] * 1e3,
        "resume at batch 10^6, ms": times[1] * 1e3,
    }


def measure_dataloader(quick: bool) -> dict[str, float]:
    """The same of DataLoader, over a tenth of the samples."""
    from torch.utils.data import DataLoader

    size = 10**5 if quick else _DATALOADER_SIZE
    dataset: Any = Huge(size)
    loader = DataLoader(dataset, batch_size=_BATCH_SIZE, shuffle=True, num_workers=1, persistent_workers=True)
    before = _peak_nbytes()
    first_s = _time_of(lambda: next(iter(loader)))
    grown = _peak_nbytes() - before
    plain: Any = DataLoader(dataset, batch_size=_BATCH_SIZE, num_workers=1, persistent_workers=True)
    batches = iter(plain)
    next(batches)
    skip_s = _time_of(lambda: [next(batches) for _ in range(_NUM_SKIPPED)]) / _NUM_SKIPPED
    label = "10^5" if quick else "10^8"
    return {
        f"first batch of an epoch, N = {label}, ms": first_s * 1e3,
        f"memory of the training process, N = {label}, MB": grown / 1e6,
        "skip to batch 10^6 (extrapolated), ms": skip_s * _RESUME_BATCH * 1e3,
    }


def measure_seeding(quick: bool) -> dict[str, float]:
    """What seeding random, numpy and torch for a batch costs."""
    import torch  # noqa: F401

    from ringloader._runtime.seeding import Seeder

    seeder = Seeder(0)
    num_calls = 2000
    seeder.for_position(0, 0)
    took_s = _time_of(lambda: [seeder.for_position(0, position) for position in range(num_calls)])
    return {"seeding per batch, us": took_s / num_calls * 1e6}


def _time_of(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_MEASURES: dict[str, Callable[[bool], dict[str, float]]] = {
    "ringloader": measure_ringloader,
    "DataLoader": measure_dataloader,
    "seeding": measure_seeding,
}


if __name__ == "__main__":
    sys.exit(turns.main("bench_data", "long epochs, resuming, seeding", __doc__, _MEASURES, once=("DataLoader",)))
