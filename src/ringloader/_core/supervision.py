"""Supervision: starts, deaths and time limits of workers, and what follows for their batches.

Owns the way from a fact (a process is gone, a deadline has passed, a message made no sense) to a replacement or a worker given
up, and the sentences that tell of it; whose fault a death was is blame.py's, healthy workers are replaced by recycling.py.
Slots of a worker that was killed stay its own until it is reaped, because it may still be inside a memcpy. Must not look at a
clock or a process.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from typing import Any

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.blame import Blame, End
from ringloader._core.calls import Calls
from ringloader._core.policy import PoolPolicy
from ringloader._core.recycling import Recycling
from ringloader._core.room import Room
from ringloader._core.session import Batch, BatchState, Session
from ringloader._core.units import counted
from ringloader._core.views import WorkerView
from ringloader._core.workers import STOP_S, Worker, Workers, WorkerState

Observe = Callable[[int, int], WorkerView | None]  # worker id and incarnation →


class Supervision:
    """Watches over the workers of one pool."""

    def __init__(self, policy: PoolPolicy, sessions: dict[int, Session], room: Room, outbox: deque[ev.Command]) -> None:
        self.policy = policy
        self.workers = Workers(policy)
        self.calls = Calls(self.workers, outbox)
        self.blame = Blame(policy.faults, self.workers, room)
        self.recycling = Recycling(policy, self.workers, self.calls, sessions, outbox)
        self.dataset_facts: dict[str, Any] | None = None
        self.start_fault: msg.StartFailed | None = None  # no worker could start: nothing will ever come
        self.mismatch: str | None = None  # workers built different datasets
        self.num_refilled = 0
        self.last_death: dict[str, Any] = {}  # its facts
        self._sessions = sessions
        self._room = room
        self._outbox = outbox

    @property
    def is_lost(self) -> bool:
        """No worker is left."""
        return self.workers.are_lost

    def start(self, worker: Worker, now_s: float) -> None:
        """Have the next incarnation of a worker started."""
        self._outbox.append(ev.StartWorker(worker.worker_id, self.workers.start(worker, now_s)))
        self.workers.plan_look(now_s)

    def ready(self, worker: Worker, message: msg.Ready, now_s: float) -> None:
        """A worker has built its dataset."""
        if worker.state is not WorkerState.STARTING:
            return
        if self.dataset_facts is None:
            self.dataset_facts = message.facts
        else:
            mismatch = self._compare(worker, message.facts)
            if mismatch is not None:
                # No batch may come from it. The run is over, but for a successor, whose worker is as good as before.
                if worker is not self.workers.successors.get(worker.worker_id):
                    self.mismatch, self.recycling.is_over = mismatch, True
                self._kill(worker, mismatch, now_s, dump=False)
                return
        worker.state, worker.since_s = WorkerState.RUNNING, now_s
        self.calls.repeat(worker)

    def start_failed(self, worker: Worker, message: msg.StartFailed) -> None:
        """A worker could not build its dataset: at the first start that is final, later it is tried again."""
        if worker.incarnation == 1 and worker.state is WorkerState.STARTING:
            self.start_fault = message
        worker.kill_reason = f"{message.stage} failed: {message.error_type}: {message.error}"

    def exited(self, event: ev.WorkerExited, now_s: float) -> None:
        """A process is gone and reaped."""
        worker = self.workers.get(event.worker_id, event.incarnation)
        if worker is None or worker.state in (WorkerState.STOPPED, WorkerState.GIVEN_UP, WorkerState.BACKOFF):
            self._room.unquarantine(event)
            return
        if event.death.reason:
            worker.kill_reason = f"it could not be started: {event.death.reason}"  # what a pool that is lost says
        story = _story(worker, event.death)
        self.calls.ended(worker)
        if worker is self.workers.successors.get(worker.worker_id):
            self.recycling.failed(worker, story, now_s)
            return
        blamed = self._requeue(worker, event.death, story)
        if self.mismatch is not None or (self.start_fault is not None and worker.incarnation == 1 and not worker.num_filled):
            worker.state = WorkerState.GIVEN_UP  # the run is over
            return
        self._bury(worker, event.death, story, blamed, now_s)

    def _bury(self, worker: Worker, death: ev.Death, story: str, blamed: tuple[Session, Batch] | None, now_s: float) -> None:
        """Charge a worker's end to it, and to what was being fetched, and say so."""
        if worker.is_told:
            self.workers.retiring.remove(worker)
            if worker.kill_reason:
                self._outbox.append(ev.Warn(story))
            return  # as it was to
        is_present = self.workers.all[worker.worker_id] is worker
        facts = {"who": worker.who, "incarnation": worker.incarnation, "returncode": death.returncode, "trace": death.trace}
        worker.who = "ended"
        restarts = self.workers.died(worker, now_s, is_oom=death.is_oom)
        if blamed is not None:
            story += f" while {scene(blamed[1], death)}"
        self.last_death = {"worker": worker.worker_id, "story": story, **facts}
        if blamed is not None:
            num_deadly = self.blame.deadly.num_added
            restarts, words = self.blame.charge(End(worker, *blamed, death, story, facts), restarts=restarts)
            story += words
            if self.blame.deadly.num_added > num_deadly:
                self._meet_all()
        if blamed is not None and blamed[0].streams is not None and not (self.dataset_facts or {}).get("can_replay", True):
            story += "; its stream cannot be read again (can_replay), so what was read and not delivered is lost: at most once"
        self._tell_death(worker, story, death, restarts=restarts or not is_present)
        if not is_present:
            self.workers.retiring.remove(worker)
        elif worker.worker_id in self.workers.successors:
            self._succeed(worker, now_s)
        self.workers.plan_look(now_s)

    def _meet_all(self) -> None:
        """A sample was found out: batches that wait, and hold it too, need not find it out again."""
        for session in self._sessions.values():
            for batch in list(session.batches.values()):
                if batch.state is BatchState.WAITING:
                    self.blame.meet(session, batch)

    def _succeed(self, worker: Worker, now_s: float) -> None:
        """A worker has died whose successor is there already, or being started."""
        successor = self.workers.successors[worker.worker_id]
        if worker.state is WorkerState.GIVEN_UP:
            self._kill(successor, "the worker that it was to replace was given up", now_s, dump=False)
        else:
            self.workers.promote(successor)

    def _requeue(self, worker: Worker, death: ev.Death, story: str) -> tuple[Session, Batch] | None:
        """Take back every Fill of a dead worker; return the batch in progress."""
        blamed = None
        for serial, (session_id, fill) in list(worker.fills.items()):
            self._room.take_back(fill)
            session = self._sessions.get(session_id)
            batch = session.batches.get(fill.batch_id) if session is not None else None
            if session is None or batch is None:
                continue  # the session was closed
            session.wait(batch)
            batch.last_exit = story
            self.num_refilled += 1
            if serial == death.serial:
                blamed = (session, batch)
        worker.fills.clear()
        if self.workers.all[worker.worker_id] is not worker:
            return blamed
        for session in self._sessions.values():
            for batch in session.batches.values():
                if batch.sticky_worker == worker.worker_id:
                    batch.sticky_worker = -1
        return blamed

    def _tell_death(self, worker: Worker, story: str, death: ev.Death, *, restarts: bool) -> None:
        faults = self.policy.faults
        budget = f"{counted(len(worker.deaths), 'death')} within {faults.window_s:g} s, faults.restarts={faults.restarts}"
        if restarts:
            what = "it is tried again" if death.reason else "it is replaced and its batches are made again"
            text = f"{story}; {what} ({budget})"
        else:
            left = sum(w.state is not WorkerState.GIVEN_UP for w in self.workers.all)
            text = f"{story}; it is given up ({budget}), {left} of {len(self.workers.all)} workers are left"
        if death.trace:
            text += f"\nits stack:\n{death.trace}"
        self._outbox.append(ev.Warn(text))

    def broken(self, event: ev.WorkerBroken, now_s: float) -> None:
        """A worker said what makes no sense: nothing it says can be trusted."""
        worker = self.workers.get(event.worker_id, event.incarnation)
        if worker is not None and worker.state in (WorkerState.STARTING, WorkerState.RUNNING):
            self._kill(worker, f"it broke the protocol: {event.reason}", now_s, dump=False)

    def look_at(self, worker: Worker, observe: Observe, now_s: float) -> None:
        """Judge one worker's deadlines."""
        if worker.state is WorkerState.BACKOFF and now_s >= worker.since_s:
            self.start(worker, now_s)
        elif worker.state is WorkerState.KILLED and now_s >= worker.since_s + self.policy.unreaped_s:
            self._abandon(worker, observe(worker.worker_id, worker.incarnation), now_s)
        elif worker.state is WorkerState.STARTING and self.workers.start_overdue(worker, now_s):
            view = observe(worker.worker_id, worker.incarnation)
            stage = view.stage if view is not None else "starting"
            limit_s = self.workers.start_limit_s(worker)
            self._kill(
                worker, f"it was not ready after {limit_s:g} s (faults.start_timeout_s), stage: {stage}", now_s, dump=True
            )
        elif worker.is_told:
            if now_s >= worker.since_s + STOP_S:
                self._kill(worker, f"it did not leave within {STOP_S:g} s of being told to", now_s, dump=True)
        elif worker.state in (WorkerState.RUNNING, WorkerState.RETIRING) and worker.fills:
            view = observe(worker.worker_id, worker.incarnation)
            reason = self.workers.overdue(worker, view, now_s) if view is not None else None
            if reason is not None:
                self._kill(worker, reason, now_s, dump=True)
        if worker.state is WorkerState.RUNNING and self.policy.faults.max_worker_rss is not None:
            self.recycling.look_at(worker, observe(worker.worker_id, worker.incarnation))

    def _kill(self, worker: Worker, reason: str, now_s: float, *, dump: bool) -> None:
        worker.state, worker.since_s, worker.kill_reason = WorkerState.KILLED, now_s, reason
        self._outbox.append(ev.KillWorker(worker.worker_id, worker.incarnation, dump))
        self.workers.plan_look(now_s)

    def _abandon(self, worker: Worker, view: WorkerView | None, now_s: float) -> None:
        """It was killed and does not end: leave its slots alone, make its batches elsewhere."""
        story = (
            f"worker {worker.worker_id} ({worker.who}, incarnation {worker.incarnation}) was told to end and does not, and is "
            f"left alone with its slots; why it was told to: {worker.kill_reason}"
        )
        death = ev.Death(None)
        if view is not None:
            death = ev.Death(None, view.serial, view.blamed, view.stage, view.trace, num_samples=view.num_samples)
        self._room.quarantine(worker.worker_id, worker.incarnation, [fill for _, fill in worker.fills.values()])
        blamed = self._requeue(worker, death, story)
        self._outbox.append(ev.AbandonWorker(worker.worker_id, worker.incarnation))
        if worker is self.workers.successors.get(worker.worker_id):
            self.recycling.failed(worker, story, now_s)
            return
        self._bury(worker, death, story, blamed, now_s)

    def _compare(self, worker: Worker, facts: dict[str, Any]) -> str | None:
        """Rebuilt means rebuilt alike: hold a worker's dataset against the first. Returns why it is another one, if it is."""
        first: dict[str, Any] = self.dataset_facts or {}
        for name in ("length", "fingerprint"):
            if facts.get(name) != first.get(name):
                return (
                    f"worker {worker.worker_id} (incarnation {worker.incarnation}) built another dataset: "
                    f"{name} {facts.get(name)!r} instead of {first.get(name)!r}; usual causes are an unseeded shuffle or "
                    "split, an unsorted directory listing, the order of a set, or files that changed since the first start"
                )
        files, before = facts.get("files", {}), first.get("files", {})
        changed = sorted(path for path in files if path in before and files[path] != before[path])
        if changed and worker.incarnation > 1:
            first["files"] = {**before, **files}  # said once for each change
            names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            self._outbox.append(
                ev.Warn(
                    f"worker {worker.worker_id} was started anew (incarnation {worker.incarnation}) from files that have "
                    f"changed since the first start: {names}; its samples may be others than those of the workers before"
                )
            )
        digests, expected = facts.get("digests", {}), first.get("digests", {})
        differing = sorted(name for name in digests if name in expected and digests[name] != expected[name])
        if differing:
            names = ", ".join(repr(name) for name in differing[:5])
            self._outbox.append(
                ev.Warn(
                    f"the dataset of worker {worker.worker_id} differs from the first worker's in attribute {names}; "
                    "if samples depend on it, build it the same way everywhere (sorted listings, seeded draws)"
                )
            )
        return None


def _story(worker: Worker, death: ev.Death) -> str:
    """What happened to a worker, in one sentence."""
    who = f"worker {worker.worker_id} ({worker.who}, incarnation {worker.incarnation})"
    if death.reason:
        return f"worker {worker.worker_id} (incarnation {worker.incarnation}) could not be started: {death.reason}"
    if worker.kill_reason:
        return (
            f"{who} was killed: {worker.kill_reason}" if worker.state is WorkerState.KILLED else f"{who}: {worker.kill_reason}"
        )
    return f"{who} {describe_exit(death.returncode, death.cause)}"


def scene(batch: Batch, death: ev.Death) -> str:
    """Return what a worker was doing, e.g. "fetching sample 7 of batch 1"."""
    if batch.stream >= 0:
        sample = f" sample {death.sample} of" if death.sample >= 0 else ""
        return f"{death.stage}{sample} batch {batch.number} of stream {batch.stream}"
    keys = batch.key_list()
    last = death.sample + death.num_samples - 1
    if not 0 <= death.sample <= last < len(keys):
        sample = ""
    elif death.num_samples > 1:
        sample = f" {death.num_samples} samples ({keys[death.sample]!r} to {keys[last]!r}) of"
    else:
        sample = f" sample {keys[death.sample]!r} of"
    return f"{death.stage}{sample} batch {batch.batch_id}"


def describe_exit(returncode: int | None, cause: str = "") -> str:
    """Return how a process ended and why, e.g. "was killed by SIGSEGV (a fault in a compiled extension)"."""
    if returncode is None:
        return "ended with an unknown status"
    how = f"exited with code {returncode}" if returncode >= 0 else f"was killed by {signal_name(-returncode)}"
    return f"{how} ({cause})" if cause else how


def signal_name(number: int) -> str:
    """Return e.g. "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
