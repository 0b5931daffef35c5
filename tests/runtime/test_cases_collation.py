"""Reported cases around collation, through a loader: what a worker refuses arrives in the same words as inline."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringloader import FactorySpec, LayoutError, Loader
from tests.runtime import case_datasets as cases
from tests.runtime.running import Program, run

both = pytest.mark.parametrize("num_workers", [0, 2])
ADVICE = {"text": ".tolist()", "object": ".tolist()", "bytes": ".tolist()", "date": ".astype('int64')", "record": "dict"}


def refusal(dataset: Any, **options: Any) -> LayoutError:
    """The error that takes the first batch's place."""
    with Loader(dataset, **options) as loader, pytest.raises(LayoutError) as caught:
        next(iter(loader))
    return caught.value


def without_worker(error: LayoutError) -> str:
    """The error's words without the only part that may differ between inline and workers."""
    return re.sub(r", worker \d+", "", str(error))


@both
def test_b03_one_odd_shape_is_named_and_the_next_batch_comes(num_workers: int) -> None:
    """The error has path, both shapes and both dataset indices; the worker survives and goes on with the next batch."""
    with Loader(FactorySpec(cases.OddShape, 64), batch_size=32, num_workers=num_workers) as loader:
        iterator = iter(loader)
        with pytest.raises(LayoutError) as caught:
            next(iterator)
        assert next(iterator)["y"].tolist() == list(range(32, 64))
        assert list(iterator) == []
        assert loader.stats().num_restarts == 0
    words = str(caught.value)
    assert re.search(r"sample\['x'\] has shape \[8, 8\] in sample 29, but \[3, 8, 8\] in sample 0\b", words)
    assert caught.value.samples == (0, 29)
    assert caught.value.batch == 0


def test_b10_other_shapes_have_the_same_words_inline_and_in_workers() -> None:
    """Type and text of the error do not depend on where the batch was made, and speak of shapes only."""
    inline, worker = (
        refusal(FactorySpec(cases.GrowingShape, 8), batch_size=4, num_workers=num_workers) for num_workers in (0, 1)
    )
    assert type(inline) is type(worker) is LayoutError
    assert without_worker(inline) == without_worker(worker)
    for part in ("[3, 10]", "[3, 11]", "sample 0", "sample 1"):
        assert part in str(worker)
    assert "resize_" not in str(worker)
    assert "storage" not in str(worker)


@both
def test_b11_sample_on_a_device_is_refused(num_workers: int) -> None:
    """A tensor outside host memory is refused with path, device, sample and advice; batches without one arrive."""
    with Loader(FactorySpec(cases.OnDevice, 4), batch_size=2, num_workers=num_workers) as loader:
        iterator = iter(loader)
        assert next(iterator)["x"].tolist() == [[1, 1], [1, 1]]
        with pytest.raises(LayoutError) as caught:
            next(iterator)
    for part in ("sample['x']", "device meta", "sample 3", "return CPU tensors; move them in the training loop"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("kind", "has_torch"), [(cases.TorchFacts, False), (cases.TorchFactsAfterUse, True)])
def test_b11_workers_never_initialise_cuda(kind: type, has_torch: bool) -> None:
    """A worker does not even import torch by itself, and where the dataset does, CUDA stays untouched."""
    with Loader(FactorySpec(kind, 8), batch_size=2, num_workers=2) as loader:
        facts = torch.cat(list(loader)).tolist()
    assert facts == [[has_torch, False]] * 8


@both
def test_b16_none_names_its_sample_or_its_field(num_workers: int) -> None:
    """A whole sample that is None is named by its index, a field by its path and the first index."""
    with Loader(FactorySpec(cases.NoneSample, 8), batch_size=4, num_workers=num_workers) as loader:
        iterator = iter(loader)
        assert next(iterator)["x"].shape == (4, 2)
        with pytest.raises(LayoutError, match=r"sample is None in sample 5\b"):
            next(iterator)
    spec = FactorySpec(cases.Constant, 8, {"x": 1, "meta": None})
    assert "sample['meta'] is None in sample 0" in str(refusal(spec, batch_size=4, num_workers=num_workers))


@both
def test_b16_none_in_a_finished_batch_arrives_as_none(num_workers: int) -> None:
    """None survives the way from a collate_fn, also as the whole batch, which is not the end of the epoch."""
    spec = FactorySpec(cases.NoneSample, 8)
    with Loader(spec, batch_size=4, num_workers=num_workers, collate_fn=cases.without_none) as loader:
        batches = list(loader)
    assert [list(batch) for batch in batches] == [["x", "meta"]] * 2
    assert [len(batch["x"]) for batch in batches] == [4, 3]
    assert [batch["meta"] for batch in batches] == [None, None]
    with Loader(spec, batch_size=4, num_workers=num_workers, collate_fn=cases.whole_batch_none) as loader:
        assert list(loader) == [None, None]


def test_b17_arrays_without_numbers_are_named() -> None:
    """Arrays of text, objects, dates or records are refused with path, dtype, index and advice, inline and in a worker."""
    for kind, advice in ADVICE.items():
        spec = FactorySpec(cases.TextArray, 4, kind)
        inline, worker = (refusal(spec, batch_size=2, num_workers=num_workers) for num_workers in (0, 1))
        assert without_worker(inline) == without_worker(worker)
        dtype = str(cases.TextArray(1, kind)[0]["t"].dtype)
        for part in ("sample['t']", dtype, "sample 0", advice, "collate_fn"):
            assert part in str(worker), (kind, part)


@both
def test_b17_numpy_text_arrives_as_a_list(num_workers: int) -> None:
    """numpy's text scalars are collated as text."""
    with Loader(FactorySpec(cases.TextArray, 4, "scalar"), batch_size=2, num_workers=num_workers) as loader:
        assert next(iter(loader)) == {"t": ["file.jpg", "file.jpg"]}


READ_ONLY = """
import torch
from ringloader import FactorySpec, Loader
from tests.runtime.case_datasets import ReadOnly
if __name__ == "__main__":
    kept = ReadOnly(8)
    for dataset, num_workers in ((FactorySpec(ReadOnly, 8), 2), (kept, 2), (kept, 0)):
        with Loader(dataset, batch_size=2, num_workers=num_workers) as loader:
            for epoch in range(2):
                for k, batch in enumerate(loader):
                    assert batch.tolist() == [[2 * k] * 4, [2 * k + 1] * 4], batch
                    batch += 1
                    assert batch.tolist() == [[2 * k + 1] * 4, [2 * k + 2] * 4], batch
    assert kept.raw == [bytes([i] * 4) for i in range(8)]
    print("done")
"""


def test_b20_read_only_samples_give_writable_batches_in_silence(tmp_path: Path) -> None:
    """With warnings as errors everywhere: writing to a batch reaches neither the dataset nor a later batch, and nothing is
    said."""
    done = run(tmp_path, READ_ONLY, program=Program(flags=("-W", "error")))
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_b34_types_of_a_batch_are_the_same_inline_and_in_workers() -> None:
    """Containers keep their types at every level, whoever made the batch."""
    expected = cases.as_each_container([0, 1])
    for num_workers in (0, 1):
        with Loader([0, 1], batch_size=2, num_workers=num_workers, collate_fn=cases.as_each_container) as loader:
            batch = next(iter(loader))
        assert types_of(batch) == types_of(expected)
        assert batch["named"].first().tolist() == [0, 1]


def test_b34_types_of_samples_are_kept_by_default_collation() -> None:
    """Default collation in a worker gives torch's types: namedtuples, dict subclasses, lists for text."""
    sample = cases.Pair(np.ones(2), collections.OrderedDict(b="text", a=(1, 2.5)))
    with Loader([sample] * 2, batch_size=2, num_workers=1) as loader:
        batch = next(iter(loader))
    assert types_of(batch) == types_of(torch.utils.data.default_collate([sample] * 2))
    assert type(batch) is cases.Pair


def types_of(value: Any) -> Any:
    """The types of a batch, at every level."""
    if isinstance(value, dict):
        return type(value), [(key, types_of(child)) for key, child in value.items()]
    if isinstance(value, cases.Record):
        return type(value), types_of(value.x), types_of(value.names)
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(child) for child in value]
    return type(value), (value.dtype if isinstance(value, torch.Tensor) else value)
