"""Recycling: workers that have grown, or have made enough batches, give way to a successor.

Owns the way of a change between two healthy incarnations. The successor is started first, while the worker goes on; once it has
built its dataset it takes the worker's place, the worker finishes the batches it was given, and is told to stop. So no batch
waits for a change. One worker changes at a time: each is there twice meanwhile, with all its memory.

Streams. Two processes cannot read one stream, so there the worker is given no more batches first, and gives way when it has
none left; and only where the dataset saves its state, or between epochs: a successor would read the stream from its beginning.
"""

from __future__ import annotations

from collections import deque

from ringloader._core import events as ev
from ringloader._core.calls import Calls
from ringloader._core.policy import PoolPolicy
from ringloader._core.session import Session
from ringloader._core.units import in_words
from ringloader._core.views import WorkerView
from ringloader._core.workers import Worker, Workers, WorkerState

# A limit that is reached after fewer batches than this is too low, and is not heeded again for a while.
_FEW_BATCHES = 16
_PAUSE_S = 60.0
_MAX_PAUSE_S = 600.0


class Recycling:
    """Changes healthy workers."""

    def __init__(
        self, policy: PoolPolicy, workers: Workers, calls: Calls, sessions: dict[int, Session], outbox: deque[ev.Command]
    ) -> None:
        self._calls = calls
        self.num_recycled = 0
        self.is_over = False  # nothing will come of the run any more
        self._limits = policy.faults
        self._is_on = policy.recycles and policy.faults.recycles
        self._workers = workers
        self._sessions = sessions
        self._outbox = outbox

    def look_at(self, worker: Worker, view: WorkerView | None) -> None:
        """Mark a worker that has grown beyond its limit."""
        limit = self._limits.max_worker_rss
        if self._is_on and limit is not None and view is not None and view.private_nbytes > limit:
            grown = in_words(view.private_nbytes)
            worker.due = f"it had {grown} of private memory (faults.max_worker_rss={limit:,} bytes)"

    def made(self, worker: Worker) -> None:
        """A worker has made one batch more: mark it when it has made enough."""
        limit = self._limits.max_batches_per_worker
        if self._is_on and limit is not None and worker.num_filled >= limit:
            worker.due = f"it had made {worker.num_filled:,} batches (faults.max_batches_per_worker={limit:,})"

    def settle(self, now_s: float) -> None:
        """Take every step that can be taken now."""
        if not self._is_on or self.is_over:
            return
        for worker_id, successor in list(self._workers.successors.items()):
            if successor.state is WorkerState.RUNNING and self._may_give_way(self._workers.all[worker_id]):
                self._change(self._workers.all[worker_id], successor, now_s)
        for worker in self._workers.retiring:
            is_idle = not worker.fills and not self._calls.are_pending(worker)
            if worker.state is WorkerState.RETIRING and is_idle and not worker.is_told:
                worker.is_told, worker.since_s = True, now_s
                self._outbox.append(ev.StopWorker(worker.worker_id, worker.incarnation))
        if not self._workers.successors and not self._workers.retiring:
            self._begin_next(now_s)

    def _begin_next(self, now_s: float) -> None:
        for worker in self._workers.all:
            if worker.due and worker.state is WorkerState.RUNNING and now_s >= worker.spared_until_s and self._can_resume():
                successor = self._workers.successors[worker.worker_id] = Worker(worker.worker_id)
                self._outbox.append(ev.StartWorker(worker.worker_id, self._workers.start(successor, now_s)))
                return

    def _can_resume(self) -> bool:
        return all(session.streams is None or session.streams.are_saved for session in self._sessions.values())

    def _may_give_way(self, worker: Worker) -> bool:
        if all(session.streams is None for session in self._sessions.values()):
            return True
        # An epoch may have begun since the successor was started, of a stream that it would have to read from the beginning.
        worker.is_draining = self._can_resume()
        return worker.is_draining and not worker.fills

    def _change(self, worker: Worker, successor: Worker, now_s: float) -> None:
        """The successor takes the worker's place."""
        reason, num_filled = worker.due, worker.num_filled
        self._workers.promote(successor)
        worker.state, worker.since_s = WorkerState.RETIRING, now_s
        self._workers.retiring.append(worker)
        self.num_recycled += 1
        for session in self._sessions.values():
            for batch in session.batches.values():
                if batch.sticky_worker == worker.worker_id:
                    batch.sticky_worker = -1  # it will be fetched again
        who = f"worker {worker.worker_id} ({worker.who}, incarnation {worker.incarnation})"
        text = f"{who} gives way to {successor.who}: {reason}"
        is_low = num_filled < _FEW_BATCHES and self._limits.max_worker_rss is not None and "max_worker_rss" in reason
        if is_low:
            successor.spared_until_s = now_s + _PAUSE_S
            text += f", after {num_filled} batches only; the limit is not heeded for {_PAUSE_S:g} s: raise it"
        self._outbox.append(ev.Warn(text, is_fault=is_low))

    def failed(self, successor: Worker, story: str, now_s: float) -> None:
        """A successor did not come to life: the worker goes on as it is."""
        self._workers.successors.pop(successor.worker_id, None)
        worker = self._workers.all[successor.worker_id]
        worker.is_draining = False
        if worker.state is WorkerState.RUNNING:
            pause_s = min(_MAX_PAUSE_S, self._limits.backoff_s * 2.0 ** min(worker.num_spared, 32))
            worker.num_spared += 1
            worker.spared_until_s = now_s + pause_s
            text = f"{story}; it was to take the place of {worker.who}, which goes on, and is tried again in {pause_s:g} s"
            self._outbox.append(ev.Warn(text))
