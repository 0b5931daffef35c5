"""The value coding: equal and of the same type on the other side, or refused."""

from __future__ import annotations

import collections
import enum
import math
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringloader._core.values import decode, encode

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary() | st.text(st.characters()),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4),
    max_leaves=5,
)
LEAF = (
    HASHABLE
    | st.complex_numbers(allow_nan=False)
    | st.binary().map(bytearray)
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers())
    | st.text("abc/.", min_size=1).map(pathlib.Path)
    | st.sampled_from([np.int8(-3), np.uint64(2**64 - 1), np.float16(0.5), np.float64(1e300), np.bool_(True), np.complex64(1j)])
    | st.sampled_from([np.str_("é"), np.bytes_(b"\xff")])
    | st.text(st.characters(categories=["Cs"]), max_size=3)
)
VALUE = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=4)
    ),
    max_leaves=12,
)


class Color(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "a b")


class Text(str):
    __slots__ = ()


def same(left: Any, right: Any) -> bool:
    """Equal and of equal types all the way down; dicts in the same order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(map(same, left.items(), right.items()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(VALUE)
def test_value_plain_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    """Whatever is accepted is the same after the trip, tuples, keys and numpy scalars included."""
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize(
    "mapping",
    [{0: 1, 1: 2}, {("cam", 1): 0}, {None: 0}, {True: 0, "True": 1}, {1.5: 0}, {b"k": 0}, {"a": {(1, (2,)): [3]}}, {2**80: 1}],
    ids=repr,
)
def test_b60_dict_keys_of_any_plain_type_arrive_equal(mapping: dict[Any, Any]) -> None:
    """B60: keys that bare msgpack packs but cannot unpack arrive equal, of their type and in order."""
    assert same(decode(encode(mapping)), mapping)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**64, 10**400, -(10**400)], ids=lambda number: f"{float(number > 0)}")
def test_value_big_int_comes_back(number: int) -> None:
    """Integers beyond 64 bits survive."""
    assert decode(encode([number])) == [number]


def test_value_special_floats_come_back() -> None:
    """NaN, infinities and the sign of zero survive."""
    nan, infinity, zero = decode(encode([math.nan, -math.inf, -0.0]))
    assert math.isnan(nan)
    assert infinity == -math.inf
    assert math.copysign(1, zero) == -1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Color.RED,
        Pair(1, 2),
        collections.OrderedDict(a=1),
        Text("a"),
        np.zeros(2),
        len,
        memoryview(b"a"),
        {1: [object()]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_without_plain_form_is_refused(value: Any) -> None:
    """Subclasses and objects raise instead of arriving as something else."""
    with pytest.raises(TypeError, match="plain form"):
        encode(value)


def test_value_nested_too_deep_is_refused() -> None:
    """Depth without end is an error at the sender, not a crash at the receiver."""
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises((ValueError, RecursionError)):
        encode(deep)


@given(st.binary(max_size=60))
def test_value_arbitrary_bytes_decode_or_raise(packed: bytes) -> None:
    """Bytes from elsewhere give a value or an exception, and never more."""
    try:
        decode(packed)
    except (MemoryError, SystemError):
        raise
    except Exception:  # msgpack has no common base for what it raises
        return
