"""Torch's datasets of tensors, which process workers read without torch."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
    random_split,
)

from ringloader import Loader, SampleError
from ringloader._runtime.memory import private_nbytes
from ringloader._runtime.torch_datasets import without_torch

MIB = 1 << 20


def tensors(size: int = 30) -> tuple[torch.Tensor, ...]:
    """Columns of many kinds: large rows, rows of one number, dtypes that numpy lacks."""
    numbers = torch.arange(size * 6, dtype=torch.float32).reshape(size, 2, 3)
    return (
        numbers,
        torch.arange(size),
        numbers.to(torch.bfloat16),
        numbers[:, 0, 0].to(torch.float8_e4m3fn),
        torch.arange(size * 4096, dtype=torch.int16).reshape(size, 4096),
        numbers[:, 0].to(torch.complex64),
        torch.arange(size) % 3 == 0,
        torch.zeros(size, 0),
    )


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def same(left: Any, right: Any) -> bool:
    """Bytes, dtypes, shapes and containers."""
    if isinstance(left, torch.Tensor):
        is_alike = left.dtype == right.dtype and left.shape == right.shape
        as_bytes = [side.contiguous().view(-1).view(torch.uint8) for side in (left, right) if side.numel()]
        return is_alike and (not as_bytes or torch.equal(*as_bytes))
    return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))


def halves() -> list[Dataset[Any]]:
    return list(random_split(TensorDataset(*tensors()), [0.5, 0.5], torch.Generator().manual_seed(3)))


READ_WITHOUT: dict[str, Any] = {
    "tensors": lambda: TensorDataset(*tensors()),
    "one": lambda: TensorDataset(torch.arange(7)),
    "split": lambda: halves()[1],
    "twice": lambda: Subset(halves()[0], [3, 3, -1, 0, 14]),
    "range": lambda: Subset(TensorDataset(*tensors()), range(4, 25, 2)),
    "tensor": lambda: Subset(TensorDataset(*tensors()), torch.tensor([5, 2, -3])),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", READ_WITHOUT)
def test_workers_read_tensors_without_torch(kind: str) -> None:
    """In order and by keys that count from the end; the same batches as torch's loader gives, and no torch in the workers."""
    dataset = READ_WITHOUT[kind]()
    order = [2, -1, 0, 1, -2, 2]
    with Loader(dataset, batch_size=4, num_workers=1) as loader:
        assert same(list(loader), list(DataLoader(dataset, batch_size=4)))
        assert not any(map(has_torch, loader.stats().worker_pids))
    with Loader(dataset, batch_size=4, sampler=order, num_workers=1, collate_fn=default_collate) as loader:
        assert same(list(loader), list(DataLoader(dataset, batch_size=4, sampler=order)))
        assert loader.dataset is dataset
        assert not any(map(has_torch, loader.stats().worker_pids))


class OwnRows(TensorDataset):
    """Reads in its own way."""

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][index] * 2


def joined(samples: list[Any]) -> Any:
    assert all(type(leaf) is torch.Tensor for sample in samples for leaf in sample)
    return default_collate(samples)


def look(worker_id: int) -> None:
    from ringloader import get_worker_info

    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is TensorDataset


def marked() -> Any:
    dataset = TensorDataset(torch.arange(5))
    dataset.note = "mine"  # type: ignore[attr-defined]
    return dataset


READ_WITH: dict[str, tuple[Any, dict[str, Any]]] = {
    "own class": (lambda: OwnRows(torch.arange(5)), {}),
    "own attribute": (marked, {}),
    "own collate_fn": (lambda: TensorDataset(torch.arange(5)), {"collate_fn": joined}),
    "own start": (lambda: TensorDataset(torch.arange(5)), {"worker_init_fn": look}),
    "no batches": (lambda: TensorDataset(torch.arange(5)), {"batch_size": None}),
    "expanded": (lambda: TensorDataset(torch.arange(3).expand(5, 3)), {}),
    "part of own": (lambda: Subset(OwnRows(torch.arange(5)), [0, 3]), {}),
    "keys": (lambda: Subset(TensorDataset(torch.arange(5)), [True, True]), {}),
}


def test_function_that_collates_gets_tensors() -> None:
    """It sees what torch's dataset gives."""
    dataset = TensorDataset(*tensors(4))
    with Loader(dataset, batch_size=2, num_workers=1, collate_fn=joined, worker_init_fn=look) as loader:
        assert same(list(loader), list(DataLoader(dataset, batch_size=2)))
        assert all(map(has_torch, loader.stats().worker_pids))


class Numbers:
    """A sampler of one's own."""

    def __iter__(self) -> Iterator[Any]:
        yield from (3, 4, 2)


class LikeSeries:
    """Picks by label, and becomes an array by position."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, label: int) -> int:
        return 2 - label

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.arange(3)


def unequal() -> Any:
    dataset = TensorDataset(torch.arange(5), torch.arange(5))
    dataset.tensors = (torch.arange(5), torch.arange(6))
    return dataset


READ_WITH |= {
    "one by one": (lambda: TensorDataset(torch.arange(5)), {"seed_per": "sample"}),
    "what numpy lacks": (lambda: TensorDataset(torch.zeros(5, dtype=torch.bfloat16)), {"output": "numpy"}),
    "unequal": (unequal, {}),
    "picks by label": (lambda: Subset(TensorDataset(torch.arange(5)), LikeSeries()), {}),  # type: ignore[arg-type]
    "masked": (lambda: Subset(TensorDataset(torch.arange(5)), np.ma.masked_array([1, 2], [0, 1])), {}),  # type: ignore[arg-type]
    "numbers and truths": (lambda: Subset(TensorDataset(torch.arange(5)), [3, True, 0]), {}),
}


def test_samplers_of_numbers_of_any_kind_need_no_torch() -> None:
    """Arrays, torch's and ours, of keys and of batches."""
    dataset = TensorDataset(*tensors())
    made: list[dict[str, Any]] = [
        {"sampler": np.array([4, 2, -1, 7]), "batch_size": 3},
        {"sampler": SubsetRandomSampler([4, 2, 9], torch.Generator().manual_seed(0)), "batch_size": 2},
        {"sampler": list(np.arange(5)), "batch_size": 2},
        {"batch_sampler": BatchSampler(SequentialSampler(dataset), 4, drop_last=False)},
        {"batch_sampler": [[1, 2], [5, -3]]},
        {"sampler": Numbers(), "batch_size": 2},
    ]
    for options in made:
        with Loader(dataset, num_workers=1, **options) as loader:
            found = list(loader)
            assert not any(map(has_torch, loader.stats().worker_pids))
        if isinstance(options.get("sampler"), SubsetRandomSampler):
            options["sampler"] = SubsetRandomSampler([4, 2, 9], torch.Generator().manual_seed(0))
        assert same(found, list(DataLoader(dataset, **options)))


def test_keys_that_only_torch_takes_are_read_with_torch() -> None:
    """Slices and lists as keys of single samples; to import torch for them is no batch's time, and no sample's fault."""
    for dataset, sampler in (
        (TensorDataset(*tensors()), [slice(0, 3), [1, 4, 2], slice(6, 9)]),
        (Subset(TensorDataset(*tensors()), [4, 3, 2, 9, 9]), [slice(0, 3), slice(1, 4), slice(2, 5)]),
        (READ_WITHOUT["range"](), [slice(0, 3)]),
    ):
        with Loader(dataset, batch_size=3, sampler=sampler, num_workers=1, timeout=1.0) as loader:
            found = list(loader)
            assert loader.stats().num_restarts == 0
        with Loader(dataset, batch_size=3, sampler=sampler) as loader:
            assert same(found, list(loader))


@pytest.mark.parametrize("kind", READ_WITHOUT)
def test_samples_are_the_same_one_by_one(kind: str) -> None:
    """As they are read where each has a seed of its own; in the worker, so after a pickle."""
    dataset = READ_WITHOUT[kind]()
    found = without_torch(dataset, Loader(dataset, num_workers=1)._options)
    assert found is not dataset
    assert len(found) == len(dataset)
    rebuilt = pickle.loads(pickle.dumps(found))
    for index in [*range(len(dataset)), -1]:
        assert same(found[index], dataset[index])
        assert same(rebuilt[index], dataset[index])
    with pytest.raises(IndexError):
        found[len(dataset)]


@pytest.mark.parametrize("kind", READ_WITH)
def test_other_datasets_are_read_as_they_are(kind: str) -> None:
    """Where anybody could tell the difference there is none."""
    make, options = READ_WITH[kind]
    dataset = make()
    assert without_torch(dataset, Loader(dataset, num_workers=1, **options)._options) is dataset


class Together(Dataset[Any]):
    """Rows that can be fetched one by one, by a list of keys in one sample, and many in one call; a list is none of those."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.arange(30)[key]

    def __getitems__(self, keys: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(100 + int(key)) for key in keys]


@pytest.mark.parametrize("backend", [{}, {"num_workers": 2, "worker_backend": "thread"}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("sampler", [[[0, 1, 2], [5, 7], 4], [slice(3), slice(4, 9, 2)], None], ids=["lists", "slices", "none"])
def test_sample_that_is_its_own_batch_is_fetched_by_its_key(sampler: Any, backend: dict[str, Any]) -> None:
    """With `batch_size=None`, as in torch, `__getitems__` is not called: the key of one sample may be a list."""
    with Loader(Together(), batch_size=None, sampler=sampler, **backend) as loader:
        found = list(loader)
    assert same(found, list(DataLoader(Together(), batch_size=None, sampler=sampler)))
    with Loader(Together(), batch_size=7, **backend) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(100, 130))  # the rule is for single samples alone


def test_samples_that_are_not_there() -> None:
    """An index beyond the rows is the sample's fault, in all three places it can be read from; the epoch goes on."""
    numbers = torch.arange(99)
    for rows in (numbers, torch.empty(99, 0)):
        for dataset in (TensorDataset(rows[:9]), Subset(TensorDataset(rows), range(9)), Subset(TensorDataset(rows), [8] * 9)):
            for num_workers in (0, 1):
                with Loader(dataset, batch_size=2, sampler=[0, 9, 3, 4], num_workers=num_workers) as loader:
                    iterator = iter(loader)
                    with pytest.raises(SampleError, match="IndexError") as caught:
                        next(iterator)
                    assert caught.value.facts["index"] == 9
                    (found,) = next(iterator)
                    assert torch.equal(found, default_collate([dataset[3], dataset[4]])[0])


def test_state_fits_workers_of_every_kind() -> None:
    """What one process saved with workers goes on inline, and the other way round."""
    dataset = TensorDataset(*tensors())
    whole = [batch[1].tolist() for batch in Loader(dataset, batch_size=4, shuffle=True)]
    for first, second in ((1, 0), (0, 1)):
        with Loader(dataset, batch_size=4, shuffle=True, num_workers=first) as loader:
            iterator = iter(loader)
            head = [next(iterator)[1].tolist() for _ in range(3)]
            state = json.loads(json.dumps(loader.state_dict()))
        with Loader(dataset, batch_size=4, shuffle=True, num_workers=second) as loader:
            loader.load_state_dict(state)
            assert head + [batch[1].tolist() for batch in loader] == whole


def test_rows_and_places_are_there_once() -> None:
    """Workers share the tensors and the places of a subset: private memory is that of a worker of numpy."""
    rows = torch.ones(64 * MIB // 4096, 1024)
    dataset = Subset(TensorDataset(rows), (np.arange(4_000_000) % len(rows)).tolist())
    with Loader(dataset, batch_size=512, sampler=range(0, 4_000_000, 250), num_workers=2) as loader:
        assert sum(int(batch[0][:, 0].sum()) for batch in loader) == 16_000
        assert max(map(private_nbytes, loader.stats().worker_pids)) < 24 * MIB
