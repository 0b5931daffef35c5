"""Calls of the dataset's methods in every worker: what was asked, who has answered.

Owns the list of calls that a replacement repeats before its first batch, so that its dataset is in the state of the others.
Must not know what a method does.
"""

from __future__ import annotations

import itertools
from collections import deque

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.workers import Worker, Workers, WorkerState


class Calls:
    """The calls of one loader. `recorded` outlives its workers."""

    def __init__(self, workers: Workers, outbox: deque[ev.Command]) -> None:
        # Both are kept beyond these workers by whoever has others made.
        self.recorded: list[msg.Call] = []
        self.ids = itertools.count()
        self._workers = workers
        self._outbox = outbox
        self._answers: dict[int, dict[int, msg.Called]] = {}  # call id → worker id →
        self._pending: dict[tuple[int, int], set[int]] = {}  # worker id and incarnation → ids of calls it has not answered

    def make(self, method: str, arguments: bytes) -> int:
        """Have every worker run a method; returns the call's id."""
        call_id = next(self.ids)
        call = msg.Call(call_id, method, arguments)
        self.recorded.append(call)
        self._answers[call_id] = {}
        for worker in self._workers.everyone():
            if worker.state is WorkerState.RUNNING:
                self._send(worker, call)
        return call_id

    def _send(self, worker: Worker, call: msg.Call) -> None:
        self._pending.setdefault((worker.worker_id, worker.incarnation), set()).add(call.call_id)
        self._outbox.append(ev.SendCall(worker.worker_id, worker.incarnation, call))

    def are_pending(self, worker: Worker) -> bool:
        """A worker has not answered all calls that it was sent."""
        return bool(self._pending.get((worker.worker_id, worker.incarnation)))

    def ended(self, worker: Worker) -> None:
        """A worker has ended, and will answer nothing more."""
        self._pending.pop((worker.worker_id, worker.incarnation), None)

    def repeat(self, worker: Worker) -> None:
        """A worker is ready: before its first batch it runs what the others have run."""
        for call in self.recorded:
            self._send(worker, call)

    def answered(self, worker: Worker, message: msg.Called) -> None:
        """A worker has run a method, or failed to."""
        self._pending.get((worker.worker_id, worker.incarnation), set()).discard(message.call_id)
        answers = self._answers.get(message.call_id)
        if answers is not None:
            answers[worker.worker_id] = message
        elif message.error_type:
            method = next((call.method for call in self.recorded if call.call_id == message.call_id), "?")
            text = f"worker {worker.worker_id} could not repeat the call of {method}: {message.error_type}: {message.error}"
            self._outbox.append(ev.Warn(text))

    def results(self, call_id: int) -> dict[int, msg.Called] | None:
        """What each worker has answered, by worker id, once all have that are not given up; None before. Asked for once."""
        answers = self._answers[call_id]
        awaited = (worker for worker in self._workers.all if worker.state is not WorkerState.GIVEN_UP)
        if not answers or any(worker.worker_id not in answers for worker in awaited):
            return None
        del self._answers[call_id]
        if all(answer.error_type for answer in answers.values()):
            self.forget(call_id)  # where it has changed something, replacements have to be changed, too
        return answers

    def give_up(self, call_id: int) -> None:
        """Nobody waits for the results any more."""
        self._answers.pop(call_id, None)

    def forget(self, call_id: int) -> None:
        """Not to be repeated."""
        self.recorded[:] = [call for call in self.recorded if call.call_id != call_id]
