"""A batch that is laid out, on its way into a slot.

Owns the bounds of what travels beside the slot, and the words for what cannot. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringloader._collate.leaves import Source, Subtree, write_all
from ringloader._collate.structure import Keys
from ringloader._core import values
from ringloader._core.layout import Layout, LeafType, Placement, Shapes, numbered

# What travels in a message must not stall the pipe: a batch with more text than this belongs into arrays.
MAX_INLINE_NBYTES = 64 << 20


class Collated:
    """A batch that is laid out: its definition, what travels beside it, and, until written, where its bytes come from.

    `inline` holds the encoded inline values (b"" if there are none), `nbytes` is the room needed in a slot, `copied_nbytes` all
    that is copied to make the batch. A batch without bytes is `written` without a slot.
    """

    __slots__ = ("_placement", "_sources", "copied_nbytes", "inline", "layout", "nbytes", "shapes", "written")

    def __init__(
        self, layout: Layout, placement: Placement, inline: bytes, sources: Sequence[Source], copied_nbytes: int
    ) -> None:
        self.layout = layout
        self.shapes: Shapes = placement.shapes
        self.inline = inline
        self.nbytes = placement.nbytes
        self.copied_nbytes = copied_nbytes
        self.written = placement.nbytes == 0
        self._placement = placement
        self._sources = sources

    def write(self, slot: np.ndarray) -> None:
        """Write to a slot, a writable 1-D uint8 array of at least `nbytes`; may be repeated until `forget_sources`."""
        write_all(self._sources, slot, self._placement.offsets, self._placement.sizes)
        self.written = True

    def check(self) -> None:
        """Raise what `write` would raise about rows that do not agree."""
        for source in self._sources:
            source.check()

    def check_empty(self) -> None:
        """Check the leaves without bytes, which `write` leaves out."""
        for source, size in zip(self._sources, self._placement.sizes, strict=True):
            if not size:
                source.check()

    def forget_sources(self) -> None:
        """Drop samples and slot: the batch is written, and `write` does nothing from now on."""
        self._sources = ()
        self.written = True


def make_layout(unify: Callable[[Layout], Layout], tree: Subtree, leaves: list[LeafType], keys: Keys) -> Layout:
    """Return the layout of a tree, after `unify`, which gives equal layouts one object.

    Raises LayoutError for dict keys that cannot be sent.
    """
    try:
        return unify(Layout(numbered(tree.node), tuple(leaves), len(tree.values)))
    except (TypeError, ValueError, OverflowError) as error:
        for node in tree.node.walk():
            for key in node.keys:
                _check_key(key, keys)
        raise keys.error("batch", f"cannot be described ({error})", 0) from error


def _check_key(key: Any, keys: Keys) -> None:
    try:
        values.encode(key)
    except (TypeError, ValueError, OverflowError) as error:
        kind = type(key).__qualname__
        words = f"has the key {key!r} of type {kind}, which cannot be sent ({error}): use text, numbers or tuples"
        raise keys.error("batch", words, 0, key=repr(key)) from error


def pack_inline(inline: list[Any], keys: Keys) -> bytes:
    """Encode the inline values. Raises LayoutError if they are too large or hold something that is no plain value."""
    try:
        packed = values.encode(inline)
    except (TypeError, ValueError, OverflowError) as error:
        words = f"holds values that cannot travel in a message ({error}); batch of sample {keys[0]!r}"
        raise keys.error("batch", words, 0) from error
    if len(packed) > MAX_INLINE_NBYTES:
        words = (
            f"holds {len(packed)} bytes of text and other plain values, more than the {MAX_INLINE_NBYTES} of a message: "
            "return arrays, or fewer samples per batch"
        )
        raise keys.error("batch", words, 0, nbytes=len(packed), limit=MAX_INLINE_NBYTES)
    return packed
