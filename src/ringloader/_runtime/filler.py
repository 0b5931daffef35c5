"""Fetch the samples of one batch and collate them into a slot.

Owns what a worker does with a Fill, in a process of its own or inline: epoch, seeds, fetching, collation, and the answer.
What it cannot place for want of room it keeps, one batch per session, until it is told where to or to forget it; it never
waits. Must not know pipes or processes.
"""

from __future__ import annotations

import functools
import operator
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ringloader._collate.collate import Batch, Collated, Collator
from ringloader._collate.written import Writer, draws_nothing, offers
from ringloader._core import messages as msg
from ringloader._core import values
from ringloader._core.batch_keys import Keys, unpack_keys
from ringloader._core.layout import Layout
from ringloader._core.policy import SampleRetry
from ringloader._core.records import record
from ringloader._kernels import fetch
from ringloader._runtime import status
from ringloader._runtime.seeding import Seeder
from ringloader._runtime.status import StatusPage
from ringloader._runtime.words import format_traceback, run_user_code, safe_text, type_name
from ringloader._runtime.worker_info import WorkerInfo
from ringloader.errors import LayoutError, LoaderError

# How soon a wait before a retry is broken off when nobody wants the batch any more.
_PAUSE_STEP_S = 0.1
# Layouts an incarnation remembers having sent; ragged data makes new shapes all the time but few new trees.
MAX_LAYOUTS = 256


@record
class Kept:
    """A batch that waits for room."""

    collated: Collated | _Copied
    num_samples: int
    fetch_ns: int
    num_retried: int


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
        retry: SampleRetry | None = None,
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
        self._retry = retry
        self._num_retried = 0  # in the present batch
        self._epoch: int | None = None
        self._kept: dict[tuple[int, int], Kept] = {}  # (session id, batch id) →
        self.preface: msg.FromWorker | None = None  # what is to be said before the answer
        self._layout_ids: OrderedDict[Layout, int] = OrderedDict()
        self._next_layout_id = 0
        # torch looks for the method and for its truth, so that a wrapper can switch it off with None.
        # As in torch, a sample that is its own batch is fetched by its key, which may be a list.
        is_asked = not (self._seed_samples or collator.takes_one)
        self._getitems = getattr(dataset, "__getitems__", None) if is_asked else None
        self._writer = Writer(dataset, collator) if collator.is_plain and not self._seed_samples and offers(dataset) else None
        self._writer_draws = not draws_nothing(dataset)
        # What reading samples takes where batches are written, if anything: it is no batch's time.
        self._prepare = getattr(dataset, "prepare_samples", None) if draws_nothing(dataset) else None

    def fill(self, fill: msg.Fill, slot: np.ndarray[Any, Any] | None) -> msg.FromWorker:
        """Carry out one Fill into `slot` (1-D uint8, None: no room yet) and return the answer."""
        if self._prepare is not None and not fill.int_keys and self._indices_of(fill) is None:
            self._page.stage(status.IMPORTING)
            self._prepare()
            self._prepare = None
        began_ns = time.monotonic_ns()
        self._page.begin(fill.serial, began_ns)
        self.preface = None
        self._num_retried = 0
        kept = self._kept.pop((fill.session_id, fill.batch_id), None)
        answer: msg.FromWorker
        try:
            answer = self._place(fill, kept, slot) if kept is not None else run_user_code(self._make, fill, slot, began_ns)
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
        if fill.cuts:
            self._probe(fill)
        indices = self._indices_of(fill)
        if self._writer_draws or indices is None:
            self._seed(fill)
        self._page.stage(status.FETCHING)
        self._doing = "sample"
        if indices is not None:
            return self._write(fill, indices, slot, began_ns)
        keys = unpack_keys(Keys(fill.keys, fill.int_keys, fill.position))
        batch = self._collator.begin(len(keys), keys, slot)
        getitems = self._getitems
        if getitems:
            self._page.fetch_together(0, len(keys))
            batch.extend(self._patiently(fill, lambda: getitems(keys)) if self._retry else getitems(keys))
        elif self._retry:
            self._fetch_each_patiently(fill, keys, batch)
        else:
            self._fetch_each(fill, keys, batch)
        return self._collated(fill, batch, len(keys), slot, began_ns)

    def _indices_of(self, fill: msg.Fill) -> np.ndarray[Any, Any] | None:
        """What to have a batch written from; None where it is made of samples."""
        if self._writer is None:
            return None
        if fill.int_keys:
            return np.frombuffer(fill.keys, np.int64)
        keys = unpack_keys(Keys(fill.keys, fill.int_keys, fill.position))
        try:
            # Numbers of numpy's are as good: samplers that are arrays give them.
            return np.array(keys, np.int64) if all(isinstance(key, np.integer) for key in keys) else None
        except OverflowError:
            return None

    def _seed(self, fill: msg.Fill) -> None:
        self._info.begin(fill.position)
        self._seeder.for_position(fill.epoch, fill.position)

    def _collated(
        self, fill: msg.Fill, batch: Batch, num_samples: int, slot: np.ndarray[Any, Any] | None, began_ns: int
    ) -> msg.FromWorker:
        """Collate the samples that were fetched, and answer."""
        fetched_ns = time.monotonic_ns()
        self._page.stage(status.COLLATING)
        self._doing = "collate"
        collated = batch.finish()
        kept = Kept(collated, num_samples, fetched_ns - began_ns, self._num_retried)
        if collated.written or not collated.nbytes:
            return self._filled(fill, kept, time.monotonic_ns() - fetched_ns)
        return self._place(fill, kept, slot)

    def _write(
        self, fill: msg.Fill, indices: np.ndarray[Any, Any], slot: np.ndarray[Any, Any] | None, began_ns: int
    ) -> msg.FromWorker:
        """Have the dataset write the batch into the slot. Without room nothing is made, so nothing is kept."""
        writer = self._writer
        assert writer is not None
        collated = writer.plan(len(indices))
        room = slot if slot is not None else np.empty(0, np.uint8)
        if len(room) < collated.nbytes:
            return msg.NeedRoom(fill.serial, fill.generation, collated.nbytes, False)
        self._page.fetch_together(0, len(indices))
        if self._retry:
            self._patiently(fill, lambda: writer.write(collated, indices, room))
        else:
            writer.write(collated, indices, room)
        made = Kept(collated, len(indices), time.monotonic_ns() - began_ns, self._num_retried)
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
            samples = batch.gathered if not place else None
            if samples is not None:
                if fetch is not None and not self._seed_samples:
                    if not fetch(dataset, keys, samples, info, words, sample, cancel, serial):
                        raise CancelledFill
                    return
                add = samples.append

    def _fetch_each_patiently(self, fill: msg.Fill, keys: list[Any], batch: Any) -> None:
        """As `_fetch_each`, for a dataset whose faults may pass by themselves."""
        words, dataset = self._page.words, self._dataset
        for place, key in enumerate(keys):
            words[status.SAMPLE_WORD] = self._info.place = place
            self._check_cancel(fill)
            if self._seed_samples:
                self._seed_sample(fill, place)
            batch.add(self._patiently(fill, functools.partial(operator.getitem, dataset, key)))

    def _patiently(self, fill: msg.Fill, fetch: Callable[[], Any]) -> Any:
        """Fetch, again and again if need be, each time with the draws of the first."""
        retry = self._retry
        assert retry is not None
        draws = self._seeder.save()
        for attempt in range(retry.times):
            try:
                return fetch()
            except retry.on as error:
                if isinstance(error, LoaderError):
                    raise  # ours: trying again changes nothing
                self._num_retried += 1
            self._pause(fill, retry.wait_s(attempt))
            self._seeder.restore(draws)
            self._info.begin_again()
        return fetch()

    def _pause(self, fill: msg.Fill, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _PAUSE_STEP_S))
            self._check_cancel(fill)

    def _check_cancel(self, fill: msg.Fill) -> None:
        if self._page.words[status.CANCEL_WORD] == fill.serial:
            raise CancelledFill

    # --- which of the samples that are fetched in one call it is that fails -------------------------------------------------

    def _probe(self, fill: msg.Fill) -> None:
        """Fetch a batch in pieces and forget it: the sample that ends workers does so with the page telling where it is. What
        is delivered comes of one call, as ever."""
        if not (self._getitems or self._writer is not None):
            return
        starts = np.frombuffer(fill.cuts, np.int64).tolist()
        num_samples = len(unpack_keys(Keys(fill.keys, fill.int_keys, fill.position)))
        for start, stop in zip(starts, [*starts[1:], num_samples], strict=True):
            self._fetch_part(fill, start, stop)
        self._page.begin(fill.serial, time.monotonic_ns())

    def _find_culprit(self, fill: msg.Fill, error: BaseException) -> int:
        """Return the place of the sample at which the dataset raises, by halves; -1 where no sample does by itself.

        What raises anything else in a part says nothing of a sample: the dataset cannot be asked for parts.
        """
        view = self._page.view()
        start, stop = view.sample, view.sample + view.num_samples
        try:
            while stop - start > 1:
                middle = (start + stop) // 2
                found = self._fetch_part(fill, start, middle)
                if found is None:
                    start, found = middle, self._fetch_part(fill, middle, stop)
                else:
                    stop = middle
                if type(found) is not type(error):
                    return -1
        except CancelledFill:
            return -1
        return start

    def _fetch_part(self, fill: msg.Fill, start: int, stop: int) -> BaseException | None:
        """Fetch some samples of a batch in one call of their own, and forget them; return what the dataset raised."""
        self._check_cancel(fill)
        self._page.begin(fill.serial, time.monotonic_ns())  # each call has a time limit of its own
        self._page.stage(status.FETCHING)
        self._page.fetch_together(start, stop - start)
        self._seed(fill)
        try:
            if self._retry:
                self._patiently(fill, lambda: run_user_code(self._call_for, fill, start, stop))
            else:
                run_user_code(self._call_for, fill, start, stop)
        except (CancelledFill, SystemExit):
            raise
        except self._catch as error:
            return error
        return None

    def _call_for(self, fill: msg.Fill, start: int, stop: int) -> None:
        indices = self._indices_of(fill)
        if self._writer is not None and indices is not None:
            indices = indices[start:stop]
            collated = self._writer.plan(len(indices))
            self._writer.write(collated, indices, np.empty(collated.nbytes, np.uint8))
        elif self._getitems:
            self._getitems(unpack_keys(Keys(fill.keys, fill.int_keys, fill.position))[start:stop])

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
            made.num_retried,
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
        kind, facts, text = self._doing, {}, safe_text(error)
        name, trace = type_name(error), format_traceback(error)
        if isinstance(error, LayoutError):
            kind, facts = "layout", _plain_facts(error)
        if self._retry is not None and kind == "sample" and isinstance(error, self._retry.on):
            text += f" (after {self._retry.times} retries, faults.retry)"
        place = -1
        if kind == "sample":
            place = self._find_culprit(fill, error)
        if self._num_retried:
            facts = {**facts, "num_retried": self._num_retried}
        return msg.Failed(fill.serial, fill.generation, kind, place, name, text, trace, facts)


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
