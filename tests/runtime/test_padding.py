"""`pad_collate`: rows of several lengths in one batch, by hand and written into the ring."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from ringloader import ConfigError, FactorySpec, LayoutError, Loader, default_collate, pad_collate
from tests.runtime.light_datasets import LongRows, Sentences


def by_hand(rows: list[np.ndarray], value: Any, side: str, dim: int) -> np.ndarray:
    longest = max(row.shape[dim] for row in rows)
    padded = []
    for row in rows:
        widths = [(0, 0)] * row.ndim
        missing = longest - row.shape[dim]
        widths[dim] = (0, missing) if side == "right" else (missing, 0)
        padded.append(np.pad(row, widths, constant_values=value))
    return np.stack(padded)


@given(
    data=st.data(),
    side=st.sampled_from(["right", "left"]),
    dtype=st.sampled_from(["int64", "uint8", "float32", "float16", "bool", "complex64"]),
    as_tensors=st.booleans(),
)
def test_padded_rows_are_numpys(data: st.DataObject, side: str, dtype: str, as_tensors: bool) -> None:
    """Any number of dimensions, any of them ragged, rows of length 0 among them."""
    ndim = data.draw(st.integers(1, 3))
    dim = data.draw(st.integers(0, ndim - 1))
    rest = data.draw(st.lists(st.integers(0, 3), min_size=ndim, max_size=ndim))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    rows = [np.full((*rest[:dim], length, *rest[dim + 1 :]), 1 + k % 2).astype(dtype) for k, length in enumerate(lengths)]
    found = pad_collate(3 if dtype != "bool" else True, side, dim)([torch.from_numpy(r) if as_tensors else r for r in rows])
    expected = by_hand(rows, 3 if dtype != "bool" else True, side, dim)
    assert found.numpy().dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.array_equal(found.numpy(), expected)


def test_default_padding_is_pad_sequence_of_torch() -> None:
    """What people come from."""
    rows = [torch.randn(length, 3) for length in (4, 1, 7)]
    assert torch.equal(pad_collate()(rows), pad_sequence(rows, batch_first=True))
    assert torch.equal(pad_collate(-1.0)(rows), pad_sequence(rows, batch_first=True, padding_value=-1.0))


def test_only_ragged_leaves_are_padded_and_all_else_is_the_default() -> None:
    """Leaves that agree, numbers, text and containers come as from `default_collate`."""
    samples = [(np.ones(2), np.float32(k), f"t{k}", {"n": k}) for k in range(3)]
    found, expected = pad_collate(9)(samples), default_collate(samples)
    assert type(found) is type(expected)
    assert torch.equal(found[0], expected[0])
    assert found[0].dtype == expected[0].dtype
    assert torch.equal(found[1], expected[1])
    assert found[2] == expected[2]
    assert torch.equal(found[3]["n"], expected[3]["n"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_dtypes_that_numpy_lacks_are_padded(dtype: torch.dtype) -> None:
    """Their bytes are carried by another dtype."""
    rows = [torch.ones(length).to(dtype) for length in (3, 1)]
    found = pad_collate(2.0)(rows)
    assert found.dtype == dtype
    assert found.float().tolist() == [[1, 1, 1], [1, 2, 2]]


def test_rows_of_several_dtypes_are_promoted() -> None:
    """As rows of one length are."""
    found = pad_collate()([np.ones(2, np.int32), np.ones(3, np.int64)])
    assert found.dtype == torch.int64
    assert pad_collate()([torch.ones(2, dtype=torch.bfloat16), torch.ones(3)]).dtype == torch.float32


def test_lengths_have_the_tree_of_the_batch() -> None:
    """Also in a batch where all rows agree, and for leaves that could differ but do not."""
    samples = [{"a": np.arange(k), "b": (k, np.ones((2, 5)), "x")} for k in (3, 1)]
    batch, lengths = pad_collate(lengths=True)(samples)
    assert batch["a"].shape == (2, 3)
    assert lengths["a"].tolist() == [3, 1]
    assert lengths["a"].dtype == torch.int64
    assert lengths["b"][0] is None
    assert lengths["b"][1].tolist() == [2, 2]
    assert lengths["b"][2] is None
    _, lengths = pad_collate(lengths=True)(samples[:1])
    assert lengths["a"].tolist() == [3]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Sentences, LongRows])
def test_padded_batches_are_written_into_the_ring(dataset: Any, num_workers: int) -> None:
    """The same as by hand; no byte is copied twice."""
    spec, samples = FactorySpec(dataset), dataset()
    collate = pad_collate(-0.0 if dataset is LongRows else 0, lengths=True)
    with Loader(spec, batch_size=8, num_workers=num_workers, collate_fn=collate, output="torch") as loader:
        nbytes = 0
        for number, (batch, lengths) in enumerate(loader):
            own, own_lengths = collate([samples[index] for index in range(number * 8, min(50, number * 8 + 8))])
            for found, expected in zip(flat(batch) + flat(lengths), flat(own) + flat(own_lengths), strict=True):
                if isinstance(found, torch.Tensor):
                    assert torch.equal(found, expected)
                    nbytes += found.nbytes
                else:
                    assert found == expected
        copied = loader.stats().copied_nbytes
    # A batch that outgrows its slot is kept and copied once more; alignment is counted by nobody.
    assert nbytes <= copied < 2 * nbytes + 4096


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in flat(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in flat(value)]
    return [tree]


def test_pad_collate_may_be_given_as_a_spec() -> None:
    """For a worker it is a callable like any other, and still works in the slot."""
    spec = FactorySpec("ringloader:pad_collate", side="left")
    with Loader(FactorySpec(Sentences), batch_size=8, num_workers=1, collate_fn=spec, output="numpy") as loader:
        batch = next(iter(loader))
    assert batch["tokens"][0, -1] == 0
    assert batch["tokens"][0, 0] == 0
    assert batch["tokens"].shape == (8, 36)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"padding_value": "0"}, "padding_value is '0'; give a number"),
        ({"side": "top"}, "side is 'top'; choose one of 'right', 'left'"),
        ({"dim": -1}, "dim is -1; give an int of at least 0"),
        ({"dim": True}, "dim is True; give an int of at least 0"),
        ({"lengths": 1}, "lengths is 1; give True or False"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    """Before any sample is fetched."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        pad_collate(**options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name() -> None:
    """As they are without padding."""
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(LayoutError, match="a nested tensor"):
        pad_collate()([nested, nested])


def test_pad_collate_itself_is_no_collate_fn() -> None:
    """Forgotten parentheses are told at construction."""
    with pytest.raises(ConfigError, match=r"collate_fn is pad_collate itself; call it"):
        Loader(Sentences(), collate_fn=pad_collate)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "rows", "words"),
    [
        (-1, [np.zeros(2, np.uint8), np.zeros(3, np.uint8)], "cannot hold padding_value=-1"),
        (0.5, [torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)], "cannot hold padding_value=0.5"),
        (float("nan"), [np.zeros(2, np.int64), np.zeros(3, np.int64)], "cannot hold padding_value=nan"),
        (-1e9, [np.zeros(2, np.float16), np.zeros(3, np.float16)], "cannot hold padding_value=-1000000000.0"),
        (1e39, [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)], "cannot hold padding_value"),
        (1j, [np.zeros(2), np.zeros(3)], "cannot hold padding_value=1j"),
        (0, [np.zeros((2, 3)), np.zeros((3, 2))], "must have equal shapes"),
        (0, [np.zeros((2, 3)), np.zeros(3)], "must have equal shapes"),
        (0, [np.zeros(2), np.array(["a", "b", "c"])], "no tensor can hold"),
    ],
)
def test_rows_that_cannot_be_padded_are_refused(value: Any, rows: list[Any], words: str) -> None:
    """By value, shape and dtype."""
    with pytest.raises(LayoutError, match=re.escape(words)):
        pad_collate(value)(rows)
