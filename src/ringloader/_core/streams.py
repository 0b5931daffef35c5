"""The streams of an iterable dataset, one per worker: whose turn it is, how far each has come, where each ends.

Owns the fixed interleave: batch k of an epoch is number k // W of stream k mod W, left out where that stream has ended before;
so the order is a function of W alone. A stream is read by the worker of its number, and by another only when that one is given
up. Where a worker has to take a stream up in the middle, it gets the latest saved state before, if the dataset saves any, and
reads on from there. Must not know samples.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from ringloader._core import values
from ringloader._core.batch_keys import Keys

_NO_STATE = -1
# How a state is packed: as plain values, or, where it holds others (generators, arrays), as a pickle.
PLAIN, PICKLED = 0, 1
# In place of a state: the stream has ended. The dataset's own would be that of its next round.
OVER = 2


def saved_form(packed: bytes) -> list[object]:
    """A packed state as JSON can carry it: how it is packed, and the values or the pickle as text."""
    kind, state = values.decode(packed)
    return [kind, base64.b64encode(state).decode("ascii") if kind == PICKLED else state]


def packed_form(saved: Sequence[Any]) -> bytes:
    """The inverse. Raises ValueError for what is none."""
    kind, state = saved
    if kind not in (PLAIN, PICKLED, OVER):
        raise ValueError(f"a state packed in a way {kind!r} that is not known")
    return values.encode([kind, base64.b64decode(state, validate=True) if kind == PICKLED else state])


def stream_keys(stream: int, number: int, position: int) -> Keys:
    """Return what stands for the keys of a batch: number `number` of a stream."""
    return Keys(values.encode([stream, number]), False, position)


class Streams:
    """The streams of one epoch. Numbers count the batches of a stream from the epoch's beginning.

    `states` are (stream, number, packed state) that were saved before, each after `number` batches. `num_kept` says how many
    states per stream may be needed again: as many as batches are in flight.
    """

    def __init__(self, num_streams: int, states: Iterable[tuple[int, int, bytes]] = (), num_kept: int = 1) -> None:
        self.num_streams = num_streams
        self.ends: dict[int, int] = {}  # stream → how many batches it had
        self.num_made: dict[int, int] = {}  # stream → how many it is known to have
        self._states: dict[int, deque[tuple[int, bytes]]] = {
            stream: deque(maxlen=num_kept + 2) for stream in range(num_streams)
        }
        self._readers: dict[int, tuple[int, int, int]] = {}  # stream → worker id, incarnation, next number it reads
        for stream, number, state in states:
            self._states[stream].append((number, state))

    @staticmethod
    def of(keys: Keys) -> tuple[int, int]:
        """Return the stream and number of a batch."""
        stream, number = values.decode(keys.packed)
        return stream, number

    @property
    def are_saved(self) -> bool:
        """The dataset saves its state, or nothing was read yet."""
        return any(self._states.values()) or not self._readers

    @property
    def are_over(self) -> bool:
        """Every stream has ended."""
        return len(self.ends) == self.num_streams

    def is_gone(self, stream: int, number: int) -> bool:
        """The stream has no batch of this number."""
        end = self.ends.get(stream)
        return end is not None and number >= end

    def end(self, stream: int, number: int) -> None:
        """The stream has `number` batches."""
        self.ends[stream] = min(number, self.ends.get(stream, number))

    def made(self, stream: int, number: int) -> None:
        """Batch `number` of a stream was made."""
        self.num_made[stream] = max(number + 1, self.num_made.get(stream, 0))

    def note(self, stream: int, number: int, state: bytes) -> None:
        """Remember the state of a stream after `number` batches."""
        known = self._states[stream]
        # A batch that was made again: what is known of it and later ones is of a reader that is gone.
        while known and known[-1][0] >= number:
            known.pop()
        known.append((number, state))

    def state_before(self, stream: int, number: int) -> tuple[int, bytes] | None:
        """Return the latest known (number, state) from which batch `number` can be reached."""
        return next(((at, state) for at, state in reversed(self._states[stream]) if at <= number), None)

    def issue(self, keys: Keys, worker_id: int, incarnation: int) -> bytes:
        """Return what a worker is told of a batch: stream, number, and where to begin if it does not read the stream yet."""
        stream, number = self.of(keys)
        follows = self._readers.get(stream) == (worker_id, incarnation, number)
        self._readers[stream] = (worker_id, incarnation, number + 1)
        known = None if follows else self.state_before(stream, number)
        at, state = (_NO_STATE, b"") if known is None else known
        return values.encode([stream, number, at, state])
