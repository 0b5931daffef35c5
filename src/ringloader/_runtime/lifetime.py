"""What happens to engines when the process forks or ends.

Owns the list of engines that live, and of rings that outlive theirs because page-locked memory of them is still in use. At
interpreter exit threads are stopped, workers ended and registrations undone before modules go; in a forked child engines are
marked foreign, since their locks, sockets and processes are the parent's.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from typing import Any, Protocol

from ringloader._runtime import as_worker, memory
from ringloader._runtime.locking import holding

# How long workers may take to leave by themselves at interpreter exit.
_EXIT_STOP_S = 0.3
# How long, all told, for copies before registrations are left to the end of the process.
_EXIT_WAIT_S = 1.0


class Closable(Protocol):
    """What this module needs of an engine."""

    def close(self, stop_s: float = ...) -> None: ...

    def disown(self) -> None: ...

    def release(self, leaf: Any, address: int) -> bool: ...

    def record_stream(self, leaf: Any, address: int, stream: Any) -> bool: ...


class Lingering(Protocol):
    """What this module needs of a ring."""

    def linger(self) -> bool: ...

    def leave(self, deadline_s: float) -> None: ...


ENGINES: weakref.WeakSet[Closable] = weakref.WeakSet()
LINGERING: list[Lingering] = []  # rings that are closed and hold registrations
_sweeping = threading.RLock()
_hook_is_registered = False
_is_exiting = False


def register(engine: Closable) -> None:
    """Have an engine closed at exit and disowned in forked children."""
    global _hook_is_registered
    ENGINES.add(engine)
    if not _hook_is_registered:
        _hook_is_registered = True
        atexit.register(_close_all)


def stay_if_exiting() -> None:
    """Do not return to the user's code in a daemon thread that the exit of the interpreter has thrown out of `next`.

    It would end the program with the traceback of a ClosedError that nobody can do anything about. Threads of other kinds have
    ended before the exit hook runs; this one ends with the process.
    """
    if _is_exiting and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()


def sweep() -> None:
    """Undo the registrations of closed rings that nobody uses any more. Only on a thread that may call CUDA."""
    if not LINGERING or _sweeping._is_owned():  # type: ignore[attr-defined]  # a signal handler in the midst of it
        return
    holding(_sweeping, _sweep)


def _sweep() -> None:
    for ring in list(LINGERING):
        if not ring.linger():
            LINGERING.remove(ring)


def _close_all() -> None:
    global _is_exiting
    _is_exiting = True
    engines = list(ENGINES)
    closers = [
        threading.Thread(target=engine.close, args=(_EXIT_STOP_S,), name="ringloader-exit", daemon=True) for engine in engines
    ]
    started = []
    for closer, engine in zip(closers, engines, strict=True):
        try:
            closer.start()
            started.append(closer)
        except RuntimeError:
            engine.close(_EXIT_STOP_S)  # no more threads to be had
    for closer in started:
        closer.join()
    deadline_s = time.monotonic() + _EXIT_WAIT_S
    for ring in LINGERING:
        ring.leave(deadline_s)  # here, not in a closer: the main thread's device is the user's
    LINGERING.clear()


def _disown_all() -> None:
    global _sweeping
    _sweeping = threading.RLock()
    LINGERING.clear()
    memory.ACCOUNT.reset()
    memory.PINNED.reset()
    as_worker.reset()
    for engine in list(ENGINES):
        engine.disown()


os.register_at_fork(after_in_child=_disown_all)
