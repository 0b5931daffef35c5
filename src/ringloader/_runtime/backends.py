"""Which backend runs a loader's workers.

Owns the choice between processes, threads and the caller's own thread, and what each is told; nothing else names one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringloader._runtime import sources
from ringloader._runtime.building import is_iterable
from ringloader._runtime.inline import InlinePool
from ringloader._runtime.options import Options
from ringloader._runtime.pool import ProcessPool
from ringloader._runtime.sources import Closing, LocalBuild
from ringloader._runtime.threads import ThreadPool
from ringloader._runtime.worker_info import WorkerInfo
from ringloader.errors import ConfigError
from ringloader.factory import FactorySpec, find_process_spec

logger = logging.getLogger("ringloader")


@dataclass(frozen=True, slots=True)
class Backend:
    """make: gives the pool, for the descriptor that wakes it. length: of the dataset, -1 where only workers know. closing:
    descriptors to be closed when the loader is gone."""

    make: Callable[[int], Any]
    length: int
    closing: Sequence[Closing] = ()


def choose(dataset: Any, options: Options, rank: int, world_size: int) -> Backend:
    """Settle what a worker is told. Raises ConfigError for what it could not rebuild."""
    if options.num_workers == 0:
        # One worker that is the caller: whoever divides by the number of workers gets everything.
        info = WorkerInfo(0, 1, options.seed, rank, world_size)
        build = LocalBuild(dataset, options)
        return Backend(lambda wake_fd: InlinePool(build, info, options.seed_per), _own_length(dataset))
    if options.worker_backend == "thread":
        return _threads(dataset, options, rank, world_size)
    try:
        settings, length, closing = sources.worker_settings(dataset, options, rank, world_size)
    except ConfigError as error:
        is_dataset = str(error.facts.get("argument", "")).partition(".")[0].partition("[")[0] == "dataset"
        if options.worker_backend == "process" or not is_dataset or "reason" not in error.facts:
            raise
        backend = _threads(dataset, options, rank, world_size)
        logger.warning("worker_backend='auto': threads, which share one interpreter lock, because %s", error)
        return backend
    if options.worker_backend == "auto":
        why = "there is a spec" if find_process_spec(dataset) is not None else "the dataset can be pickled"
        logger.info("worker_backend='auto': processes, because %s", why)
    measures = options.faults.max_worker_rss is not None
    return Backend(lambda wake_fd: ProcessPool(settings, wake_fd, measures_memory=measures), length, closing)


def _threads(dataset: Any, options: Options, rank: int, world_size: int) -> Backend:
    if options.seed_per == "sample":
        raise ConfigError(
            "seed_per='sample' seeds the global generators, which threads share with the training; draw from "
            "get_worker_info().rng, or use worker_backend='process'",
            option="seed_per",
            value="sample",
        )
    info = WorkerInfo(0, options.num_workers, options.seed, rank, world_size)
    build = LocalBuild(dataset, options)
    return Backend(lambda wake_fd: ThreadPool(build, info, wake_fd), _own_length(dataset))


def _own_length(dataset: Any) -> int:
    is_counted = not isinstance(dataset, FactorySpec) and hasattr(dataset, "__len__") and not is_iterable(dataset)
    return len(dataset) if is_counted else -1
