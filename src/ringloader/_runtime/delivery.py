"""Hand-over: a filled slot becomes the batch that the user gets.

Owns what is known about the layouts of each worker incarnation and how to wrap them, and the counts of what was delivered. A
batch that cannot be rebuilt here (a type that this process cannot import) is an error in its place, and its slot is free again.
Runs under the pump's lock, so it must not wait.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from typing import Any

import numpy as np

from ringloader._core import messages as msg
from ringloader._core.events import SlotReleased
from ringloader._core.layout import Layout, Placement
from ringloader._core.scheduler import Scheduler
from ringloader._core.session import Batch, Session
from ringloader._core.slots import Slot, SlotEvent
from ringloader._runtime import reports
from ringloader._runtime.cuda import DeviceError
from ringloader._runtime.filler import MAX_LAYOUTS
from ringloader._runtime.ring import Ring
from ringloader._runtime.wrapping import Wrap

# Layouts and placements remembered. A worker forgets its oldest beyond MAX_LAYOUTS; here there are more, so that none it still
# names is missing.
_MAX_KNOWN = 4 * MAX_LAYOUTS
# Leaves of all placements remembered: trees of thousands of leaves whose shapes vary must not fill the memory.
_MAX_PLANNED = 1 << 14
_EMPTY = np.empty(0, np.uint8)
# How often a batch is offered to a device that has no room for it before its error takes its place.
_MAX_REFUSED = 3


class Delivery:
    """Wraps ready batches of one loader."""

    def __init__(self, scheduler: Scheduler, ring: Ring, wrap: Wrap, *, is_inline: bool) -> None:
        self.copied_nbytes = self.num_samples = 0
        self._scheduler = scheduler
        self._ring = ring
        self._wrap = wrap
        self._is_inline = is_inline
        self._definitions: dict[tuple[int, int], OrderedDict[int, bytes]] = {}
        self._num_planned = 0
        self._plans: OrderedDict[tuple[bytes, bytes], tuple[Layout, Placement]] = OrderedDict()

    def deliver(self, session: Session, batch: Batch) -> Any:
        """Hand a ready or failed batch over: its value as a 1-tuple, or the exception that takes its place."""
        if batch.fault is not None:
            policy = self._scheduler.policy.faults
            error = reports.batch_error(batch, batch.fault, policy, inline=self._is_inline)
            self._scheduler.hand_over(session, batch)
            return error
        filled = batch.filled
        assert filled is not None
        slot = self._scheduler.slots.by_id.get(batch.slot_id)
        root = _EMPTY if slot is None else self._ring.root(slot, filled.nbytes)
        if self._wrap.streams:
            return self._copy(session, batch, slot, root)
        try:
            value, leaves = self._wrap(*self._plan(filled), filled.inline, root)
        except Exception as error:
            self._scheduler.hand_over(session, batch)
            if slot is not None:
                self._scheduler.room.released(SlotReleased(slot.slot_id, slot.generation))
            return reports.rebuild_error(batch, error)
        if slot is not None:
            self._ring.lend(slot, root, leaves)
        return self._delivered(session, batch, filled, value)

    def _copy(self, session: Session, batch: Batch, slot: Slot | None, root: np.ndarray[Any, Any]) -> Any:
        """Have a batch copied to a device. The slot is lent first: whatever fails, a copy of its first leaf may run already."""
        filled = batch.filled
        assert filled is not None
        if slot is not None:
            self._ring.lend(slot, root, [], self._wrap.streams)
        try:
            value, _ = self._wrap(*self._plan(filled), filled.inline, root)
        except DeviceError as error:
            # The device has no memory left, or worse. The batch is made again, in another slot, should the user go on.
            batch.num_refused += 1
            cause = error.__cause__ or error
            cause.__traceback__ = None  # its frames hold the slot's memory
            if batch.num_refused < _MAX_REFUSED:
                if slot is not None:
                    self._scheduler.slots.apply(slot, SlotEvent.LEND)
                session.wait(batch)
            else:
                self._scheduler.hand_over(session, batch)
                session.arrived = True  # as far as it ever will
            return cause
        except Exception as error:
            self._scheduler.hand_over(session, batch)
            traceback.clear_frames(error.__traceback__)
            return reports.rebuild_error(batch, error)
        finally:
            del root
        return self._delivered(session, batch, filled, value)

    def _delivered(self, session: Session, batch: Batch, filled: msg.Filled, value: Any) -> Any:
        self._scheduler.hand_over(session, batch)
        self.copied_nbytes += filled.copied_nbytes
        self.num_samples += filled.num_samples
        return (value,)

    def throttle(self) -> None:
        """Wait until the device can take more; outside the pump's lock."""
        self._wrap.throttle()

    def prune(self) -> None:
        """Let go of what was on its way to a device; on a thread of the user's."""
        self._wrap.prune()

    def _plan(self, filled: msg.Filled) -> tuple[Layout, Placement]:
        """Layout and placement of a batch, remembered by their bytes."""
        key = (filled.layout, filled.shapes)
        plan = self._plans.get(key)
        if plan is None:
            layout = Layout.from_wire(filled.layout)
            flat = np.frombuffer(filled.shapes, np.int64).tolist()
            shapes, start = [], 0
            for leaf in layout.leaves:
                shapes.append(tuple(flat[start : start + leaf.ndim]))
                start += leaf.ndim
            plan = self._plans[key] = (layout, layout.place(tuple(shapes)))
            self._num_planned += len(layout.leaves) + 1
            while self._num_planned > _MAX_PLANNED and len(self._plans) > 1:
                _, (oldest, _) = self._plans.popitem(last=False)
                self._num_planned -= len(oldest.leaves) + 1
        return plan

    def define(self, worker_id: int, incarnation: int, filled: msg.Filled) -> msg.Filled | None:
        """Put the layout's definition, sent once per incarnation, back into the message; None when it was never sent."""
        known = self._definitions.setdefault((worker_id, incarnation), OrderedDict())
        if filled.layout:
            known[filled.layout_id] = filled.layout
            if len(known) > _MAX_KNOWN:
                known.popitem(last=False)
            return filled
        definition = known.get(filled.layout_id)
        if definition is None:
            return None
        known.move_to_end(filled.layout_id)
        filled.layout = definition  # type: ignore[misc]  # fresh from the wire, and nobody else's yet
        return filled

    def forget(self, worker_id: int, incarnation: int) -> None:
        """An incarnation has ended."""
        self._definitions.pop((worker_id, incarnation), None)

    def forget_all(self) -> None:
        """Every incarnation has ended."""
        self._definitions.clear()
