"""Slots that the user has let go while a copy out of them may still run.

Owns the leases that have ended since CUDA is in use, until everything that was queued on the right streams before is done:
the streams current when the batch was handed over, those current now, and those the user named. "Now" is the next call of the
thread that was handed the batch; another thread's streams say nothing about it, so its leases wait for it, but not for ever. A
stream that is current only between two calls is seen by nobody and has to be named. A lease whose streams are known for
certain is `is_exact`. torch would keep track of copies only out of memory of its own.

`add` may be called anywhere under the pump's lock, for it calls nothing; `advance` on threads of the user's alone. A slot stays
listed until `advance` has said that it is free, so an interrupt forgets none. Must not change a slot's state itself.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ringloader._runtime.cuda import CaptureError, Cuda, Event, Stream

Key = tuple[int, int]

# How long the thread that was handed a batch may stay away before another one's streams have to do.
_OTHERS_S = 1.0


@dataclass(slots=True, eq=False)
class _Fence:
    """Marks on streams, and the leases that ended before they were set."""

    events: list[Event]
    leases: dict[Key, Any]


class Fences:
    """What one ring waits for."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._unrecorded: dict[Key, Any] = {}
        self._fences: list[_Fence] = []

    def needs(self, lease: Any) -> bool:
        """Whether a copy out of this lease's slot can be under way at all."""
        return bool(lease.streams) or self._cuda.is_active()

    def add(self, lease: Any) -> None:
        """Take in a lease that has ended. A second time changes nothing."""
        if lease.key not in self._unrecorded:
            lease.ended_s = time.monotonic()
            self._unrecorded[lease.key] = lease

    @property
    def is_waiting(self) -> bool:
        return bool(self._unrecorded or self._fences)

    def leases(self) -> dict[Key, Any]:
        """All leases that are waited for, by (slot id, generation)."""
        found = dict(self._unrecorded)
        for fence in self._fences:
            found.update(fence.leases)
        return found

    def is_postponed(self) -> bool:
        """Nothing can be found out at present: a graph is being captured."""
        return self._cuda.is_capturing()

    def advance(self, *, of_all_threads: bool = False) -> list[Key]:
        """Set marks for what has been added, and return the slots whose copies have all ended. On a thread of the user's."""
        if not self.is_waiting or self._cuda.is_capturing():
            return []
        if self._unrecorded:
            try:
                self._record(of_all_threads=of_all_threads)
            except CaptureError:
                return []  # on another thread, which `is_capturing` does not see
        done = [fence for fence in self._fences if self._is_done(fence)]
        if not done:
            return []
        self._fences = [fence for fence in self._fences if fence not in done]
        for event in chain.from_iterable(fence.events for fence in done):
            self._cuda.recycle(event)
        return list(chain.from_iterable(fence.leases for fence in done))

    def _is_done(self, fence: _Fence) -> bool:
        try:
            return all(map(self._cuda.is_complete, fence.events))
        except CaptureError:
            # Another thread was capturing on that very stream, and the mark has become part of its graph: set another.
            self._unrecorded.update(fence.leases)
            self._fences = [other for other in self._fences if other is not fence]
            return False

    def _record(self, *, of_all_threads: bool) -> None:
        due = {key: lease for key, lease in self._unrecorded.items() if of_all_threads or self._is_due(lease)}
        exact = {key: lease for key, lease in due.items() if lease.is_exact}
        others = {key: lease for key, lease in due.items() if not lease.is_exact}
        fences = [self._fence(leases, now) for leases, now in ((exact, []), (others, self._cuda.streams())) if leases]
        # An interrupt between the two leaves a lease in both: it is marked again, later, and its slot comes back once.
        self._fences = [*self._fences, *fences]
        self._unrecorded = {key: lease for key, lease in self._unrecorded.items() if key not in due}

    def _is_due(self, lease: Any) -> bool:
        """This thread's streams are the ones to wait for, or nobody else will come to say."""
        if lease.is_exact or lease.thread == threading.get_ident():
            return True
        is_old = time.monotonic() - lease.ended_s > _OTHERS_S
        return is_old or all(thread.ident != lease.thread for thread in threading.enumerate())

    def _fence(self, leases: dict[Key, Any], streams: list[Stream]) -> _Fence:
        distinct = {self._cuda.identity(s): s for s in chain(streams, *(lease.streams for lease in leases.values()))}
        return _Fence([self._cuda.record(stream) for stream in distinct.values()], leases)
