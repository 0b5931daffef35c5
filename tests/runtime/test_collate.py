"""Default collation into a slot, against the installed torch; the named cases of samples that go wrong."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate as torch_collate

from ringloader import collation
from ringloader._collate import collate, leaves, tensors, wrap
from ringloader._collate import collated as collated_module
from ringloader._collate.collate import Collated, Collator
from ringloader._core.layout import ALIGNMENT, Layout
from ringloader.errors import LayoutError

SLOT_NBYTES = 1 << 20
THRESHOLDS = [(0, True), (1 << 40, True), (1 << 40, False)]


class Point(NamedTuple):
    """A namedtuple sample."""

    x: Any
    y: Any


class Stamped(dict):  # type: ignore[type-arg]
    """A dict subclass with a state of its own."""

    def __init__(self, *args: Any, stamp: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stamp = stamp


class Row(list):  # type: ignore[type-arg]
    """A list subclass."""


@dataclasses.dataclass(frozen=True)
class Inner:
    """A frozen dataclass."""

    a: Any
    b: Any = 0


@dataclasses.dataclass(slots=True)
class Outer:
    """A dataclass with slots, and another one in it."""

    inner: Inner
    name: Any


class SubTensor(torch.Tensor):
    """A tensor of a class of its own."""


class AlmostArray:
    """What numpy would take for an array."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(3)

    def __len__(self) -> int:
        return 3


@pytest.fixture(params=THRESHOLDS, ids=["direct", "gather", "gather in Python"])
def _threshold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    threshold, is_compiled = request.param
    monkeypatch.setattr(collate, "DIRECT_NBYTES", threshold)
    if not is_compiled:
        monkeypatch.setattr(leaves, "join", None)
        monkeypatch.setattr(tensors, "are_joined", False)


all_modes = pytest.mark.usefixtures("_threshold")


def make(
    samples: list[Any], collator: Collator | None = None, slot_nbytes: int = SLOT_NBYTES, **options: Any
) -> tuple[Collated, Any]:
    """Collate into a slot full of marks, send the layout, and wrap the batch."""
    collator = collator or Collator(**options)
    slot = np.frombuffer(bytearray(b"\xa5" * SLOT_NBYTES), np.uint8)
    keys = [100 + row for row in range(len(samples))]
    batch = collator.begin(len(samples), keys, slot[:slot_nbytes] if slot_nbytes else None)
    for sample in samples:
        batch.add(sample)
    collated = batch.finish()
    if not collated.written:
        assert collated.nbytes > slot_nbytes
        collated.write(slot)
        collated.write(slot)
    layout = Layout.from_wire(collated.layout.to_wire())
    unwrap = wrap.wrap_numpy if collator.asker.numpy_only else tensors.wrap
    result, kept = unwrap(layout, layout.place(collated.shapes), collated.inline, slot, False)
    assert all(leaf.nbytes for leaf in kept)
    return collated, result


def collated(samples: list[Any], **options: Any) -> Any:
    """Return the batch."""
    return make(samples, **options)[1]


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def assert_same(ours: Any, theirs: Any, path: str = "batch") -> None:
    """Assert that two batches have the same types, dtypes, shapes and bytes."""
    assert type(ours) is type(theirs), (path, type(ours), type(theirs))
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), path
        assert raw(ours) == raw(theirs.resolve_conj().resolve_neg()), path
        assert ours.is_contiguous()
        assert ours.untyped_storage().nbytes() == ours.numel() * ours.element_size()
    elif isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), path
        assert ours.tobytes() == theirs.tobytes(), path
        assert ours.flags.writeable
    elif isinstance(theirs, collections.abc.Mapping):
        assert [(type(key), key) for key in ours] == [(type(key), key) for key in theirs], path
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(theirs):
        for field in dataclasses.fields(theirs):
            assert_same(getattr(ours, field.name), getattr(theirs, field.name), f"{path}.{field.name}")
    elif isinstance(theirs, collections.abc.Sequence) and not isinstance(theirs, (str, bytes)):
        assert len(ours) == len(theirs), path
        for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{path}[{position}]")
    else:
        assert ours == theirs or ours != ours, path


NUMPY_DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
TORCH_DTYPES = [*NUMPY_DTYPES, "bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def random_array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of random bits."""
    held = np.dtype(dtype)
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, shape), bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * held.itemsize), held).reshape(shape)


def random_tensor(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bits."""
    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind)
    bits = torch.from_numpy(random_array(rng, "uint8", (*shape, kind.itemsize)).copy())
    return (bits & 1).view(torch.bool).reshape(shape) if dtype == "bool" else bits.view(kind).reshape(shape)


def strided(value: Any, how: str) -> Any:
    """Return an equal array or tensor with other strides."""
    if how == "plain" or value.ndim == 0:
        return value
    if how == "transposed" and value.ndim > 1:
        swapped = value.swapaxes(0, 1)
        return (swapped.contiguous() if isinstance(value, torch.Tensor) else swapped.copy()).swapaxes(0, 1)
    if isinstance(value, torch.Tensor):
        wide = torch.stack([value, value], -1)
        return wide[..., 1]
    return np.stack([value, value], -1)[..., 1]


with warnings.catch_warnings():
    # torch says once per process that this type is experimental.
    warnings.simplefilter("ignore")
    torch.empty(0, dtype=torch.complex32)

Leaf = Callable[[np.random.Generator], Any]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
HOW = st.sampled_from(["plain", "transposed", "sliced"])
ARRAYS = st.builds(
    lambda dtype, shape, how: lambda rng: strided(random_array(rng, dtype, shape), how),
    st.sampled_from(NUMPY_DTYPES),
    SHAPES,
    HOW,
)
TENSORS = st.builds(
    lambda dtype, shape, how: lambda rng: strided(random_tensor(rng, dtype, shape), how),
    st.sampled_from(TORCH_DTYPES),
    SHAPES,
    HOW,
)
MIXED_ARRAYS = st.builds(
    lambda names, shape: lambda rng: random_array(rng, str(rng.choice(names)), shape),
    st.lists(st.sampled_from([*NUMPY_DTYPES[:6], "float32"]), min_size=1),
    SHAPES,
)
MIXED_TENSORS = st.builds(
    lambda names, shape: lambda rng: torch.ones(shape, dtype=getattr(torch, str(rng.choice(names)))),
    st.lists(st.sampled_from(TORCH_DTYPES), min_size=1, max_size=3),
    SHAPES,
)
NUMBERS = st.sampled_from(
    [
        lambda rng: int(rng.integers(-(2**62), 2**62)),
        lambda rng: float(rng.normal()),
        lambda rng: bool(rng.integers(2)),
        lambda rng: np.float32(rng.normal()),
        lambda rng: np.int16(rng.integers(100)),
        lambda rng: np.bool_(rng.integers(2)),
        lambda rng: np.complex64(rng.normal() + 1j),
        lambda rng: [1, 2.5, True][int(rng.integers(3))],
        lambda rng: [1, np.float64(2.5), True, np.int8(3)][int(rng.integers(4))],
    ]
)
TEXT = st.sampled_from(
    [lambda rng: "ab" * int(rng.integers(3)), lambda rng: rng.bytes(3), lambda rng: np.str_("é"), lambda rng: "\ud800"]
)
KEYS = st.sampled_from(["x", "y", 1, True, None, (1, "a"), 2.5, b"k"])


def containers(inner: st.SearchStrategy[Leaf]) -> st.SearchStrategy[Leaf]:
    """Containers of every type that torch collates."""
    parts = st.lists(inner, max_size=3)
    sequence = st.builds(
        lambda kind, made: lambda rng: kind(make(rng) for make in made),
        st.sampled_from([list, tuple, Row, collections.deque, collections.UserList]),
        parts,
    )
    mapping = st.builds(
        lambda kind, made: lambda rng: kind([(key, make(rng)) for key, make in made.items()]),
        st.sampled_from(
            [
                dict,
                collections.OrderedDict,
                collections.UserDict,
                Stamped,
                lambda items: Stamped(items, stamp="s"),
                lambda items: collections.defaultdict(int, items),
                lambda items: types.MappingProxyType(dict(items)),
            ]
        ),
        st.dictionaries(KEYS, inner, max_size=3),
    )
    named = st.builds(lambda first, second: lambda rng: Point(first(rng), second(rng)), inner, inner)
    return sequence | mapping | named


SAMPLES = st.recursive(ARRAYS | TENSORS | MIXED_ARRAYS | MIXED_TENSORS | NUMBERS | TEXT, containers, max_leaves=6)


def outcome(function: Callable[[Any], Any], samples: Any) -> Any:
    """Return the result, or the exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(samples)
        except Exception as error:
            return error


@all_modes
@settings(deadline=None, max_examples=250)
@given(
    make_sample=SAMPLES,
    num_samples=st.integers(1, 4),
    seed=st.integers(0, 99),
    slot_nbytes=st.sampled_from([SLOT_NBYTES, 256, 0]),
)
def test_collate_generated_samples_equals_torch(make_sample: Leaf, num_samples: int, seed: int, slot_nbytes: int) -> None:
    """Types, dtypes, shapes and bytes are torch's, with any slot and in every way to fill it; where torch raises, we do."""
    rng = np.random.default_rng(seed)
    samples = [make_sample(rng) for _ in range(num_samples)]
    theirs = outcome(torch_collate, copy.deepcopy(samples) if not has_proxy(samples) else samples)
    ours = outcome(lambda given: make(given, slot_nbytes=slot_nbytes), samples)
    if isinstance(theirs, Exception):
        assert isinstance(ours, LayoutError), (theirs, ours)
        return
    assert not isinstance(ours, Exception), ours
    assert_same(ours[1], theirs)
    assert_stamps(ours[1], theirs)


def has_proxy(value: Any) -> bool:
    """Return whether there is a mapping proxy (which cannot be copied deeply)."""
    return "mappingproxy" in repr(value)


def assert_stamps(ours: Any, theirs: Any) -> None:
    """Assert that containers kept their own state."""
    if isinstance(theirs, Stamped):
        assert ours.stamp == theirs.stamp
    if isinstance(theirs, collections.defaultdict):
        assert ours.default_factory is theirs.default_factory


POOL: list[Any] = [
    *(
        1,
        2.5,
        True,
        -3,
        10**20,
        2**63,
        np.float32(1.5),
        np.float64(2.5),
        np.int8(3),
        np.uint16(4),
        np.bool_(True),
        np.complex64(1j),
    ),
    *(
        np.float16(0.1),
        np.longdouble(1),
        np.timedelta64(1, "s"),
        np.array(3),
        np.array(2.5),
        np.array(1, np.int8),
        np.ones(2),
        np.ones((2, 1)),
    ),
    *(
        np.ones(2, np.int32),
        np.ones(2, np.uint16),
        np.ones(2, ">f4"),
        np.array(["a"]),
        np.array([None]),
        np.zeros(0),
        np.zeros((0, 2)),
    ),
    *(
        torch.tensor(3),
        torch.tensor(2.5),
        torch.ones(2),
        torch.ones(2, dtype=torch.int32),
        torch.ones(2, 1),
        torch.zeros(0),
        None,
        1j,
    ),
    *(
        np.array(1, "M8[s]"),
        np.zeros(1, "i4,i4"),
        torch.ones(2, dtype=torch.bfloat16),
        object(),
        {1},
        [1],
        (1.5,),
        {"a": 1},
        [],
    ),
]


@all_modes
@settings(deadline=None, max_examples=600)
@given(samples=st.lists(st.sampled_from(POOL), min_size=1, max_size=3))
def test_collate_irregular_column_equals_torch_or_is_refused(samples: list[Any]) -> None:
    """A mixture of anything gives what torch gives, or a LayoutError; never another dtype or a cut value."""
    theirs = outcome(torch_collate, samples)
    ours = outcome(collated, samples)
    if isinstance(ours, Exception):
        assert isinstance(ours, LayoutError), ours
        lossy = isinstance(samples[0], float) and any(isinstance(value, np.complex64) for value in samples)
        structured = any(isinstance(value, (list, tuple, dict)) for value in samples)
        assert isinstance(theirs, Exception) or lossy or structured, (theirs, ours)
    else:
        assert not isinstance(theirs, Exception), (theirs, ours)
        assert_same(ours, theirs)


def arrays_of(shape: tuple[int, ...], count: int) -> Iterator[np.ndarray]:
    """Yield arrays that differ."""
    for row in range(count):
        yield np.full(shape, row, np.float32)


@all_modes
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("odd", [(8, 8), (1, 8, 8), (), (3, 1, 8), (1, 3, 8, 8), (3, 8, 9), (6, 8, 4), (4, 8, 8)])
def test_b03_shape_that_numpy_would_broadcast_is_refused(convert: Any, odd: tuple[int, ...]) -> None:
    """A row of another shape is an error with the path, both shapes and both dataset keys; it is never broadcast."""
    samples = [{"x": [convert(array)]} for array in arrays_of((3, 8, 8), 4)]
    samples[2] = {"x": [convert(np.zeros(odd, np.float32))]}
    with pytest.raises(LayoutError) as caught:
        make(samples)
    words = str(caught.value)
    assert "sample['x'][0]" in words
    assert "[3, 8, 8]" in words
    assert str(list(odd)) in words
    assert "100" in words
    assert "102" in words
    assert caught.value.samples == (100, 102)
    assert caught.value.path == "sample['x'][0]"
    assert caught.value.shapes == ([3, 8, 8], list(odd))


@all_modes
def test_b03_lengths_that_add_up_are_refused() -> None:
    """Rows of 3 and 5 elements do not pass as two rows of 4."""
    with pytest.raises(LayoutError, match=r"\[5\].*\[4\]"):
        make([np.zeros(4), np.zeros(5), np.zeros(3)])


@pytest.mark.parametrize("first", [np.zeros(4, np.float32), np.zeros((), np.float32), np.zeros((2, 2), np.float32)])
@pytest.mark.parametrize(
    "odd",
    [
        np.zeros(2, np.float64),
        np.zeros(8, np.float16),
        np.zeros((4, 1), np.float32),
        np.zeros((1, 4), np.float32),
        np.zeros((2, 2), np.float32),
        np.zeros(4, np.float32),
        np.zeros((), np.float32),
        np.zeros(1, np.float32),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_small_rows_of_as_many_bytes_are_not_of_one_shape(first: np.ndarray, odd: np.ndarray) -> None:
    """Neither shape nor dtype is guessed from a size, in any path that rows take."""
    if first.shape == odd.shape:
        assert collated([first, odd, first]).shape == (3, *first.shape)
        return
    with pytest.raises(LayoutError) as caught:
        make([first, odd, first])
    assert caught.value.shapes == (list(first.shape), list(odd.shape))


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_small_rows_of_several_dtypes_and_strides_have_torchs_values(rows: list[int]) -> None:
    """Rows are promoted and taken element by element where they have to be, whichever comes first."""
    kinds: list[Any] = [np.arange(4, dtype=np.int32), np.arange(4.0) + 0.5, np.arange(8, dtype=np.int32)[::-2]]
    ours = collated([kinds[row] for row in rows])
    theirs = torch.from_numpy(np.stack([kinds[row] for row in rows]))
    assert ours.dtype == theirs.dtype == torch.float64
    assert ours.tolist() == theirs.tolist()
    same = collated([kinds[0], kinds[2], kinds[0]])
    assert same.tolist() == [[0, 1, 2, 3], [7, 5, 3, 1], [0, 1, 2, 3]]
    assert same.dtype == torch.int32


def test_small_rows_of_subclasses_and_without_dimensions(tmp_path: Path) -> None:
    """Arrays of a file and arrays of one number are rows like any other."""
    np.save(tmp_path / "rows.npy", np.arange(8.0).reshape(2, 4))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert collated([mapped[0], np.zeros(4), mapped[1]]).tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [4, 5, 6, 7]]
    assert collated([np.array(7), np.array(8)]).tolist() == [7, 8]
    assert collated([np.array(True), np.array(False)]).tolist() == [True, False]


class _Marked(np.ndarray):
    """A subclass."""


def _features(rng: np.random.Generator, num: int, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> dict[str, Any]:
    return {f"f{index}": (100 * rng.random(shape)).astype(dtype) for index in range(num)}


def _change(samples: list[dict[str, Any]], row: int, key: str, how: Callable[[Any], Any]) -> None:
    samples[row] = {**samples[row], key: how(samples[row][key])}


@settings(max_examples=150)
@given(
    st.integers(1, 40),
    st.sampled_from([(4,), (3,), (16,), (2, 8), (1,), (), (0,), (3, 0)]),
    st.sampled_from(["float32", "int64", "uint8", "float16", "bool"]),
    st.sampled_from([3, 4, 9]),
    st.sampled_from([0, 64, 700, SLOT_NBYTES]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_many_leaves_of_one_shape_equal_torch(
    num_samples: int, shape: tuple[int, ...], dtype: str, num_leaves: int, slot_nbytes: int, is_split: bool, seed: int
) -> None:
    """Leaves whose rows are joined at once have the values and types of torch's, whatever lies between them and behind them."""
    rng = np.random.default_rng(seed)
    samples: list[Any] = [
        {**_features(rng, num_leaves, shape, dtype), **({"label": number, "f00": np.zeros(5)} if is_split else {}), "x": number}
        | {f"g{name}": value[..., ::-1] if value.ndim else value for name, value in _features(rng, 5, shape, dtype).items()}
        for number in range(num_samples)
    ]
    ours = collated(samples, slot_nbytes=slot_nbytes)
    assert_same(ours, torch_collate([{key: np.array(sample[key]) for key in sample} for sample in samples]))


@pytest.mark.parametrize("slot_nbytes", [0, SLOT_NBYTES])
def test_one_of_many_leaves_that_differs_is_named(slot_nbytes: int) -> None:
    """Rows of other leaves cannot make up for one that is too short, and the words are those for any leaf."""
    rng = np.random.default_rng(0)
    for others in ([], [("f3", 3)]):
        samples = [_features(rng, 8) for _ in range(16)]
        _change(samples, 7, "f2", lambda row: np.zeros(5, np.float32))
        for key, size in others:
            _change(samples, 7, key, lambda row, size=size: np.zeros(size, np.float32))  # type: ignore[misc]
        with pytest.raises(LayoutError) as caught:
            make(samples, slot_nbytes=slot_nbytes)
        assert str(caught.value).startswith("sample['f2'] has shape [5] in sample 107, but [4] in sample 100")
    samples = [_features(rng, 8) for _ in range(16)]
    _change(samples, 7, "f2", lambda row: row.reshape(4, 1))
    with pytest.raises(LayoutError, match=r"\['f2'\] has shape \[4, 1\]"):
        make(samples, slot_nbytes=slot_nbytes)


@all_modes
@pytest.mark.parametrize("shape", [(3,), (16,), (0,)], ids=["gaps", "no gaps", "empty"])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "odd", [None, "text", [7, 8, 9], (7, 8, 9), range(3), 1.5, SubTensor(), AlmostArray()], ids=lambda odd: type(odd).__name__
)
def test_run_of_leaves_with_a_row_of_another_type_is_refused(convert: Any, shape: tuple[int, ...], odd: Any) -> None:
    """Of one leaf, in one row: with the path, and the keys of the samples; and the next batch is as it should be."""
    collator = Collator()

    def samples() -> list[dict[str, Any]]:
        return [{name: convert(np.full(shape, row)) for name in "abcd"} for row in range(3)]

    expected = torch_collate(samples())
    for row in (1, 2):
        assert_same(collated(samples(), collator=collator), expected)
        changed = samples()
        changed[row]["b"] = odd
        with pytest.raises(LayoutError, match=r"sample\['b'\]") as caught:
            make(changed, collator)
        assert 100 + row in caught.value.samples
    assert_same(collated(samples(), collator=collator), expected)


def test_first_row_that_cannot_be_asked_for_its_size_is_refused_by_name() -> None:
    """Its type is looked at before anything else."""
    batch = [torch.nn.parameter.UninitializedParameter()] * 2
    for slot_nbytes in (SLOT_NBYTES, 0):
        with pytest.raises(LayoutError, match="subclass"):
            make(batch, slot_nbytes=slot_nbytes)


def test_small_last_batch_leaves_the_others_as_they_were() -> None:
    """Leaves that are joined at once in full batches are so again after one whose leaves have gaps between them."""
    rng = np.random.default_rng(0)
    collator = Collator()
    for num_samples in (16, 5, 16):
        samples = [_features(rng, 8) for _ in range(num_samples)]
        assert_same(collated(samples, collator=collator), torch_collate(samples))
        assert collator.structure is not None
        assert collator.structure.runs == ((0, 8),)


@pytest.mark.parametrize("slot_nbytes", [0, 64, SLOT_NBYTES])
@pytest.mark.parametrize("leaf", ["f0", "f3", "f7"])
def test_leaves_that_differ_from_one_another_in_a_later_batch(slot_nbytes: int, leaf: str) -> None:
    """Each leaf of one shape and dtype by itself is a good batch, whatever the slot it is to fit; the next ones too."""
    rng = np.random.default_rng(0)
    collator = Collator()
    kinds: list[Callable[[Any], Any]] = [
        lambda row: np.repeat(row, 300),
        lambda row: row.reshape(2, 2),
        lambda row: row.astype(np.float64),
        lambda row: row[:0],
        lambda row: row[0],
    ]
    for kind in kinds:
        for changed in (False, True, True, False):
            samples = [_features(rng, 8) for _ in range(16)]
            if changed:
                samples = [{**sample, leaf: kind(sample[leaf])} for sample in samples]
            assert_same(collated(samples, collator=collator, slot_nbytes=slot_nbytes), torch_collate(samples))


def test_batch_with_an_odd_row_leaves_the_others_as_they_were() -> None:
    """One that is promoted, or refused, does not end the joining of leaves for the batches after it."""
    rng = np.random.default_rng(0)
    collator = Collator()
    for how in (lambda row: row.astype(np.float64), lambda row: row[:3], lambda row: list(row)):
        samples = [_features(rng, 8) for _ in range(16)]
        _change(samples, 5, "f3", how)
        outcome(functools.partial(collated, collator=collator), samples)
        for _ in range(2):
            samples = [_features(rng, 8) for _ in range(16)]
            assert_same(collated(samples, collator=collator), torch_collate(samples))
        assert collator.structure is not None
        assert collator.structure.runs == ((0, 8),)


def test_many_leaves_of_one_shape_in_the_first_batch_alone() -> None:
    """What was alike in one batch need not be in the next: other dtypes, shapes, types, strides, lists in place of arrays."""
    rng = np.random.default_rng(0)
    changes: list[Callable[[Any], Any]] = [
        lambda row: row.astype(np.float64),
        lambda row: row.astype(np.int32),
        lambda row: np.repeat(row, 2)[::2],
        lambda row: torch.from_numpy(row),
        lambda row: np.asarray(row).view(_Marked),
        lambda row: row[:3],
        lambda row: row.reshape(2, 2),
        lambda row: float(row[0]),
    ]
    for change, leaf in itertools.product(changes, ("f0", "f5", "f7")):
        for rows in (range(16), [0], [5]):
            collator = Collator()
            first = [_features(rng, 8) for _ in range(16)]
            assert_same(collated(first, collator=collator), torch_collate(first))
            later = [_features(rng, 8) for _ in range(16)]
            for row in rows:
                _change(later, row, leaf, change)
            ours, theirs = (
                outcome(collate, later) for collate in (functools.partial(collated, collator=collator), torch_collate)
            )
            if isinstance(theirs, Exception):
                assert isinstance(ours, LayoutError)
            elif not isinstance(ours, LayoutError):
                assert_same(ours, theirs)
            again = [_features(rng, 8) for _ in range(3)]
            assert_same(collated(again, collator=collator), torch_collate(again))


@pytest.mark.parametrize("slot_nbytes", [0, 64, SLOT_NBYTES])
@all_modes
def test_b10_same_words_with_any_slot(slot_nbytes: int) -> None:
    """The error is the same wherever it is found, and speaks of shapes, not of storages."""
    samples = [torch.zeros(3, 10 + row) for row in range(4)]
    with pytest.raises(LayoutError) as caught:
        make(samples, slot_nbytes=slot_nbytes)
    assert str(caught.value).startswith("sample has shape [3, 11] in sample 101, but [3, 10] in sample 100")
    assert "resize_" not in str(caught.value)
    assert "storage" not in str(caught.value)


@all_modes
@pytest.mark.parametrize("position", [0, 1])
def test_b11_tensor_on_a_device_is_refused(position: int) -> None:
    """A tensor outside host memory is named with its device, and with what to do."""
    samples = [{"x": torch.ones(2)}, {"x": torch.ones(2)}]
    samples[position] = {"x": torch.ones(2, device="meta")}
    with pytest.raises(
        LayoutError, match=r"sample\['x'\].*device meta.*return CPU tensors; move them in the training loop"
    ) as caught:
        make(samples)
    assert caught.value.samples == (100 + position,)
    with pytest.raises(LayoutError, match=r"batch\['x'\].*device meta"):
        make(samples, collate_fn=lambda given: given[position])


@all_modes
def test_b16_none_is_refused_with_its_path() -> None:
    """A None names its field or its sample; in a finished batch it arrives as None."""
    with pytest.raises(LayoutError, match=r"sample\['meta'\] is None in sample 100"):
        make([{"x": torch.ones(2), "meta": None}] * 2)
    with pytest.raises(LayoutError, match=r"sample is None in sample 101"):
        make([{"x": 1}, None])
    with pytest.raises(LayoutError, match=r"sample is None in sample 101"):
        make([1, None])
    batch = collated([1], collate_fn=lambda given: {"x": torch.ones(2), "meta": None})
    assert_same(batch, {"x": torch.ones(2), "meta": None})
    assert collated([1], collate_fn=lambda given: None) is None


@all_modes
@pytest.mark.parametrize(
    "value", [np.array(["ab"]), np.array([b"x", None]), np.array([b"ab"]), np.array(["2020"], "M8[D]"), np.zeros(1, "i4,f4")]
)
def test_b17_array_without_numbers_is_refused(value: np.ndarray) -> None:
    """Arrays of objects, text, dates or records are refused with path, dtype and sample, in samples and in finished batches."""
    with pytest.raises(LayoutError) as caught:
        make([{"t": value}] * 2)
    for part in ("sample['t']", str(value.dtype), "100", "collate_fn"):
        assert part in str(caught.value)
    with pytest.raises(LayoutError, match=r"batch\['t'\]"):
        make([1], collate_fn=lambda given: {"t": value})


def test_b17_numpy_text_becomes_a_list() -> None:
    """numpy's text scalars are text."""
    assert_same(
        collated([{"t": np.str_("f.jpg"), "b": np.bytes_(b"x")}] * 2), {"t": [np.str_("f.jpg")] * 2, "b": [np.bytes_(b"x")] * 2}
    )


@all_modes
def test_b20_read_only_arrays_give_writable_batches_without_a_warning() -> None:
    """No warning about read-only memory; the batch can be written, and that changes no sample."""
    samples: list[Any] = [np.frombuffer(bytes([row] * 4), np.uint8) for row in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = collated(samples)
        mixed = collated([*samples, torch.ones(4, dtype=torch.uint8)])
    batch += 1
    assert batch.tolist() == [[1] * 4, [2] * 4]
    assert mixed.shape == (3, 4)
    assert samples[0].tolist() == [0] * 4


@all_modes
def test_b20_negative_strides_are_taken() -> None:
    """A flipped image needs no copy by the user (torch refuses it)."""
    assert collated([np.arange(4)[::-1]] * 2).tolist() == [[3, 2, 1, 0]] * 2


@pytest.mark.parametrize(
    "batch",
    [
        Point(torch.ones(2), 3),
        (torch.ones(2), "name"),
        [torch.ones(2), "name", b"x", 1, 2.5, None, True, 1j],
        Stamped({"x": torch.ones(2)}, stamp="kept"),
        collections.OrderedDict(b=torch.ones(2), a=1),
        collections.defaultdict[str, Any](int, {"a": torch.ones(1)}),
        collections.UserDict({"a": torch.ones(1)}),
        collections.deque([torch.ones(1)]),
        Inner(torch.ones(2), Inner(np.ones(3), "deep")),
        Outer(Inner(1, (2, torch.ones(1))), ["a", "b"]),
        Row([torch.ones(2)]),
        torch.nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)]),
        torch.ones(3, 4).max(dim=0),
        np.float32(3),
        np.ones(3, ">f4"),
        np.ones((), np.int8),
        np.ones(2, np.longdouble),
        10**30,
        (),
        [],
        {},
        "",
        {"a": (1, [2, ("b",)]), "c": {1: "x", "1": "y", (1, 2): None}},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_b34_types_of_a_finished_batch_are_kept(batch: Any) -> None:
    """What a collate_fn returns arrives with the same types at every level."""
    found = collated([1, 2], collate_fn=lambda given: batch)
    assert_same(found, batch)
    assert_stamps(found, batch)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "mkldnn", "nested", "jagged", "quantized"])
@all_modes
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_b50_tensors_without_strided_memory_are_refused(layout: str) -> None:
    """Sparse, nested, opaque and quantized tensors are named with their path and advice, in samples and finished batches."""
    eye = torch.eye(4)
    value = {
        "coo": lambda: eye.to_sparse(),
        "csr": lambda: eye.to_sparse_csr(),
        "csc": lambda: eye.to_sparse_csc(),
        "bsr": lambda: eye.to_sparse_bsr((2, 2)),
        "mkldnn": lambda: eye.to_mkldnn(),
        "nested": lambda: torch.nested.nested_tensor([eye]),
        "jagged": lambda: torch.nested.nested_tensor([eye, eye], layout=torch.jagged),
        "quantized": lambda: torch.quantize_per_tensor(eye, 1.0, 0, torch.quint8),
    }[layout]()
    for samples in ([{"x": value}] * 2, [{"x": eye}, {"x": value}]):
        with pytest.raises(LayoutError, match=r"sample\['x'\] is a .*(return|rebuild)"):
            make(samples)
    with pytest.raises(LayoutError, match=r"batch\['x'\] is a .*return"):
        make([1], collate_fn=lambda given: {"x": value})


def test_b50_tensor_subclass_is_refused_and_parameter_is_not() -> None:
    """A subclass would lose its type: it is named; a Parameter is a plain tensor once detached."""

    class Special(torch.Tensor):
        pass

    with pytest.raises(LayoutError, match=r"subclass .*Special"):
        make([torch.ones(2).as_subclass(Special)])
    with pytest.warns(UserWarning, match="sample requires grad"):
        assert_same(collated([torch.nn.Parameter(torch.ones(2))] * 2), torch.ones(2, 2))


@all_modes
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_b53_every_dtype_arrives_with_its_bytes(dtype: str) -> None:
    """All bits survive, NaN payloads and negative zeros included."""
    rng = np.random.default_rng(7)
    samples = [random_tensor(rng, dtype, (3, 5)) for _ in range(3)]
    assert_same(collated(samples), torch.stack(samples))
    assert_same(collated(samples, collate_fn=torch.stack), torch.stack(samples))


def test_b53_dtype_that_numpy_lacks_is_refused_for_numpy_output() -> None:
    """output="numpy" names the dtype."""
    with pytest.raises(LayoutError, match="bfloat16"):
        make([torch.ones(2, dtype=torch.bfloat16)], output="numpy")


@pytest.mark.parametrize("key", [0, ("cam", 1), None, True, 1.5, b"k", -(2**70), "\ud800"])
def test_b60_any_plain_key_arrives(key: Any) -> None:
    """Dict keys keep value, type and order, through the default and a custom collation."""
    samples = [{key: torch.ones(1), "z": {key: row}} for row in range(2)]
    assert_same(collated(samples), torch_collate(samples))
    assert_same(collated(samples, collate_fn=lambda given: given[0]), samples[0])


def test_b60_key_that_cannot_be_sent_is_refused_by_name() -> None:
    """The worker refuses, so that the parent never meets an undecodable message."""
    for options in ({}, {"collate_fn": lambda given: given[0]}):
        with pytest.raises(LayoutError, match=r"has the key .*Point"):
            make([{Point(1, 2): torch.ones(1)}], **options)  # type: ignore[arg-type]


@all_modes
def test_b72_only_the_bytes_of_a_view_are_written() -> None:
    """A slice costs its own size, an expanded tensor its logical one, whatever their storage."""
    big = torch.arange(1_000_000, dtype=torch.float32)
    result, batch = make([big[:3]] * 2)
    assert result.nbytes == ALIGNMENT
    assert batch.untyped_storage().nbytes() == 24
    result, _ = make([1], collate_fn=lambda given: torch.ones(1).expand(10))
    assert result.nbytes == ALIGNMENT
    assert result.shapes == ((10,),)
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert_same(collated([1], collate_fn=lambda given: image), image.contiguous())


@all_modes
def test_b73_gradients_are_detached_with_one_warning() -> None:
    """Tensors that require grad arrive detached; one warning per loader names the path."""
    collator = Collator()
    samples = [{"w": (torch.ones(2, requires_grad=True) * 2)} for _ in range(3)]
    with pytest.warns(UserWarning, match=r"sample\['w'\] requires grad") as caught:
        batch = make(samples, collator)[1]
    make([{"w": torch.ones(2)}, *samples], collator)
    assert len(caught) == 1
    assert not batch["w"].requires_grad
    assert_same(batch, {"w": torch.full((3, 2), 2.0)})


def test_b73_conjugate_and_negative_views_are_resolved() -> None:
    """Lazy bits become values."""
    value = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert_same(collated([value, value.clone()]), torch.stack([value, value.clone()]).resolve_conj())
    assert_same(collated([value.imag] * 2), torch.stack([value.imag] * 2).resolve_neg())
    assert_same(collated([1], collate_fn=lambda given: value), value.resolve_conj())


B81_ROWS: list[list[Any]] = [
    *([1.5, 2.5], [True, False], [1, 2], [1, 2.5], [2.5, 1], [True, 2], [np.float32(1), np.float32(2)], [np.bool_(True)] * 2),
    *(
        [np.array(3)] * 2,
        ["a", "b"],
        [b"a", b"b"],
        [torch.tensor(3)] * 2,
        [np.float16(1)] * 2,
        [1, np.float64(2)],
        [10**20, 1.5],
    ),
    *(
        [torch.ones(1), torch.ones(1, dtype=torch.float64)],
        [np.ones(1, np.int32), np.ones(1, np.int64)],
        [np.ones(1), torch.ones(1)],
    ),
]


@all_modes
@pytest.mark.parametrize("samples", B81_ROWS, ids=str)
def test_b81_scalars_have_torchs_dtypes(samples: list[Any]) -> None:
    """Every row of the table is what the installed torch makes of it."""
    assert_same(collated(samples), torch_collate(samples))
    assert_same(
        collated([(value, {"k": value}) for value in samples]), torch_collate([(value, {"k": value}) for value in samples])
    )


def test_b81_number_that_does_not_fit_is_refused() -> None:
    """An integer beyond int64 names its sample instead of wrapping round."""
    with pytest.raises(LayoutError, match=r"100000000000000000000 in sample 101, which does not fit int64"):
        make([1, 10**20])


def test_b81_default_dtype_of_torch_is_followed() -> None:
    """A float among integers takes torch's default dtype, also when the user changed it."""
    torch.set_default_dtype(torch.float64)
    try:
        assert collated([1, 2.5]).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@all_modes
@pytest.mark.parametrize("slot_nbytes", [0, SLOT_NBYTES])
def test_b82_empty_tensors_keep_shape_and_dtype(slot_nbytes: int) -> None:
    """Leaves without bytes work beside others and alone, and hold no slot."""
    sample = {"boxes": torch.zeros(0, 4), "t": torch.ones(0, 2, dtype=torch.long).t(), "z": torch.tensor(3.0)}
    assert_same(make([sample] * 2, slot_nbytes=slot_nbytes)[1], torch_collate([sample] * 2))
    values: list[Any] = [torch.empty(0), np.zeros((2, 0)), {}, [], (), ""]
    for value in values:
        result, batch = make([value] * 2, slot_nbytes=slot_nbytes)
        assert_same(batch, torch_collate([value] * 2))
        assert result.nbytes == 0
        assert result.written
    with pytest.raises(LayoutError, match=r"\[2, 4\].*\[0, 4\]"):
        make([torch.zeros(0, 4), torch.zeros(2, 4)], slot_nbytes=slot_nbytes)
    with pytest.raises(LayoutError, match=r"\[0, 5\].*\[0, 4\]"):
        make([np.zeros((0, 4)), np.zeros((0, 5))], slot_nbytes=slot_nbytes)


def test_b87_dataclass_samples_are_collated_field_by_field() -> None:
    """Frozen, nested and slotted dataclasses are containers, rebuilt without calling their constructors."""
    samples = [Outer(Inner(torch.full((2,), float(row)), row), "n") for row in range(2)]
    expected = Outer(Inner(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([0, 1])), ["n", "n"])
    assert_same(collated(samples), expected)


def test_b87_many_strings_are_one_inline_value() -> None:
    """A list of 160,000 strings is one value, in order and equal, odd ones included."""
    names = [f"n{row}\0é\ud800" for row in range(160_000)]
    result, batch = make([1], collate_fn=lambda given: {"x": torch.ones(2), "names": names})
    assert batch["names"] == names
    assert result.layout.num_values == 1


def test_b87_too_much_text_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata above the limit is an error that says how much it is."""
    monkeypatch.setattr(collated_module, "MAX_INLINE_NBYTES", 100)
    with pytest.raises(LayoutError, match=r"holds \d+ bytes"):
        make(["x" * 60] * 2)


def test_b87_array_beside_text_is_refused_with_its_path() -> None:
    """torch hands a column over as it is if the first value is text; what cannot travel in a message is named."""
    assert collated([("a",), ("b",), (1,)]) == [("a", "b", 1)]
    with pytest.raises(LayoutError, match=r"sample\[0\] is of type numpy.ndarray in sample 101, but of type str in sample 100"):
        make([("a",), (np.ones(2),)])


class Opaque:
    """A type without a rule."""


@all_modes
@pytest.mark.parametrize("value", [Opaque(), 1j, {1, 2}, object(), np.longdouble(1)], ids=lambda value: type(value).__name__)
def test_b87_unknown_object_is_refused_with_path_and_type(value: Any) -> None:
    """An object without a rule is named, in the first sample and in a later one."""
    for samples in ([{"g": value}] * 2, [{"g": np.ones(2)}, {"g": value}]):
        with pytest.raises(LayoutError, match=rf"sample\['g'\].*{type(value).__name__}"):
            make(samples)


def test_b87_unknown_object_in_a_finished_batch_is_refused() -> None:
    """A collate_fn's object names path and type; so does a container whose type cannot be imported."""
    with pytest.raises(LayoutError, match=r"batch\['a'\]\[0\] is of type .*Opaque"):
        make([1], collate_fn=lambda given: {"a": [Opaque()]})

    @dataclasses.dataclass
    class Local:
        x: Any

    with pytest.raises(LayoutError, match=r"batch\['d'\] is whose|batch\['d'\].*Local.*cannot be imported"):
        make([1], collate_fn=lambda given: {"d": Local(torch.ones(1))})
    with pytest.raises(LayoutError, match=r"sample.*Local.*cannot be imported"):
        make([Local(torch.ones(1))])


class Registered:
    """A type with a collate rule that the user gave torch."""


@all_modes
def test_b87_type_with_a_torch_collate_rule_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`default_collate_fn_map` extends our default collation as it extends torch's; that costs a second copy."""
    rules = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(rules, Registered, lambda batch, *, collate_fn_map=None: {"ones": torch.ones(len(batch)), "s": "x"})
    samples = [{"a": Registered(), "b": np.ones(3)} for _ in range(2)]
    result, batch = make(samples)
    assert_same(batch, torch_collate(samples))
    assert result.copied_nbytes == 2 * 8 + 48


class Output(collections.OrderedDict[str, Any]):
    """A mapping whose items are attributes too, and which refuses `update`."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Refuse."""
        raise RuntimeError("no update")


def test_b34_containers_that_refuse_update_are_filled_by_item() -> None:
    """Counters are not added up, and mappings that guard `update` are rebuilt."""
    assert collated([1], collate_fn=lambda given: collections.Counter("aab")) == collections.Counter("aab")
    batch = Output()
    batch["logits"] = torch.ones(2)
    found = collated([1], collate_fn=lambda given: batch)
    assert_same(found, batch)
    assert_same(found.logits, batch["logits"])


@all_modes
def test_structure_that_differs_is_refused_with_its_path() -> None:
    """Missing keys, unequal lengths and other containers are named with both samples."""
    with pytest.raises(LayoutError, match=r"sample\['a'\]\['c'\] is missing from sample 101") as caught:
        make([{"a": {"b": np.ones(9), "c": 1}}, {"a": {"b": np.ones(9)}}])
    assert caught.value.samples == (100, 101)
    with pytest.raises(LayoutError, match=r"sample\[0\] has 1 elements in sample 101, but 2 in sample 100"):
        make([([1, np.ones(9)],), ([1],)])
    with pytest.raises(LayoutError, match=r"sample\['a'\] is of type list in sample 101, but of type dict in sample 100"):
        make([{"a": {"b": np.ones(9)}}, {"a": [1]}])


@all_modes
def test_structure_is_remembered_but_not_trusted() -> None:
    """Batches of other structures through one Collator are right, and the layout object of an earlier one comes back."""
    collator = Collator()
    first = [{"a": np.ones(2), "b": row} for row in range(2)]
    others: list[list[Any]] = [
        [{"b": 1, "a": np.ones(2)}],
        [{"a": np.ones(2), True: 1}],
        [{"a": np.ones(3, np.int8), "b": 1.5}] * 3,
        [{"a": torch.ones(2), "b": "t"}],
        [(np.ones(2), 1)],
        [{"a": (1,), "b": [2]}],
    ]
    layout = make(first, collator)[0].layout
    assert make(first, collator)[0].layout is layout
    for samples in others:
        assert_same(make(samples, collator)[1], torch_collate(samples))
        assert make(first, collator)[0].layout is layout


@all_modes
def test_copied_nbytes_of_arrays_are_the_bytes_of_the_batch() -> None:
    """One copy per byte, in every mode; a custom collation costs two."""
    samples = [(np.ones((3, 4), np.float32), torch.ones(5), row) for row in range(6)]
    assert make(samples)[0].copied_nbytes == 6 * (48 + 20 + 8)
    assert make(samples, slot_nbytes=0)[0].copied_nbytes == 6 * (48 + 20 + 8)
    assert make([1], collate_fn=lambda given: torch.ones(5))[0].copied_nbytes == 40


def test_direct_rows_are_written_as_samples_arrive() -> None:
    """A large array is in the slot before the next sample is fetched, and the sample is dropped."""
    slot = np.zeros(SLOT_NBYTES, np.uint8)
    batch = Collator().begin(2, None, slot)
    array = np.ones(collate.DIRECT_NBYTES, np.uint8)
    references = sys.getrefcount(array)
    batch.add((1, array))
    assert slot.sum() == collate.DIRECT_NBYTES
    assert sys.getrefcount(array) == references


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_direct_rows_of_a_later_dtype_are_recovered_and_promoted(convert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later sample of another dtype widens the batch; rows that are in the slot already are kept."""
    monkeypatch.setattr(collate, "DIRECT_NBYTES", 0)
    samples: list[Any] = [{"n": 1, "x": convert(np.full(100, row, np.int16)), "s": "a"} for row in range(3)]
    samples.insert(2, {"n": 2.5, "x": convert(np.full(100, 0.5)), "s": "b"})
    for slot_nbytes in (SLOT_NBYTES, 1200, 0):
        assert_same(make(samples, slot_nbytes=slot_nbytes)[1], torch_collate(samples))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_direct_rows_other_number_of_samples_than_announced(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped or additional samples change the batch's size, not its contents."""
    monkeypatch.setattr(collate, "DIRECT_NBYTES", 0)
    slot = np.zeros(SLOT_NBYTES, np.uint8)
    samples = [(np.full(33, row), torch.full((7,), row), row) for row in range(count)]
    batch = Collator().begin(3, None, slot)
    for sample in samples:
        batch.add(sample)
    result = batch.finish()
    assert result.written
    found, _ = tensors.wrap(result.layout, result.layout.place(result.shapes), result.inline, slot, False)
    assert_same(found, torch_collate(samples))


def test_extend_samples_fetched_together_equals_add() -> None:
    """`__getitems__` gives the same batch."""
    batch = Collator().begin(2, None, np.zeros(SLOT_NBYTES, np.uint8))
    batch.extend([(np.ones(20_000), 1), (np.zeros(20_000), 2)])
    assert batch.finish().shapes == ((2, 20_000), (2,))


def test_finish_without_samples_is_refused() -> None:
    """A batch of nothing is an error, not an empty tensor."""
    with pytest.raises(LayoutError, match="no samples"):
        Collator().begin(2).finish()


@pytest.mark.parametrize(
    "sample",
    [
        np.ones((2, 3)),
        np.float32(2),
        {"a": np.ones(2), "b": [1, "x", (np.int8(1), 2)], "c": Point(np.array(1), 2)},
        (1, 2.5),
        ((1, 2), [3, (4,)]),
        torch.ones(2),
        "text",
        None,
        Stamped({"x": np.ones(1)}, stamp="kept"),
        collections.deque([np.ones(2)]),
        Inner(np.ones(2), 3),
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_convert_sample_as_batch_equals_torchs_default_convert(sample: Any) -> None:
    """`batch_size=None`: arrays and numpy scalars become tensors, all else stays, tuples become lists."""
    found = collated([sample], convert=True)
    assert_same(found, torch.utils.data.default_convert(copy.deepcopy(sample)))  # type: ignore[no-untyped-call]


def test_numpy_output_gives_arrays() -> None:
    """With output="numpy" leaves are arrays of the same dtypes."""
    samples = [{"x": np.full((2, 2), row, np.float16), "y": row, "t": torch.ones(2)} for row in range(2)]
    found = collated(samples, output="numpy")
    assert type(found["t"]) is np.ndarray
    assert_same({key: torch.from_numpy(value) for key, value in found.items()}, torch_collate(samples))


def test_wrap_small_leaf_beside_large_one_is_copied_out() -> None:
    """Kept labels do not hold images; each leaf has a storage of its own, and an empty leaf holds nothing."""
    samples = [(np.zeros((100, 100), np.float32), row, np.zeros((0, 2))) for row in range(2)]
    result, _ = make(samples)
    slot = np.frombuffer(bytearray(SLOT_NBYTES), np.uint8)
    placement = result.layout.place(result.shapes)
    (images, labels, empty), kept = tensors.wrap(result.layout, placement, result.inline, slot, True)
    assert [leaf.data_ptr() for leaf in kept] == [images.data_ptr()]
    slot[:] = 1
    assert labels.tolist() == [0, 0]
    assert empty.shape == (2, 0, 2)
    assert images.untyped_storage().nbytes() == 80_000
    _, kept = tensors.wrap(result.layout, placement, result.inline, slot, False)
    assert len(kept) == 2


def test_default_collate_by_hand_equals_torch() -> None:
    """The public function gives torch's batch; ours and torch's are known as the default, others are not."""
    samples = [{"x": torch.rand(2, 2), "y": (row, "s"), "z": np.ones(20_000)} for row in range(3)]
    assert_same(collation.default_collate(samples), torch_collate(samples))
    assert collation.is_default(collation.default_collate)
    assert collation.is_default(torch_collate)
    assert not collation.is_default(torch.utils.data.default_convert)
    assert not collation.is_default(lambda samples: samples)


def test_collate_numpy_samples_imports_no_torch() -> None:
    """A worker whose dataset gives arrays, numbers and text never imports torch, whatever the output."""
    program = """
import sys
import numpy as np
from ringloader import collation
from ringloader._collate.collate import Collator
slot = np.zeros(1 << 20, np.uint8)
for output in ("torch", "numpy"):
    batch = Collator(output=output).begin(2, None, slot)
    batch.extend([{"x": np.ones(3), "y": 1, "z": 2.5, "s": "a"}, {"x": np.ones(3, np.int8), "y": 1.5, "z": 1, "s": "b"}])
    assert batch.finish().written
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
