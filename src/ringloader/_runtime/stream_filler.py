"""Batches of an iterable dataset: Fills carried out by reading on.

Owns the streams that a worker reads, one per session as a rule, and how one is taken up in the middle: from a state that the
dataset saved, or by reading it again from the beginning with the same draws. A dataset with `can_replay = False` is never read
again: what was read and not delivered is lost then. Must not know pipes or processes.
"""

from __future__ import annotations

import logging
import pickle
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from ringloader._collate.collate import Batch
from ringloader._core import messages as msg
from ringloader._core import values
from ringloader._core.streams import OVER, PICKLED, PLAIN
from ringloader._runtime import status
from ringloader._runtime.filler import CancelledFill, Filler
from ringloader._runtime.words import safe_text, type_name
from ringloader.errors import LayoutError, LoaderError

logger = logging.getLogger("ringloader")

# A place that no sample has: draws of `iter` are nobody else's.
_OPENING = -1


class UnshardedError(LoaderError):
    """Every worker would read the same samples."""


class _Reader:
    """One stream in reading. `number` is that of the batch it gives next."""

    __slots__ = ("failure", "is_over", "iterator", "number")

    def __init__(self, iterator: Iterator[Any], number: int) -> None:
        self.iterator = iterator
        self.number = number
        self.failure = ""  # what it raised last; a generator has ended with that
        self.is_over = False


class StreamFiller(Filler):
    """Answers Fills from an iterable dataset.

    `batch_size` None takes each item as a batch. `is_alone`: no other worker reads this very dataset object, so its own
    `state_dict` tells of this stream.
    """

    def __init__(self, *parts: Any, batch_size: int | None, drop_last: bool, is_alone: bool = True, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.batch_size, self.drop_last, self.is_alone = batch_size, drop_last, is_alone
        self._readers: dict[tuple[int, int], _Reader] = {}
        self._writer = self._getitems = None
        self._can_replay = bool(getattr(self._dataset, "can_replay", True))
        self._midway: _Reader | None = None  # who has moved the dataset, which keeps its place itself, and not come to its end
        self._pristine = self._dataset.state_dict() if _is_stateful(self._dataset) else None

    def drop_session(self, session_id: int) -> None:
        """Forget the streams of a session that is over."""
        super().drop_session(session_id)
        for key in [key for key in self._readers if key[0] == session_id]:
            _close(self._readers.pop(key).iterator)

    def _make_place(self, session_id: int) -> None:
        """Every batch that waits for room is kept: there are as many as Fills on their way, and none can be fetched again."""

    def _make(self, fill: msg.Fill, slot: np.ndarray[Any, Any] | None, began_ns: int) -> msg.FromWorker:
        stream, number, known_number, state = values.decode(fill.keys)
        self._set_epoch(fill.epoch)
        self._doing = "sample"
        self._page.stage(status.FETCHING)
        self._info.id = stream  # another's, when that worker was given up
        reader = self._seek(fill, stream, number, known_number, state)
        if reader.is_over:
            return self._ended(fill, reader)
        self._begin(fill, number, number)
        size = 1 if self.batch_size is None else self.batch_size
        batch = self._collator.begin(size, None, slot)
        try:
            num_samples = self._read(fill, reader, batch, size)
        except CancelledFill:
            self.drop_session(fill.session_id)  # nobody reads on
            raise
        except BaseException as error:
            reader.number = number + 1  # what was read of this batch is gone
            reader.failure = f"{type_name(error)}: {safe_text(error)}"
            raise
        if self._info.num_workers > 1 and not number and not self._is_sharded():
            reader.is_over = True  # whoever goes on after the error gets nothing twice
            raise UnshardedError("")
        if not num_samples or (self.drop_last and num_samples < size):
            return self._ended(fill, reader)
        reader.number = number + 1
        reader.failure = ""
        reader.is_over = num_samples < size
        self._save(fill, reader)
        return self._collated(fill, batch, num_samples, slot, began_ns)

    def _read(self, fill: msg.Fill, reader: _Reader, batch: Batch | None, size: int) -> int:
        """Read a batch into `batch`, or past it; return how many samples there were."""
        words, sample, cancel, serial = self._page.words, status.SAMPLE_WORD, status.CANCEL_WORD, fill.serial
        info, iterator = self._info, reader.iterator
        refusal: LayoutError | None = None
        for place in range(size):
            words[sample] = info.place = place
            if words[cancel] == serial:
                raise CancelledFill
            if self._seed_samples:
                self._seeder.for_position(fill.epoch, info.batch_position, place + 1)
            try:
                item = next(iterator)
            except StopIteration:
                size = place
                break
            if batch is not None and refusal is None:
                try:
                    batch.add(item)
                except LayoutError as error:
                    refusal = error  # the batch is read to its end all the same: where the next begins must not depend on it
        if refusal is not None:
            raise refusal
        return size

    def _begin(self, fill: msg.Fill, wanted: int, number: int, place: int = 0) -> None:
        """Seed for batch `number` of the stream that the Fill wants batch `wanted` of."""
        info = self._info
        position = fill.position + (wanted - number) * info.num_workers * info.world_size
        info.begin(position)
        self._seeder.for_position(fill.epoch, position, place)

    def _seek(self, fill: msg.Fill, stream: int, number: int, known_number: int, state: bytes) -> _Reader:
        """Return the stream, about to give batch `number`."""
        key = (fill.session_id, stream)
        reader = self._readers.get(key)
        if reader is None or reader.number > number:
            if reader is not None:
                _close(self._readers.pop(key).iterator)
            try:
                reader = self._readers[key] = self._open(fill, number, known_number, state)
            except Exception as error:
                # It cannot be opened, now or later: this batch says so, and is the last.
                reader = self._readers[key] = _Reader(iter(()), number)
                reader.failure, reader.is_over = f"{type_name(error)}: {safe_text(error)}", True
                raise
        if reader.number < number and not self._can_replay:
            reader.number = number
        if reader.number < number and not reader.is_over:
            try:
                self._read_again(fill, reader, number)
            except BaseException:
                _close(self._readers.pop(key).iterator)  # it stands in the middle of a batch: nobody could read on
                raise
            self._page.begin(fill.serial, time.monotonic_ns())
            self._page.stage(status.FETCHING)
        return reader

    def _read_again(self, fill: msg.Fill, reader: _Reader, number: int) -> None:
        """Read up to batch `number`, with the draws of the first time. Each batch has a time limit of its own."""
        size = 1 if self.batch_size is None else self.batch_size
        self._page.stage(status.READING_AGAIN)
        while reader.number < number and not reader.is_over:
            self._page.begin(fill.serial, time.monotonic_ns())
            self._begin(fill, number, reader.number)
            try:
                num_samples = self._read(fill, reader, None, size)
            except CancelledFill:
                raise
            except Exception as error:  # it raised then, too
                reader.failure = f"{type_name(error)}: {safe_text(error)}"
                num_samples = size
            reader.is_over = num_samples < size
            reader.number += num_samples > 0 and not (reader.is_over and self.drop_last)

    def _open(self, fill: msg.Fill, number: int, known_number: int, state: bytes) -> _Reader:
        dataset = self._dataset
        kind, saved = values.decode(state) if known_number >= 0 else (PLAIN, None)
        if kind == OVER:
            reader = _Reader(iter(()), known_number)
            reader.is_over = True
            return reader
        if kind == PICKLED:
            saved = pickle.loads(saved)  # type: ignore[arg-type]
        # What `iter` draws, a shuffled list of files perhaps, is the same wherever the stream is taken up.
        self._begin(fill, number, 0, _OPENING)
        if not _is_stateful(dataset):
            iterator = iter(dataset)
            if known_number >= 0:
                iterator.load_state_dict(saved)
                return _Reader(iterator, known_number)
            return _Reader(iterator, self._first(number))
        return self._open_stateful(number, known_number, saved)

    def _open_stateful(self, number: int, known_number: int, saved: Any) -> _Reader:
        """A dataset with a state of its own, if its iterator has none, is at one place at a time."""
        dataset = self._dataset
        iterator = iter(dataset)
        if iterator is not dataset and _is_stateful(iterator):
            if known_number >= 0:
                iterator.load_state_dict(saved)
            return _Reader(iterator, known_number if known_number >= 0 else self._first(number))
        if not self.is_alone or any(not reader.is_over for reader in self._readers.values()):
            raise LoaderError(
                "the dataset keeps the place of its stream itself (its state_dict), so it can be read by one iterator at a "
                "time, by its own worker alone: have __iter__ return an iterator with state_dict and load_state_dict"
            )
        if known_number >= 0:
            dataset.load_state_dict(saved)
            iterator = iter(dataset)
        elif self._midway is not None:
            dataset.load_state_dict(self._pristine)  # an epoch was left in the middle
            iterator = iter(dataset)
        self._midway = _Reader(iterator, known_number if known_number >= 0 else self._first(number))
        return self._midway

    def _first(self, number: int) -> int:
        """Which batch comes first where a stream is opened for batch `number`."""
        if self._can_replay or not number:
            return 0
        if not self._defines_once:  # on the user's own thread: elsewhere it is a worker's death that says so
            logger.warning(
                "a stream that cannot be read again (can_replay) is begun anew at batch %d: what was read and not delivered is "
                "lost, at most once",
                number,
            )
        return number

    def _save(self, fill: msg.Fill, reader: _Reader) -> None:
        """Have the stream's state after this batch travel ahead of it, where there is one."""
        holder: Any = reader.iterator if _is_stateful(reader.iterator) else self._dataset
        if not _is_stateful(holder):
            return
        if reader.is_over:
            self._come_to_end(reader)
            self.preface = msg.StreamState(fill.serial, fill.generation, values.encode([OVER, None]))
            return
        state = holder.state_dict()
        try:
            packed = values.encode([PLAIN, state])
        except (TypeError, ValueError, OverflowError):
            packed = values.encode([PICKLED, pickle.dumps(state)])
        self.preface = msg.StreamState(fill.serial, fill.generation, packed)

    def _ended(self, fill: msg.Fill, reader: _Reader) -> msg.Ended:
        reader.is_over = True
        self._come_to_end(reader)
        return msg.Ended(fill.serial, fill.generation, reader.number, reader.failure)

    def _come_to_end(self, reader: _Reader) -> None:
        if reader is self._midway:
            self._midway = None

    def _failed(self, fill: msg.Fill, error: BaseException) -> msg.Failed:
        if isinstance(error, UnshardedError):
            return msg.Failed(fill.serial, fill.generation, "unsharded", -1, "", "", "", {})
        return super()._failed(fill, error)

    def _is_sharded(self) -> bool:
        return self._info.is_consulted or bool(getattr(self._dataset, "is_sharded", False))


def _is_stateful(holder: Any) -> bool:
    return callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None))


def _close(iterator: Any) -> None:
    """Let a generator end its `with` blocks here rather than whenever it is collected. What else can be closed is not ours."""
    if isinstance(iterator, types.GeneratorType):
        try:
            iterator.close()
        except (Exception, SystemExit):
            pass  # nobody is there to be told
