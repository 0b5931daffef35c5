"""One iteration over an epoch: its batches, their order, retries and bad samples.

Owns every batch from the moment its keys are pulled from the sampler until it is handed to the user, exactly once. A batch is
WAITING (for a worker and a slot), ISSUED, READY or FAILED; handed over, it is kept `in_hand` until the next call proves that it
arrived, so that an interrupt in between loses nothing. Must not know processes or memory.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringloader._core.bad_samples import BadSamples
from ringloader._core.batch_keys import Keys, pack_keys, unpack_keys
from ringloader._core.messages import NO_SLOT, Failed, Filled
from ringloader._core.streams import Streams

# How many batches say, more or less, what one takes.
_NUM_MEAN = 16
# How many batches say what the next slot must hold; one that does not fit costs a message, not its samples.
_RECENT_BATCHES = 16


class BatchState(enum.Enum):
    WAITING = "waiting"
    ISSUED = "issued"
    READY = "ready"
    FAILED = "failed"


# Python 3.11 takes 0.16 us to find a member in its class.
_WAITING, _DONE = BatchState.WAITING, (BatchState.READY, BatchState.FAILED)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a batch cannot be handed over: a worker's `Failed` (its kind), or deaths (kind "deaths"), the last one's facts."""

    kind: str
    sample: int
    worker_id: int
    failed: Failed | None = None
    text: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """One batch. `original` maps its present places to places in the batch as pulled, once samples were skipped or replaced."""

    batch_id: int
    keys: Keys
    previous: Keys | None = None  # of the batch before
    state: BatchState = BatchState.WAITING
    serial: int = -1
    worker_id: int = -1
    incarnation: int = -1
    slot_id: int = NO_SLOT
    need_nbytes: int | None = None
    sticky_worker: int = -1  # keeps this batch's samples, waiting for room
    filled: Filled | None = None
    fault: Fault | None = None
    deaths: dict[int, int] = field(default_factory=dict)
    charged: dict[int, list[int]] = field(default_factory=dict)  # sample → ids of the workers that died of it
    num_range_deaths: int = 0  # in calls for several samples
    suspect: tuple[int, int] | None = None  # the places that were fetched in the last such call, first and behind the last
    cuts: bytes = b""  # places at which such calls are to begin, packed int64
    last_exit: str = ""
    num_refused: int = 0  # by the device it was to be copied to
    stream: int = -1  # of an iterable dataset
    number: int = -1  # within the stream

    def wait_again(self) -> None:
        """Forget what was made; the keys stay."""
        self.state, self.serial, self.slot_id = BatchState.WAITING, -1, NO_SLOT
        self.filled = self.fault = None

    @property
    def num_keys(self) -> int:
        """Samples of the batch."""
        return len(self.keys.packed) // 8 if self.keys.int_keys else len(self.key_list())

    def key_list(self) -> list[object]:
        """The keys as Python values; samples of a stream have none."""
        return [] if self.stream >= 0 else unpack_keys(self.keys)


class Session:
    """The batches of one iteration, in order."""

    def __init__(
        self,
        session_id: int,
        epoch: int,
        *,
        in_order: bool,
        streams: Streams | None = None,
        pull: Callable[[int], Keys | None] | None = None,
    ) -> None:
        self.session_id = session_id
        self.epoch = epoch
        self.in_order = in_order
        self.streams = streams
        self._pull = pull  # gives the keys of any batch of the streams
        self.num_gone = 0  # batches that turned out not to exist: their stream had ended
        self.batches: dict[int, Batch] = {}
        self.in_hand: Batch | None = None
        self.num_submitted = 0
        self._last_keys: Keys | None = None
        self.arrived = True  # what is in hand has reached the user; set by the iterator just before it returns
        self.num_delivered = 0
        self._num_with_hand = 0
        self.ended = False  # the sampler has no more
        self.slot_nbytes: int | None = None  # what the next Fill's slot must hold; None until a batch was made
        self.awaited = False  # its consumer is blocked
        self.is_early = False  # of an epoch that nobody has asked for yet: all others come first
        self.has_collected = False  # garbage was collected for want of a slot
        self.starved = False  # the oldest missing batch cannot get a slot before the user lets one go
        self.busy_ns = 0
        self.max_depth = 0  # what a worker may hold of it where its batches are quick, if more than it holds by policy
        self.depth = 0  # what it may hold at present; 0: as the policy says
        self.usual_ns = 0  # what a batch takes a worker, a mean of which the last few weigh most; 0: not known yet
        self.skipped = BadSamples()
        self._sizes: deque[int] = deque(maxlen=_RECENT_BATCHES)
        self._waiting: list[int] = []
        self._ready: list[int] = []  # in the order of completion, for in_order=False

    def submit(self, batch_id: int, keys: Keys) -> Batch | None:
        """Take in the next batch and return it; a second time for the same id changes nothing."""
        if batch_id != self.num_submitted:
            return None
        batch = Batch(batch_id, keys, self._last_keys)
        if self.streams is not None:
            batch.stream, batch.number = self.streams.of(keys)
            if self.streams.is_gone(batch.stream, batch.number):
                self.num_gone += 1
                self.num_submitted = batch_id + 1
                return None
        self.batches[batch_id] = batch
        self._last_keys = keys
        heapq.heappush(self._waiting, batch_id)
        self.num_submitted = batch_id + 1
        return batch

    def oldest_waiting(self) -> Batch | None:
        """The batch to issue next: re-issues come before new ones, being older."""
        while self._waiting:
            batch = self.batches.get(self._waiting[0])
            if batch is not None and batch.state is _WAITING:
                return batch
            heapq.heappop(self._waiting)
        return None

    def first_waiting(self) -> list[Batch]:
        """The oldest waiting batch of each stream, oldest first."""
        found: dict[int, Batch] = {}
        for batch_id in sorted(set(self._waiting)):
            batch = self.batches.get(batch_id)
            if batch is not None and batch.state is _WAITING:
                found.setdefault(batch.stream, batch)
        return list(found.values())

    def end_stream(self, stream: int, number: int) -> list[Batch]:
        """A stream has no more than `number` batches: those beyond will never come, and are returned."""
        assert self.streams is not None
        self.streams.end(stream, number)
        gone = [batch for batch in self.batches.values() if batch.stream == stream and batch.number >= number]
        for batch in gone:
            del self.batches[batch.batch_id]
            self.num_gone += 1
        # Others take their places now: nobody might ask again before one of them is there.
        for _ in gone:
            self._submit_next()
        return gone

    def _submit_next(self) -> None:
        assert self._pull is not None
        num_before = len(self.batches)
        while len(self.batches) == num_before:
            keys = self._pull(self.num_submitted)
            if keys is None:
                return
            self.submit(self.num_submitted, keys)

    def wait(self, batch: Batch) -> None:
        """Put a batch back among those to be issued."""
        batch.wait_again()
        heapq.heappush(self._waiting, batch.batch_id)

    def ready(self, batch: Batch, filled: Filled) -> None:
        batch.state, batch.filled = BatchState.READY, filled
        batch.sticky_worker = -1
        sizes, nbytes = self._sizes, filled.nbytes
        is_same = len(sizes) == _RECENT_BATCHES and sizes[0] == nbytes  # one leaves, its equal comes
        sizes.append(nbytes)
        if not is_same:
            # The largest but one: a single outlier must not have every later batch ask for a slot of its size.
            self.slot_nbytes = sorted(sizes)[-2:][0]
        self._completed(batch)

    def took(self, took_ns: int) -> None:
        """A worker has spent so long on one batch of this session."""
        self.busy_ns += took_ns
        # A mean: few slow batches among many quick ones are what counts.
        self.usual_ns = max(1, self.usual_ns + (took_ns - self.usual_ns) // _NUM_MEAN if self.usual_ns else took_ns)

    def fail(self, batch: Batch, fault: Fault) -> None:
        batch.state, batch.fault, batch.sticky_worker = BatchState.FAILED, fault, -1
        self._completed(batch)

    def _completed(self, batch: Batch) -> None:
        if not self.in_order:
            self._ready.append(batch.batch_id)

    def head(self) -> Batch | None:
        """The batch to hand over next, if it is ready or failed."""
        if self.in_order:
            batch = self.oldest()
            return batch if batch is not None and batch.state in _DONE else None
        while self._ready:
            batch = self.batches.get(self._ready[0])
            if batch is not None and batch.state in _DONE:
                return batch
            self._ready.pop(0)
        return None

    def oldest(self) -> Batch | None:
        """The oldest batch not handed over."""
        if self.in_order:
            return next(iter(self.batches.values()), None)
        # Batches that come back from the user's hand may stand before older ones.
        return self.batches[min(self.batches)] if self.batches else None

    def youngest_ready(self) -> Batch | None:
        """The batch whose slot may be taken back for the sake of the oldest."""
        for batch in reversed(self.batches.values()):
            if batch.state is BatchState.READY and batch.slot_id != NO_SLOT:
                return batch
        return None

    def hand_over(self, batch: Batch) -> None:
        """The batch goes to the user; it is in hand until `acknowledge`."""
        self.arrived = False
        self._num_with_hand = self.num_delivered + 1
        self.in_hand = batch
        del self.batches[batch.batch_id]

    def settle(self) -> None:
        """What is in hand has arrived and is done with, or never did and is made again, as the oldest."""
        batch = self.in_hand
        if batch is None:
            return
        if self.arrived:
            # In this order, so that an interrupt in between counts it neither twice nor never.
            self.num_delivered = self._num_with_hand
            self.in_hand = None
            return
        if batch.batch_id not in self.batches:
            self.batches = {batch.batch_id: batch, **self.batches}
            if batch.fault is None:
                self.wait(batch)
            else:
                self._completed(batch)
        self.in_hand = None

    def restart(self) -> None:
        """Every batch that is not failed is made again: no worker is left that could answer."""
        # Rebuilt from the batches alone: an interrupt may have left the lists half changed. What is in hand stays so: only its
        # consumer knows whether it arrived.
        self.batches = dict(sorted(self.batches.items()))
        self._waiting, self._ready = [], []
        for batch in self.batches.values():
            batch.sticky_worker = -1
            if batch.fault is None:
                batch.wait_again()
                self._waiting.append(batch.batch_id)
            else:
                batch.state = BatchState.FAILED
                self._completed(batch)

    def finished(self) -> bool:
        is_over = self.ended or (self.streams is not None and self.streams.are_over)
        return is_over and not self.batches

    def leave_out(self, batch: Batch, sample: int, *, replace: bool) -> bool:
        """Skip or replace the sample at a place of a batch; False when no good sample is left.

        Another sample of the batch stands in, or, when there is none, one of the batch before: it is known whatever the timing.
        """
        if batch.stream >= 0:
            return False  # what a stream has given is gone; there is nothing to ask for again
        keys = batch.key_list()
        bad = keys[sample]
        others = [key for key in keys if key != bad and key not in self.skipped]
        if replace and not others and batch.previous is not None:
            others = [key for key in unpack_keys(batch.previous) if key != bad and key not in self.skipped]
        if not others:
            return False
        self.skipped.add(bad)
        changed = [others[sample % len(others)] if key == bad else key for key in keys] if replace else others
        batch.keys = pack_keys(changed, batch.keys.position)
        batch.deaths.clear()
        batch.charged.clear()
        batch.num_range_deaths, batch.suspect, batch.cuts = 0, None, b""
        self.wait(batch)
        return True
