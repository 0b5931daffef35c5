"""One record per control message between the training process and a worker.

Owns the vocabulary of the control pipe; `protocol.py` owns its bytes. A field's annotation is its exact wire type: int, str,
bytes, list, dict or bool, nothing optional, so that a whole message is checked in one comparison. Absent bytes are `b""`, an
absent id is -1. Must not hold objects that only one side understands.
"""

from __future__ import annotations

from ringloader._core.records import record

PROTOCOL_VERSION = 3
NO_SLOT = -1


@record
class Setup:
    """First message to a worker: who it is and what it builds. Carries the status page, then the dataset's segment if any."""

    version: int
    worker_id: int
    incarnation: int
    parent_pid: int
    settings: dict[str, object]


@record
class Ready:
    """The worker has built its dataset. `facts`: length (-1: none), fingerprint, digests."""

    version: int
    facts: dict[str, object]


@record
class StartFailed:
    """The worker could not import or build the dataset; `stage` says which. The worker exits after this."""

    version: int
    stage: str
    error_type: str
    error: str
    traceback: str


@record
class Fill:
    """Fetch `keys`, collate them into the slot. Carries one descriptor per entry of `attach` ([segment_id, nbytes]).

    `keys` is packed int64 when `int_keys`, else a coded list: for an iterable dataset stream, number, and the number and state
    from which to read on (-1: none). `position` is the global position of the batch's first sample in the epoch's permutation:
    the key of every random draw. `slot_id` is -1 when the size is not known yet. `cuts` (packed int64, mostly empty) are the
    places at which a dataset that fetches many samples in one call is to be called anew.
    """

    session_id: int
    batch_id: int
    serial: int
    slot_id: int
    generation: int
    segment_id: int
    offset: int
    capacity: int
    epoch: int
    position: int
    int_keys: bool
    keys: bytes
    cuts: bytes
    attach: list[list[int]]


@record
class Cancel:
    """Forget a Fill: one not begun is answered with `Cancelled`, samples kept for want of room are dropped."""

    session_id: int
    batch_id: int
    serial: int


@record
class DropSegment:
    """Unmap a segment; no later Fill names it."""

    segment_id: int


@record
class Call:
    """Run a method of the dataset. `arguments` is a packed spec of them."""

    call_id: int
    method: str
    arguments: bytes


@record
class Called:
    """What a method returned, packed; or what it raised (`error_type` not empty)."""

    call_id: int
    error_type: str
    error: str
    traceback: str
    value: bytes


@record
class DropSession:
    """Let go of the streams of a session that is over."""

    session_id: int


@record
class Stop:
    """Leave politely, after what is in progress."""

    version: int


@record
class Filled:
    """A batch lies in its slot. `layout` is the definition the first time this incarnation uses `layout_id`, else empty.

    `shapes` is packed int64, leaf after leaf; `inline` the values that cannot live in a slot. `num_retried`: fetches that
    failed and were tried again.
    """

    serial: int
    generation: int
    layout_id: int
    layout: bytes
    shapes: bytes
    inline: bytes
    nbytes: int
    copied_nbytes: int
    num_samples: int
    fetch_ns: int
    collate_ns: int
    num_retried: int


@record
class StreamState:
    """Comes before the `Filled` of a batch from an iterable dataset that saves its state: that state, packed."""

    serial: int
    generation: int
    state: bytes


@record
class Ended:
    """The stream has ended after `num_batches`. `failure` is what it raised last, if it did."""

    serial: int
    generation: int
    num_batches: int
    failure: str


@record
class NeedRoom:
    """The batch needs `nbytes`; its samples are kept until a larger slot or a `Cancel` comes (`kept`), or will be fetched
    again."""

    serial: int
    generation: int
    nbytes: int
    kept: bool


@record
class Failed:
    """The batch could not be made. `kind` is "sample" (the dataset raised at `sample`), "collate" (the
    `collate_fn` did), "set_epoch" (the dataset's method did), "layout" (samples disagree) or "unsharded" (every worker would
    read the same stream).

    `sample` is the place within the batch, -1 when no single sample is to blame.
    """

    serial: int
    generation: int
    kind: str
    sample: int
    error_type: str
    error: str
    traceback: str
    facts: dict[str, object]


@record
class Cancelled:
    """The answer to a `Cancel` that came in time."""

    serial: int
    generation: int


ToWorker = Setup | Fill | Call | Cancel | DropSegment | DropSession | Stop
FromWorker = Ready | StartFailed | Filled | StreamState | Ended | NeedRoom | Failed | Cancelled | Called
Message = ToWorker | FromWorker
