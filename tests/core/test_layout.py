"""Layouts: wire form and placement."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringloader._core import dtypes, values
from ringloader._core.layout import ALIGNMENT, MAX_PLACEMENTS, Kind, Layout, LeafType, Node, numbered

KEYS = st.one_of(
    st.text(max_size=3),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(max_size=3),
    st.tuples(st.text(max_size=2), st.integers()),
)
DTYPES = st.sampled_from(["float32", "bool", "int64", "bfloat16", "complex32", "uint8", "complex128", "float8_e5m2"])
LEAF, VALUE = Node(Kind.LEAF), Node(Kind.VALUE)


def branches(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    """Nodes of every kind that has children."""
    lists = st.lists(children, max_size=3)
    plain = st.builds(
        lambda kind, inner: Node(
            kind, -1, "collections:deque" if kind in (Kind.SEQUENCE, Kind.NAMED) else "", (), tuple(inner)
        ),
        st.sampled_from([Kind.LIST, Kind.TUPLE, Kind.SEQUENCE_LIKE, Kind.NAMED, Kind.SEQUENCE]),
        lists,
    )
    keyed = st.builds(
        lambda kind, items: Node(
            kind,
            -1,
            "collections:OrderedDict" if kind is Kind.MAPPING else "",
            tuple(key for key, _ in items),
            tuple(n for _, n in items),
        ),
        st.sampled_from([Kind.DICT, Kind.MAPPING, Kind.MAPPING_LIKE]),
        st.lists(st.tuples(KEYS, children), max_size=3, unique_by=lambda item: item[0]),
    )
    return plain | keyed


TREES = st.recursive(st.sampled_from([LEAF, VALUE]), branches, max_leaves=8)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout."""
    tree = numbered(draw(TREES))
    nodes = list(tree.walk())
    num_leaves = sum(node.kind is Kind.LEAF for node in nodes)
    num_values = sum(node.kind in (Kind.VALUE, Kind.MAPPING_LIKE, Kind.SEQUENCE_LIKE) for node in nodes)
    leaves = [
        LeafType(draw(st.sampled_from(["tensor", "array"])), draw(DTYPES), draw(st.integers(0, 3))) for _ in range(num_leaves)
    ]
    return Layout(tree, tuple(leaves), num_values)


@given(layouts())
def test_layout_round_trip_is_equal(layout: Layout) -> None:
    """What arrives is what was sent, key types included."""
    back = Layout.from_wire(layout.to_wire())
    assert back == layout
    assert hash(back) == hash(layout)
    assert back.tree == layout.tree
    assert back.leaves == layout.leaves
    assert back.num_values == layout.num_values


@given(layouts(), st.data())
def test_place_leaves_are_aligned_and_disjoint(layout: Layout, data: st.DataObject) -> None:
    """No leaf overlaps another, all start at a multiple of the alignment, all end within the slot."""
    shapes = tuple(tuple(data.draw(st.integers(0, 5)) for _ in range(leaf.ndim)) for leaf in layout.leaves)
    placement = layout.place(shapes)
    end = 0
    for leaf, shape, offset, size in zip(layout.leaves, shapes, placement.offsets, placement.sizes, strict=True):
        assert size == math.prod(shape) * dtypes.storage_of(leaf.dtype).itemsize
        assert offset % ALIGNMENT == 0
        assert offset >= end
        end = offset + size
    assert placement.nbytes >= end
    assert placement.nbytes % ALIGNMENT == 0
    assert layout.place(shapes) is placement
    assert (placement.nbytes == 0) == (sum(placement.sizes) == 0)


def test_place_ragged_batches_remembers_only_recent_ones() -> None:
    """A new shape in every batch does not grow memory."""
    layout = Layout(Node(Kind.LEAF, 0), (LeafType("tensor", "float32", 1),), 0)
    first = layout.place(((0,),))
    for size in range(1, MAX_PLACEMENTS + 10):
        layout.place(((size,),))
    assert layout.place(((0,),)) is not first


@pytest.mark.parametrize("shapes", [(), ((1,), (1,)), ((1, 2),), ((-1,),)])
def test_place_wrong_shapes_are_refused(shapes: Any) -> None:
    """Shapes that do not belong to the layout are an error, not a wrong offset."""
    layout = Layout(Node(Kind.LEAF, 0), (LeafType("tensor", "float32", 1),), 0)
    with pytest.raises(ValueError, match=r"shapes|negative"):
        layout.place(shapes)


@given(st.binary(max_size=40))
def test_from_wire_random_bytes_raise_value_error(wire: bytes) -> None:
    """Garbage never takes down the reader."""
    with pytest.raises(ValueError, match="not a layout"):
        Layout.from_wire(wire)


@pytest.mark.parametrize(
    "definition",
    [
        (("leaf", 0), [], 0),
        (("leaf", 1), [("tensor", "float32", 1)], 0),
        (("value", 0), [("tensor", "float32", 1)], 0),
        (("leaf", 0), [("tensor", "object", 1)], 0),
        (("leaf", 0), [("tensor", ">f4", 1)], 0),
        (("leaf", 0), [("pointer", "float32", 1)], 0),
        (("dict", ["a", "b"], [("leaf", 0)]), [("tensor", "float32", 1)], 0),
        (("dict", [["a"]], [("value", 0)]), [], 1),
        (("nonsense", []), [], 0),
        (7, [], 0),
        ([], [], 0),
    ],
)
def test_from_wire_wrong_definition_raises_value_error(definition: Any) -> None:
    """A well-formed message with an impossible layout is refused."""
    with pytest.raises(ValueError, match="not a layout"):
        Layout.from_wire(values.encode(definition))


def test_layout_equality_distinguishes_equal_keys_of_other_types() -> None:
    """Key 1 and key True are two layouts."""
    first, second = (Layout(Node(Kind.DICT, -1, "", (key,), (Node(Kind.VALUE, 0),)), (), 1) for key in (1, True))
    assert first != second
