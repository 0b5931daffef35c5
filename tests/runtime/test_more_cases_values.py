"""Reported cases around what is in a batch: dtypes, keys, views, gradients, scalars, empty tensors, objects and long lists."""

from __future__ import annotations

import copy
import functools
import re
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import default_collate

from ringloader import FactorySpec, LayoutError, Loader, LoaderError
from tests.runtime import more_case_datasets as cases
from tests.runtime.conftest import UNIT_S

MIB = 1 << 20


def assert_same(found: Any, expected: Any, path: str = "batch") -> None:
    """Same types, order, shapes, dtypes and bits all the way down."""
    assert type(found) is type(expected), f"{path}: {type(found)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert _bytes_of(found) == _bytes_of(expected), path
    elif isinstance(expected, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected], path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for k, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{path}[{k}]")
    else:
        assert found == expected, path


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Row(NamedTuple):
    """Two samples, what became of their batch, and the bytes that were copied to make it."""

    samples: list[Any]
    outcome: Any
    copied_nbytes: int


TABLES = ("b53", "b60", "b72", "b73", "b81", "b82", "p02")


@functools.cache
def read_tables(num_workers: int) -> tuple[dict[str, list[Row]], str]:
    """Every row of every table, and this process's warnings; read once, since workers take a second to import torch."""
    tables, rows = cases.tables(), iter(cases.Table(TABLES).rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Loader(FactorySpec(cases.Table, TABLES), batch_size=2, num_workers=num_workers) as loader:
            found, iterator, before = [], iter(loader), 0
            while (outcome := _outcome(iterator)) is not None:
                copied_nbytes = loader.stats().copied_nbytes
                found.append(Row(list(next(rows)), copy.deepcopy(outcome), copied_nbytes - before))
                before = copied_nbytes
            del outcome
    assert len(found) == sum(map(len, tables.values()))
    left = iter(found)
    return {name: [next(left) for _ in tables[name]] for name in TABLES}, "\n".join(str(one.message) for one in caught)


def _outcome(iterator: Any) -> Any:
    """The next batch, or the error in its place; None at the end."""
    try:
        return next(iterator, None)
    except LoaderError as error:
        return error.with_traceback(None)


def read_table(name: str, num_workers: int) -> list[Row]:
    return read_tables(num_workers)[0][name]


both = pytest.mark.parametrize("num_workers", [0, 2])


@both
def test_b53_every_dtype_of_torch_arrives_bit_for_bit(num_workers: int) -> None:
    """Dtypes that numpy lacks, NaN payloads and negative zeros included."""
    rows = read_table("b53", num_workers)
    assert len({samples[0].dtype for samples, _, _ in rows}) == len(cases.DTYPES)
    for (first, second), batch, _ in rows:
        assert not isinstance(batch, Exception), batch
        assert batch.dtype == first.dtype
        assert _bytes_of(batch) == _bytes_of(first) + _bytes_of(second)


@both
def test_b60_keys_of_any_plain_type_keep_type_and_order(num_workers: int) -> None:
    """What msgpack alone would change or refuse arrives as it was, nested too."""
    for samples, batch, _ in read_table("b60", num_workers):
        assert_same(batch, default_collate(samples))


@both
def test_b72_views_cost_their_own_size_and_keep_their_values(num_workers: int) -> None:
    """Slices, strides, transposed, overlapping, expanded and aliasing views are copied by value, to the byte."""
    for samples, batch, copied_nbytes in read_table("b72", num_workers):
        assert_same(batch, default_collate(samples))
        leaves = list(batch.values()) if isinstance(batch, dict) else [batch]
        assert copied_nbytes == sum(leaf.nbytes for leaf in leaves)


@both
def test_b72_expanded_array_counts_with_its_logical_size(num_workers: int) -> None:
    """Where there is no room the error says what the batch takes, not what its storage did."""
    options: dict[str, Any] = {"collate_fn": cases.expanded, "num_workers": num_workers, "max_ring_bytes": MIB}
    with (
        Loader(FactorySpec(cases.Plain, 4), batch_size=2, **options) as loader,
        pytest.raises(LoaderError, match=r"slot of [789]\.\d MiB"),
    ):
        next(iter(loader))


@both
def test_b73_gradients_do_not_travel(num_workers: int) -> None:
    """Values arrive without a graph; inline one warning names the path."""
    for _, batch, _ in read_table("b73", num_workers):
        assert not batch["w"].requires_grad
        assert batch["w"].grad_fn is None
        assert batch["w"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    words = read_tables(num_workers)[1]
    assert words.count("sample['w'] requires grad") == (num_workers == 0)


def test_b73_worker_warns_once_and_names_the_path(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker's warning reaches this process's stderr, once for any number of batches."""
    with Loader(FactorySpec(cases.Table, ("b73",)), batch_size=2, num_workers=1) as loader:
        assert [batch["w"].tolist() for batch in loader] == [[[2.0, 2.0], [2.0, 2.0]]] * 3
    assert capfd.readouterr().err.count("sample['w'] requires grad") == 1


@both
def test_b81_scalars_and_mixed_rows_are_torchs_or_refused(num_workers: int) -> None:
    """Every row of the table is what the installed torch makes of it; what torch refuses is refused with its path."""
    for samples, batch, _ in read_table("b81", num_workers):
        try:
            expected = default_collate(samples)
        except Exception:
            assert isinstance(batch, LayoutError), (samples, batch)
            assert re.search(r"sample is of type|100000000000000000000 in sample", str(batch)), batch
        else:
            assert_same(batch, expected)


@both
def test_b82_empty_tensors_keep_shape_dtype_and_neighbours(num_workers: int) -> None:
    """Leaves without bytes are as torch makes them, and so is what follows them."""
    for samples, batch, _ in read_table("b82", num_workers):
        assert_same(batch, default_collate(samples))


def test_b82_empty_batches_hold_no_slot() -> None:
    """Batches without a byte can be kept by the hundred; those with some give their slots back."""
    with Loader(cases.Table(("b82",)), batch_size=2) as loader:
        kept = list(loader)[2:]
        num_slots = loader.stats().num_slots
        for _ in range(30):
            kept += list(loader)[2:]
        assert loader.stats().num_slots == num_slots


def test_b82_zero_dimensional_result_of_a_collate_fn_stays_so() -> None:
    """A number from a collate_fn has no dimension to lose."""
    with Loader(FactorySpec(cases.Plain, 4), batch_size=2, num_workers=1, collate_fn=cases.mean) as loader:
        assert [(tuple(batch.shape), batch.item()) for batch in loader] == [((), 0.5), ((), 2.5)]


@both
def test_b87_dataclasses_of_a_collate_fn_keep_type_and_lie_in_a_slot(num_workers: int) -> None:
    """Frozen and nested records arrive equal, their arrays as views of the ring."""
    with Loader(FactorySpec(cases.Plain, 12), batch_size=4, num_workers=num_workers, collate_fn=cases.as_frozen) as loader:
        for k, batch in enumerate(loader):
            indices = list(range(4 * k, 4 * k + 4))
            assert type(batch) is cases.Frozen
            assert type(batch.inner) is cases.Inner
            assert batch.inner.names == [f"n{i}" for i in indices]
            assert batch.inner.y.tolist() == indices
            assert batch.x[:, 5].tolist() == indices
            engine = loader._engine
            assert engine is not None
            starts = {one.mapping.array(1).ctypes.data: one.nbytes for one in engine.ring.segments.values()}
            address = torch.as_tensor(batch.x).data_ptr()
            assert any(start <= address < start + nbytes for start, nbytes in starts.items())


def test_b87_many_strings_cost_little_and_arrive_equal() -> None:
    """160,000 strings a batch, odd ones among them: in order, equal, at 0.3 s a batch at the most."""
    with Loader(FactorySpec(cases.Plain, 6), batch_size=1, num_workers=1, collate_fn=cases.many_names) as loader:
        iterator, times_s = iter(loader), []
        for k in range(6):
            began_s = time.perf_counter()
            batch = next(iterator)
            times_s.append(time.perf_counter() - began_s)
            assert int(batch["x"][0]) == k
            assert batch["names"] == cases.expected_names()
        assert min(times_s[1:]) < 0.3 * UNIT_S


REFUSED: dict[str, tuple[type, Callable[[list[Any]], Any] | None, str]] = {
    "image": (cases.Picture, None, r"sample\['img'\] is of type PIL\.Image.* in sample 0"),
    "object": (cases.Objects, None, r"sample\['graph'\] is of type .*Opaque.* in sample 3"),
    "object of a collate_fn": (cases.Plain, cases.returns_object, r"batch\['extra'\] is of type .*Opaque"),
}


@both
@pytest.mark.parametrize("case", REFUSED)
def test_b87_objects_without_a_rule_are_refused_by_path_and_type(case: str, num_workers: int) -> None:
    """The error names path, type and sample and what to do, and the epoch can go on."""
    kind, collate_fn, words = REFUSED[case]
    with Loader(FactorySpec(kind, 8), batch_size=4, num_workers=num_workers, collate_fn=collate_fn) as loader:
        iterator = iter(loader)
        with pytest.raises(LayoutError, match=words) as caught:
            next(iterator)
        assert "return tensors, arrays, numbers" in str(caught.value)
        if case == "object":
            assert next(iterator)["graph"].shape == (4, 2)


@both
def test_p02_rows_are_never_broadcast_or_cast(num_workers: int) -> None:
    """The dtype follows the whole batch by torch's rule, or the batch is refused; 2.9 never becomes 2, 300 never 44."""
    num_refused = 0
    for samples, batch, _ in read_table("p02", num_workers):
        try:
            expected = default_collate(samples)
        except Exception:
            num_refused += 1
            assert isinstance(batch, LayoutError), (samples, batch)
            assert len(batch.samples) == 2
            assert re.search(r"sample (has|is of)", str(batch))
        else:
            assert_same(batch, expected)
    assert num_refused == 5
