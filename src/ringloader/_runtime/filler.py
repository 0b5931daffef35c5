"""Fetch the samples of one batch and collate them into a slot.

Owns what a worker does with a Fill, in a process of its own or inline: epoch, seeds, fetching, collation, and the answer.
What it cannot place for want of room it keeps, one batch per session, until it is told where to or to forget it; it never
waits. Must not know pipes or processes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np

from ringloader._collate.collate import Batch, Collated, Collator
from ringloader._collate.written import Writer, offers
from ringloader._core import messages as msg
from ringloader._core import values
from ringloader._core.events import Keys
from ringloader._core.layout import Layout
from ringloader._core.records import record
from ringloader._core.session import unpack_keys
from ringloader._runtime import status
from ringloader._runtime.seeding import Seeder
from ringloader._runtime.status import StatusPage
from ringloader._runtime.words import format_traceback, safe_text, type_name
from ringloader._runtime.worker_info import WorkerInfo
from ringloader.errors import LayoutError, LoaderError

# Layouts an incarnation remembers having sent; ragged data makes new shapes all the time but few new trees.
MAX_LAYOUTS = 256


@record
class Kept:
    """A batch that waits for room."""

    collated: Collated | _Copied
    num_samples: int
    fetch_ns: int


def _keep(made: Kept) -> Kept:
    """Take a copy of a batch's bytes out of the user's memory."""
    if isinstance(made.collated, _Copied):
        return made
    return replace(made, collated=_Copied(made.collated))


class _Copied:
    """A batch that was laid out in private memory."""

    def __init__(self, collated: Collated) -> None:
        self.layout, self.shapes, self.inline = collated.layout, collated.shapes, collated.inline
        self.nbytes = collated.nbytes
        self.copied_nbytes = collated.copied_nbytes + collated.nbytes
        self._bytes = np.empty(collated.nbytes, np.uint8)
        collated.write(self._bytes)

    def write(self, slot: np.ndarray[Any, Any]) -> None:
        slot[: self.nbytes] = self._bytes


class CancelledFill(Exception):
    """The Fill in progress is not wanted any more."""


class Filler:
    """Answers Fills from one dataset.

    `catch` are the exceptions that count as the sample's: the rest ends the worker. `defines_once`: a layout's definition goes
    with its first batch only; False where an answer can be lost without the worker (inline, to an interrupt).
    """

    def __init__(
        self,
        dataset: Any,
        collator: Collator,
        seeder: Seeder,
        info: WorkerInfo,
        page: StatusPage,
        *,
        seed_per: str = "batch",
        catch: type[BaseException] = BaseException,
        defines_once: bool = True,
    ) -> None:
        self._dataset = dataset
        self._collator = collator
        self._seeder = seeder
        self._info = info
        self._page = page
        self._seed_samples = seed_per == "sample"
        self._catch = catch
        self._defines_once = defines_once
        self._doing = "sample"  # what an exception is blamed on
        self._epoch: int | None = None
        self._kept: dict[tuple[int, int], Kept] = {}  # (session id, batch id) →
        self.preface: msg.FromWorker | None = None  # what is to be said before the answer
        self._layout_ids: OrderedDict[Layout, int] = OrderedDict()
        self._next_layout_id = 0
        # torch looks for the method and for its truth, so that a wrapper can switch it off with None.
        self._getitems = None if self._seed_samples else getattr(dataset, "__getitems__", None)
        self._writer = Writer(dataset, collator) if collator.is_plain and not self._seed_samples and offers(dataset) else None

    def fill(self, fill: msg.Fill, slot: np.ndarray[Any, Any] | None) -> msg.FromWorker:
        """Carry out one Fill into `slot` (1-D uint8, None: no room yet) and return the answer."""
        began_ns = time.monotonic_ns()
        self._page.begin(fill.serial, began_ns)
        self.preface = None
        kept = self._kept.pop((fill.session_id, fill.batch_id), None)
        answer: msg.FromWorker
        try:
            answer = self._place(fill, kept, slot) if kept is not None else self._make(fill, slot, began_ns)
        except CancelledFill:
            answer = msg.Cancelled(fill.serial, fill.generation)
        except SystemExit:
            raise
        except self._catch as error:
            answer = self._failed(fill, error)
        self._page.stage(status.SENDING)
        return answer

    @property
    def is_tainted(self) -> bool:
        """The dataset holds memory of a slot, and might write into another batch: this process must not go on."""
        return self._writer is not None and self._writer.is_kept

    def done(self, *, made: bool) -> None:
        """The answer has been sent."""
        self._page.end(made=made)

    def cancel(self, session_id: int, batch_id: int) -> None:
        """Forget samples kept for a batch."""
        self._kept.pop((session_id, batch_id), None)

    def call(self, call: msg.Call) -> msg.Called:
        """Run a method of the dataset."""
        from ringloader._runtime.calls import carry_out

        if self._writer is not None:
            self._writer.forget()
        return carry_out(self._dataset, call)

    def drop_session(self, session_id: int) -> None:
        """Forget what belongs to a session that is over."""
        self._forget_kept(session_id)

    def _forget_kept(self, session_id: int) -> None:
        for key in [key for key in self._kept if key[0] == session_id]:
            del self._kept[key]

    def _make(self, fill: msg.Fill, slot: np.ndarray[Any, Any] | None, began_ns: int) -> msg.FromWorker:
        self._set_epoch(fill.epoch)
        info = self._info
        info.begin(fill.position)
        self._seeder.for_position(fill.epoch, fill.position)
        self._page.stage(status.FETCHING)
        self._doing = "sample"
        if self._writer is not None and fill.int_keys:
            return self._write(fill, self._writer, slot, began_ns)
        keys = unpack_keys(Keys(fill.keys, fill.int_keys, fill.position))
        batch = self._collator.begin(len(keys), keys, slot)
        if self._getitems:
            batch.extend(self._getitems(keys))
        else:
            self._fetch_each(fill, keys, batch)
        return self._collated(fill, batch, len(keys), slot, began_ns)

    def _collated(
        self, fill: msg.Fill, batch: Batch, num_samples: int, slot: np.ndarray[Any, Any] | None, began_ns: int
    ) -> msg.FromWorker:
        """Collate the samples that were fetched, and answer."""
        fetched_ns = time.monotonic_ns()
        self._page.stage(status.COLLATING)
        self._doing = "collate"
        collated = batch.finish()
        kept = Kept(collated, num_samples, fetched_ns - began_ns)
        if collated.written or not collated.nbytes:
            return self._filled(fill, kept, time.monotonic_ns() - fetched_ns)
        return self._place(fill, kept, slot)

    def _write(self, fill: msg.Fill, writer: Writer, slot: np.ndarray[Any, Any] | None, began_ns: int) -> msg.FromWorker:
        """Have the dataset write the batch into the slot. Without room nothing is made, so nothing is kept."""
        indices = np.frombuffer(fill.keys, np.int64)
        collated = writer.plan(len(indices))
        if not collated.written:
            if slot is None or len(slot) < collated.nbytes:
                return msg.NeedRoom(fill.serial, fill.generation, collated.nbytes, False)
            writer.write(collated, indices, slot)
        made = Kept(collated, len(indices), time.monotonic_ns() - began_ns)
        return self._filled(fill, made, 0)

    def _fetch_each(self, fill: msg.Fill, keys: list[Any], batch: Any) -> None:
        page, dataset, serial = self._page, self._dataset, fill.serial
        # The page's words are written without a call: this runs for every sample.
        words, sample, cancel = page.words, status.SAMPLE_WORD, status.CANCEL_WORD
        add, info = batch.add, self._info
        for place, key in enumerate(keys):
            words[sample] = info.place = place
            if words[cancel] == serial:
                raise CancelledFill
            if self._seed_samples:
                self._seed_sample(fill, place)
            add(dataset[key])
            if not place:
                add = batch.next_add

    def _seed_sample(self, fill: msg.Fill, place: int) -> None:
        """Seed for one sample: by its own position where the order is ours, else by its place in its batch."""
        if fill.position >= 0:
            self._seeder.for_position(fill.epoch, fill.position + place * self._info.world_size)
        else:
            self._seeder.for_position(fill.epoch, fill.position, place + 1)

    def _place(self, fill: msg.Fill, kept: Kept, slot: np.ndarray[Any, Any] | None) -> msg.FromWorker:
        """Write a made batch into the slot, or keep it and ask for room."""
        self._page.stage(status.COLLATING)
        nbytes = kept.collated.nbytes
        if nbytes and (slot is None or len(slot) < nbytes):
            # Kept are a batch's bytes, not its samples: a dataset may return one buffer again and again, and the next Fill
            # comes before the room.
            self._make_place(fill.session_id)
            self._kept[fill.session_id, fill.batch_id] = _keep(kept)
            return msg.NeedRoom(fill.serial, fill.generation, nbytes, True)
        began_ns = time.monotonic_ns()
        if nbytes:
            kept.collated.write(slot)  # type: ignore[arg-type]
        return self._filled(fill, kept, time.monotonic_ns() - began_ns)

    def _make_place(self, session_id: int) -> None:
        # One batch per session is kept, never more: an older one is fetched again when its Fill comes.
        self._forget_kept(session_id)

    def _filled(self, fill: msg.Fill, made: Kept, collate_ns: int) -> msg.Filled:
        collated = made.collated
        layout_id, definition = self._layout_id(collated.layout)
        return msg.Filled(
            fill.serial,
            fill.generation,
            layout_id,
            definition,
            pack_shapes(collated.shapes),
            collated.inline,
            collated.nbytes,
            collated.copied_nbytes,
            made.num_samples,
            made.fetch_ns,
            collate_ns,
        )

    def _layout_id(self, layout: Layout) -> tuple[int, bytes]:
        if not self._defines_once:
            return 0, layout.to_wire()
        known = self._layout_ids.get(layout)
        if known is not None:
            self._layout_ids.move_to_end(layout)
            return known, b""
        layout_id, self._next_layout_id = self._next_layout_id, self._next_layout_id + 1
        self._layout_ids[layout] = layout_id
        if len(self._layout_ids) > MAX_LAYOUTS:
            self._layout_ids.popitem(last=False)
        return layout_id, layout.to_wire()

    def _set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._info.epoch = epoch
            set_epoch = getattr(self._dataset, "set_epoch", None)
            if set_epoch is not None:
                self._doing = "set_epoch"
                set_epoch(epoch)
            if self._writer is not None:
                self._writer.forget()
            self._epoch = epoch  # only now: if it failed, no batch of this epoch may pass

    def _failed(self, fill: msg.Fill, error: BaseException) -> msg.Failed:
        kind, facts = self._doing, {}
        place = self._page.view().sample if kind == "sample" else -1
        if isinstance(error, LayoutError):
            kind, facts = "layout", _plain_facts(error)
        return msg.Failed(
            fill.serial, fill.generation, kind, place, type_name(error), safe_text(error), format_traceback(error), facts
        )


def pack_shapes(shapes: tuple[tuple[int, ...], ...]) -> bytes:
    """Pack the dimensions of all leaves, leaf after leaf; their number of dimensions is part of the layout."""
    packed = _packed_shapes.get(shapes)
    if packed is None:
        if len(_packed_shapes) >= MAX_LAYOUTS:
            _packed_shapes.clear()
        flat = [dimension for shape in shapes for dimension in shape]
        packed = _packed_shapes[shapes] = np.array(flat, np.int64).tobytes()
    return packed


_packed_shapes: dict[tuple[tuple[int, ...], ...], bytes] = {}


def _plain_facts(error: LoaderError) -> dict[str, Any]:
    """The facts of one of our own errors that can travel."""
    facts = {}
    for name, value in error.facts.items():
        try:
            values.encode(value)
        except (TypeError, ValueError):
            value = repr(value)
        facts[name] = value
    return {"packed": values.encode(facts)}
