"""A thread of the training process that runs dataset code as a worker would.

Owns the borrowing of the process's random generators: they are seeded for the dataset and put back afterwards, so that training
draws what it would have drawn without a loader. One thread at a time may borrow. Must not import torch.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ringloader._runtime.locking import holding
from ringloader._runtime.seeding import Generators, LateImports, Seeder
from ringloader._runtime.worker_info import WorkerInfo, current_info, set_thread_info

P = ParamSpec("P")
T = TypeVar("T")

# The generators are the process's: two threads at once would each put back what the other had lent.
_LENDING = threading.RLock()


def is_borrowing() -> bool:
    """This thread runs dataset code already, so that others that it waits for cannot borrow, and need not."""
    owned: bool = _LENDING._is_owned()  # type: ignore[attr-defined]
    return owned


def reset() -> None:
    """In a forked child: whoever borrows is a thread that is not here."""
    global _LENDING
    _LENDING = threading.RLock()


def as_worker(info: WorkerInfo, seeder: Seeder, body: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `body`, in which `get_worker_info` answers and which may draw; the user's generators are as before afterwards."""
    result: T = holding(_LENDING, _AsWorker(info, seeder).run, functools.partial(body, *args, **kwargs))
    return result


class _AsWorker:
    """What one call changes and puts back. An interrupt may break into either."""

    def __init__(self, info: WorkerInfo, seeder: Seeder) -> None:
        self._info = info
        self._late = LateImports(seeder) if "torch" not in sys.modules else None
        self._outer = current_info()
        self._generators = Generators()

    def run(self, body: Callable[[], Any]) -> Any:
        try:
            self._generators.lend()
            set_thread_info(self._info)
            if self._late is not None:
                sys.meta_path.insert(0, self._late)
            return body()
        finally:
            try:
                self._put_back()
            except BaseException:
                self._put_back()  # an interrupt broke into it
                raise

    def _put_back(self) -> None:
        if self._late in sys.meta_path:
            sys.meta_path.remove(self._late)
        set_thread_info(self._outer)
        self._generators.put_back()
