"""One suite for every backend: the caller's own thread, threads and processes give the same bytes and the same words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringloader import FactorySpec, FaultPolicy, Loader, LoaderError
from tests.conformance import datasets

BACKENDS = {"thread": {"worker_backend": "thread"}, "process": {"worker_backend": "process"}}
Outcome = list[Any]


def read(loader: Loader, num_epochs: int = 2) -> Outcome:
    """What comes of each `next` of some epochs: a batch in types, shapes and bytes, or an error in words."""
    found: Outcome = []
    for _ in range(num_epochs):
        iterator = iter(loader)
        for _ in range(50):
            try:
                found.append(digest(next(iterator)))
            except StopIteration:
                found.append("end")
                break
            except LoaderError as error:
                found.append((type(error).__name__, in_words(error)))
        else:
            found.append("no end")
    return found


def in_words(error: LoaderError) -> str:
    """The error's own sentence, without worker and traceback."""
    return re.sub(r", worker \d+", "", str(error).partition("\n\n")[0])


def digest(batch: Any) -> Any:
    """A batch in plain values: types, dtypes, shapes and a digest of the bytes."""
    if isinstance(batch, np.ndarray):
        return batch.dtype.str, batch.shape, hashlib.sha256(np.ascontiguousarray(batch).tobytes()).hexdigest()[:16]
    if isinstance(batch, dict):
        return type(batch).__name__, [(key, digest(value)) for key, value in batch.items()]
    if isinstance(batch, (list, tuple)):
        return type(batch).__name__, [digest(value) for value in batch]
    if isinstance(batch, datasets.Record):
        return "Record", digest(batch.left), digest(batch.right)
    return type(batch).__name__, repr(batch)


def outcome(kind: Callable[[], Any], num_workers: int, **options: Any) -> Outcome:
    with Loader(kind(), batch_size=4, num_workers=num_workers, output="numpy", **options) as loader:
        return read(loader)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return BACKENDS[request.param]


@pytest.mark.parametrize("kind", datasets.MAPPED, ids=lambda kind: kind.__name__)
def test_backends_read_a_dataset_alike(kind: Callable[[], Any], backend: dict[str, Any]) -> None:
    """The bytes of each batch, the words of each error and what follows it, over two shuffled epochs."""
    assert outcome(kind, 2, shuffle=True, **backend) == outcome(kind, 0, shuffle=True)


@pytest.mark.parametrize("kind", datasets.STREAMS, ids=lambda kind: kind.__name__)
def test_backends_read_a_stream_alike(kind: Callable[[], Any], backend: dict[str, Any]) -> None:
    """One stream: what the caller's own thread reads."""
    assert outcome(kind, 1, **backend) == outcome(kind, 0)


@pytest.mark.parametrize("kind", datasets.STREAMS, ids=lambda kind: kind.__name__)
def test_backends_interleave_streams_alike(kind: Callable[[], Any]) -> None:
    """Three streams: threads and processes."""
    threads, processes = (outcome(kind, 3, **options) for options in BACKENDS.values())
    assert threads == processes
    assert threads[-1] == "end"


@pytest.mark.parametrize("kind", [datasets.DrawsGlobal])
def test_global_generators_are_seeded_inline_and_in_processes(kind: Callable[[], Any]) -> None:
    """Threads promise `rng` alone, and say so."""
    assert outcome(kind, 2, worker_backend="process") == outcome(kind, 0)


def test_threads_name_a_dataset_that_draws_from_global_generators_once(caplog: pytest.LogCaptureFixture) -> None:
    """And leave the generators as the dataset left them: they are not seeded."""
    outcome(datasets.DrawsGlobal, 2, worker_backend="thread")
    said = [record.message for record in caplog.records if "global generators" in record.message]
    assert len(said) == 1
    assert "get_worker_info().rng" in said[0]
    caplog.clear()
    outcome(datasets.DrawsOwn, 2, worker_backend="thread")
    assert not [record.message for record in caplog.records if "global generators" in record.message]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (datasets.Numbers, {"drop_last": True}),
        (datasets.Numbers, {"sampler": [3, 1, 4, 1, 5, 9, 2, 6]}),
        (datasets.Numbers, {"batch_size": 1, "batch_sampler": [[1, 2], [3], [21, 0, 7]]}),
        (datasets.Arrays, {"batch_size": None}),
        (datasets.Numbers, {"collate_fn": datasets.collate_to_pairs}),
        (datasets.Failing, {"faults": FaultPolicy(on_bad_sample="skip")}),
        (datasets.Failing, {"faults": FaultPolicy(on_bad_sample="replace")}),
        (datasets.Fetching, {"faults": FaultPolicy(on_bad_sample="skip")}),
        (datasets.Stream, {"drop_last": True}),
        (datasets.Stream, {"batch_size": None}),
        (datasets.StreamDraws, {"rank": 1, "world_size": 2}),
        (datasets.DrawsOwn, {"rank": 1, "world_size": 2, "shuffle": True}),
    ],
    ids=lambda value: getattr(value, "__name__", "") or "-".join(value),
)
def test_backends_take_options_alike(kind: Callable[[], Any], options: dict[str, Any], backend: dict[str, Any]) -> None:
    """Options that change what a batch is."""
    options = {"batch_size": 4, **options}
    num_workers = 1 if kind in datasets.STREAMS else 2
    loader = Loader(kind(), num_workers=num_workers, output="numpy", **options, **backend)
    with loader, Loader(kind(), output="numpy", **options) as own:
        assert read(loader) == read(own)


@pytest.mark.parametrize("kind", [datasets.Numbers, datasets.DrawsOwn, datasets.StreamSaves, datasets.Stream])
@pytest.mark.parametrize("cut", [0, 1, 3, 5, 6])
def test_state_of_one_backend_is_another_s(kind: Callable[[], Any], cut: int) -> None:
    """What one has begun, another goes on with."""
    whole = outcome(kind, 0)
    names: tuple[dict[str, Any], ...] = (
        {"num_workers": 0},
        {"num_workers": 1, "worker_backend": "thread"},
        {"num_workers": 1, "worker_backend": "process"},
    )
    for begun, resumed in [(names[0], names[1]), (names[1], names[2]), (names[2], names[0])]:
        with Loader(kind(), batch_size=4, output="numpy", **begun) as loader:
            iterator = iter(loader)
            found = [digest(next(iterator)) for _ in range(cut)]
            state = loader.state_dict()
        with Loader(kind(), batch_size=4, output="numpy", **resumed) as loader:
            loader.load_state_dict(state)
            assert found + read(loader) == whole


def test_backends_build_a_spec_alike(backend: dict[str, Any]) -> None:
    """A spec is rebuilt by every backend; one that fails has the same words."""
    spec = FactorySpec(datasets.Recorded, factor=5)
    assert outcome(lambda: spec, 2, **backend) == outcome(lambda: spec, 0)
    broken = FactorySpec(datasets.Recorded, wrong=5)
    words = []
    for options in ({"num_workers": 0}, {"num_workers": 2, **backend}):
        with Loader(broken, **options) as loader, pytest.raises(LoaderError) as caught:
            iter(loader)
        words.append((type(caught.value), str(caught.value).partition("\n\n")[0]))
    assert words[0] == words[1]


def test_backends_refuse_what_is_no_dataset_alike(backend: dict[str, Any]) -> None:
    """An object without samples, at construction or, from a spec, before the first batch."""
    words = []
    for options in ({"num_workers": 0}, {"num_workers": 2, **backend}):
        with pytest.raises(LoaderError) as caught:
            Loader(object(), **options)
        words.append(str(caught.value))
        with Loader(FactorySpec(object), **options) as loader, pytest.raises(LoaderError) as caught:
            iter(loader)
        words.append(str(caught.value).partition("\n\n")[0])
    assert words[:2] == words[2:]
