"""The compiled loops: what they write, what they leave to others, and that nothing given to them gets them out of bounds."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from ringloader import ClosedError, FactorySpec, Loader, TokenWindows, _kernels
from ringloader._collate import tensors
from tests.runtime.sample_datasets import KernelSamples

_MARK = 0xA5

_IS_BUILT = importlib.util.find_spec("ringloader._kernels.compiled") is not None
built = pytest.mark.skipif(_kernels.join is None, reason="not compiled")
# Importing `tensors` has told the kernels of them, if torch can be told of.
_HAS_TENSORS = tensors.are_joined
with_tensors = pytest.mark.skipif(not _HAS_TENSORS, reason="this torch does not describe tensors to C")


def test_kernels_are_there_where_there_is_a_compiler() -> None:
    """Or all other tests here would say nothing."""
    has_headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    assert _IS_BUILT or not (shutil.which("cc") and has_headers)


def test_kernels_that_cannot_be_loaded_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were never built are not."""

    def fail_with(error: ImportError) -> None:
        def fail(name: str) -> None:
            raise error

        monkeypatch.setattr(importlib, "import_module", fail)

    monkeypatch.delenv("RINGLOADER_KERNELS", raising=False)
    fail_with(ImportError("undefined symbol"))
    with pytest.warns(RuntimeWarning, match="undefined symbol; install it anew"):
        assert _kernels._load() is None
    fail_with(ModuleNotFoundError("No module named 'ringloader._kernels.compiled'"))
    assert _kernels._load() is None


# -- join


def _slot(nbytes: int) -> np.ndarray:
    return np.full(nbytes, _MARK, np.uint8)


@built
@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["bool", "int8", "uint16", "float16", "int32", "float64", "complex128"]),
            st.lists(st.integers(0, 5), max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 9),
    st.integers(0, 70),
)
def test_join_writes_the_rows_and_nothing_else(leaves: list[Any], num_rows: int, gap: int) -> None:
    """Of any dtype and shape, arrays and tensors side by side, wherever they are to lie."""
    rng = np.random.default_rng(num_rows)
    columns: list[Any] = []
    offsets, offset = [], gap
    for dtype, shape, is_tensor in leaves:
        rows = (100 * rng.random((num_rows, *shape))).astype(dtype)
        made = [torch.from_numpy(np.array(row)) for row in rows] if is_tensor and _HAS_TENSORS else list(map(np.array, rows))
        columns.append(made if len(columns) % 2 else tuple(made))
        offsets.append(offset)
        offset += rows.nbytes + gap
    slot = _slot(offset)
    expected = slot.copy()
    for column, start in zip(columns, offsets, strict=True):
        written = b"".join(np.asarray(row).tobytes() for row in column)
        expected[start : start + len(written)] = np.frombuffer(written, np.uint8)
    assert _kernels.join(tuple(columns), slot, tuple(offsets)) == []
    assert slot.tobytes() == expected.tobytes()


class _Named(np.ndarray):
    """A subclass, which may do anything where it is copied."""


def _odd_rows() -> dict[str, list[Any]]:
    plain = np.arange(12.0).reshape(3, 4)
    tensor = torch.arange(12.0).reshape(3, 4)
    halves = torch.arange(24).reshape(3, 8).to(torch.complex64)
    return {
        "another shape": [plain[0], plain[1, :3]],
        "another number of dimensions": [plain[0], plain[:1]],
        "as many bytes": [plain[0], plain[0].astype(np.int64)],
        "another byte order": [plain[0], plain[0].astype(">f8")],
        "strides": [plain[0], plain[1, ::-1]],
        "a first row with strides": [plain[0, ::-1], plain[1]],
        "a subclass": [plain[0], plain[1].view(_Named)],
        "a number": [plain[0], 1.0],
        "nothing": [plain[0], None],
        "objects": [np.array([1, None]), np.array([2, 3])],
        "dates": [np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-02"], "M8[D]")],
        "text": [np.array(["a"]), np.array(["b"])],
        "fields": [np.zeros(2, "i4,f4"), np.zeros(2, "i4,f4")],
        "a tensor beside an array": [plain[0], tensor[0]],
        "an array beside a tensor": [tensor[0], plain[0]],
        "another shape, of tensors": [tensor[0], tensor[1, :3]],
        "another dtype, of tensors": [tensor[0], tensor[0].int()],
        "strides, of tensors": [tensor[0], tensor.t()[0]],
        "no strides": [tensor[0], torch.ones(1, dtype=torch.float32).expand(4)],
        "a gradient": [tensor[0], tensor[1].clone().requires_grad_()],
        "conjugated": [halves[0], halves[1].conj()],
        "a first row that is conjugated": [halves[0].conj(), halves[1]],
        "an imaginary part": [tensor[0], torch.imag(halves[0, :4].conj())],
        "an imaginary part of one number": [tensor[0, :1], torch.imag(halves[0, :1].conj())],
        "an imaginary part without dimensions": [tensor[0, 0], torch.imag(halves[0, 1].conj())],
        "imaginary parts side by side": [tensor[0], torch.imag(halves[0].conj()).as_strided((4,), (1,))],
        "sparse": [tensor[0], tensor[0].to_sparse()],
        "a first row that is sparse": [tensor[0].to_sparse(), tensor[0]],
        "on no device": [tensor[0], tensor[0].to("meta")],
        "a parameter": [tensor[0], torch.nn.Parameter(tensor[1], requires_grad=False)],
        "tensors of no numbers": [torch.empty(2, dtype=torch.bits8), torch.empty(2, dtype=torch.bits8)],
    }


@built
@pytest.mark.parametrize("name", _odd_rows())
def test_join_leaves_rows_that_are_not_alike(name: str) -> None:
    """The column is named, whatever the others are; no exception stays behind, nothing of it is written."""
    odd, plain = _odd_rows()[name], [np.arange(4), np.arange(4)]
    for columns, left in (((odd,), [0]), ((plain, odd, plain), [1]), ((odd, plain, odd), [0, 2])):
        slot = _slot(1024)
        assert _kernels.join(columns, slot, tuple(256 * place for place in range(len(columns)))) == left
        for place in left:
            assert (slot[256 * place : 256 * (place + 1)] == _MARK).all()


@built
def test_join_takes_rows_whose_dtypes_are_equal_objects() -> None:
    """An array that was unpickled has a dtype of its own."""
    rows = [pickle.loads(pickle.dumps(np.arange(3) + number)) for number in range(4)]
    rows.append(np.frombuffer(rows[0].tobytes(), np.dtype("i8", copy=True)))
    slot = _slot(24 * len(rows))
    assert _kernels.join((rows,), slot, (0,)) == []
    assert slot.tobytes() == b"".join(row.tobytes() for row in rows)


@built
@pytest.mark.parametrize("rows", [[np.arange(8)] * 4, pytest.param([torch.arange(8)] * 4, marks=with_tensors)])
@pytest.mark.parametrize("offset", [1, 256, 257, 1 << 62, -1, 1 << 80])
def test_join_refuses_a_column_that_does_not_fit(rows: list[Any], offset: int) -> None:
    """256 bytes into 256: anywhere but at the beginning is too far."""
    slot = _slot(256)
    with pytest.raises((ValueError, OverflowError)):
        _kernels.join((rows,), slot, (offset,))
    assert (slot == _MARK).all()


@built
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (([np.arange(2)],), _slot(64)),
        ([[np.arange(2)]], _slot(64), (0,)),
        (([np.arange(2)],), _slot(64), [0]),
        (([np.arange(2)],), _slot(64), (0, 0)),
        ((), _slot(64), ()),
        (([],), _slot(64), (0,)),
        (([np.arange(2)], [np.arange(2)] * 2), _slot(64), (0, 16)),
        ((np.zeros((2, 2)),), _slot(64), (0,)),
        (([np.arange(2)],), bytes(64), (0,)),
        (([np.arange(2)],), _slot(64)[::2], (0,)),
        (([np.arange(2)],), "slot", (0,)),
        (([np.arange(2)],), _slot(64), ("0",)),
    ],
)
def test_join_refuses_what_is_no_batch(arguments: tuple[Any, ...]) -> None:
    """With an exception, not with a crash."""
    with pytest.raises((TypeError, ValueError, BufferError)):
        _kernels.join(*arguments)


class _Mode(TorchFunctionMode):
    """Runs code whenever something is asked of a tensor, as `torch.set_default_device` does."""

    def __init__(self, body: Callable[[], None]) -> None:
        super().__init__()
        self._body = body

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._body()
        return func(*args, **(kwargs or {}))


@with_tensors
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError, SystemExit])
def test_join_passes_on_what_a_signal_raises(kind: type[BaseException]) -> None:
    """A handler may run while a tensor is looked at: its exception is not the tensor's."""

    def interrupt() -> None:
        raise kind

    rows = [torch.arange(4)] * 3
    with _Mode(interrupt), pytest.raises(kind):
        _kernels.join((rows,), _slot(256), (0,))
    assert _kernels.join((rows,), _slot(256), (0,)) == []


@with_tensors
def test_join_of_rows_that_are_taken_away_meanwhile() -> None:
    """By code that runs while a tensor is looked at: what was given is what is written."""
    rows = [torch.arange(4) + number for number in range(50)]
    expected = torch.stack(rows).numpy().tobytes()
    slot = _slot(len(expected))
    with _Mode(rows.clear):
        assert _kernels.join((rows,), slot, (0,)) == []
    assert slot.tobytes() == expected
    assert rows == []


@with_tensors
def test_know_tensors_refuses_what_describes_nothing() -> None:
    """Older versions of torch, and anything else; torch stays known."""

    class Liar:
        __dlpack_c_exchange_api__ = "no capsule"

    assert not _kernels.know_tensors(Liar)
    assert not _kernels.know_tensors(int)
    assert not _kernels.know_tensors(3)
    slot = _slot(64)
    assert _kernels.join(([torch.arange(4)] * 2,), slot, (0,)) == []


# -- take


@built
@settings(deadline=None, max_examples=150)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 9), st.integers(0, 99))
def test_take_writes_the_windows_and_nothing_else(num_tokens: int, length: int, stride: int, seed: int) -> None:
    """Of any length and distance, each place as often as it is named."""
    num_windows = (num_tokens - length - 1) // stride + 1
    if num_windows < 1:
        return
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1 << 40, num_tokens)
    places = rng.integers(0, num_windows, int(rng.integers(1, 20)))
    inputs, targets = np.full((2, len(places) + 1, length), -1)
    _kernels.take(tokens, 8 * stride, 8 * length, places, (inputs, targets), (0, 8))
    for row, place in enumerate(places * stride):
        assert np.array_equal(inputs[row], tokens[place : place + length])
        assert np.array_equal(targets[row], tokens[place + 1 : place + 1 + length])
    assert (inputs[-1] == -1).all()
    assert (targets[-1] == -1).all()


@built
@pytest.mark.parametrize(
    ("stride", "row_nbytes", "places", "shifts"),
    [
        (8, 16, [8], (0,)),
        (8, 16, [7], (8,)),
        (8, 16, [-1], (0,)),
        (8, 16, [1 << 62], (0,)),
        (1 << 62, 16, [1], (0,)),
        (8, 73, [0], (0,)),
        (8, 16, [0], (64,)),
        (8, 16, [0], (1 << 62,)),
        (8, 16, [0], (-8,)),
        (0, 16, [0], (0,)),
        (-8, 16, [0], (0,)),
        (8, 0, [0], (0,)),
        (8, -16, [0], (0,)),
        (8, 16, [0] * 6, (0,)),
        (8, 1 << 62, [0, 0, 0, 0], (0,)),
    ],
)
def test_take_refuses_rows_that_are_not_whole(stride: int, row_nbytes: int, places: list[int], shifts: tuple[int, ...]) -> None:
    """In an array of 72 bytes, or a target of 80."""
    target = np.full(10, -1)
    with pytest.raises((IndexError, ValueError)):
        _kernels.take(np.arange(9), stride, row_nbytes, np.array(places), (target,), shifts)
    assert (target == -1).all()


@built
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (np.arange(9)[::2], 8, 8, np.arange(2), (np.zeros(2),), (0,)),
        (np.arange(9), 8, 8, np.arange(2), [np.zeros(2)], (0,)),
        (np.arange(9), 8, 8, np.arange(2), (np.zeros(2),), ()),
        (np.arange(9), 8, 8, np.arange(2), (bytes(16),), (0,)),
        (np.arange(9), 8, 8, np.arange(2), (np.zeros(2), "x"), (0, 0)),
        (np.arange(9), "8", 8, np.arange(2), (np.zeros(2),), (0,)),
        (np.arange(9), 8, 1 << 80, np.arange(2), (np.zeros(2),), (0,)),
        (np.arange(9), 8, 8, [0], (np.zeros(2),), (0,)),
    ],
)
def test_take_refuses_what_is_no_buffer(arguments: tuple[Any, ...]) -> None:
    """With an exception, and with every buffer let go of."""
    held = [argument for argument in arguments if isinstance(argument, np.ndarray)]
    counts = [sys.getrefcount(array) for array in held]
    with pytest.raises((TypeError, ValueError, BufferError, OverflowError)):
        _kernels.take(*arguments)
    assert [sys.getrefcount(array) for array in held] == counts


class WiderWindows(TokenWindows):
    """Windows in another dtype than their tokens."""

    def batch_spec(self, num_samples: int) -> Any:
        from ringloader import ArraySpec

        return [ArraySpec((num_samples, 5), "int64") for _ in range(2)]


@pytest.mark.parametrize("dtype", ["int32", "uint16", "int64"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_windows_in_another_dtype_or_with_strides_are_as_ever(dtype: str, num_workers: int) -> None:
    """What a class derived from ours asks for is cast; tokens that do not lie in one piece are put into one."""
    tokens = np.arange(400).astype(dtype)[::2]
    for kind in (TokenWindows, WiderWindows):
        with Loader(kind(tokens, 5, 3), batch_size=7, num_workers=num_workers) as loader:
            for batch, (inputs, targets) in enumerate(loader):
                starts = 3 * loader.indices(0, batch)
                assert inputs.tolist() == [tokens[start : start + 5].tolist() for start in starts]
                assert targets.tolist() == [tokens[start + 1 : start + 6].tolist() for start in starts]
                assert str(inputs.dtype) == f"torch.{dtype if kind is TokenWindows else 'int64'}"


def test_windows_at_places_that_do_not_lie_side_by_side() -> None:
    """Of an array of indices that is a view with strides."""
    out = np.zeros((2, 3, 5), np.int64)
    TokenWindows(np.arange(100), 5, 3).write_batch(np.arange(20)[::7], list(out))
    assert out[:, :, 0].tolist() == [[0, 21, 42], [1, 22, 43]]


# -- stream


@pytest.mark.skipif(_kernels.stream is None, reason="written for x86, in C")
@pytest.mark.parametrize(
    ("rows", "place", "row", "error"),
    [
        (_slot(100), 1, _slot(100), IndexError),
        (_slot(100), -1, _slot(50), IndexError),
        (_slot(100), 2, _slot(50), IndexError),
        (_slot(100), 1 << 62, _slot(50), IndexError),
        (_slot(100), 0, _slot(0), IndexError),
        (_slot(100), 0, _slot(100)[::2], (ValueError, BufferError)),
        (_slot(200)[::2], 0, _slot(50), (ValueError, BufferError)),
        (bytes(100), 0, _slot(50), BufferError),
        (_slot(100), 0, "row", TypeError),
        (_slot(100), "0", _slot(50), TypeError),
    ],
)
def test_stream_refuses_a_row_without_a_place(rows: Any, place: Any, row: Any, error: Any) -> None:
    """Nothing is written."""
    with pytest.raises(error):
        _kernels.stream(rows, place, row)
    assert set(np.frombuffer(rows, np.uint8) if isinstance(rows, bytes) else rows) <= {0, _MARK}


# -- fetch


class _Info:
    place = -1


class _Noting:
    """Notes what `info` and the page say while a sample is fetched."""

    def __init__(self, info: _Info, words: Any) -> None:
        self._info, self._words = info, words
        self.seen: list[tuple[int, int, Any]] = []

    def __getitem__(self, key: Any) -> Any:
        self.seen.append((self._info.place, self._words[1], key))
        if key == "cancel":
            self._words[8] = 77
        if key == "raise":
            raise RuntimeError(key)
        return [key]


def _fetch(keys: list[Any], samples: list[Any], serial: int = 77) -> tuple[Any, list[tuple[int, int, Any]]]:
    info, words = _Info(), memoryview(bytearray(128)).cast("q")
    dataset = _Noting(info, words)
    try:
        result = _kernels.fetch(dataset, keys, samples, info, words, 1, 8, serial)
    except RuntimeError as error:
        result = error
    return result, dataset.seen


@built
def test_fetch_goes_on_behind_what_is_there_and_says_where_it_is() -> None:
    """The page tells of the sample while it is read, not after it."""
    samples = ["first"]
    found, seen = _fetch([9, 8, "x"], samples)
    assert found is True
    assert samples == ["first", [8], ["x"]]
    assert seen == [(1, 1, 8), (2, 2, "x")]


@built
def test_fetch_stops_where_it_is_cancelled_or_fails() -> None:
    """Between two samples; what was read stays."""
    samples: list[Any] = []
    found, seen = _fetch([1, "cancel", 2], samples)
    assert found is False
    assert samples == [[1], ["cancel"]]
    assert len(seen) == 2
    samples = []
    found, seen = _fetch([1, "cancel", 2], samples, serial=78)
    assert found is True
    samples = []
    found, seen = _fetch([1, "raise", 2], samples)
    assert str(found) == "raise"
    assert samples == [[1]]
    assert seen[-1] == (1, 1, "raise")


@built
def test_fetch_holds_the_page_for_no_longer_than_a_look() -> None:
    """Its owner may close it while a sample is read; then there is nothing to write to."""
    words = memoryview(bytearray(128)).cast("q")

    class Closing:
        def __getitem__(self, key: Any) -> Any:
            words.release()
            return key

    samples: list[Any] = []
    with pytest.raises(ValueError, match="released"):
        _kernels.fetch(Closing(), [1, 2], samples, _Info(), words, 1, 8, 77)
    assert samples == [1]


@pytest.mark.parametrize("place", [0, 1, 5])
def test_loader_closed_while_a_sample_is_read_inline(place: int) -> None:
    """By the dataset itself, or a handler of a signal: all that it holds is given back."""
    loaders: list[Loader] = []
    closed: list[int] = []

    class Closing:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            if index == place and loaders:
                loaders.pop().close()
                closed.append(index)
            return np.arange(4)

    loader = Loader(Closing(), batch_size=8)
    loaders.append(loader)
    with pytest.raises(ClosedError):
        list(loader)
    assert closed == [place]
    loader.close()


@built
def test_fetch_with_a_dataset_that_empties_the_list_of_keys() -> None:
    """No key is read beyond its end, whatever the dataset does meanwhile."""
    keys = [1, 2, 3]

    class Emptying:
        def __getitem__(self, key: Any) -> Any:
            keys.clear()
            gc.collect()
            return key

    samples: list[Any] = []
    assert _kernels.fetch(Emptying(), keys, samples, _Info(), memoryview(bytearray(128)).cast("q"), 1, 8, 77) is True
    assert samples == [1]


@built
@pytest.mark.parametrize(
    "change",
    [
        {1: (1, 2)},
        {2: ()},
        {4: bytes(128)},
        {5: 16},
        {5: -1},
        {6: 16},
        {6: -1},
        {5: "1"},
        {7: 1 << 80},
        {7: None},
    ],
)
def test_fetch_refuses_other_arguments(change: dict[int, Any]) -> None:
    """No word is written beyond the page."""
    arguments: list[Any] = [{1: 2}, [1], [], _Info(), memoryview(bytearray(128)).cast("q"), 1, 8, 77]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises((TypeError, IndexError, OverflowError, BufferError)):
        _kernels.fetch(*arguments)


# -- together


@built
def test_kernels_keep_nothing() -> None:
    """No reference is kept, and none is given back twice: rows, slots, samples and keys have as many as before."""
    rows, tensors = [np.arange(700) + 1000 for _ in range(8)], [torch.arange(700) + 1000 for _ in range(8)]
    odd = [*rows[:7], None]
    slot, key, sample = _slot(1 << 20), 123456, ["sample"]
    places, target = np.arange(4), np.zeros((4, 700), np.int64)
    everything = [*rows, *tensors, slot, key, sample, places, target, rows[0].dtype, np.ndarray, torch.Tensor]
    before = [sys.getrefcount(each) for each in everything]
    for _ in range(1000):
        _kernels.join((rows, tensors, odd), slot, (0, 100_000, 200_000))
        _kernels.take(rows[0], 8, 8, places, (target,), (0,))
        _kernels.fetch({key: sample}, [key], [], _Info(), memoryview(bytearray(128)).cast("q"), 1, 8, 77)
        if _kernels.stream is not None:
            _kernels.stream(target, 1, rows[0])
    assert max(abs(now - then) for now, then in zip(map(sys.getrefcount, everything), before, strict=True)) < 10


@pytest.mark.parametrize("kind", ["arrays", "tensors", "run", "tensor run", "strides", "windows", "large"])
def test_batches_without_kernels_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that may not use them make the bytes that this process makes, which may."""
    spec = FactorySpec(KernelSamples, 60, kind)
    with Loader(spec, batch_size=8, shuffle=True, num_workers=0) as loader:
        inline = [_flat(batch) for batch in loader]
    monkeypatch.setenv("RINGLOADER_KERNELS", "0")
    with Loader(spec, batch_size=8, shuffle=True, num_workers=2) as loader:
        assert [_flat(batch) for batch in loader] == inline
        assert loader.call("has_kernels") == [False, False]
    monkeypatch.delenv("RINGLOADER_KERNELS")
    with Loader(spec, batch_size=8, shuffle=True, num_workers=2) as loader:
        assert [_flat(batch) for batch in loader] == inline
        assert loader.call("has_kernels") == [_IS_BUILT] * 2


def _flat(batch: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    leaves = list(batch.values()) if isinstance(batch, dict) else batch
    return [(str(leaf.dtype), tuple(leaf.shape), leaf.numpy().tobytes()) for leaf in leaves]
