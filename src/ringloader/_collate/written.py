"""Batches that the dataset writes into the slot by itself.

Owns the two methods that a dataset may offer, `batch_spec(n)` and `write_batch(indices, out)`, and what may go wrong with
them. `out` has the tree of the spec, with arrays over the slot in the place of each `ArraySpec`; it is the dataset's for the
length of the call. Must not import torch.
"""

from __future__ import annotations

import gc
import operator
import os
import sys
from collections import OrderedDict
from typing import Any

import numpy as np

from ringloader._collate.collate import Collator
from ringloader._collate.collated import Collated, make_layout, pack_inline
from ringloader._collate.containers import leaves_of
from ringloader._collate.results import Unwritten, walk_batch
from ringloader._collate.structure import Keys
from ringloader._collate.wrap import LeafPlan, plan_of, wrap_with
from ringloader._core.layout import Layout, Placement
from ringloader._core.units import MARKER
from ringloader.errors import LayoutError

# What a class that changes how samples are read defines.
_READING = ("__getitem__", "__getitems__", "__len__")
# A full batch and a short one are all that most datasets need.
_MAX_SPECS = 16


class Writer:
    """Has one dataset write batches."""

    def __init__(self, dataset: Any, collator: Collator) -> None:
        self._dataset = dataset
        self._collator = collator
        self._plans: OrderedDict[int, tuple[Layout, Placement, bytes]] = OrderedDict()
        self._marks = os.environ.get("RINGLOADER_DEBUG") == "1"
        self.is_kept = False  # the dataset holds memory of a slot, and might write into it at any time

    def plan(self, num_samples: int) -> Collated:
        """Return a batch of so many samples, laid out and not yet written. Raises LayoutError for a spec that is none."""
        known = self._plans.get(num_samples)
        if known is None:
            known = self._plans[num_samples] = self._derive(num_samples)
            if len(self._plans) > _MAX_SPECS:
                self._plans.popitem(last=False)
        layout, placement, inline = known
        return Collated(layout, placement, inline, (), sum(placement.sizes))

    def _derive(self, num_samples: int) -> tuple[Layout, Placement, bytes]:
        spec = self._dataset.batch_spec(num_samples)
        keys = Keys(range(num_samples))
        tree = walk_batch(spec, "batch_spec", keys, self._collator.asker, specs=True)
        if not tree.sources or any(type(source) is not Unwritten for source in tree.sources):
            raise LayoutError(
                f"batch_spec({num_samples}) gave {spec!r:.200}; give an ArraySpec, or dicts, lists and tuples of them",
                path="batch_spec",
            )
        layout = make_layout(self._collator.layout_of, tree, [source.leaf for source in tree.sources], keys)
        inline = pack_inline(tree.values, keys) if tree.values else b""
        return layout, layout.place(tuple([source.shape for source in tree.sources])), inline

    def forget(self) -> None:
        """Another epoch begins: the dataset may make other batches now."""
        self._plans.clear()

    def write(self, collated: Collated, indices: np.ndarray[Any, Any], slot: np.ndarray[Any, Any]) -> None:
        """Have the dataset write a batch that `plan` gave.

        Raises LayoutError when it keeps an array of `out`, `is_kept` then being set, or puts another in its place.
        """
        num_holders = sys.getrefcount(slot)
        try:
            self._write(indices, slot)
        except BaseException as error:
            import traceback  # only when something failed: workers start lighter without it

            # What failed holds its local variables.
            traceback.clear_frames(error.__traceback__)
            self._check_holders(slot, num_holders)
            raise
        self._check_holders(slot, num_holders)
        collated.written = True

    def _write(self, indices: np.ndarray[Any, Any], slot: np.ndarray[Any, Any]) -> None:
        layout, placement, inline = self._plans[len(indices)]
        plan = plan_of(layout, placement, "written", _make_storage)
        out, arrays = wrap_with(plan, inline, slot, copy_out=False)
        if not plan.all_stay:
            arrays = _arrays_of(out)  # the empty ones, too, which lie in no slot
        if self._marks:
            slot[: placement.nbytes] = MARKER
        self._dataset.write_batch(indices, out)
        found = _arrays_of(out)
        if len(found) != len(arrays) or any(map(operator.is_not, found, arrays)):
            raise LayoutError(
                "write_batch put another array into `out`, which is lost: write into the arrays that are there, as by "
                "out[...][...] = rows",
                path="out",
            )

    def _check_holders(self, slot: np.ndarray[Any, Any], num_holders: int) -> None:
        # One more: this call's own.
        if sys.getrefcount(slot) > num_holders + 1:
            gc.collect()  # a cycle may hold it: that of an exception that was caught, say
            if sys.getrefcount(slot) > num_holders + 1:
                self.is_kept = True
                raise LayoutError(
                    "write_batch kept an array of `out`, or a view of one, after it had returned: the memory belongs to other "
                    "batches now; copy what is to be kept",
                    path="out",
                )


def _arrays_of(out: Any) -> list[Any]:
    # A new list: the dataset may put other things into `out`.
    flat = list(out) if type(out) is list else list(out.values()) if type(out) is dict else []
    if flat and all(type(leaf) is np.ndarray for leaf in flat):
        return flat  # what most are
    return [leaf for leaf in leaves_of(out) if isinstance(leaf, np.ndarray)]


def _make_storage(array: np.ndarray[Any, Any], leaf: LeafPlan) -> Any:
    return array


def draws_nothing(dataset: Any) -> bool:
    """Whether a dataset's very class says that its batches draw no random numbers; one derived from it may."""
    return vars(type(dataset)).get("draws_nothing") is True


def offers(dataset: Any) -> bool:
    """Whether a dataset writes batches by itself.

    Its class has to say so: a wrapper that passes everything on, or a class that reads samples in another way than the one it
    inherits `write_batch` from, has its own `__getitem__`.
    """
    for kind in type(dataset).__mro__:
        own = vars(kind)
        if "write_batch" in own:
            return callable(own["write_batch"]) and callable(getattr(type(dataset), "batch_spec", None))
        if not own.keys().isdisjoint(_READING):
            return False
    return False
