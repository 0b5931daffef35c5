"""Reported cases around errors and large messages: long texts, many indices, failing batches, the same words with and without
workers, breakpoints."""

from __future__ import annotations

import io
import pdb
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringloader import FactoryError, FactorySpec, FaultPolicy, Loader, LoaderError, SampleError
from ringloader._runtime.pool import ProcessPool
from tests.runtime import more_case_datasets as cases
from tests.runtime.conftest import UNIT_S, wait_until
from tests.runtime.sample_datasets import Numbers, Truncated


def test_b61_long_texts_long_arguments_and_many_in_flight() -> None:
    """5 MB of text per batch and 2 MB of arguments pass the pipes in both directions, four workers at once."""
    spec = FactorySpec(cases.Text, 24, 2_500_000, ballast="y" * 2_000_000)
    with Loader(spec, batch_size=2, num_workers=4) as loader:
        seen = []
        for indices, texts in loader:
            assert all(text == f"{i} " + "x" * 2_500_000 for i, text in zip(indices.tolist(), texts, strict=True))
            seen += indices.tolist()
        assert seen == list(range(24))


def test_b61_a_hundred_thousand_indices_per_batch() -> None:
    """Fills far larger than a socket's buffer are sent without anyone waiting for anyone."""
    with Loader(FactorySpec(cases.Plain, 800_000), batch_size=100_000, shuffle=True, num_workers=2) as loader:
        batches = list(loader)
    assert [len(batch) for batch in batches] == [100_000] * 8
    assert torch.equal(torch.cat(batches).sort().values, torch.arange(800_000))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_b61_error_text_of_50_mb_is_cut_and_says_so(num_workers: int) -> None:
    """Beginning, end and true length of the text arrive."""
    with (
        Loader(FactorySpec(cases.LongError, 4), batch_size=2, num_workers=num_workers) as loader,
        pytest.raises(SampleError, match=r"ValueError: beginx+") as caught,
    ):
        next(iter(loader))
    assert len(str(caught.value)) < 1_000_000
    assert "50,000,008 characters in all" in str(caught.value)
    assert caught.value.original_message.endswith("xend")


def test_b61_close_while_a_worker_writes_what_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is blocked in a send is ended like a busy one."""
    spec = FactorySpec(cases.Text, 24, 5_000_000, gate=str(tmp_path / "go"))
    with Loader(spec, batch_size=1, num_workers=1) as loader:
        iterator = iter(loader)
        assert len(next(iterator)) == 2
        engine = loader._engine
        assert engine is not None
        assert wait_until(lambda: engine.backend.observe(0, 1).stage == "fetching")
        monkeypatch.setattr(ProcessPool, "_read", lambda self, member, drain=False: [])
        (tmp_path / "go").touch()
        assert wait_until(lambda: engine.backend.observe(0, 1).stage == "sending")
        began_s = time.monotonic()
        loader.close()
        assert time.monotonic() - began_s < 4.0 * UNIT_S


@pytest.mark.parametrize("num_workers", [0, 2])
def test_b88_two_thousand_failing_batches_use_nothing_up(num_workers: int) -> None:
    """Batches that fail in the dataset and in the collation give their slots back; what follows is right."""
    spec = FactorySpec(cases.Fails, 4040, 4000)
    with Loader(spec, batch_size=2, num_workers=num_workers) as loader:
        iterator, kinds = iter(loader), []
        for _ in range(2000):
            with pytest.raises(LoaderError) as caught:
                next(iterator)
            kinds.append(type(caught.value).__name__)
        assert kinds == ["SampleError", "LayoutError"] * 1000
        assert [rows[:, 0].tolist() for rows in iterator] == [[i, i + 1] for i in range(4000, 4040, 2)]
        assert loader.stats().num_slots <= 6
        assert loader.stats().num_restarts == 0


HABITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "numbers": (FactorySpec(Numbers, 10), {}),
    "nested": (FactorySpec(cases.Nested, 10), {}),
    "batched": (FactorySpec(cases.Batched, 10), {}),
    "texts as keys": (FactorySpec(cases.Keyed, 10), {"sampler": ["a", "bc", "def", "ü", ""]}),
    "draws": (FactorySpec(cases.Draws, 10), {"shuffle": True, "seed": 7}),
    "draws per sample": (FactorySpec(cases.Draws, 10), {"seed_per": "sample"}),
    "epochs": (FactorySpec(cases.Epochs, 10), {}),
    "worker info": (FactorySpec(cases.WorkerFacts, 10), {"rank": 1, "world_size": 2}),
    "no batches": (FactorySpec(cases.Nested, 5), {"batch_size": None}),
    "collate_fn": (FactorySpec(cases.Plain, 10), {"collate_fn": cases.doubling}),
    "empty": (FactorySpec(cases.Empty), {}),
    "ragged": (FactorySpec(cases.Ragged, 10), {}),
    "missing key": (FactorySpec(cases.MissingKey, 10), {}),
    "None": (FactorySpec(cases.NoneField, 10), {}),
    "truncated": (FactorySpec(Truncated, 10), {}),
    "own error": (FactorySpec(cases.RaisesOwn, 10), {}),
    "StopIteration": (FactorySpec(cases.StopsEarly, 10), {}),
    "image": (FactorySpec(cases.Picture, 4), {}),
    "failing collate_fn": (FactorySpec(cases.Plain, 10), {"collate_fn": cases.failing}),
    "object of a collate_fn": (FactorySpec(cases.Plain, 4), {"collate_fn": cases.returns_object}),
    "too long": (FactorySpec(cases.BadLength, 10), {}),
    "bad key": (FactorySpec(cases.BadLength, 10), {"sampler": [1, 2, 99, 3]}),
    "not built": (FactorySpec(cases.BadInit, 10), {}),
    "skipped": (FactorySpec(Truncated, 10), {"on_bad_sample": "skip"}),
}


def _story(dataset: Any, options: dict[str, Any], num_workers: int) -> list[Any]:
    """Two epochs: batches as plain values, errors as type, text and facts without what tells one process from another."""
    options = {"batch_size": 2, "num_workers": num_workers, **options}
    if "on_bad_sample" in options:
        options["faults"] = FaultPolicy(on_bad_sample=options.pop("on_bad_sample"))
    told: list[Any] = []
    with Loader(dataset, **options) as loader:
        for _ in range(2):
            try:
                told += _epoch(iter(loader))
            except FactoryError as error:
                told.append(_words(error))
        told.append(loader.skipped)
    return told


def _epoch(iterator: Iterator[Any]) -> list[Any]:
    told: list[Any] = []
    while len(told) < 50:
        try:
            told.append(_plain(next(iterator)))
        except StopIteration:
            return told
        except FactoryError:
            raise
        except LoaderError as error:
            told.append(_words(error))
    raise AssertionError("an epoch without end")


def _words(error: LoaderError) -> tuple[object, ...]:
    # The traceback after the first paragraph shows each process's own frames.
    sentence = re.sub(r", worker \d+", "", str(error).partition("\n\nTraceback")[0]).replace(" in a worker", "")
    facts = {name: value for name, value in error.facts.items() if name != "worker"}
    return type(error).__name__, sentence, repr(facts)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(child) for child in value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value).__name__, str(value.dtype), value.tolist()
    return value


@pytest.mark.parametrize("habit", HABITS)
def test_b94_workers_change_neither_batches_nor_words(habit: str) -> None:
    """Batches, and the errors' types, texts and facts, are the same for 0 and 2 workers but for the worker's number."""
    dataset, options = HABITS[habit]
    inline, workers = (_story(dataset, options, num_workers) for num_workers in (0, 2))
    assert inline == workers
    assert len(inline) > 1 or habit == "empty"


@pytest.mark.parametrize("kind", [cases.Breaks, cases.BreaksAndLeaves, cases.BreaksAndLeavesTogether])
def test_b94_breakpoint_in_a_worker_is_an_error_with_advice(kind: type[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """No debugger waits for a terminal that is not there: the error names BdbQuit and what to do, and the epoch goes on."""
    with Loader(FactorySpec(kind, 6), batch_size=2, num_workers=1) as loader:
        iterator = iter(loader)
        began_s = time.monotonic()
        with pytest.raises(SampleError, match=r"BdbQuit.*num_workers=0"):
            next(iterator)
        assert time.monotonic() - began_s < 5.0 * UNIT_S
        assert [batch.tolist() for batch in iterator] == [[2, 3], [4, 5]]
    capfd.readouterr()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_b94_breakpoint_elsewhere_is_an_error_that_names_it(
    num_workers: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the dataset is made, in `worker_init_fn` and in a method: told at once, nobody is replaced."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setattr(pdb.Pdb, "do_EOF", pdb.Pdb.do_EOF)  # put back afterwards
    for spec, init in ((FactorySpec(cases.BreaksInBuild, 6), None), (FactorySpec(Numbers, 6), cases.break_and_leave)):
        with Loader(spec, num_workers=num_workers, worker_init_fn=init) as loader:
            with pytest.raises(FactoryError, match="BdbQuit"):
                iter(loader)
            assert loader.stats().num_restarts == 0
    with Loader(FactorySpec(cases.BreaksInCall, 6), num_workers=num_workers, batch_size=3) as loader:
        with pytest.raises(LoaderError, match=r"inspect raised bdb\.BdbQuit"):
            loader.call("inspect")
        assert len(list(loader)) == 2
    capfd.readouterr()


def test_b94_breakpoint_inline_reaches_the_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workers `breakpoint()` stops in the sample's own frame, on the caller's thread."""
    frames: list[str] = []

    def hook() -> None:
        frames.append(sys._getframe(1).f_code.co_name)

    monkeypatch.setattr("sys.breakpointhook", hook)
    with Loader(FactorySpec(cases.Breaks, 6), batch_size=2) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(6))
    assert frames == ["make"]
