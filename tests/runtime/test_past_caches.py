"""Copies past the caches: the bytes are those of any copy, wherever rows begin and end, and nothing beside them is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringloader import ArrayDataset, FactorySpec, Loader, _kernels
from ringloader._collate import past_caches
from ringloader._collate.past_caches import LARGE_BATCH_NBYTES, LARGE_ROW_NBYTES, row_copier
from tests.runtime.writing_datasets import LargeRows

_MARK = 0xA5
_LARGE = 1 << 40

only_x86 = pytest.mark.skipif(_kernels.stream is None, reason="written for x86, in C")


def _bytes(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 256, size).astype(np.uint8)


@only_x86
@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 4),
    st.integers(LARGE_ROW_NBYTES, LARGE_ROW_NBYTES + 70_000),
    st.integers(0, 130),
    st.integers(0, 130),
    st.integers(0, 99),
)
def test_rows_of_any_size_and_place_have_their_bytes(num_rows: int, nbytes: int, offset: int, shift: int, seed: int) -> None:
    """Whatever the alignment of the row and of its place, and whatever is left of a block."""
    rng = np.random.default_rng(seed)
    held = np.full(offset + num_rows * nbytes + 300, _MARK, np.uint8)
    out = held[offset : offset + num_rows * nbytes].reshape(num_rows, nbytes)
    copy = row_copier(out, _LARGE)
    assert copy is not None
    place = int(rng.integers(num_rows))
    row = _bytes(rng, nbytes + shift)[shift:]
    copy(place, row)
    expected = np.full_like(held, _MARK)
    expected[offset + place * nbytes : offset + (place + 1) * nbytes] = row
    assert np.array_equal(held, expected)


@only_x86
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "complex128"])
@pytest.mark.parametrize("shape", [(3, 224, 224), (40_001,), (1, 1, 90_000)])
def test_rows_of_any_kind(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Read-only rows, those of a file, transposed and reversed ones, broadcast ones."""
    values = (100 * np.random.default_rng(0).random(shape)).astype(dtype)
    np.save(tmp_path / "row.npy", values)
    read_only = values.copy()
    read_only.flags.writeable = False
    rows = [values, read_only, np.load(tmp_path / "row.npy", mmap_mode="r"), values[..., ::-1], values.T.copy().T]
    rows.append(np.broadcast_to(values[..., :1], shape))
    out = np.empty((len(rows), *shape), dtype)
    copy = row_copier(out, _LARGE)
    assert (copy is None) == (values.nbytes < LARGE_ROW_NBYTES)
    for place, row in enumerate(rows):
        (copy or out.__setitem__)(place, row)
        assert np.array_equal(out[place], row)


@pytest.mark.parametrize(
    ("held", "shape", "dtype"),
    [
        (np.arange(200_000, dtype=np.int32).reshape(2, -1), (100_000,), np.float32),
        (np.arange(200_000, dtype=np.float64).reshape(2, -1), (100_000,), np.float32),
        (np.arange(200_000).astype(np.uint8).reshape(2, -1), (100_000,), np.float32),
        (np.arange(200_000, dtype=np.float32).reshape(2, 1, -1), (3, 100_000), np.float32),
    ],
    ids=["same size", "larger", "smaller", "spread"],
)
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["block", "gathered"])
def test_rows_for_another_dtype_or_shape_are_cast_as_ever(
    held: np.ndarray, shape: tuple[int, ...], dtype: Any, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subclass of ArrayDataset may ask for other leaves than it holds: numpy casts, and nothing beyond a row is read."""
    monkeypatch.setattr(past_caches, "LARGE_BATCH_NBYTES", 1)
    out = np.full((2, *shape), -1, dtype)
    ArrayDataset(held).write_batch(np.array(order), [out])
    assert np.array_equal(out, np.broadcast_to(held[order], out.shape).astype(dtype))


def test_row_that_does_not_fit_its_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes in another shape are not taken for it."""
    monkeypatch.setattr(past_caches, "LARGE_BATCH_NBYTES", 1)
    held, out = np.zeros((2, 300, 300), np.float32), np.zeros((2, 90_000), np.float32)
    for order in ([0, 1], [1, 0]):
        with pytest.raises(ValueError, match="broadcast"):
            ArrayDataset(held).write_batch(np.array(order), [out])


@only_x86
@pytest.mark.parametrize("distance", [1, 64, 5_000, 99_999, 100_000])
def test_row_that_lies_over_its_place_is_moved(distance: int) -> None:
    """As numpy moves it: from a copy where need be."""
    for is_behind in (True, False):
        held = _bytes(np.random.default_rng(0), 200_000)
        at, other = (0, distance) if is_behind else (distance, 0)
        row, out = held[other : other + 100_000], held[at : at + 100_000].reshape(1, -1)
        expected = row.copy()
        copy = row_copier(out, _LARGE)
        assert copy is not None
        copy(0, row)
        assert np.array_equal(out[0], expected)


@pytest.mark.parametrize(
    ("batch_nbytes", "shape"),
    [
        (LARGE_BATCH_NBYTES - 1, (2, LARGE_ROW_NBYTES)),
        (LARGE_BATCH_NBYTES, (2, LARGE_ROW_NBYTES - 1)),
        (LARGE_BATCH_NBYTES, (2, 0)),
        (LARGE_BATCH_NBYTES, (2,)),
    ],
)
def test_small_rows_and_batches_are_copied_as_ever(batch_nbytes: int, shape: tuple[int, ...]) -> None:
    """The training process finds them in the cache."""
    assert row_copier(np.empty(shape, np.uint8), batch_nbytes) is None


def test_where_it_is_not_wanted_or_not_built_rows_are_copied_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, other processors, and whoever wants to see what difference it makes."""
    out = np.empty((2, LARGE_ROW_NBYTES), np.uint8)
    monkeypatch.setenv("RINGLOADER_PAST_CACHES", "0")
    assert row_copier(out, _LARGE) is None
    monkeypatch.delenv("RINGLOADER_PAST_CACHES")
    monkeypatch.setattr(past_caches, "stream", None)
    assert row_copier(out, _LARGE) is None


@only_x86
@pytest.mark.parametrize("kind", ["samples", "tensors", "rows", "blocks"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_large_batches_arrive_with_their_bytes(kind: str, num_workers: int) -> None:
    """Rows out of samples, gathered ones and blocks of neighbours; every row of 65,544 bytes begins elsewhere in a line."""
    held = LargeRows(300)
    spec: Any = FactorySpec(LargeRows, 300, kind) if kind in ("samples", "tensors") else ArrayDataset(held.rows, held.labels)
    with Loader(spec, batch_size=260, shuffle=kind != "blocks", num_workers=num_workers) as loader:
        for epoch in range(2):
            keys = [loader.indices(epoch, batch) for batch in range(2)]
            for indices, (rows, labels) in zip(keys, loader, strict=True):
                assert labels.tolist() == indices.tolist()
                assert torch.equal(rows, torch.from_numpy(held.rows[indices]))
