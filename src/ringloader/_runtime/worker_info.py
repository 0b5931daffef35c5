"""What a dataset can ask about the worker it runs in.

Owns the one `WorkerInfo` of this process (of this thread's batch, inline). Source: the meaning of the fields is torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class WorkerInfo:
    """id: 0 to num_workers - 1. seed: the loader's. epoch: of the batch in progress. dataset: this worker's own object."""

    id: int
    num_workers: int
    seed: int
    rank: int
    world_size: int
    dataset: Any = None
    epoch: int = 0


_current: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """Return what is known about the worker this runs in; None in the training process."""
    return _current


def set_worker_info(info: WorkerInfo | None) -> None:
    global _current
    _current = info
