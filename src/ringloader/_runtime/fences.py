"""Slots that the user has let go while a copy out of them may still run.

Owns the leases that have ended since CUDA is in use, until everything that was queued on the right streams before is done:
the streams current when the batch was handed over, those current now, and those the user named. "Now" is later than the end of
the lease, so it covers too much rather than too little; a lease whose streams are known for certain is `is_exact`. torch would
keep track of copies only out of memory of its own.

`add` may be called anywhere under the pump's lock, for it calls nothing; `advance` on the consumer's thread alone. A slot stays
listed until `advance` has said that it is free, so an interrupt forgets none. Must not change a slot's state itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from ringloader._runtime.cuda import CaptureError, Cuda, Event, Stream

Key = tuple[int, int]


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

    def advance(self) -> list[Key]:
        """Set marks for what has been added, and return the slots whose copies have all ended. The consumer's thread alone."""
        if not self.is_waiting or self._cuda.is_capturing():
            return []
        if self._unrecorded:
            try:
                self._record()
            except CaptureError:
                return []  # on another thread, which `is_capturing` does not see
        done = [fence for fence in self._fences if all(map(self._cuda.is_complete, fence.events))]
        if not done:
            return []
        self._fences = [fence for fence in self._fences if fence not in done]
        for event in chain.from_iterable(fence.events for fence in done):
            self._cuda.recycle(event)
        return list(chain.from_iterable(fence.leases for fence in done))

    def _record(self) -> None:
        exact = {key: lease for key, lease in self._unrecorded.items() if lease.is_exact}
        others = {key: lease for key, lease in self._unrecorded.items() if not lease.is_exact}
        fences = [self._fence(leases, now) for leases, now in ((exact, []), (others, self._cuda.streams())) if leases]
        # An interrupt between the two leaves a lease in both: it is marked again, later, and its slot comes back once.
        self._fences = [*self._fences, *fences]
        self._unrecorded = {key: lease for key, lease in self._unrecorded.items() if key not in exact and key not in others}

    def _fence(self, leases: dict[Key, Any], streams: list[Stream]) -> _Fence:
        distinct = {self._cuda.identity(s): s for s in chain(streams, *(lease.streams for lease in leases.values()))}
        return _Fence([self._cuda.record(stream) for stream in distinct.values()], leases)
