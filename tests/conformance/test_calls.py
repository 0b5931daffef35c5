"""`loader.call`: a method of the dataset in every worker, once, and again in a replacement."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from ringloader import ConfigError, FactorySpec, FaultPolicy, Loader, LoaderError
from tests.runtime.conftest import wait_until
from tests.runtime.light_datasets import Scaled

BACKENDS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2, "worker_backend": "thread"},
    {"num_workers": 2, "worker_backend": "process"},
]


def read(loader: Loader) -> list[int]:
    found: list[int] = np.concatenate(list(loader)).tolist()
    return found


@pytest.fixture(params=BACKENDS, ids=["inline", "thread", "process"])
def loader(request: pytest.FixtureRequest) -> Any:
    with Loader(FactorySpec(Scaled), batch_size=2, output="numpy", faults=FaultPolicy(restarts=9), **request.param) as loader:
        yield loader


def test_call_reaches_every_worker_once(loader: Loader) -> None:
    """Calls add up; each worker's dataset runs each once, also with an argument that is pickled."""
    assert read(loader) == list(range(12))
    num_results = 2 if loader.num_workers and loader.worker_backend != "thread" else max(1, loader.num_workers)
    assert loader.call("scale", 3) == [[3, None]] * num_results
    # A frozenset is no plain value, so it is pickled.
    assert loader.call("scale", 2, note=frozenset("ba")) == [[6, None, ["a", "b"]]] * num_results
    assert read(loader) == [6 * index for index in range(12)]


def test_call_before_the_first_epoch_holds_for_it(loader: Loader) -> None:
    """It starts the workers."""
    loader.call("scale", 5)
    assert read(loader) == [5 * index for index in range(12)]


def test_call_that_raises_is_an_error_and_is_not_repeated(loader: Loader) -> None:
    """With the method's name, and the worker's traceback as the cause; the loader goes on."""
    with pytest.raises(LoaderError, match="the dataset's fail raised ValueError: not today") as caught:
        loader.call("fail")
    assert caught.value.original_type == "ValueError"
    assert "not today" in str(caught.value.__cause__)
    with pytest.raises(LoaderError, match="nothing raised AttributeError"):
        loader.call("nothing")
    with pytest.raises(LoaderError, match="give_object raised"):
        loader.call("give_object")
    assert read(loader) == list(range(12))


def test_call_refuses_what_is_no_method_or_cannot_travel(loader: Loader) -> None:
    """In the parent, by name, before a worker is started."""
    with pytest.raises(ConfigError, match="method is 'a b'"):
        loader.call("a b")
    with pytest.raises(ConfigError, match="cannot be sent to a worker"):
        loader.call("scale", threading.Lock())
    assert loader._engine is None


def test_call_that_leaves_the_program_is_an_error(loader: Loader) -> None:
    """As in a sample: nobody's process ends, and the next batch comes."""
    with pytest.raises(LoaderError, match="leave raised SystemExit: 3"):
        loader.call("leave")
    assert read(loader) == list(range(12))


def test_calls_after_one_that_raised_are_run() -> None:
    """Also by workers that were made since, on an object that lives on."""
    for options in BACKENDS:
        with Loader(Scaled(), batch_size=2, output="numpy", persistent_workers=False, **options) as loader:
            with pytest.raises(LoaderError):
                loader.call("fail")
            assert read(loader) == list(range(12))
            loader.call("scale", 3)
            assert read(loader) == [3 * index for index in range(12)]


def test_call_that_raised_in_one_worker_is_repeated_for_the_others() -> None:
    """It has changed them; their replacements are changed, too."""
    with Loader(FactorySpec(Scaled), batch_size=2, num_workers=2, output="numpy", faults=FaultPolicy(restarts=9)) as loader:
        with pytest.raises(LoaderError, match="only here"):
            loader.call("fail_elsewhere", 10)
        os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
        assert read(loader) == [10 * index for index in range(12)]


def test_replacement_repeats_calls_before_its_first_batch() -> None:
    """Every sample of every epoch is scaled, whoever dies."""
    spec = FactorySpec(Scaled)
    with Loader(spec, batch_size=2, num_workers=2, output="numpy", faults=FaultPolicy(restarts=20)) as loader:
        loader.call("scale", 2)
        loader.call("scale", 5)
        for _ in range(3):
            victim = loader.stats().worker_pids[0]
            os.kill(victim, signal.SIGKILL)
            assert read(loader) == [10 * index for index in range(12)]
            assert wait_until(lambda: len(loader.stats().worker_pids) == 2)
        assert loader.call("scale", 1) == [[10, None, None, None]] * 2


def test_calls_outlive_workers_that_end_with_each_epoch() -> None:
    """In new processes they are repeated, on an object that lives on they are not."""
    for options in BACKENDS:
        for dataset in (FactorySpec(Scaled), Scaled()):
            with Loader(dataset, batch_size=2, output="numpy", persistent_workers=False, **options) as loader:
                assert read(loader) == list(range(12))
                loader.call("scale", 3)
                for _ in range(2):
                    assert read(loader) == [3 * index for index in range(12)]
