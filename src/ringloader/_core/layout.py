"""The layout of a batch: its tree, the types of its leaves, and where their bytes lie in a slot.

A layout is tree + dtypes + number of dimensions: it is sent once and then named by an id. Shapes change with every ragged batch
and travel beside it. Leaves are aligned to `ALIGNMENT`, do not overlap and follow one another in tree order. Must not import
torch or a user's module: types are references that the shell resolves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ringloader._core import dtypes, values

# A cache line, and what torch's own CPU allocator gives: vectorised kernels take their aligned path.
ALIGNMENT = 64
# Ragged datasets give a new set of shapes with every batch: only the recent ones are worth remembering.
MAX_PLACEMENTS = 64
# Guards against trees that contain themselves and against Python's recursion limit in the other process.
MAX_DEPTH = 64

Shapes = tuple[tuple[int, ...], ...]


class Kind(StrEnum):
    """How one node of the tree is rebuilt."""

    LEAF = "leaf"  # the array at `index`
    VALUE = "value"  # the inline value at `index`
    DICT = "dict"
    LIST = "list"
    TUPLE = "tuple"
    MAPPING = "mapping"  # `type_name`, made without __init__, then updated
    MAPPING_FROM = "mapping-from"  # `type_name`, called with a dict
    MAPPING_LIKE = "mapping-like"  # a pickled prototype (the inline value at `index`), then updated
    SEQUENCE = "sequence"  # `type_name`, made without __init__, then extended
    SEQUENCE_FROM = "sequence-from"  # `type_name`, called with a list
    SEQUENCE_LIKE = "sequence-like"  # a pickled prototype (the inline value at `index`), then each position set
    NAMED = "named"  # a subclass of tuple
    FIELDS = "fields"  # `type_name`, made without __init__, attributes `keys` set: a dataclass


_KEYED = frozenset((Kind.DICT, Kind.MAPPING, Kind.MAPPING_FROM, Kind.MAPPING_LIKE, Kind.FIELDS))
_INDEXED = frozenset((Kind.LEAF, Kind.VALUE, Kind.MAPPING_LIKE, Kind.SEQUENCE_LIKE))
_TYPED = frozenset((Kind.MAPPING, Kind.MAPPING_FROM, Kind.SEQUENCE, Kind.SEQUENCE_FROM, Kind.NAMED, Kind.FIELDS))


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a batch's tree; which fields count depends on `kind`."""

    kind: Kind
    index: int = -1
    type_name: str = ""
    keys: tuple[Any, ...] = ()
    children: tuple[Node, ...] = ()

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class LeafType:
    """What a leaf is, whatever its shape: `kind` "tensor" or "array" (numpy in every output), torch's dtype name."""

    kind: str
    dtype: str
    ndim: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the leaves of one batch lie: byte `offsets` and `sizes` in the slot, `nbytes` in all, a multiple of `ALIGNMENT`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int
    shapes: Shapes
    # What the shells derived from this placement, by their own names, so that it is derived once.
    plans: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


class Layout:
    """A tree of leaves and inline values; immutable, equal and hashable by its wire form (so that key 1 is not key True)."""

    __slots__ = ("_itemsizes", "_placements", "_wire", "leaves", "num_values", "plans", "tree")

    def __init__(self, tree: Node, leaves: tuple[LeafType, ...], num_values: int) -> None:
        self.tree = tree
        self.leaves = leaves
        self.num_values = num_values
        self.plans: dict[str, Any] = {}
        self._itemsizes = tuple(dtypes.storage_of(leaf.dtype).itemsize for leaf in leaves)
        self._placements: OrderedDict[Shapes, Placement] = OrderedDict()
        types = [(leaf.kind, leaf.dtype, leaf.ndim) for leaf in leaves]
        self._wire = values.encode((_node_to_wire(tree), types, num_values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._wire == other._wire

    def __hash__(self) -> int:
        return hash(self._wire)

    def __repr__(self) -> str:
        return f"Layout({len(self.leaves)} leaves, {self.num_values} inline values)"

    def to_wire(self) -> bytes:
        """Return the definition as bytes, for `from_wire`."""
        return self._wire

    @classmethod
    def from_wire(cls, wire: bytes) -> Layout:
        """Rebuild a layout. Raises ValueError for bytes that `to_wire` did not make."""
        try:
            tree, types, num_values = values.decode(wire)
            leaves = tuple(LeafType(str(kind), str(dtype), int(ndim)) for kind, dtype, ndim in types)
            layout = cls(_node_from_wire(tree, MAX_DEPTH + 2), leaves, int(num_values))
            layout._check()
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, StopIteration) as error:
            raise ValueError(f"not a layout: {error}") from error
        return layout

    def place(self, shapes: Shapes) -> Placement:
        """Return the placement of leaves of these shapes; recent ones are remembered. Raises ValueError for a wrong number."""
        placement = self._placements.get(shapes)
        if placement is not None:
            return placement
        placement = self._compute(shapes)
        self._placements[shapes] = placement
        if len(self._placements) > MAX_PLACEMENTS:
            self._placements.popitem(last=False)
        return placement

    def _compute(self, shapes: Shapes) -> Placement:
        if tuple(map(len, shapes)) != tuple(leaf.ndim for leaf in self.leaves):
            raise ValueError(f"shapes {shapes} do not fit {self!r}")
        if any(size < 0 for shape in shapes for size in shape):
            raise ValueError(f"negative size in {shapes}")
        sizes = tuple(math.prod(shape) * itemsize for shape, itemsize in zip(shapes, self._itemsizes, strict=True))
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return Placement(tuple(offsets), sizes, end, shapes)

    def _check(self) -> None:
        leaf_indices = [node.index for node in self.tree.walk() if node.kind is Kind.LEAF]
        value_indices = [node.index for node in self.tree.walk() if node.kind in _INDEXED and node.kind is not Kind.LEAF]
        if leaf_indices != list(range(len(self.leaves))) or value_indices != list(range(self.num_values)):
            raise ValueError("leaves or values are missing from its tree")
        if any(leaf.kind not in ("tensor", "array") or leaf.ndim < 0 for leaf in self.leaves):
            raise ValueError("unknown kind of leaf")
        if any(leaf.kind == "tensor" and not dtypes.is_known(leaf.dtype) for leaf in self.leaves):
            raise ValueError("unknown dtype of a tensor")


@functools.cache
def leaf_type(kind: str, dtype: str, ndim: int) -> LeafType:
    """Return the one LeafType of these facts, so that identity means equality."""
    return LeafType(kind, dtype, ndim)


def numbered(tree: Node) -> Node:
    """Return the tree with its leaves, and its inline values, numbered in tree order, parents first."""
    return _number(tree, itertools.count(), itertools.count())


def _number(node: Node, leaves: Iterator[int], inline: Iterator[int]) -> Node:
    index = -1 if node.kind not in _INDEXED else next(leaves if node.kind is Kind.LEAF else inline)
    children = tuple(_number(child, leaves, inline) for child in node.children)
    return Node(node.kind, index, node.type_name, node.keys, children)


def _node_to_wire(node: Node) -> tuple[Any, ...]:
    wire: list[Any] = [node.kind.value]
    if node.kind in _INDEXED:
        wire.append(node.index)
    if node.kind in _TYPED:
        wire.append(node.type_name)
    if node.kind in _KEYED:
        wire.append(list(node.keys))
    if node.kind not in (Kind.LEAF, Kind.VALUE):
        wire.append([_node_to_wire(child) for child in node.children])
    return tuple(wire)


def _node_from_wire(wire: tuple[Any, ...], depth: int) -> Node:
    if depth < 0:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    parts = iter(wire)
    kind = Kind(next(parts))
    index = int(next(parts)) if kind in _INDEXED else -1
    type_name = str(next(parts)) if kind in _TYPED else ""
    keys = tuple(next(parts)) if kind in _KEYED else ()
    leafless = kind in (Kind.LEAF, Kind.VALUE)
    children = () if leafless else tuple(_node_from_wire(child, depth - 1) for child in next(parts))
    # Raises TypeError for keys that no dict can have.
    if len({*keys}) != (len(children) if kind in _KEYED else 0):
        raise ValueError("keys and children differ in number")
    return Node(kind, index, type_name, keys, children)
