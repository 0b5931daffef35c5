"""Events into the scheduler and commands out of it.

Owns the typed border between decisions and system calls. Messages of workers (`messages.py`) are events too; here is the rest.
Every command is idempotent: carried out twice, or carried out for an incarnation that is gone, it changes nothing more.
"""

from __future__ import annotations

from ringloader._core.messages import Call, Fill
from ringloader._core.records import record


@record
class Death:
    """How a worker ended, in facts. `returncode` None: the status could not be had. `serial` -1: no Fill was in progress.

    `sample`: the first of `num_samples` places that were being fetched in one call, -1: none was.
    """

    returncode: int | None
    serial: int = -1
    sample: int = -1
    stage: str = ""
    trace: str = ""
    reason: str = ""  # why the process could not even be started
    num_samples: int = 1
    cause: str = ""  # what is likely to have ended it, in words
    is_oom: bool = False  # the kernel ended it for want of memory


@record
class WorkerExited:
    """The process is gone and reaped, and all it had sent has been handled."""

    worker_id: int
    incarnation: int
    death: Death


@record
class WorkerBroken:
    """A worker sent bytes that are no message, or one that makes no sense; `reason` in words."""

    worker_id: int
    incarnation: int
    reason: str


@record
class SegmentAdded:
    """The segment asked for exists."""

    segment_id: int
    slot_nbytes: int
    num_slots: int


@record
class SegmentRefused:
    """No room for even one slot. `reason` is a sentence with needed and free bytes; `configured`: the ring's own bound said
    no."""

    slot_nbytes: int
    reason: str
    configured: bool


@record
class SlotReleased:
    """The last view of a lease is gone, or it was given back. `pending`: a copy from the slot may still run."""

    slot_id: int
    generation: int
    pending: bool = False


@record
class SlotCompleted:
    """Every copy from a pending slot has ended."""

    slot_id: int
    generation: int


Event = WorkerExited | WorkerBroken | SegmentAdded | SegmentRefused | SlotReleased | SlotCompleted


@record
class StartWorker:
    worker_id: int
    incarnation: int


@record
class KillWorker:
    """Kill at once; `dump` takes the Python stack first."""

    worker_id: int
    incarnation: int
    dump: bool


@record
class StopWorker:
    """Have a worker leave: its successor has taken over, and it has nothing left to do."""

    worker_id: int
    incarnation: int


@record
class AbandonWorker:
    """Stop waiting for a process that cannot be reaped."""

    worker_id: int
    incarnation: int


@record
class SendFill:
    worker_id: int
    incarnation: int
    fill: Fill


@record
class SendCall:
    worker_id: int
    incarnation: int
    call: Call


@record
class SendCancel:
    """Forget a Fill: `running` is the serial the worker is likely to be in, to be stopped between two samples (-1: none)."""

    worker_id: int
    incarnation: int
    session_id: int
    batch_id: int
    serial: int
    running: int


@record
class AddSegment:
    """Reserve up to `num_slots` slots of `slot_nbytes`, at least `least`. `forced`: above the ring's bound if need be."""

    slot_nbytes: int
    num_slots: int
    least: int
    forced: bool


@record
class DropSegment:
    segment_id: int


@record
class DropSession:
    """Have every worker let go of a session's streams."""

    session_id: int


@record
class Warn:
    """Tell the user, now, through the log. `is_fault`: it is a warning, else a piece of information."""

    text: str
    is_fault: bool = True


Command = (
    StartWorker
    | KillWorker
    | StopWorker
    | AbandonWorker
    | SendFill
    | SendCall
    | SendCancel
    | AddSegment
    | DropSegment
    | DropSession
    | Warn
)
