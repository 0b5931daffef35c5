"""Samples that end workers or raise: found out, left out, remembered, tried again."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ringloader import ConfigError, FactorySpec, FaultPolicy, LayoutError, Loader, SampleError, SampleRetry, WorkerError
from tests.runtime.conftest import wait_until
from tests.runtime.fault_datasets import (
    Dies277,
    Flaky,
    FlakyOdd,
    FlakyTogether,
    Innocent,
    LargeOnly,
    Named,
    Odd,
    Panics,
    Together,
    TogetherOnce,
    WholeBatches,
    Written,
)
from tests.runtime.writing_datasets import KeepsOut

_SIZE = 600


def rows(loader: Loader) -> dict[int, bytes]:
    """The bytes of every sample of an epoch, by index; the name of its error for a batch that failed."""
    found: dict[int, bytes] = {}
    iterator = iter(loader)
    while True:
        try:
            values, indices = next(iterator)
        except StopIteration:
            return found
        except (SampleError, WorkerError) as error:
            found.update({i: type(error).__name__.encode() for i in error.indices or [error.index]})
            continue
        assert not {*indices.tolist()} & {*found}
        found.update({i: row.tobytes() for i, row in zip(indices.tolist(), values, strict=True)})


def make(kind: type, *args: Any, **options: Any) -> Loader:
    options = {"batch_size": 100, "num_workers": 2, "output": "numpy", **options}
    return Loader(FactorySpec(kind, _SIZE, *args), **options)


@pytest.mark.parametrize("kind", [Together, Written])
def test_deadly_sample_in_a_call_for_many_is_narrowed_down_and_left_out(kind: type) -> None:
    """One in a batch of 100 is found with four deaths, within a budget of three; all others come as if nothing was."""
    with make(kind) as loader:
        undisturbed = rows(loader)
    faults = FaultPolicy(on_bad_sample="skip", restarts=3)
    with make(kind, [277], num_workers=1, faults=faults) as loader:
        found = rows(loader)
        assert loader.skipped == [277]
        assert loader.stats().num_restarts == 4
        # Left out, the rows behind it draw other numbers; every other batch is the same to the byte.
        assert sorted(found) == [i for i in range(_SIZE) if i != 277]
        assert {i: found[i] for i in found if i not in range(200, 300)} == {
            i: undisturbed[i] for i in undisturbed if i not in range(200, 300)
        }


def test_deadly_sample_in_a_call_for_many_is_named_in_the_error() -> None:
    """With "raise" the batch is an error that names the sample and how the worker ended; the epoch goes on."""
    with make(Together, [277], num_workers=1) as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        with pytest.raises(WorkerError, match=r"sample 277 ended 4 workers") as caught:
            next(iterator)
        assert (caught.value.index, caught.value.batch, caught.value.signal) == (277, 2, "SIGKILL")
        assert caught.value.incarnation == 4
        assert caught.value.pid > 0
        assert len(list(iterator)) == 3


def test_call_for_many_that_kills_once_is_made_again_whole(tmp_path: Path) -> None:
    """A single death is nobody's fault: the same call again, the same bytes, nothing left out."""
    with make(Together) as loader:
        undisturbed = rows(loader)
    with make(TogetherOnce, str(tmp_path), [277], faults=FaultPolicy(on_bad_sample="skip")) as loader:
        assert rows(loader) == undisturbed
        assert loader.skipped == []
        assert loader.stats().num_restarts == 1


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Together, Written])
def test_sample_that_raises_in_a_call_for_many_is_named(kind: type, num_workers: int) -> None:
    """The worker finds by halves which sample it is that raises; skip leaves out that one alone."""
    with make(kind, (), [277], num_workers=num_workers) as loader, pytest.raises(SampleError, match="cannot read") as caught:
        list(loader)
    assert (caught.value.index, caught.value.batch) == (277, 2)
    faults = FaultPolicy(on_bad_sample="skip")
    with make(kind, (), [277, 299, 0], num_workers=num_workers, faults=faults) as loader:
        assert sorted(rows(loader)) == [i for i in range(_SIZE) if i not in (277, 299, 0)]
        assert {*loader.skipped} == {0, 277, 299}


def test_deadly_sample_is_remembered_over_epochs_and_in_the_state() -> None:
    """What ended workers once is not tried again: not in the next epoch, nor after a resumption."""
    faults = FaultPolicy(on_bad_sample="skip", sample_deaths=1)
    expected = [i for i in range(_SIZE) if i != 277]
    with make(Together, [277], faults=faults) as loader:
        for _ in range(2):
            assert sorted(rows(loader)) == expected
            num_restarts = loader.stats().num_restarts
        assert loader.stats().num_restarts == num_restarts <= 3
        state = json.loads(json.dumps(loader.state_dict()))
    with make(Together, [277], faults=faults) as loader:
        loader.load_state_dict(state)
        assert sorted(rows(loader)) == expected
        assert loader.stats().num_restarts == 0


def test_deadly_sample_is_tried_once_more_where_it_is_an_error() -> None:
    """With "raise" a sample that was deadly gets one more chance per epoch, fetched alone, and no more."""
    with make(Together, [277], num_workers=1, faults=FaultPolicy(restarts=9)) as loader:
        assert rows(loader)[277] == b"WorkerError"
        before = loader.stats().num_restarts
        assert rows(loader)[277] == b"WorkerError"
        assert loader.stats().num_restarts == before + 1


def test_batch_of_nothing_but_deadly_samples_is_an_error() -> None:
    """skip never makes a step disappear."""
    faults = FaultPolicy(on_bad_sample="skip", sample_deaths=1, restarts=20)
    with make(Together, [0, 1], batch_size=2, faults=faults) as loader:
        for _ in range(2):
            found = rows(loader)
            assert sorted(found) == list(range(1, _SIZE))
            assert found[1] == b"WorkerError"
            assert loader.skipped == [0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Flaky, FlakyTogether])
def test_sample_retry_fetches_again_with_the_same_draws(kind: type, num_workers: int, tmp_path: Path) -> None:
    """A fault that passes costs a retry and changes no byte of the epoch."""
    with make(kind, str(tmp_path), []) as loader:
        undisturbed = rows(loader)
    faults = FaultPolicy(retry=SampleRetry(times=2, backoff_s=0.001))
    with make(kind, str(tmp_path), [5, 277], 2, num_workers=num_workers, faults=faults) as loader:
        assert rows(loader) == undisturbed
        assert loader.stats().num_retried == 4


def test_sample_retry_ends_with_the_error_and_says_how_often_it_tried(tmp_path: Path) -> None:
    """More failures than retries: the sample is bad, and the sentence says it was tried again."""
    faults = FaultPolicy(retry=SampleRetry(times=2, backoff_s=0.001))
    with make(Flaky, str(tmp_path), [5], 99, faults=faults) as loader, pytest.raises(SampleError, match="after 2 retries"):
        list(loader)


def test_sample_retry_of_other_exceptions_only(tmp_path: Path) -> None:
    """`on` decides, by class, the user's own too."""
    faults = FaultPolicy(retry=SampleRetry(on=Odd, backoff_s=0.001))
    with make(FlakyOdd, str(tmp_path), [5], faults=faults) as loader:
        assert len(rows(loader)) == _SIZE
    with make(Flaky, str(tmp_path / ".."), [6], faults=faults) as loader, pytest.raises(SampleError, match="stale file handle"):
        list(loader)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("times", {"times": 0}),
        ("backoff_s", {"backoff_s": -1}),
        ("on", {"on": "OSError"}),
        ("on", {"on": (KeyboardInterrupt,)}),
    ],
)
def test_sample_retry_refuses_what_cannot_be(words: str, value: dict[str, Any]) -> None:
    """Each is an error that names option, value and remedy."""
    with pytest.raises(ConfigError, match=rf"SampleRetry\.{words} is .*; give"):
        SampleRetry(**value)


def test_sample_retry_of_a_class_that_workers_cannot_import_is_refused_early() -> None:
    """Before any process starts."""

    class Local(Exception):
        pass

    with pytest.raises(ConfigError, match="SampleRetry"):
        make(Together, faults=FaultPolicy(retry=SampleRetry(on=Local)))


def test_warning_of_a_death_names_what_was_fetched_and_the_likely_cause(caplog: pytest.LogCaptureFixture) -> None:
    """Samples, batch, signal and who is likely to have sent it, budget and what follows, in one line."""
    with caplog.at_level(logging.WARNING, "ringloader"), make(Together, [277], num_workers=1) as loader:
        rows(loader)
    first, *_, last = [record.getMessage() for record in caplog.records if "killed" in record.getMessage()]
    assert "while fetching 100 samples (200 to 299) of batch 2" in first
    assert "SIGKILL (" in first
    assert "it is replaced and its batches are made again (1 death within 600 s, faults.restarts=3)" in first
    assert "while fetching sample 277 of batch 2" in last


def test_what_is_no_exception_is_narrowed_down_too() -> None:
    """A panic of an extension, in a call for many: one sample is left out, no neighbour of it."""
    with make(Panics, (), [277], num_workers=1, faults=FaultPolicy(on_bad_sample="skip")) as loader:
        assert sorted(rows(loader)) == [i for i in range(_SIZE) if i != 277]
        assert loader.skipped == [277]


def test_dataset_that_cannot_be_asked_for_parts_blames_no_sample() -> None:
    """What a part raises for being a part says nothing: an error without an index, and nothing left out."""
    with make(WholeBatches, (), [277], num_workers=1, faults=FaultPolicy(on_bad_sample="skip")) as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        with pytest.raises(SampleError, match="the dataset raised OSError: cannot read") as caught:
            next(iterator)
        assert caught.value.index is None
        assert len(list(iterator)) == 3
        assert loader.skipped == []


def test_sample_that_fails_for_a_moment_is_not_blamed_for_another() -> None:
    """Retries hold while the culprit is looked for, too."""
    faults = FaultPolicy(on_bad_sample="skip", retry=SampleRetry(times=3, backoff_s=0.001))
    with make(Innocent, num_workers=1, faults=faults) as loader:
        assert sorted(rows(loader)) == [i for i in range(_SIZE) if i != 21]
        assert loader.skipped == [21]


def test_call_that_ends_workers_only_as_a_whole_is_an_error_of_its_batch() -> None:
    """Too much memory for a whole batch, say: the budget is not used up, and the epoch goes on."""
    with make(LargeOnly, [277], num_workers=1, faults=FaultPolicy(on_bad_sample="skip", restarts=3)) as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        with pytest.raises(WorkerError, match="in one call, and none of them alone, ended 3 workers") as caught:
            next(iterator)
        assert (caught.value.index, caught.value.batch) == (None, 2)
        assert len(list(iterator)) == 3
        assert loader.skipped == []


def test_deadly_text_keys_are_remembered_as_they_are() -> None:
    """Long paths, alike but for their ends: the other is read, after a resumption too."""
    good = "/data/archive/2024/speakers/000/clip_000421"
    names = ["a", "b", good, f"{good}_noisy.wav", "c", "d"]
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "output": "numpy", "sampler": names}
    options["faults"] = FaultPolicy(on_bad_sample="skip", sample_deaths=1)
    with Loader(FactorySpec(Named, names, names[3]), **options) as loader:
        assert [i for batch in loader for i in batch.tolist()] == [0, 1, 2, 4, 5]
        state = json.loads(json.dumps(loader.state_dict()))
    with Loader(FactorySpec(Named, names, names[3]), **options) as loader:
        loader.load_state_dict(state)
        assert [i for batch in loader for i in batch.tolist()] == [0, 1, 2, 4, 5]
        assert loader.stats().num_restarts == 0


def test_batch_of_known_deadly_samples_says_so() -> None:
    """No worker is named, no count is made up, and what is set already is not recommended."""
    faults = FaultPolicy(on_bad_sample="skip", sample_deaths=1, restarts=20)
    with make(Together, [0, 1], batch_size=2, num_workers=1, faults=faults) as loader:
        rows(loader)
        with pytest.raises(WorkerError, match=r"nothing is left of batch 0: its samples .1. have ended") as caught:
            next(iter(loader))
        assert caught.value.worker is None
        assert "leaves such samples out" not in str(caught.value)


def test_sample_that_was_found_out_is_not_tried_by_batches_on_their_way() -> None:
    """Four batches hold it: three deaths find it out, those on their way cost one each at most."""
    sampler = [[*range(10 * k, 10 * k + 9), 277] for k in range(4)]
    faults = FaultPolicy(on_bad_sample="skip", restarts=50)
    with Loader(
        FactorySpec(Dies277, _SIZE), batch_sampler=sampler, num_workers=1, prefetch_factor=4, faults=faults, output="numpy"
    ) as loader:
        assert sum(len(batch[1]) for batch in loader) == 36
        assert loader.stats().num_restarts == 3


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"sample_deaths": 5, "restarts": 3, "on_bad_sample": "skip"}, r"sample_deaths=5 is never reached"),
        ({"retry": SampleRetry(times=20, max_backoff_s=60.0)}, r"faults\.retry waits .* s for one sample, and timeout=30"),
    ],
)
def test_limits_that_others_stand_in_the_way_of_are_refused(faults: dict[str, Any], words: str) -> None:
    """Before any process starts, with what to change."""
    with pytest.raises(ConfigError, match=words):
        make(Together, num_workers=1, timeout=30.0, faults=FaultPolicy(stall_s=None, **faults))


def test_retries_longer_than_the_stall_limit_are_refused() -> None:
    """The loader would end its own worker for waiting."""
    with pytest.raises(ConfigError, match=r"faults\.retry waits .* and faults\.stall_s=5"):
        FaultPolicy(retry=SampleRetry(times=20), stall_s=5.0)
    assert SampleRetry(times=1000, backoff_s=0.0).total_wait_s == 0
    with pytest.raises(ConfigError, match=r"times is 1001; give 1000 at most"):
        SampleRetry(times=1001)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_retry_does_not_cover_errors_of_ours(num_workers: int) -> None:
    """write_batch that keeps its arrays is refused at once, whatever is retried."""
    faults = FaultPolicy(retry=SampleRetry(on=Exception, backoff_s=0.001), restarts=0)
    options: dict[str, Any] = {"batch_size": 8, "num_workers": num_workers, "faults": faults, "output": "numpy"}
    with Loader(FactorySpec(KeepsOut, 64), **options) as loader, pytest.raises(LayoutError, match="write_batch kept"):
        next(iter(loader))


def test_worker_that_leaves_by_itself_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """Its last words are in the warning."""
    with Loader(FactorySpec(KeepsOut, 64), batch_size=8, num_workers=1, output="numpy") as loader:
        with pytest.raises(LayoutError):
            next(iter(loader))
        assert wait_until(lambda: "write_batch kept memory of a slot, which ends with this process" in caplog.text)
