"""Datasets that write batches by themselves: ours over arrays, and the protocol for anybody's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ringloader import (
    ArrayDataset,
    ArraySpec,
    ConfigError,
    FactorySpec,
    LayoutError,
    Loader,
    SampleError,
    TokenWindows,
    dataset,
    tensor_dataset,
)
from tests.runtime import writing_datasets as writing

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def rows_of(loader: Any) -> Any:
    """All batches joined, leaf by leaf."""
    batches = list(loader)
    if isinstance(batches[0], dict):
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    return [torch.cat(column) for column in zip(*batches, strict=True)]


def arrays(size: int = 50) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((size, 3, 4), dtype=np.float32), rng.integers(0, 10, size), rng.random((size, 2048))


# --- arrays --------------------------------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("shuffle", [False, True])
def test_array_dataset_gives_what_tensor_dataset_gives(num_workers: int, shuffle: bool) -> None:
    """Tuples of arrays become the same batches as torch's TensorDataset, rows small and large, in order and shuffled."""
    held = arrays()
    with Loader(ArrayDataset(*held), batch_size=8, shuffle=shuffle, num_workers=num_workers) as loader:
        order = loader._orders.plan(0)._compute_keys(0, 50).tolist() if shuffle else list(range(50))
        batches = list(loader)
    expected = list(DataLoader(TensorDataset(*map(torch.from_numpy, held)), batch_size=8, sampler=order))
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert type(batch) is type(other)
        for leaf, wanted in zip(batch, other, strict=True):
            assert leaf.dtype == wanted.dtype
            assert torch.equal(leaf, wanted)


@WORKERS
def test_array_dataset_of_names_gives_dicts_and_equals_its_own_samples(num_workers: int) -> None:
    """A mapping of arrays: dict samples, dict batches, the same whether they are written whole or collated."""
    images, labels, rows = arrays()
    held = ArrayDataset({"image": images, "label": labels, "rows": rows})
    assert list(held[-1]) == ["image", "label", "rows"]
    assert held[-1]["label"] == labels[49]
    with Loader(held, batch_size=7, shuffle=True, num_workers=num_workers) as loader:
        written = rows_of(loader)
    with Loader(held, batch_size=7, shuffle=True, num_workers=num_workers, seed_per="sample") as loader:
        collated = rows_of(loader)
    assert list(written) == list(collated)
    for name in written:
        assert torch.equal(written[name], collated[name])


@WORKERS
def test_array_dataset_over_a_folder_maps_its_files(num_workers: int, tmp_path: Path) -> None:
    """`.npy` files by name; workers are told the paths, not sent the rows."""
    images, labels, rows = arrays()
    for name, array in (("image", images), ("label", labels), ("rows", rows)):
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "notes.txt").write_text("not an array")
    held = ArrayDataset(tmp_path)
    assert held.process_spec is not None
    assert len(held.process_spec.to_wire()) < 2000
    assert isinstance(held._columns[0].array.base, np.memmap)
    with Loader(held, batch_size=16, num_workers=num_workers) as loader:
        found = rows_of(loader)
    assert torch.equal(found["rows"], torch.from_numpy(rows))
    assert len(pickle.dumps(held)) < 4000


def test_array_dataset_over_a_slice_of_a_memmap_maps_that_slice(tmp_path: Path) -> None:
    """A part of a file is found again by where it lies in the mapping."""
    np.arange(60_000, dtype=np.float32).tofile(tmp_path / "flat")
    mapped = np.memmap(tmp_path / "flat", np.float32, "r", 4000, (100, 500))
    part = ArrayDataset(mapped[20:30])
    assert part.process_spec is not None
    rebuilt = part.process_spec.build()
    assert (rebuilt[3][0] == part[3][0]).all()
    assert rebuilt[0][0][0] == 1000 + 20 * 500


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool, torch.uint16])
def test_tensor_dataset_carries_every_dtype(dtype: torch.dtype) -> None:
    """Also those that numpy does not have."""
    x = torch.arange(24).reshape(12, 2).to(torch.float32).to(dtype)
    with Loader(tensor_dataset(x, torch.arange(12)), batch_size=5, num_workers=1) as loader:
        found, numbers = rows_of(loader)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))
    assert numbers.tolist() == list(range(12))
    assert torch.equal(torch.as_tensor(tensor_dataset(x)[3][0]), x[3])


@pytest.mark.parametrize("make", [lambda x: x[::2], lambda x: x[:, ::-1], np.asfortranarray])
def test_array_dataset_over_views_is_right(make: Any) -> None:
    """Strided, reversed and column-major arrays give their own rows."""
    x = make(np.arange(400.0).reshape(40, 10))
    with Loader(ArrayDataset(x), batch_size=6, shuffle=True) as loader:
        order = loader._orders.plan(0)._compute_keys(0, len(x))
        assert np.array_equal(rows_of(loader)[0].numpy(), x[order])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ((np.zeros(3), np.zeros(4)), r"the arrays differ in length: \{'0': 3, '1': 4\}"),
        ((np.float64(1.0),), "array 0 is a float64; give arrays or CPU tensors"),
        ((np.array(1.0),), "array 0 has no dimension"),
        ((np.array(["a"]),), "array 0 has dtype <U1, which no tensor has"),
        ((np.zeros(3, ">f4"),), "which no tensor has"),
        ((), "no arrays were given"),
        (({},), "arrays have the names"),
        (([1, 2],), "array 0 is a list"),
        ((torch.zeros(3, device="meta"),), "array 0 is a tensor on device meta"),
        ((torch.zeros(3).to_sparse(),), "array 0 is a sparse or opaque tensor"),
    ],
)
def test_array_dataset_refuses_what_has_no_rows(given: Any, match: str) -> None:
    """At construction, naming the array."""
    with pytest.raises(ConfigError, match=match):
        ArrayDataset(*given)


def test_array_dataset_refuses_folders_and_files_it_cannot_map(tmp_path: Path) -> None:
    """No files, or one that is no array."""
    with pytest.raises(ConfigError, match=r"has no \.npy files"):
        ArrayDataset(tmp_path)
    (tmp_path / "bad.npy").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"bad\.npy cannot be mapped"):
        ArrayDataset(tmp_path)


@WORKERS
@pytest.mark.parametrize("key", [50, -51, 1 << 40])
def test_array_dataset_refuses_an_index_outside(key: int, num_workers: int) -> None:
    """`clip` must never hide it; a negative index within counts from the end."""
    held = ArrayDataset(arrays()[1])
    with Loader(held, batch_sampler=[[0, -1], [3, key, 4], [5, 6]], num_workers=num_workers) as loader:
        iterator = iter(loader)
        assert next(iterator)[0].tolist() == held._columns[0].array[[0, -1]].tolist()
        with pytest.raises(SampleError, match=f"index {key} of a dataset of 50 samples"):
            next(iterator)
        assert len(next(iterator)[0]) == 2


# --- token windows -------------------------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (16, 1), (7, 5), (16, 100)])
def test_token_windows_are_every_window_shifted_by_one(length: int, stride: int, num_workers: int) -> None:
    """Written whole, collated, and by hand: equal; with stride 1 there are N - length."""
    tokens = np.arange(1000, 1400, dtype=np.int32)
    held = TokenWindows(tokens, length, stride)
    assert len(held) == len(range(0, 400 - length, stride))
    with Loader(held, batch_size=9, shuffle=True, num_workers=num_workers) as loader:
        order = loader._orders.plan(0)._compute_keys(0, len(held)).tolist()
        inputs, targets = rows_of(loader)
    assert inputs.dtype == torch.int32
    for row, index in enumerate(order):
        start = 1000 + index * stride
        assert inputs[row].tolist() == list(range(start, start + length))
        assert targets[row].tolist() == list(range(start + 1, start + length + 1))
        assert held[index][1].tolist() == targets[row].tolist()


@WORKERS
def test_token_windows_over_files_map_them(num_workers: int, tmp_path: Path) -> None:
    """`.npy` and flat numbers; workers are told the path."""
    tokens = np.arange(500, dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    tokens.tofile(tmp_path / "tokens.bin")
    for held in (
        TokenWindows(tmp_path / "tokens.npy", 8),
        TokenWindows(str(tmp_path / "tokens.bin"), 8, dtype=np.uint16),
        TokenWindows(np.memmap(tmp_path / "tokens.bin", np.uint16, "r"), 8),
        TokenWindows(torch.from_numpy(tokens), 8),
        TokenWindows(np.repeat(tokens, 2)[::2], 8),
    ):
        with Loader(held, batch_size=64, num_workers=num_workers) as loader:
            inputs, targets = rows_of(loader)
        assert len(inputs) == 492
        assert inputs[100].tolist() == list(range(100, 108))
        assert targets[-1, -1] == 499


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ((np.arange(8), 8), "tokens has 8 numbers; a window of length=8 and its target need 9"),
        ((np.zeros((3, 3)), 1), "tokens has 2 dimensions"),
        ((np.arange(8), 0), "length is 0; give an int of at least 1"),
        ((np.arange(8), 2, True), "stride is True; give an int of at least 1"),
        (("tokens.bin", 2), "no .npy file; say by dtype="),
        (("nowhere.npy", 2), "nowhere.npy cannot be mapped"),
    ],
)
def test_token_windows_refuse_what_is_no_sequence(given: Any, match: str) -> None:
    """At construction, by name and number."""
    with pytest.raises(ConfigError, match=match):
        TokenWindows(*given)


# --- the protocol --------------------------------------------------------------------------------------------------------


@WORKERS
def test_write_batch_of_anybody_fills_the_slot(num_workers: int) -> None:
    """A tree of specs; a short last batch; the leaves are tensors of those dtypes, written once."""
    with Loader(FactorySpec(writing.Writes, 10), batch_size=4, num_workers=num_workers) as loader:
        batches = list(loader)
        assert loader.stats().copied_nbytes == sum(batch["a"].nbytes + batch["b"][0].nbytes for batch in batches)
    assert [batch["a"][:, 0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[2]["b"][0].dtype == torch.bfloat16
    assert batches[2]["b"][0].tolist() == [8.0, 9.0]
    assert batches[0]["b"][1] == "text"


@WORKERS
def test_write_batch_without_room_is_not_called_in_vain(num_workers: int) -> None:
    """The first Fill has no slot: the size is known from the spec, and the dataset writes each batch once."""
    with Loader(FactorySpec(writing.CountsWrites, 12), batch_size=4, num_workers=num_workers) as loader:
        counts = [batch[0][:, 0].tolist() for batch in loader]
    assert max(map(max, counts)) <= 3


@WORKERS
def test_p30_write_batch_that_keeps_out_is_refused(num_workers: int) -> None:
    """A view kept beyond the call would write into another batch: an error at that batch, by name."""
    loader = Loader(FactorySpec(writing.KeepsOut, 8), batch_size=4, num_workers=num_workers)
    with loader, pytest.raises(LayoutError, match="write_batch kept an array of `out`"):
        next(iter(loader))


@WORKERS
@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("Raises", SampleError, "cannot write"),
        ("WrongShape", SampleError, "could not broadcast"),
        ("NoSpec", LayoutError, "give an ArraySpec, or dicts, lists and tuples of them"),
        ("MixedSpec", LayoutError, "give an ArraySpec, or dicts, lists and tuples of them"),
    ],
)
def test_write_batch_that_fails_is_an_error_of_its_batch(kind: str, error: Any, match: str, num_workers: int) -> None:
    """The same iterator goes on."""
    with Loader(FactorySpec(getattr(writing, kind), 8), batch_size=4, num_workers=num_workers) as loader:
        iterator = iter(loader)
        for _ in range(2):
            with pytest.raises(error, match=match):
                next(iterator)
        assert list(iterator) == []


def test_write_batch_gives_way_to_a_collate_fn_and_to_other_keys() -> None:
    """Where whole batches cannot be written, samples are fetched one by one."""
    held = ArrayDataset(np.arange(12.0))
    with Loader(held, batch_size=4, collate_fn=len) as loader:
        assert list(loader) == [4, 4, 4]
    with Loader(writing.TextKeys(3), batch_sampler=[["a", "b"], ["c"]]) as loader:
        assert [batch.tolist() for batch in loader] == [[97, 98], [99]]


def test_array_spec_takes_dtypes_of_numpy_and_torch_and_refuses_others() -> None:
    """By object or by name."""
    assert ArraySpec((2, 3), np.float32) == ArraySpec([2, 3], torch.float32) == ArraySpec((2, 3), "float32")
    assert ArraySpec((2,), torch.bfloat16).nbytes == 4
    assert hash(ArraySpec((2,), "int64")) == hash(ArraySpec((2,), int))
    for shape, dtype in (((2,), "text"), ((2,), "U3"), ((2,), object), ((-1,), "int8")):
        with pytest.raises(LayoutError, match="ArraySpec has the"):
            ArraySpec(shape, dtype)


@pytest.mark.parametrize("kind", ["Changed", "Fewer", "Wrapped"])
def test_class_that_reads_in_another_way_is_read_that_way(kind: str) -> None:
    """A subclass with its own samples or length, a wrapper that passes the rest on: whole batches would go past them."""
    held = getattr(writing, kind)(np.arange(8.0))
    with Loader(held, batch_size=4) as loader:
        found = [value for batch in loader for value in batch[0].tolist()]
    assert found == [held[i][0] for i in range(len(held))]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_write_batch_that_keeps_out_and_fails_harms_no_other_batch(num_workers: int) -> None:
    """The kept view is found behind the exception, too; a worker that holds one is replaced, and its view ends with it."""
    with Loader(FactorySpec(writing.KeepsAndFails, 40), batch_size=4, num_workers=num_workers) as loader:
        iterator = iter(loader)
        with pytest.raises(LayoutError, match="write_batch kept an array of `out`"):
            next(iterator)
        assert [(batch[0] == number).all().item() for number, batch in enumerate(iterator, 1)] == [True] * 9
        assert loader.stats().num_restarts == 1


def test_write_batch_that_puts_another_array_in_its_place_is_refused() -> None:
    """What it wrote would be lost, and the slot delivered as it was."""
    for kind in (writing.Replaces, writing.ReplacesBesideNothing):
        with Loader(kind(8), batch_size=4) as loader, pytest.raises(LayoutError, match="put another array into"):
            next(iter(loader))


def test_batch_spec_is_asked_anew_in_each_epoch() -> None:
    """A dataset whose resolution grows with set_epoch."""
    with Loader(FactorySpec(writing.Grows, 8), batch_size=4, num_workers=1) as loader:
        shapes = [[tuple(batch[0].shape) for batch in loader] for _ in range(3)]
    assert shapes == [[(4, 2)] * 2, [(4, 3)] * 2, [(4, 4)] * 2]


def test_what_write_batch_leaves_out_shows_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """RINGLOADER_DEBUG=1: bytes 0xAB instead of another batch's."""
    monkeypatch.setenv("RINGLOADER_DEBUG", "1")
    with Loader(writing.WritesLittle(8), batch_size=4) as loader:
        for batch in loader:
            assert batch[0][0, 0] == 1
            assert (batch[0][1:].view(torch.uint8) == 0xAB).all()


def test_array_spec_is_no_value_of_a_batch() -> None:
    """Out of a collate_fn it would be memory that nobody has written."""
    with (
        Loader(range(4), batch_size=2, collate_fn=lambda samples: {"a": ArraySpec((4,), "int64")}) as loader,
        pytest.raises(LayoutError, match=r"is of type .*ArraySpec"),
    ):
        next(iter(loader))


def test_private_mappings_and_odd_files_are_taken_as_they_are(tmp_path: Path) -> None:
    """Changes to a copy-on-write mapping reach workers; Fortran order is mapped, too; a wrong dtype for a .npy is refused."""
    np.arange(100, dtype=np.float32).tofile(tmp_path / "flat")
    private = np.memmap(tmp_path / "flat", np.float32, "c", 0, (10, 10))
    private[...] = -1
    held = ArrayDataset(private)
    assert held.process_spec is None
    with Loader(held, batch_size=10, num_workers=1) as loader:
        assert (next(iter(loader))[0] == -1).all()
    folder = tmp_path / "folder"
    folder.mkdir()
    np.save(folder / "x.npy", np.asfortranarray(np.arange(12.0).reshape(4, 3)))
    mapped = ArrayDataset(folder)
    assert mapped.process_spec is not None
    assert mapped.process_spec.build()[2]["x"].tolist() == [6, 7, 8]
    (folder / "y.npy").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"y\.npy cannot be mapped"):
        ArrayDataset(folder)
    np.save(tmp_path / "tokens.npy", np.arange(50))
    assert len(TokenWindows(tmp_path / "tokens.npy", 4, dtype=np.int64)) == 46
    with pytest.raises(ConfigError, match="holds int64, not uint16; leave dtype out"):
        TokenWindows(tmp_path / "tokens.npy", 4, dtype="uint16")
    with pytest.raises(ConfigError, match="cannot be mapped"):
        TokenWindows(str(tmp_path / "flat"), 4, dtype="nonsense")


def test_strided_arrays_travel_once_and_not_inside_the_pickle() -> None:
    """Every second row of an array goes out of band like any other."""
    base = np.zeros((4000, 100))
    buffers: list[Any] = []
    body = pickle.dumps(ArrayDataset(base[::2]), protocol=5, buffer_callback=buffers.append)
    assert len(body) < 2000
    assert sum(buffer.raw().nbytes for buffer in buffers) == base.nbytes // 2


def test_masked_arrays_and_impossible_specs_are_refused() -> None:
    """A mask would be lost; a shape of no ints, or of more bytes than there are."""
    with pytest.raises(ConfigError, match="array 0 is a MaskedArray"):
        ArrayDataset(np.ma.masked_array([1.0, 2.0], [True, False]))
    for shape in (5, ("a",), (2.7,), "12"):
        with pytest.raises(LayoutError, match="give a tuple of ints"):
            ArraySpec(shape, "int8")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="bytes"):
        ArraySpec((1 << 60, 8), "int64")
    with pytest.raises(LayoutError, match="which no tensor has"):
        ArraySpec((2,), None)


# --- dataset() -----------------------------------------------------------------------------------------------------------


@WORKERS
def test_dataset_of_functions_reads_like_any_other(num_workers: int) -> None:
    """A size and a function; with a spec, workers build their own."""
    with Loader(dataset(size=6, get_item=writing.square), batch_size=3, num_workers=num_workers) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 4], [9, 16, 25]]
    spec: Any = {"factory": writing.Writes, "args": [8]}
    held = dataset(size=lambda: 8, get_item=lambda i: i, process_spec=spec)
    assert len(held) == 8
    with Loader(held, batch_size=4, num_workers=num_workers) as loader:
        assert len(loader) == 2
        assert len(list(loader)) == 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"size": -1, "get_item": len}, "size is -1"),
        ({"size": 3.0, "get_item": len}, "size is 3.0"),
        ({"size": 3, "get_item": 5}, "get_item is 5"),
        ({"size": 3, "get_item": len, "process_spec": {"args": []}}, "process_spec is"),
        ({"size": 3, "get_item": len, "process_spec": {"factory": len, "more": 1}}, "process_spec is"),
        ({"size": 3, "get_item": len, "process_spec": {"factory": len, "args": 5}}, "process_spec has args=5"),
    ],
)
def test_dataset_of_functions_refuses_others(options: Any, match: str) -> None:
    """By option and value."""
    with pytest.raises(ConfigError, match=match):
        dataset(**options)


def test_class_that_draws_in_write_batch_draws_the_same_with_any_number_of_workers() -> None:
    """Our own classes draw nothing, and are not seeded for; one derived from them may, and is."""
    for kind in (writing.Jitters, writing.SaysItDraws):
        found = []
        for num_workers in (1, 2):
            with Loader(kind(np.zeros((40, 2))), batch_size=4, num_workers=num_workers) as loader:
                found.append([batch[0].tolist() for _ in range(2) for batch in loader])
        assert found[0] == found[1]
        assert len({str(batch) for batch in found[0]}) == 20


def test_numbers_of_numpys_as_keys_are_written_whole() -> None:
    """A sampler that is an array gives them."""
    with Loader(writing.Writes(40), batch_size=4, sampler=np.arange(39, -1, -1, dtype=np.int16), num_workers=1) as loader:
        assert [row for batch in loader for row in batch["a"][:, 0].tolist()] == list(range(39, -1, -1))


def test_rows_of_no_bytes_are_looked_for_all_the_same() -> None:
    """One beyond the last is an error, though nothing of it would be delivered."""
    for num_workers in (0, 1):
        with (
            Loader(ArrayDataset(np.empty((10, 0))), batch_size=2, sampler=[0, 50], num_workers=num_workers) as loader,
            pytest.raises(SampleError, match="IndexError") as caught,
        ):
            next(iter(loader))
        assert caught.value.facts["index"] == 50


def test_write_batch_by_hand_takes_indices_of_any_integer_type() -> None:
    """Also such that count from the end; one beyond is refused."""
    held = ArrayDataset(np.arange(10.0))
    for dtype in (np.int64, np.int32, np.int8):
        out = [np.empty(3)]
        held.write_batch(np.array([9, -10, -1], dtype), out)
        assert out[0].tolist() == [9.0, 0.0, 9.0]
    for wrong in (10, -11):
        with pytest.raises(IndexError, match=str(wrong)):
            held.write_batch(np.array([0, wrong]), [np.empty(2)])
