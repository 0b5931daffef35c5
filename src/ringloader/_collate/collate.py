"""Samples to a slot, one copy.

Owns the life of one batch: samples are added as they are fetched; `finish` lays the batch out and writes it, or keeps what it
needs for a larger slot. Large arrays are copied to their row when they are added, while they are in the cache, and dropped;
all else is kept and joined column by column at the end, which takes a third of the time of a loop over rows. Must not import
torch, know a process, or keep a slot after `finish` has written to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringloader._collate.collated import Collated, make_layout, pack_inline
from ringloader._collate.columns import LEAF_NODE, VALUE_NODE, Asker, find_runs, gather, gather_run
from ringloader._collate.direct import DirectRows, direct_rows, is_large
from ringloader._collate.leaves import Inline, Outcome, Source, Subtree
from ringloader._collate.padding import Padding
from ringloader._collate.results import walk_batch
from ringloader._collate.structure import Keys, Structure
from ringloader._core.layout import Kind, Layout, LeafType, Node, Placement
from ringloader.errors import LayoutError

__all__ = ["Batch", "Collated", "Collator"]

# From this size a leaf is worth its own Python call per row; below, joining a column at once is faster.
DIRECT_NBYTES = 16 * 1024
# Ragged trees (dict keys that differ per batch) must not grow the memory of a worker without bound.
_MAX_LAYOUTS = 64


class Batch:
    """One batch in the making."""

    def add(self, sample: Any) -> None:
        """Add the next sample. Raises LayoutError for one that cannot be part of this batch."""
        raise NotImplementedError

    @property
    def gathered(self) -> list[Any] | None:
        """The list that samples after the first may be appended to, where they need no look before the end."""
        return None

    def extend(self, samples: Sequence[Any]) -> None:
        """Add samples that were fetched together."""
        for sample in samples:
            self.add(sample)

    def finish(self) -> Collated:
        """Lay the batch out and write it if it fits the slot. Raises LayoutError for samples that do not make a batch."""
        raise NotImplementedError


class Collator:
    """What all batches of one loader share: the options, and the structures and layouts seen so far.

    `output` "torch" or "numpy" says what leaves will become. Without `collate_fn` samples are collated as by torch's
    `default_collate`; `convert` takes the one sample of a batch as the batch itself (`batch_size=None`); `padding` lets rows of
    a leaf differ in length.
    """

    def __init__(
        self,
        *,
        output: str = "torch",
        collate_fn: Callable[..., Any] | None = None,
        convert: bool = False,
        padding: Padding | None = None,
    ) -> None:
        self.asker = Asker(output, self._warn_of_grad)
        self.asker.walk = lambda batch, path, keys: walk_batch(batch, path, keys, self.asker)
        self.padding = padding
        if padding is not None:
            self.asker.pad = padding.pad
        self.structure: Structure | None = None
        self._collate_fn = collate_fn
        self._convert = convert
        self._warned_of_grad = False
        self._layouts: dict[Layout, Layout] = {}

    @property
    def takes_one(self) -> bool:
        """A batch is one sample, whatever its key is (`batch_size=None`)."""
        return self._convert

    @property
    def is_plain(self) -> bool:
        """Samples are collated by the default rules."""
        return self._collate_fn is None and not self._convert and self.padding is None

    def begin(self, num_samples: int, keys: Sequence[Any] | None = None, slot: np.ndarray | None = None) -> Batch:
        """Start a batch of about `num_samples` samples for `slot`, a writable 1-D uint8 array, or for a slot yet to be found.

        `keys` are the dataset keys of the samples in order, for error messages; they are read when an error is worded, not
        before, so the caller may remove the key of a sample that is left out.
        """
        if self._collate_fn is None and not self._convert:
            return GatheredBatch(self, num_samples, Keys(keys), slot)
        return ResultBatch(self, self._collate_fn, self._convert, Keys(keys), slot)

    def layout_of(self, layout: Layout) -> Layout:
        """Return the object that stands for all layouts equal to this one."""
        known = self._layouts.setdefault(layout, layout)
        if len(self._layouts) > _MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return known

    def _warn_of_grad(self, path: str) -> None:
        if not self._warned_of_grad:
            self._warned_of_grad = True
            words = f"{path} requires grad; batches are detached, since autograd does not reach into a dataset"
            warnings.warn(words, UserWarning, stacklevel=2)


class GatheredBatch(Batch):
    """A batch under torch's rules for `default_collate`."""

    __slots__ = (
        "_collator",
        "_direct",
        "_flat",
        "_keys",
        "_num_samples",
        "_recovered_nbytes",
        "_samples",
        "_slot",
        "_structure",
    )

    def __init__(self, collator: Collator, num_samples: int, keys: Keys, slot: np.ndarray | None) -> None:
        self._collator = collator
        self._num_samples = num_samples
        self._keys = keys
        self._slot = slot
        self._samples: list[Any] = []
        self._structure: Structure | None = None
        # The leaves that go to their row at once, by position; while there are any, `_flat` holds the other leaves per sample.
        self._direct: dict[int, DirectRows] = {}
        self._flat: list[list[Any]] | None = None
        self._recovered_nbytes = 0

    def add(self, sample: Any) -> None:
        if self._flat is not None:
            self._add_flat(sample)
        elif self._samples:
            self._samples.append(sample)
        else:
            self._start(sample)

    @property
    def gathered(self) -> list[Any] | None:
        return self._samples if self._flat is None else None

    def extend(self, samples: Sequence[Any]) -> None:
        if self._flat is None:
            self._samples += samples
        else:
            super().extend(samples)

    def finish(self) -> Collated:
        num_rows = len(self._samples if self._flat is None else self._flat)
        if num_rows == 0:
            raise LayoutError("a batch has no samples", path="batch", samples=())
        structure = self._structure or self._structure_of(self._samples[0])
        if self._flat is None:
            columns: Sequence[Sequence[Any]] = structure.columns(self._samples, self._keys)
        else:
            columns = self._flat_columns()
        try:
            return self._finish(structure, columns, num_rows, strict=False)
        except LayoutError:
            raise
        except (ValueError, TypeError, RuntimeError, NotImplementedError):
            # Rows that do not agree: look at each of them, to promote or to say where.
            self._recover()
            columns = columns if self._flat is None else self._flat_columns()
            return self._finish(structure, columns, num_rows, strict=True)

    def _finish(self, structure: Structure, columns: Sequence[Sequence[Any]], num_rows: int, strict: bool) -> Collated:
        direct = self._direct
        outcomes = self._gather(structure, columns, num_rows, strict)
        collated, placement = self._lay_out(structure, outcomes)
        fits = self._slot is not None and len(self._slot) >= collated.nbytes
        if direct and not (fits and self._are_in_place(structure, outcomes, placement)):
            self._recover()
            return self._finish(structure, self._flat_columns(), num_rows, strict)
        collated.check_empty()
        if self._slot is not None and fits:
            collated.write(self._slot)
            collated.forget_sources()
        elif not collated.written:
            collated.check()
        return collated

    def _gather(self, structure: Structure, columns: Sequence[Sequence[Any]], num_rows: int, strict: bool) -> list[Outcome]:
        outcomes: list[Outcome] = []
        if not (self._direct or strict or self._collator.padding):
            if structure.runs is None:
                structure.runs = find_runs([column[0] for column in columns])
            for first, end in structure.runs:
                run = gather_run(columns[first:end])
                if run is None:
                    structure.runs = None  # found anew with the next batch
                    return self._gather_each(structure, columns, num_rows, strict, 0)
                outcomes += self._gather_each(structure, columns[:first], num_rows, strict, len(outcomes))
                outcomes += run
        return outcomes + self._gather_each(structure, columns, num_rows, strict, len(outcomes))

    def _gather_each(
        self, structure: Structure, columns: Sequence[Sequence[Any]], num_rows: int, strict: bool, start: int
    ) -> list[Outcome]:
        keys, asker, direct = self._keys, self._collator.asker, self._direct
        return [
            direct[position].placed(num_rows)
            if position in direct
            else gather(columns[position], structure.leaves[position], keys, asker, strict)
            for position in range(start, len(columns))
        ]

    def _flat_columns(self) -> list[tuple[Any, ...]]:
        return list(zip(*self._flat, strict=True)) if self._flat else []

    def _lay_out(self, structure: Structure, outcomes: list[Outcome]) -> tuple[Collated, Placement]:
        sources: list[Source] = []
        inline: list[Any] = []
        doubled: list[int] = []
        for outcome in outcomes:
            if isinstance(outcome, Inline):
                inline.append(outcome.value)
            elif isinstance(outcome, Subtree):
                # torch has copied these once already.
                doubled += range(len(sources), len(sources) + len(outcome.sources))
                sources += outcome.sources
            else:
                sources.append(outcome)
        for length in self._lengths(outcomes):
            if length is None:
                inline.append(None)
            else:
                sources.append(length)
        signature = signature_of(outcomes) if structure.reusable else None
        layout = structure.layouts.get(signature)
        if layout is None:
            layout, inline = self._make_layout(structure, outcomes, [source.leaf for source in sources])
            if signature is not None:
                structure.layouts[signature] = layout
        placement = layout.place(tuple([source.shape for source in sources]))
        packed = pack_inline(inline, self._keys) if inline else b""
        copied = sum(placement.sizes) + self._recovered_nbytes + sum([placement.sizes[index] for index in doubled])
        return Collated(layout, placement, packed, sources, copied), placement

    def _lengths(self, outcomes: list[Outcome]) -> list[Source | None]:
        """If they are wanted, the lengths of the rows of each leaf, None for a leaf without."""
        padding = self._collator.padding
        if padding is None or not padding.lengths:
            return []
        return [
            padding.lengths_of(one) if not isinstance(one, (Inline, Subtree)) and padding.applies(one) else None
            for one in outcomes
        ]

    def _make_layout(self, structure: Structure, outcomes: list[Outcome], leaves: list[LeafType]) -> tuple[Layout, list[Any]]:
        parts: list[Any] = []
        for outcome in outcomes:
            if isinstance(outcome, Inline):
                parts.append((VALUE_NODE, [outcome.value]))
            elif isinstance(outcome, Subtree):
                parts.append((outcome.node, outcome.values))
            else:
                parts.append((LEAF_NODE, []))
        tree, inline = structure.node(parts)
        lengths = self._lengths(outcomes)
        if lengths:
            nodes = [(VALUE_NODE, [None]) if one is None else (LEAF_NODE, []) for one in lengths]
            beside, values = structure.node(nodes)
            tree, inline = Node(Kind.TUPLE, children=(tree, beside)), inline + values
        return make_layout(self._collator.layout_of, Subtree(tree, [], inline), leaves, self._keys), inline

    def _structure_of(self, sample: Any) -> Structure:
        structure = self._collator.structure
        if structure is None or not structure.matches(sample):
            structure = Structure(sample, self._keys, self._collator.asker.accepts)
            self._collator.structure = structure
        self._structure = structure
        return structure

    def _start(self, sample: Any) -> None:
        structure = self._structure_of(sample)
        self._samples.append(sample)
        if self._slot is None or self._collator.padding is not None:
            return
        flat = structure.flatten(sample, 0, self._keys)
        if not any(map(_is_large, flat)):
            return
        if self._plan_direct(structure, flat, self._slot):
            self._flat = []
            self._samples.clear()
            self._add_flat(sample)

    def _plan_direct(self, structure: Structure, flat: list[Any], slot: np.ndarray) -> bool:
        """Predict where the leaves will lie from the first sample; `finish` moves them if it was wrong."""
        keys, asker = self._keys, self._collator.asker
        outcomes = [gather([value], leaf, keys, asker, False) for value, leaf in zip(flat, structure.leaves, strict=True)]
        sources = [outcome for outcome in outcomes if not isinstance(outcome, (Inline, Subtree))]
        if any(isinstance(outcome, Subtree) for outcome in outcomes):
            return False
        layout = structure.layouts.get(signature_of(outcomes))
        if layout is None:
            layout = self._make_layout(structure, outcomes, [source.leaf for source in sources])[0]
        shapes = tuple([(self._num_samples, *source.shape[1:]) for source in sources])
        placement = layout.place(shapes)
        if placement.nbytes > len(slot):
            return False
        positions = [position for position, outcome in enumerate(outcomes) if not isinstance(outcome, Inline)]
        for position, source, offset, shape in zip(positions, sources, placement.offsets, shapes, strict=True):
            if _is_large(flat[position]):
                self._direct[position] = direct_rows(flat[position], source.leaf, shape, slot[: placement.nbytes], offset)
        return True

    def _add_flat(self, sample: Any) -> None:
        assert self._flat is not None
        assert self._structure is not None
        row = len(self._flat)
        flat = self._structure.flatten(sample, row, self._keys)
        if self._direct and row >= self._num_samples:
            self._recover()
        for position, rows in list(self._direct.items()):
            if not rows.write_row(row, flat[position], self._structure.leaves[position].path, self._keys):
                self._recover()
                break
        for position in self._direct:
            flat[position] = None
        self._flat.append(flat)

    def _are_in_place(self, structure: Structure, outcomes: list[Outcome], placement: Placement) -> bool:
        # A prediction has no subtrees, so without one sources and outcomes that are no text correspond.
        if any(isinstance(outcome, Subtree) for outcome in outcomes):
            return False
        offsets = iter(placement.offsets)
        found = [None if isinstance(outcome, Inline) else next(offsets) for outcome in outcomes]
        return all(found[position] == rows.offset for position, rows in self._direct.items())

    def _recover(self) -> None:
        """Take the rows that were written back out of the slot, and go on as if they had been kept."""
        for position, rows in self._direct.items():
            assert self._flat is not None
            recovered = rows.recover(len(self._flat))
            self._recovered_nbytes += rows.row_nbytes * len(self._flat)
            for flat, value in zip(self._flat, recovered, strict=True):
                flat[position] = value
        self._direct = {}


class ResultBatch(Batch):
    """A batch that a collate_fn makes, or a single sample that is one."""

    def __init__(
        self, collator: Collator, collate_fn: Callable[..., Any] | None, convert: bool, keys: Keys, slot: np.ndarray | None
    ) -> None:
        self._collator = collator
        self._collate_fn = collate_fn
        self._convert = convert
        self._keys = keys
        self._slot = slot
        self._samples: list[Any] = []

    def add(self, sample: Any) -> None:
        self._samples.append(sample)

    @property
    def gathered(self) -> list[Any]:
        return self._samples

    def finish(self) -> Collated:
        if self._collate_fn is None and len(self._samples) != 1:
            raise LayoutError(f"batch_size=None takes one sample per batch, not {len(self._samples)}", path="batch", samples=())
        samples: Any = self._samples[0] if self._convert else self._samples
        batch = samples if self._collate_fn is None else self._collate_fn(samples)
        convert = self._convert and self._collate_fn is None
        tree = walk_batch(batch, "sample" if convert else "batch", self._keys, self._collator.asker, convert)
        layout = make_layout(self._collator.layout_of, tree, [source.leaf for source in tree.sources], self._keys)
        placement = layout.place(tuple([source.shape for source in tree.sources]))
        # What the collate_fn put together is copied once more, into the slot.
        copied = sum(placement.sizes) * (1 if self._collate_fn is None else 2)
        inline = pack_inline(tree.values, self._keys) if tree.values else b""
        collated = Collated(layout, placement, inline, tree.sources, copied)
        if self._slot is not None and len(self._slot) >= collated.nbytes:
            collated.write(self._slot)
            collated.forget_sources()
        return collated


def signature_of(outcomes: list[Outcome]) -> tuple[int, ...] | None:
    """Return what, beside the structure, decides the layout; None where a leaf has become a tree of its own."""
    if any(type(outcome) is Subtree for outcome in outcomes):
        return None
    # Leaf types are one object each and live for ever.
    return tuple([0 if isinstance(outcome, Inline) else id(outcome.leaf) for outcome in outcomes])  # type: ignore[union-attr]


def _is_large(value: Any) -> bool:
    return is_large(value, DIRECT_NBYTES)
