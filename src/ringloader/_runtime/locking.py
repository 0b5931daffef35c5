"""Locks that no interrupt leaves held, or lets go of for somebody else.

`with lock:` is that up to Python 3.13. In 3.14 a signal is handled between the `__enter__` of the lock and the body as well
(python/cpython#148874): what its handler raises there leaves the lock held for ever, and the loader waits for it. So code that
may run on the user's thread takes a lock as below.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def holding(lock: threading.RLock, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `change` with the lock held. A re-entrant lock: of another kind the release could be another thread's."""
    try:
        lock.acquire()
        return change(*args, **kwargs)
    finally:
        try:
            lock.release()
        except RuntimeError:
            pass  # the interrupt came while this thread waited for it
