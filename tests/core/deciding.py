"""A scheduler whose workers are ready, for tests of single decisions."""

from __future__ import annotations

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core.policy import FaultPolicy, PoolPolicy
from ringloader._core.scheduler import Scheduler


def scheduler(num_workers: int = 1, num_beside: int = 99, **faults: object) -> Scheduler:
    policy = FaultPolicy(stall_s=None, **faults)  # type: ignore[arg-type]
    core = Scheduler(PoolPolicy(num_workers, 2, None, policy, num_beside=num_beside))
    core.start(0.0)
    for worker in core.workers.all:
        core.receive(worker.worker_id, worker.incarnation, msg.Ready(1, {"length": 100}), 0.0)
    core.outbox.clear()
    return core


def sent(core: Scheduler) -> list[ev.Command]:
    core.dispatch(1.0)
    commands = list(core.outbox)
    core.outbox.clear()
    return commands


def filled(fill: msg.Fill, took_ns: int = 10**6) -> msg.Filled:
    return msg.Filled(fill.serial, fill.generation, 0, b"", b"", b"", 0, 0, 1, took_ns, 0, 0)


def fills(commands: list[ev.Command]) -> list[ev.SendFill]:
    return [command for command in commands if isinstance(command, ev.SendFill)]
