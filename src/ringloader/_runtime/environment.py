"""What worker processes find in their environment, and what they are told by way of it.

Owns the variables that a worker's interpreter must have from its very start: one thread per worker, one hash seed for all, and
from which size on the C library copies past the caches. Must import light: workers start with it.

Copies past the caches. A store to memory that is in no cache reads it first, so that a copy moves three bytes for each one of
its own. glibc has another way for copies above a size, of which it is told by a tunable at the start of a process alone; where
a virtual machine reports the cache of the whole host, that size is never reached. Batches that are larger than what the caches
hold gain: measured with two workers on an Intel Xeon, 64 rows of 588 KiB come at 21 GB/s for 13 GB/s, and at 11.5 for 8.5 where
the training process reads them. Small ones lose, for the training process would find them in the cache. Copies are of rows, so
the size is that of a row in a batch of `_LARGE_BATCH_NBYTES`. Source: the glibc manual, Hardware Capability Tunables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# One thread per worker: a pool of threads per process times the number of workers is more threads than cores.
_THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
TUNABLES = "GLIBC_TUNABLES"
_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
# What the user has in TUNABLES, for the worker to put back: its own children are no copiers of batches.
_GIVEN = "RINGLOADER_GIVEN_TUNABLES"
# From 12 MiB on a batch gains where the training process reads it once, from 20 MiB on where it does twice.
_LARGE_BATCH_NBYTES = 16 << 20
# Rows below are copied by the user's code too, which then works on the copy. A size above the second is well beyond what glibc
# takes by itself on most machines, and would only take something away from them.
_LEAST_ROW_NBYTES, _MOST_ROW_NBYTES = 128 << 10, 4 << 20

_withdrawn: dict[str, str] = {}  # what this process was started with, for itself alone


@dataclass(frozen=True)
class Environment:
    """What is the same for all workers of a pool. `batch_size`: samples per batch, 0 where nobody knows."""

    hash_seed: int = 0
    batch_size: int = 0

    def now(self) -> dict[str, str]:
        """Return what a process that is started now is given: this process's own, and what workers need."""
        found = dict(os.environ)
        for name in _THREAD_LIMITS:
            found.setdefault(name, os.environ.get("OMP_NUM_THREADS", "1"))
        if found.get("PYTHONHASHSEED", "random") == "random":
            found["PYTHONHASHSEED"] = str(self.hash_seed)
        return found | self._tunables(found.get(TUNABLES))

    def _tunables(self, given: str | None) -> dict[str, str]:
        nbytes = past_caches_nbytes(self.batch_size)
        if not nbytes or _TUNABLE in (given or ""):
            return {}
        others = f"{given}:" if given else ""
        return {TUNABLES: f"{others}{_TUNABLE}={nbytes:#x}", _GIVEN: given or ""}


def past_caches_nbytes(batch_size: int) -> int:
    """From which size on a worker's copies go past the caches, 0 for what the C library does by itself."""
    if os.uname().machine != "x86_64" or not batch_size:
        return 0
    nbytes = max(_LARGE_BATCH_NBYTES // batch_size, _LEAST_ROW_NBYTES)
    return nbytes if nbytes <= _MOST_ROW_NBYTES else 0


def withdraw() -> None:
    """Take out of `os.environ` what this process was told for itself alone."""
    given = os.environ.pop(_GIVEN, None)
    if given is None:
        return
    _withdrawn.update({TUNABLES: os.environ.pop(TUNABLES, ""), _GIVEN: given})
    if given:
        os.environ[TUNABLES] = given


def for_the_same() -> Mapping[str, str]:
    """Return the environment in which this process begins again."""
    return {**os.environ, **_withdrawn}
