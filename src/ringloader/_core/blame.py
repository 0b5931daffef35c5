"""Blame: which sample it is that ends workers.

Owns the count of deaths per sample and what follows when there are too many, the narrowing down where a dataset fetches many
samples in one call, and the memory of samples that were found out. Must not start or end workers.

Narrowing. A death in a call for n samples says that one of them, or something else, ended the worker. The first is followed by
the same call again, for whoever killed the worker may not have meant the sample. From then on the batch is fetched in pieces:
the range under suspicion in about sqrt(n) of them, its neighbours in one call each. Halves would need log2(n) deaths, each of
them a restart; this needs one for n <= 16, two for n <= 256. A death that narrows the range is not charged to its worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ringloader._core import events as ev
from ringloader._core.bad_samples import BadSamples
from ringloader._core.policy import FaultPolicy
from ringloader._core.records import record
from ringloader._core.room import Room
from ringloader._core.session import Batch, Fault, Session
from ringloader._core.workers import Worker, Workers

# A range this small is fetched sample by sample.
_SMALL_RANGE = 16
# Where the charges of deaths in calls for many samples are kept.
_TOGETHER = -1


@record
class End:
    """The end of a worker in the middle of a batch; `story` and `facts` are what is told of it."""

    worker: Worker
    session: Session
    batch: Batch
    death: ev.Death
    story: str
    facts: Mapping[str, Any]


class Blame:
    """Charges deaths to samples. `deadly` outlives the workers: it is kept by whoever has others made."""

    def __init__(self, faults: FaultPolicy, workers: Workers, room: Room) -> None:
        self.deadly = BadSamples()
        self._faults = faults
        self._workers = workers
        self._room = room

    def charge(self, end: End, *, restarts: bool) -> tuple[bool, str]:
        """Count a death against what was being fetched. Returns whether a restart is due, and what is to be said of it."""
        worker, session, batch, death = end.worker, end.session, end.batch, end.death
        if death.sample < 0:
            return restarts, ""
        if death.num_samples > 1 and batch.stream < 0:
            return self._narrow(end, restarts=restarts), ""
        sample = death.sample
        # It was among those of every range before: each was narrower than the last.
        batch.deaths[sample] = batch.deaths.get(sample, 0) + 1 + batch.num_range_deaths
        batch.num_range_deaths = 0
        charged = self._charged(end, sample)
        key = batch.key_list()[sample] if batch.stream < 0 and sample < batch.num_keys else None
        together = batch.charged.get(_TOGETHER, [])
        is_known = batch.stream < 0 and key in self.deadly  # found out by another batch, while this one was on its way
        is_bad = batch.deaths[sample] >= self._faults.sample_deaths or is_known
        if is_bad and batch.stream < 0 and sample < batch.num_keys:
            self.deadly.add(key)
        if is_bad and self._leave_out(session, batch, sample):
            self._refund(worker, [*charged, *together])
            policy = self._faults.on_bad_sample
            done = "is left out from now on" if policy == "skip" else "is replaced by another from now on"
            return True, f"; sample {key!r} {done} (faults.on_bad_sample={policy!r})"
        if is_bad or self._workers.are_lost:
            session.fail(batch, Fault("deaths", sample, worker.worker_id, None, end.story, end.facts))
            if session.streams is not None:
                # Beyond the sample that kills nobody can read.
                self._room.end_stream(session, batch.stream, batch.number + 1)
        return restarts, ""

    def _narrow(self, end: End, *, restarts: bool) -> bool:
        worker, session, batch, death = end.worker, end.session, end.batch, end.death
        start, stop = death.sample, death.sample + death.num_samples
        batch.num_range_deaths += 1
        is_enough = batch.num_range_deaths >= self._faults.sample_deaths
        if is_enough and batch.cuts and (start, stop) == (0, batch.num_keys):
            # It was fetched in pieces just before, and no piece did it: all of it together does.
            session.fail(batch, Fault("deaths", -1, worker.worker_id, None, end.story, end.facts))
            self._refund(worker, self._charged(end, _TOGETHER))
            return True
        if batch.num_range_deaths >= min(2, self._faults.sample_deaths):
            batch.cuts = np.array(cuts(start, stop, batch.num_keys), np.int64).tobytes()
        is_narrower = batch.suspect is not None and batch.suspect[0] <= start and stop <= batch.suspect[1]
        is_narrower = is_narrower and batch.suspect != (start, stop)
        batch.suspect = (start, stop)
        if not is_narrower:
            self._charged(end, _TOGETHER)
            return restarts
        self._refund(worker, [worker.worker_id] if worker.was_charged else [])
        return True

    @staticmethod
    def _charged(end: End, place: int) -> list[int]:
        """Note who was charged for a place of the batch; one of several deaths for want of memory was not."""
        noted = end.batch.charged.setdefault(place, [])
        if end.worker.was_charged:
            noted.append(end.worker.worker_id)
        return noted

    def _refund(self, worker: Worker, charged: Iterable[int]) -> None:
        """It was not the workers' fault: take their charges back, and have this one replaced after all."""
        for worker_id in charged:
            self._workers.refund(self._workers.all[worker_id])
        self._workers.reprieve(worker)

    def meet(self, session: Session, batch: Batch) -> None:
        """A new batch may have samples that ended workers before: leave them out, or have the next death decide."""
        if batch.stream >= 0:
            return
        keys = batch.key_list()
        places = [place for place, key in enumerate(keys) if key in self.deadly]
        if not places:
            return
        if self._faults.on_bad_sample == "raise":
            # It may be cured by now, so it is tried again, alone, but once only.
            for place in places:
                batch.deaths[place] = self._faults.sample_deaths - 1
            alone = {0, *places, *(place + 1 for place in places if place + 1 < len(keys))}
            batch.cuts = np.array(sorted(alone), np.int64).tobytes()
            return
        while places:
            if not self._leave_out(session, batch, places[0]):
                session.fail(batch, Fault("deadly", places[0], -1))
                return
            places = [place for place, key in enumerate(batch.key_list()) if key in self.deadly]

    def _leave_out(self, session: Session, batch: Batch, sample: int) -> bool:
        policy = self._faults.on_bad_sample
        return policy != "raise" and session.leave_out(batch, sample, replace=policy == "replace")


def cuts(start: int, stop: int, num_samples: int) -> list[int]:
    """Return the places at which calls for a batch begin: the range in pieces, what is before and behind it in one call each.

    >>> cuts(4, 8, 32)
    [0, 4, 5, 6, 7, 8]
    """
    size = stop - start
    step = 1 if size <= _SMALL_RANGE else math.isqrt(size - 1) + 1
    before = [0] if start else []
    behind = [stop] if stop < num_samples else []
    return [*before, *range(start, stop, step), *behind]
