"""Saving where a loader is, and going on from there: exactly, by others, or not at all."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler
from torch.utils.data import RandomSampler as TorchRandomSampler

from ringloader import ConfigError, FactorySpec, FaultPolicy, Loader, RandomSampler, SampleError
from ringloader._core.bad_samples import BadSamples
from ringloader._core.session import BatchState
from ringloader._runtime import cuda
from tests.runtime import determinism_datasets as drawing
from tests.runtime.conftest import wait_until
from tests.runtime.fake_cuda import FakeCuda
from tests.runtime.sample_datasets import FailsAt, Numbers, Waits

_SIZE = 23


def make(num_workers: int = 0, **options: Any) -> Loader:
    return Loader(FactorySpec(Numbers, _SIZE), num_workers=num_workers, **{"batch_size": 4, "shuffle": True, **options})


def order_of(loader: Any) -> list[int]:
    return [int(i) for _, indices in loader for i in indices]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"batch_size": 3}, {"batch_size": 7, "num_workers": 1}])
def test_state_saved_before_every_step_gives_the_rest(options: dict[str, Any]) -> None:
    """With other workers and other batches: what was handed over and the rest are the epoch, in order; then the next one."""
    with make(num_workers=1) as loader:
        iterator = iter(loader)
        states, orders = [loader.state_dict()], []
        for _, indices in iterator:
            orders.append(indices.tolist())
            states.append(loader.state_dict())
        after = loader.state_dict()
        second = order_of(loader)
    whole = list(itertools.chain(*orders))
    with make(**options) as other:
        for number, state in enumerate(states):
            other.load_state_dict(json.loads(json.dumps(state)))
            assert {**other.state_dict(), "batch_size": 4} == state
            assert list(itertools.chain(*orders[:number])) + order_of(other) == whole
            assert order_of(other) == second
        other.load_state_dict(msgpack.unpackb(msgpack.packb(after)))
        assert order_of(other) == second


def test_state_is_small_and_the_same_on_every_rank() -> None:
    """Under a kilobyte, whatever the size, and without a word of the rank."""
    states = []
    for rank in range(3):
        with Loader(range(10**6), batch_size=16, shuffle=True, rank=rank, world_size=3, seed=5) as loader:
            iterator = iter(loader)
            for _ in range(5):
                next(iterator)
            states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    assert len(json.dumps(states[0])) < 1000
    assert states[0]["position"] == 5 * 16 * 3


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4)])
def test_state_of_some_ranks_is_resumed_by_others(before: int, after: int) -> None:
    """What all ranks have consumed is a prefix: another number of ranks takes up the rest, each sample once."""
    consumed: list[int] = []
    for rank in range(before):
        with make(rank=rank, world_size=before) as loader:
            iterator = iter(loader)
            consumed += order_of([next(iterator), next(iterator)])
            state = loader.state_dict()
    rest: list[int] = []
    for rank in range(after):
        with make(rank=rank, world_size=after, batch_size=3, drop_last=False) as loader:
            loader.load_state_dict(state)
            rest += order_of(loader)
    num_left = _SIZE - state["position"]
    assert set(consumed) | set(rest) == set(range(_SIZE))
    assert not set(consumed) & set(rest) or num_left % after
    assert len(rest) == -(-num_left // after) * after


def test_resumed_epoch_fetches_nothing_of_what_was_consumed() -> None:
    """A dataset that notes accesses sees the rest alone, at any depth: no replay."""
    seen: list[int] = []

    class Noting:
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, i: int) -> int:
            seen.append(i)
            return i

    with Loader(Noting(), batch_size=100, shuffle=True) as loader:
        state = loader.state_dict()
        state["position"] = 100 * 10**6
        loader.load_state_dict(state)
        batch = next(iter(loader))
    assert batch.tolist() == seen
    assert len(seen) == 100
    with Loader(Noting(), batch_size=100, shuffle=True) as loader:
        assert loader.indices(0, 10**6).tolist() == seen


def test_draws_of_a_resumed_epoch_are_those_of_the_whole() -> None:
    """Random augmentation goes on as if nothing had happened."""
    spec = FactorySpec(drawing.DrawsWithoutTorch, "")
    with Loader(spec, batch_size=6, shuffle=True, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        state = loader.state_dict()
        rest = torch.cat(list(iterator))
    with Loader(spec, batch_size=6, shuffle=True, num_workers=2) as loader:
        loader.load_state_dict(state)
        assert torch.equal(torch.cat(list(loader)), rest)


def test_out_of_order_state_names_what_was_handed_over_beyond(tmp_path: Path) -> None:
    """in_order=False: the slow first batch is still missing; it and what else was not handed over come, nothing twice."""
    gate = tmp_path / "gate"
    with Loader(FactorySpec(Waits, 40, str(gate)), batch_size=4, num_workers=2, in_order=False) as loader:
        iterator = iter(loader)
        seen = order_of([next(iterator) for _ in range(3)])
        state = loader.state_dict()
        gate.touch()
    assert 0 not in seen
    assert state["position"] == 0
    assert len(state["above"]) == 3
    for num_workers in (0, 2):
        with Loader(FactorySpec(Numbers, 40), batch_size=4, num_workers=num_workers, in_order=False) as loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            rest = order_of([next(iterator)])
            again = loader.state_dict()
            rest += order_of(iterator)
        assert sorted(seen + rest) == list(range(40))
        if num_workers == 0:
            with Loader(FactorySpec(Numbers, 40), batch_size=4) as third:
                third.load_state_dict(again)
                assert order_of(third) == rest[4:]
    with (
        Loader(FactorySpec(Numbers, 40), batch_size=5, in_order=False) as loader,
        pytest.raises(ConfigError, match="in_order=False between batches of 4 by rank 0 of 1; these are batches of 5"),
    ):
        loader.load_state_dict(state)


def num_there(iterator: Any) -> int:
    """Batches that `next` need not wait for."""
    iterator._engine.pump.step(None)
    batches = iterator._session.batches
    made = itertools.takewhile(lambda number: batches[number].state is BatchState.READY, sorted(batches))
    return len(list(made)) + (iterator._ahead is not None)


def test_state_counts_no_batch_that_waits_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """device=: the batch copied ahead was not handed over."""
    fake = FakeCuda()
    monkeypatch.setattr(cuda, "CUDA", fake)
    with make(num_workers=2, device="cuda", pin_memory=False) as loader:
        iterator: Any = iter(loader)
        whole: list[int] = []
        for number in range(1, 4):
            if number > 1:
                # One to be handed over, and one to be copied ahead of its turn.
                assert wait_until(lambda: num_there(iterator) >= 2)
            batch = next(iterator)
            fake.default.run()
            whole += batch[1].tolist()
            assert loader.state_dict()["position"] == 4 * number
        assert iterator._ahead is not None
        state = loader.state_dict()
        del batch
    fake.finish()
    with make() as loader:
        loader.load_state_dict(state)
        whole += order_of(loader)
        assert whole == loader._orders.plan(0)._compute_keys(0, _SIZE).tolist()


# --- samplers of the user's ----------------------------------------------------------------------------------------------


class Saving:
    """A sampler with a state of its own."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 20:
            self.position += 1
            yield 19 - (self.position - 1)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _torch_sampler() -> Any:
    return TorchRandomSampler(range(20), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("make_sampler", [Saving, _torch_sampler, lambda: RandomSampler(20, seed=4)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_sampler_resumes_from_its_state_or_by_replay(make_sampler: Callable[[], Any], num_workers: int) -> None:
    """Prefetching has pulled it further than what was handed over: the state is that of the hand-over."""
    options: dict[str, Any] = {"batch_size": 3, "num_workers": num_workers}
    with Loader(FactorySpec(Numbers, 20), sampler=make_sampler(), **options) as loader:
        iterator = iter(loader)
        parts: list[list[int]] = []
        states = [loader.state_dict()]
        for batch in iterator:
            parts.append(batch[1].tolist())
            states.append(loader.state_dict())
        states.append(loader.state_dict())
    whole = list(itertools.chain(*parts))
    del states[-1]  # of the next epoch
    for number, state in enumerate(states):
        with Loader(FactorySpec(Numbers, 20), sampler=make_sampler(), **options) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            iterator = iter(loader)
            assert loader.state_dict() == state
            assert list(itertools.chain(*parts[:number])) + order_of(iterator) == whole


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batch_sampler_resumes_by_batches(num_workers: int) -> None:
    """Batches of it that were handed over are taken from it and left out."""

    def make_sampler() -> Any:
        return BatchSampler(_torch_sampler(), 6, drop_last=False)

    with Loader(FactorySpec(Numbers, 20), batch_sampler=make_sampler(), num_workers=num_workers) as loader:
        iterator = iter(loader)
        first = order_of([next(iterator), next(iterator)])
        state = loader.state_dict()
        rest = order_of(iterator)
    assert state["position"] == 2
    with Loader(FactorySpec(Numbers, 20), batch_sampler=make_sampler(), num_workers=num_workers) as loader:
        loader.load_state_dict(state)
        assert order_of(loader) == rest
    assert sorted(first + rest) == list(range(20))


# --- what counts, and what does not fit ----------------------------------------------------------------------------------


def test_failed_batch_counts_as_consumed() -> None:
    """After a SampleError the state is behind that batch."""
    with Loader(FactorySpec(FailsAt, 12, 8, 5), batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(SampleError):
            next(iterator)
        state = loader.state_dict()
    assert state["position"] == 8


def test_skipped_samples_are_counted_and_the_last_named() -> None:
    """The state carries how many were left out, and the last sixteen keys."""
    faults = FaultPolicy(on_bad_sample="skip")
    with Loader(FactorySpec(FailsAt, 12, 8, 5), batch_size=4, faults=faults) as loader:
        list(loader)
        state = loader.state_dict()
    assert (state["num_skipped"], state["skipped"]) == (1, [5])
    with Loader(FactorySpec(FailsAt, 12, 8, 5), batch_size=4) as loader:
        loader.load_state_dict(state)
        assert loader.skipped == [5]


def test_abandoned_iterator_leaves_its_place_and_set_epoch_leaves_a_resumption() -> None:
    """A broken loop can be saved; an explicit other epoch begins at its beginning."""
    with make(num_workers=1) as loader:
        for batch in loader:
            first = batch[1].tolist()
            break
        state = loader.state_dict()
        assert state["position"] == 4
    with make() as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert not set(order_of(loader)) & set(first)
        loader.load_state_dict(state)
        loader.set_epoch(3)
        assert len(order_of(loader)) == _SIZE
        assert loader.epoch == 4


_BAD: list[tuple[Any, str]] = [
    (None, "the state is a NoneType; give what state_dict"),
    ({}, "the state has version None, this release reads 1"),
    ({"version": 2}, "the state has version 2"),
    ({"version": 1, "epoch": 0}, "the state lacks above, batch_size"),
]


@pytest.mark.parametrize(("state", "match"), _BAD)
def test_what_is_no_state_is_refused_at_once(state: Any, match: str) -> None:
    """By what is wrong with it."""
    with make() as loader, pytest.raises(ConfigError, match=match):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seed": 1}, "was saved with seed 0, and this loader's is 1"),
        ({"shuffle": False}, "was saved with the order 'philox-argsort-1 .*, and this loader's is 'sequential'"),
        ({"sampler": range(4)}, "and this loader's is 'sampler range'"),
    ],
)
def test_state_of_another_run_is_refused_by_name(options: dict[str, Any], match: str) -> None:
    """Seed at once, order at the next iter, which can be tried again without the state."""
    with make() as loader:
        state = loader.state_dict()
    if "sampler" in options:
        options = {"shuffle": False, **options}
    with make(**options) as loader:
        with pytest.raises(ConfigError, match=match):  # noqa: PT012
            loader.load_state_dict(state)
            iter(loader)
        loader.set_epoch(1)
        assert len(list(loader)) > 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_state_of_another_dataset_is_refused_by_name(num_workers: int) -> None:
    """Another size, another fingerprint."""
    with Loader(FactorySpec(Numbers, 20), batch_size=4, num_workers=num_workers) as loader:
        state = loader.state_dict()
    with Loader(FactorySpec(Numbers, 21), batch_size=4, num_workers=num_workers) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="was saved with a dataset of size 20, and this loader's is 21"):
            iter(loader)
    state["fingerprint"] = "other"
    with Loader(FactorySpec(Numbers, 20), batch_size=4, num_workers=num_workers) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="the dataset's fingerprint 'other', and this loader's is ''"):
            iter(loader)


_SAVE = """
import json, sys
from ringloader import FactorySpec, Loader
from tests.runtime.sample_datasets import Numbers
with Loader(FactorySpec(Numbers, 50), batch_size=4, shuffle=True, num_workers=1, output="numpy") as loader:
    if len(sys.argv) > 1:
        loader.load_state_dict(json.loads(sys.argv[1]))
    seen = []
    for _, indices in loader:
        seen += indices.tolist()
        if len(seen) == 20:
            break
    print(json.dumps([seen, loader.state_dict()]))
"""


def test_state_goes_on_in_another_process() -> None:
    """Three runs one after the other read the epoch once."""
    seen: list[int] = []
    arguments: list[str] = []
    for _ in range(3):
        command = [sys.executable, "-c", _SAVE, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        part, state = json.loads(done.stdout)
        seen += part
        arguments = [json.dumps(state)]
    assert sorted(seen) == list(range(50))
    assert state["epoch"] == 1


def test_torch_saves_and_loads_a_state(tmp_path: Any) -> None:
    """As part of a checkpoint, with torch's safe loading."""
    with make() as loader:
        next(iter(loader))
        torch.save({"loader": loader.state_dict()}, tmp_path / "checkpoint.pt")
        loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["loader"]
        assert loaded == loader.state_dict()
        loader.load_state_dict(loaded)
        assert len(order_of(loader)) == _SIZE - 4


def test_indices_names_the_samples_of_any_batch() -> None:
    """What the loader would read, without reading it; outside an epoch an IndexError."""
    with make(num_workers=1) as loader:
        loader.set_epoch(2)
        for number, (_, indices) in enumerate(loader):
            assert loader.indices(2, number).tolist() == indices.tolist()
        assert loader.indices(2, 0).dtype == np.int64
        with pytest.raises(IndexError):
            loader.indices(2, 6)
    with make(shuffle=False, sampler=range(4)) as loader, pytest.raises(ConfigError, match="a sampler decides here"):
        loader.indices(0, 0)


class Reshuffling(Saving):
    """Its order comes from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(20, generator=self.generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


def test_sampler_with_chance_of_its_own_goes_on_at_the_boundary_of_epochs() -> None:
    """Its state between two epochs is part of ours."""
    with Loader(FactorySpec(Numbers, 20), sampler=Reshuffling(), batch_size=4) as loader:
        first = order_of(loader)
        state = loader.state_dict()
        second = order_of(loader)
    with Loader(FactorySpec(Numbers, 20), sampler=Reshuffling(), batch_size=4) as loader:
        loader.load_state_dict(state)
        assert order_of(loader) == second != first


def test_our_samplers_resume_in_a_later_epoch_in_its_order() -> None:
    """Nobody has called set_epoch: the loader numbers the epochs, and the state with them."""
    with Loader(FactorySpec(Numbers, 20), sampler=RandomSampler(20, seed=4), batch_size=4) as loader:
        first = order_of(loader)
        iterator = iter(loader)
        part = order_of([next(iterator), next(iterator)])
        state = loader.state_dict()
        rest = order_of(iterator)
    assert part + rest != first
    with Loader(FactorySpec(Numbers, 20), sampler=RandomSampler(20, seed=4), batch_size=4) as loader:
        loader.load_state_dict(state)
        assert order_of(loader) == rest
    with Loader(FactorySpec(Numbers, 20), sampler=RandomSampler(20, seed=5), batch_size=4) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="'sampler RandomSampler of 20 seed 4 epoch 1'"):
            iter(loader)


def test_states_of_ranks_that_cannot_be_each_others_are_refused(tmp_path: Path) -> None:
    """Out of order each rank has its own; with a sampler the number of ranks has to be the same."""
    options: dict[str, Any] = {"batch_size": 4, "world_size": 2}
    gate = tmp_path / "gate"
    with Loader(FactorySpec(Waits, 40, str(gate)), num_workers=2, in_order=False, rank=0, **options) as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        state = loader.state_dict()
        gate.touch()
    assert state["above"]
    with (
        Loader(FactorySpec(Numbers, 40), in_order=False, rank=1, **options) as loader,
        pytest.raises(ConfigError, match="by rank 0 of 2; these are batches of 4 of rank 1 of 2"),
    ):
        loader.load_state_dict(state)
    with Loader(FactorySpec(Numbers, 40), sampler=range(40), rank=0, **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        Loader(FactorySpec(Numbers, 40), sampler=range(40), batch_size=4) as loader,
        pytest.raises(ConfigError, match="was saved with a sampler on 2 ranks, and these are 1"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("above", [None, 5, ["x"], "12", {"a": 1}, [None], [0], [-1], [1.5], [3, 3], [2, 1], [True]]),
        ("skipped", [None, 7, "abc"]),
        ("epoch", [-1, 1 << 63, 10**400, 0.0, True, None]),
        ("position", [-1, 1 << 63, float("nan"), "4"]),
        ("batch_size", [0, 4.0]),
        ("world_size", [0]),
        ("seed", [False, 0.0]),
        ("size", [20.0, -2]),
        ("version", [True, 1.0, "1"]),
        ("order", [None, 3]),
        ("fingerprint", [None]),
        ("num_skipped", [-1]),
    ],
)
def test_state_edited_by_hand_is_refused_at_once(name: str, values: list[Any]) -> None:
    """Every field by its type and range, as a ConfigError; the loader is as it was."""
    with make() as loader:
        state = loader.state_dict()
        for value in values:
            with pytest.raises(ConfigError, match="the state"):
                loader.load_state_dict({**state, name: value})
        assert loader.state_dict() == state
        with pytest.raises(ConfigError, match="epoch is"):
            loader.set_epoch(1 << 63)


def test_state_with_a_samplers_own_needs_one_that_can_load_it() -> None:
    """Not an AttributeError in the middle of iter."""
    with Loader(FactorySpec(Numbers, 20), sampler=list(range(20)), batch_size=4) as loader:
        loader.load_state_dict({**loader.state_dict(), "sampler": {"position": 3}})
        with pytest.raises(ConfigError, match="this loader's, a list, has no load_state_dict"):
            iter(loader)


def test_refused_state_stays_what_it_is() -> None:
    """It does not take on the identity of the loader that refused it; keys are no batches."""
    with Loader(FactorySpec(Numbers, 30), batch_size=4) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with Loader(FactorySpec(Numbers, 20), batch_size=4) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="a dataset of size 30"):
            iter(loader)
        assert loader.state_dict() == state
    with Loader(FactorySpec(Numbers, 20), batch_size=4, sampler=[1, 2, 3]) as loader:
        state = loader.state_dict()
    with Loader(FactorySpec(Numbers, 20), batch_sampler=[[1], [2]]) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="'sampler list', and this loader's is 'batch_sampler list'"):
            iter(loader)


def test_state_needs_no_workers_once_the_dataset_is_known() -> None:
    """After the epoch's workers have gone, and after close."""
    with make(num_workers=1, persistent_workers=False) as loader:
        order_of(loader)
        state = loader.state_dict()
        assert loader.stats().worker_pids == ()
    assert loader.state_dict() == state
    with make(num_workers=1) as loader:
        next(iter(loader))
        inside: list[Any] = []
        engine = loader._engine
        assert engine is not None
        engine.pump.step([], lambda: inside.append(loader.state_dict()))  # as a signal handler inside `next` would
    assert inside[0]["position"] == 4


def test_resumption_survives_an_interrupt_of_iter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the epoch is opened: the next iter goes on from the state."""
    with make() as loader:
        next(iter(loader))
        state = loader.state_dict()
        loader.load_state_dict(state)
        engine: Any = loader._engine
        open_session = engine.open_session

        def interrupted(*args: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(engine, "open_session", interrupted)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        monkeypatch.setattr(engine, "open_session", open_session)
        assert len(order_of(loader)) == _SIZE - 4
        assert loader.epoch == 1


def test_skipped_keys_are_counted_on_and_named_shortly() -> None:
    """More than are named, over two resumptions; long and odd keys do not swell the state."""
    with make() as loader:
        loader._skipped = BadSamples(("a" * 1000, number) for number in range(30))
        state = json.loads(json.dumps(loader.state_dict()))
        assert len(json.dumps(state)) < 1500
        assert (state["num_skipped"], len(state["skipped"])) == (30, 16)
        for _ in range(2):
            loader.load_state_dict(state)
            order_of(loader)
            state = loader.state_dict()
        assert (state["num_skipped"], len(state["skipped"])) == (30, 16)
