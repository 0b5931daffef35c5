"""What a dataset can ask about the worker it runs in.

Owns the one `WorkerInfo` of this process (of this thread's batch, inline), and torch's beside it in a worker that has torch:
code written for DataLoader asks there. Source: the meaning of the fields is torch's. Must not import torch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringloader._runtime.seeding import draw_key

# No batch has this position: draws of the dataset's construction are nobody else's.
_BUILDING = -(1 << 62)
TORCH_MODULE = "torch.utils.data._utils.worker"


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
    # What `rng` is keyed by: the position of the batch's first sample in the epoch, and the place of the sample in the batch.
    batch_position: int = field(default=_BUILDING, repr=False)
    place: int = field(default=0, repr=False)
    is_consulted: bool = field(default=False, repr=False)  # somebody has asked which worker this is
    _rng: tuple[tuple[int, int, int], np.random.Generator] | None = field(default=None, repr=False)

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers of this very sample: a function of seed, epoch and its position in the epoch's order alone.

        The same whatever the batch size, the number of workers and of ranks; with a sampler of the user's, of batch and place.
        Where samples are fetched or written together, that of the batch's first. Source: Philox4x64.
        """
        key = self.epoch, *self._sample()
        if self._rng is None or self._rng[0] != key:
            self._rng = key, np.random.Generator(np.random.Philox(key=draw_key(self.seed, *key)))
        return self._rng[1]

    def begin(self, batch_position: int) -> None:
        """Another batch: nothing that was drawn before counts."""
        self.batch_position, self.place, self._rng = batch_position, 0, None

    def begin_again(self) -> None:
        """The same sample once more: it gets the same numbers."""
        self._rng = None

    def _sample(self) -> tuple[int, int]:
        if self.batch_position >= 0:
            return self.batch_position + self.place * self.world_size, 0
        return self.batch_position, self.place + 1


_current: WorkerInfo | None = None
# Inline and in worker threads several threads may each be in a batch of their own.
_thread = threading.local()


def get_worker_info() -> WorkerInfo | None:
    """Return what is known about the worker this runs in; None in the training process."""
    info = current_info()
    if info is not None:
        info.is_consulted = True
    return info


def current_info() -> WorkerInfo | None:
    """What `get_worker_info` answers, for our own use: it does not count as a question."""
    return getattr(_thread, "info", None) or _current


def set_worker_info(info: WorkerInfo | None) -> None:
    """Say what this process is."""
    global _current
    _current = info


def set_thread_info(info: WorkerInfo | None) -> None:
    """Say what this thread is for the time being."""
    _thread.info = info


def tell_torch(module: Any) -> None:
    """Have torch's own `get_worker_info` answer too, in a worker; `module` is `TORCH_MODULE`, far enough imported to know."""
    info = _current
    if info is not None and hasattr(module, "WorkerInfo"):
        module._worker_info = _torch_info(module.WorkerInfo, info)


def _torch_info(kind: Any, info: WorkerInfo) -> Any:
    """torch's own record of a worker, of a class that notices who asks."""

    class Noticing(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in ("id", "num_workers"):
                info.is_consulted = True
                return getattr(info, name)  # the stream in progress may be that of a worker that was given up
            return super().__getattribute__(name)

    Noticing.__name__ = Noticing.__qualname__ = kind.__name__
    return Noticing(id=info.id, num_workers=info.num_workers, seed=(info.seed + info.id) % (1 << 63), dataset=info.dataset)
