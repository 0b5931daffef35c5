"""A thread of the training process that runs dataset code as a worker would.

Owns the borrowing of the process's random generators: they are seeded for the dataset and put back afterwards, so that training
draws what it would have drawn without a loader. One thread at a time may borrow. Must not import torch.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from ringloader._runtime.seeding import LateImports, Seeder, Undisturbed
from ringloader._runtime.worker_info import WorkerInfo, current_info, set_thread_info

# The generators are the process's: two threads at once would each put back what the other had lent.
LENDING = threading.RLock()


class AsWorker:
    """While dataset code runs: `get_worker_info` answers, and the user's generators are put back afterwards."""

    def __init__(self, info: WorkerInfo, seeder: Seeder) -> None:
        self._info = info
        self._late = LateImports(seeder) if "torch" not in sys.modules else None
        self._undisturbed = Undisturbed()

    def __enter__(self) -> None:
        self._outer = current_info()
        self._undisturbed.__enter__()
        set_thread_info(self._info)
        if self._late is not None:
            sys.meta_path.insert(0, self._late)

    def __exit__(self, *error: Any) -> None:
        if self._late in sys.meta_path:
            sys.meta_path.remove(self._late)
        set_thread_info(self._outer)
        self._undisturbed.__exit__(*error)
