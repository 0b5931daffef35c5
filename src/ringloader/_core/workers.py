"""Worker life cycle: starts, restarts, budget, backoff, time limits.

Owns which incarnation of which worker lives, which Fills it holds, and when it has had its time. A worker is judged by its own
status page, and never for time in which this process itself did not run. Must not start or kill anything itself.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field

from ringloader._core.messages import Fill
from ringloader._core.policy import PoolPolicy
from ringloader._core.views import WorkerView

# The watcher looks at this interval when nothing else is due; a look that comes this much late means we did not run.
LOOK_S = 1.0
_LATE_S = 0.3
# Deaths for want of memory within this time of each other have one cause.
_SAME_OOM_S = 1.0
# How long a successor may take to be ready where there is no `start_timeout_s`.
_SUCCESSOR_START_S = 600.0
# Until a worker that was told to stop, because its successor is there, is killed.
STOP_S = 10.0


class WorkerState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    KILLED = "killed"
    BACKOFF = "backoff"
    GIVEN_UP = "given up"
    STOPPED = "stopped"
    RETIRING = "retiring"  # its successor has taken over; it finishes what it was given


@dataclass(slots=True, eq=False)
class Worker:
    """One worker id and its present incarnation. Times on the monotonic clock."""

    worker_id: int
    state: WorkerState = WorkerState.STOPPED
    incarnation: int = 0
    fills: dict[int, tuple[int, Fill]] = field(default_factory=dict)  # serial → (session id, Fill), oldest first
    num_filled: int = 0  # by this incarnation
    deaths: deque[float] = field(default_factory=deque)
    num_restarts: int = 0
    num_fruitless: int = 0  # deaths in a row without a batch in between
    since_s: float = 0.0  # start of the present state; due time in BACKOFF
    kill_reason: str = ""
    seen: tuple[int, int] = (-1, -1)  # (serial, sample) of the last look
    seen_since_s: float = 0.0
    excused_s: float = 0.0  # time of the present batch in which we did not run
    who: str = "not started"  # its name for the operating system, "pid 123"
    is_learning: bool = False  # its Fill has no slot; a Fill behind it would come before the answer to its NeedRoom
    was_charged: bool = False  # for its last death
    due: str = ""  # why it is to give way to a successor
    is_draining: bool = False  # it is given no more batches
    is_told: bool = False  # to stop
    spared_until_s: float = 0.0  # before which no successor is started
    num_spared: int = 0

    def is_available(self, limit: int) -> bool:
        return self.state is WorkerState.RUNNING and len(self.fills) < limit and not (self.is_learning or self.is_draining)


class Workers:
    """All workers of one pool."""

    def __init__(self, policy: PoolPolicy) -> None:
        self.policy = policy
        self.all = [Worker(worker_id) for worker_id in range(policy.num_workers)]
        self.successors: dict[int, Worker] = {}  # by worker id: started, to take that one's place
        self.retiring: list[Worker] = []  # whose place was taken
        self._num_starts = [0] * policy.num_workers
        self._oom_s = -math.inf  # when the kernel last ended one for want of memory
        self.look_at_s: float | None = None
        self._late_s = 0.0  # by how much the present look came too late, because this process did not run

    def get(self, worker_id: int, incarnation: int) -> Worker | None:
        """The worker, if that incarnation is there."""
        worker = self.all[worker_id]
        if worker.incarnation == incarnation:
            return worker
        others = (one for one in self.everyone() if one.worker_id == worker_id and one.incarnation == incarnation)
        return next(others, None)

    def everyone(self) -> list[Worker]:
        """Every incarnation that is there: workers, their successors, and those whose place was taken."""
        return [*self.all, *self.successors.values(), *self.retiring]

    def promote(self, successor: Worker) -> None:
        """A successor becomes the worker of its id, with the history of the one before."""
        worker = self.all[successor.worker_id]
        successor.deaths, successor.num_restarts = worker.deaths, worker.num_restarts
        self.all[successor.worker_id] = successor
        self.successors.pop(successor.worker_id, None)

    def forget_others(self) -> None:
        """No successor is there any more, nor anybody whose place was taken."""
        self.successors.clear()
        self.retiring.clear()

    def least_loaded(self, max_fills: int) -> Worker | None:
        """The running worker with the fewest Fills, less than `max_fills`."""
        best: Worker | None = None
        for worker in self.all:
            if worker.is_available(max_fills) and (best is None or len(worker.fills) < len(best.fills)):
                best = worker
        return best

    def choose_quick(self, session_id: int, max_fills: int) -> Worker | None:
        """The worker for a batch that takes less time than waking somebody; None where it had better wait.

        Of the first workers that have no batches of others, as many as can run beside the training process: the one that has
        the most, but less than `max_fills`. Never more: should batches turn slow, those on one worker hold each other up.
        """
        best: Worker | None = None
        num_left = self.policy.num_beside
        for worker in self.all:
            if not worker.is_available(1 << 30) or any(owner != session_id for owner, _ in worker.fills.values()):
                continue
            num_fills = len(worker.fills)
            if num_fills < max_fills and (best is None or num_fills > len(best.fills)):
                best = worker
            num_left -= 1
            if not num_left:
                return best
        return best or self.least_loaded(self.policy.prefetch_factor)

    def start(self, worker: Worker, now_s: float) -> int:
        """Begin the next incarnation; return its number."""
        self._num_starts[worker.worker_id] += 1
        worker.incarnation = self._num_starts[worker.worker_id]
        worker.state, worker.since_s = WorkerState.STARTING, now_s
        worker.num_filled, worker.seen, worker.excused_s, worker.kill_reason = 0, (-1, -1), 0.0, ""
        worker.is_learning = worker.is_draining = worker.is_told = False
        worker.due = ""
        return worker.incarnation

    def died(self, worker: Worker, now_s: float, *, is_oom: bool = False) -> bool:
        """Charge a death; True when a replacement is due (in BACKOFF until then), False when the worker is given up.

        Several that the kernel ends for want of memory at about the same time are one death: of the first.
        """
        faults = self.policy.faults
        worker.num_fruitless = 0 if worker.num_filled else worker.num_fruitless + 1
        is_one_of_many = is_oom and now_s - self._oom_s <= _SAME_OOM_S
        if is_oom:
            self._oom_s = now_s
        worker.was_charged = not is_one_of_many
        if worker.was_charged:
            worker.deaths.append(now_s)
        while worker.deaths and worker.deaths[0] <= now_s - faults.window_s:
            worker.deaths.popleft()
        if len(worker.deaths) > faults.restarts:
            worker.state = WorkerState.GIVEN_UP
            return False
        worker.num_restarts += 1
        worker.state, worker.since_s = WorkerState.BACKOFF, now_s + self._backoff_s(worker)
        return True

    def refund(self, worker: Worker) -> None:
        """Take back a charge: the death was a sample's fault, and that sample is left out from now on."""
        if worker.deaths:
            worker.deaths.pop()

    def reprieve(self, worker: Worker) -> None:
        """A worker whose charge was taken back is replaced after all."""
        if worker.state is WorkerState.GIVEN_UP:
            worker.num_restarts += 1
        worker.state = WorkerState.BACKOFF

    @property
    def are_lost(self) -> bool:
        """No worker is left."""
        return all(worker.state is WorkerState.GIVEN_UP for worker in self.all)

    def _backoff_s(self, worker: Worker) -> float:
        # The first replacement starts at once: a worker that was killed from outside should not cost a wait.
        if worker.num_fruitless < 2:
            return 0.0
        faults = self.policy.faults
        return min(faults.max_backoff_s, faults.backoff_s * 2.0 ** min(worker.num_fruitless - 2, 32))

    def look(self, now_s: float) -> None:
        """Excuse every worker for time in which this process did not run: stopped, suspended, or blocked as a whole."""
        late_s = 0.0 if self.look_at_s is None else now_s - self.look_at_s
        self.look_at_s = None
        self._late_s = late_s if late_s > _LATE_S else 0.0
        if self._late_s:
            for worker in self.everyone():
                worker.excused_s += late_s
                worker.seen_since_s += late_s
                if worker.state is WorkerState.STARTING:
                    worker.since_s += late_s

    def overdue(self, worker: Worker, view: WorkerView, now_s: float) -> str | None:
        """Return why a running worker has had its time, in words, or None."""
        if view.serial not in worker.fills:
            return self._begins_none(worker, view, now_s)
        if worker.seen[0] != view.serial:
            # Seen for the first time. It may have begun before this process stopped running, too late for the look before.
            worker.excused_s = min(self._late_s, now_s - view.began_s)
        if worker.seen != (view.serial, view.sample):
            worker.seen, worker.seen_since_s = (view.serial, view.sample), now_s
        timeout_s, stall_s = self.policy.timeout_s, self.policy.faults.stall_s
        spent_s = now_s - view.began_s - worker.excused_s
        if timeout_s is not None and spent_s > timeout_s:
            return f"it spent {spent_s:.1f} s on one batch (timeout={timeout_s:g})"
        if stall_s is not None and now_s - worker.seen_since_s > stall_s:
            return f"it made no progress within one sample for {now_s - worker.seen_since_s:.1f} s (faults.stall_s={stall_s:g})"
        return None

    def _begins_none(self, worker: Worker, view: WorkerView, now_s: float) -> str | None:
        """Return why a worker that was given batches, and sits there, has had its time: it may have been stopped."""
        if view.stage != "idle":
            worker.seen = (-1, -1)
            return None
        waiting = (-1, next(iter(worker.fills)))
        if worker.seen != waiting:
            worker.seen, worker.seen_since_s = waiting, now_s
        waited_s = now_s - worker.seen_since_s
        limits = {"timeout": self.policy.timeout_s, "faults.stall_s": self.policy.faults.stall_s}
        for name, limit_s in limits.items():
            if limit_s is not None and waited_s > limit_s:
                return f"it did not begin the batch that it was given {waited_s:.1f} s before ({name}={limit_s:g})"
        return None

    def start_overdue(self, worker: Worker, now_s: float) -> bool:
        limit_s = self.start_limit_s(worker)
        return limit_s is not None and now_s - worker.since_s > limit_s

    def start_limit_s(self, worker: Worker) -> float | None:
        """How long a worker may take to be ready. Nobody waits for a successor, so that one always has a limit."""
        limit_s = self.policy.faults.start_timeout_s
        return _SUCCESSOR_START_S if limit_s is None and worker in self.successors.values() else limit_s

    def plan_look(self, now_s: float) -> None:
        """Bring the next look forward to when something may become due; one that is planned is never put off."""
        for worker in self.everyone():
            due_s = self._due_s(worker, now_s)
            if due_s is not None and (self.look_at_s is None or due_s < self.look_at_s):
                self.look_at_s = max(now_s, due_s)

    def _due_s(self, worker: Worker, now_s: float) -> float | None:
        if worker.state is WorkerState.BACKOFF:
            return worker.since_s
        if worker.state is WorkerState.KILLED:
            return worker.since_s + self.policy.unreaped_s
        if worker.state is WorkerState.STARTING:
            limit_s = self.start_limit_s(worker)
            return None if limit_s is None else worker.since_s + limit_s + 0.001
        if worker.is_told:
            return worker.since_s + STOP_S
        limits = [limit for limit in (self.policy.timeout_s, self.policy.faults.stall_s) if limit is not None]
        if worker.state in (WorkerState.RUNNING, WorkerState.RETIRING) and worker.fills and limits:
            return now_s + min(LOOK_S, min(limits) / 8)
        if worker.state is WorkerState.RUNNING and self.policy.recycles and self.policy.faults.max_worker_rss is not None:
            return now_s + LOOK_S
        return None
