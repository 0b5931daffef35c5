"""Attribute digests: equal for equal datasets in every process, different where order or content differ, bounded."""

from __future__ import annotations

import collections
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringloader._core.digests import attribute_digests, value_digest

SRC = pathlib.Path(__file__).parents[2] / "src"
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4) | st.tuples(inner),
    max_leaves=10,
)


class Sample:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("size", "unset")

    def __init__(self) -> None:
        self.size = 3


@given(PLAIN)
def test_digest_rebuilt_value_is_equal(value: Any) -> None:
    """A deep copy, whose objects are others, has the same digest."""
    assert value_digest(value) == value_digest(_copy(value))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (["a", "b"], ["b", "a"]),
        ({"a": 0, "b": 1}, {"b": 1, "a": 0}),
        ([1, [2, 3]], [1, [3, 2]]),
        ([1], (1,)),
        ([1], [True]),
        ([1], [1.0]),
        (["ab", "c"], ["a", "bc"]),
        ([[1], 2], [[1, 2]]),
        ({1, 2}, {1, 3}),
        (b"a", bytearray(b"a")),
        (np.arange(4), np.arange(4, dtype=np.int32)),
        (np.arange(4), np.arange(4).reshape(2, 2)),
        (np.arange(10**6), np.arange(10**6)[::-1]),
        ("x" * 10**6, "x" * (10**6 - 1) + "y"),
        (b"x" * 10**6, b"y" + b"x" * (10**6 - 1)),
        (10**5000, 10**5000 + 1),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_digest_other_value_order_or_type_differs(left: Any, right: Any) -> None:
    """Whatever makes two workers' datasets give different samples shows."""
    assert value_digest(left) != value_digest(right)


def test_digest_sets_in_other_insertion_order_are_equal() -> None:
    """Equal sets have one digest, however their elements lie."""
    numbers = [index * 1024 for index in range(100)]
    backwards = numbers[::-1]
    assert list(set(numbers)) != list(set(backwards))
    assert value_digest(set(numbers)) == value_digest(set(backwards))


def test_digest_shuffled_list_of_many_strings_differs() -> None:
    """An unseeded shuffle of a large file list shows, though few elements are looked at."""
    names = [f"{index:07}.jpg" for index in range(200_000)]
    shuffled = names.copy()
    random.Random(0).shuffle(shuffled)
    assert value_digest(names) != value_digest(shuffled)
    assert value_digest(names) != value_digest(names[:-1])


def test_digest_large_containers_look_at_few_elements() -> None:
    """The number of elements touched is bounded, whatever the length."""

    class Counting(list[Any]):
        looks = 0

        def __getitem__(self, index: Any) -> Any:
            Counting.looks += 1
            return super().__getitem__(index)

    value_digest(Counting(range(100_000)))
    assert Counting.looks <= 256


def test_attribute_digests_skip_what_is_not_plain() -> None:
    """Objects and functions of the user's own are left out; names come sorted, slots are seen."""
    digests = attribute_digests(
        Sample(size=3, names=["a"], root=pathlib.Path("/x"), fn=len, other=Sample(), kind=np.float32(1))
    )
    assert list(digests) == ["kind", "names", "root", "size"]
    assert all(len(digest) == 16 for digest in digests.values())
    assert attribute_digests(Slotted()) == {"size": value_digest(3)}
    assert attribute_digests(object()) == {}


def test_attribute_digests_containers_of_objects_see_their_number() -> None:
    """A list of objects counts by length and types, and never calls into them."""
    assert value_digest([Sample(), Sample()]) == value_digest([Sample(a=1), Sample(b=2)])
    assert value_digest([Sample()]) != value_digest([Sample(), Sample()])
    assert value_digest(collections.Counter("aab")) != value_digest(collections.Counter("abb"))


def test_digest_self_containing_list_ends() -> None:
    """A list inside itself is no endless loop."""
    loop: list[Any] = [1]
    loop.append(loop)
    assert value_digest(loop) == value_digest(loop)


def test_digest_set_order_leaking_into_a_list_shows_between_processes() -> None:
    """`list(set(labels))` under two hash seeds, the classic cause of worker-dependent classes, gives two digests."""
    code = (
        "from ringloader._core.digests import value_digest as d; s = {f'c{i}' for i in range(50)}; "
        "print(d(sorted(s)), d(s), d(list(s)))"
    )
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout.split())
    (sorted_1, set_1, list_1), (sorted_2, set_2, list_2) = outputs
    assert (sorted_1, set_1) == (sorted_2, set_2)
    assert list_1 != list_2


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(element) for element in value)
    return value
