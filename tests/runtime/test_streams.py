"""Iterable datasets in worker processes: whose sample is whose, and what becomes of a stream whose worker dies."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ChainDataset, IterableDataset

from ringloader import ConfigError, FactorySpec, FaultPolicy, LayoutError, Loader, SampleError, WorkerError
from tests.runtime import stream_datasets as streams
from tests.runtime.conftest import wait_until
from tests.runtime.running import run

MANY = FaultPolicy(restarts=20)


def read(dataset: Any, num_workers: int, **options: Any) -> list[Any]:
    """The batches of an epoch, as lists."""
    with Loader(dataset, batch_size=4, num_workers=num_workers, output="numpy", **options) as loader:
        return [plain(batch) for batch in loader]


def joined(batches: list[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def plain(batch: Any) -> Any:
    return [leaf.tolist() for leaf in batch] if isinstance(batch, list) else batch.tolist()


@pytest.mark.parametrize("num_workers", [0, 1, 3, 4, 16])
def test_b27_sharded_stream_gives_each_item_once(num_workers: int) -> None:
    """10 items for any number of workers; those without work sit idle, and nothing hangs. Batch k is stream k mod W's."""
    batches = [batch[0] for batch in read(FactorySpec(streams.Sharded, 10), num_workers)]
    assert sorted(index for batch in batches for index in batch) == list(range(10))
    for stream, batch in enumerate(batches[: max(1, num_workers)]):
        assert batch[0] == stream
        assert {index % max(1, num_workers) for index in batch} == {stream}


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_b27_unsharded_stream_is_refused_before_the_first_batch(backend: str) -> None:
    """With the remedies; with one worker, or where the dataset says that its streams differ, it is read."""
    words = r"each sample would come once per worker.*get_worker_info\(\).*is_sharded"
    with Loader(streams.Unsharded(), num_workers=2, worker_backend=backend) as loader:
        iterator = iter(loader)
        for _ in range(2):
            with pytest.raises(ConfigError, match=words):
                next(iterator)
        assert list(iterator) == []  # nor is it read by whoever goes on
    assert read(streams.Unsharded(), 1, worker_backend=backend) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sorted(joined(read(streams.Marked(), 2, worker_backend=backend))) == sorted([*range(10)] * 2)


_TORCH = """
from torch.utils.data import IterableDataset, get_worker_info
from ringloader import Loader

class Theirs(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        assert info.seed >= 0 and info.dataset is self
        yield from range(info.id, 10, info.num_workers)

if __name__ == "__main__":
    with Loader(Theirs(), batch_size=2, num_workers=3) as loader:
        print(sorted(index for batch in loader for index in batch.tolist()))
"""


def test_b27_torchs_worker_info_shards_a_torch_dataset(tmp_path: Path) -> None:
    """Code written for DataLoader works as it is."""
    assert run(tmp_path, _TORCH).stdout == f"{list(range(10))}\n"


class Theirs(IterableDataset[int]):
    """torch's class, whose base has a `__getitem__` that raises."""

    def __iter__(self) -> Any:
        return iter(range(6))

    def __len__(self) -> int:
        return 6


def test_torch_iterable_dataset_is_iterated_inline_and_has_torchs_length() -> None:
    """Not taken for a map-style one."""
    with Loader(Theirs(), batch_size=4) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
        assert len(loader) == 2
    with Loader(FactorySpec(streams.Sharded, 10), num_workers=1) as loader:
        with pytest.raises(TypeError, match="no __len__"):
            len(loader)
        assert len(list(loader)) == 1


@pytest.mark.parametrize("option", ["shuffle", "sampler", "batch_sampler"])
def test_options_that_order_samples_are_refused(option: str) -> None:
    """At construction for an object, for a spec as soon as a worker knows."""
    options: dict[str, Any] = {option: {"shuffle": True, "sampler": [1], "batch_sampler": [[1]]}[option]}
    options["batch_size"] = 1 if option == "batch_sampler" else 4
    with pytest.raises(ConfigError, match=f"{option} was given with an iterable dataset"):
        Loader(streams.Sharded(), **options)
    loader = Loader(FactorySpec(streams.Sharded), num_workers=1, **options)
    with loader, pytest.raises(ConfigError, match=f"{option} was given with an iterable dataset"):
        iter(loader)


@pytest.mark.parametrize("in_order", [True, False])
def test_stream_of_a_worker_that_dies_is_read_on(tmp_path: Path, in_order: bool) -> None:
    """The same batches, draws included, each once, whoever dies in the middle of one, or in a replay."""
    whole = read(FactorySpec(streams.Sharded, 100), 3)
    spec = FactorySpec(streams.DiesAt, 100, str(tmp_path), [0, 1, 50, 51, 53, 97, 99])
    found = read(spec, 3, in_order=in_order, faults=MANY)
    assert (found if in_order else sorted(found)) == (whole if in_order else sorted(whole))
    assert len(os.listdir(tmp_path)) == 7


def test_order_drawn_by_a_stream_is_drawn_again_by_its_replay() -> None:
    """Shuffling in `__iter__` and from a buffer: the same before and after a death and a resumption."""
    spec = FactorySpec(streams.Shuffles, 60)
    whole = read(spec, 2)
    assert sorted(joined(whole)) == list(range(60))
    assert joined(whole) != list(range(60))
    for cut in (1, 4, 7):
        with Loader(spec, batch_size=4, num_workers=2, output="numpy", faults=MANY) as loader:
            iterator = iter(loader)
            head = [plain(next(iterator)) for _ in range(cut)]
            state = loader.state_dict()
            assert wait_until(lambda: len(loader.stats().worker_pids) == 2)
            os.kill(loader.stats().worker_pids[cut % 2], 9)
            assert head + [plain(batch) for batch in iterator] == whole
        with Loader(spec, batch_size=4, num_workers=2, output="numpy") as loader:
            loader.load_state_dict(state)
            assert head + [plain(batch) for batch in loader] == whole


def test_stream_with_a_state_is_not_read_again(tmp_path: Path) -> None:
    """A replacement, and a resumed run, read on from the state: nothing but what was in flight is read twice."""
    spec = FactorySpec(streams.SavesItself, 80, str(tmp_path))
    with Loader(spec, batch_size=4, num_workers=2, output="numpy", faults=MANY) as loader:
        iterator = iter(loader)
        head = [plain(next(iterator)) for _ in range(12)]
        state = loader.state_dict()
    reads = [int(line) for line in (tmp_path / "log1").read_text().split()]
    assert sorted({index for index in reads if reads.count(index) > 1}) == [25, 27, 29, 31]  # the batch that was killed
    for log in tmp_path.glob("log*"):
        log.unlink()
    with Loader(spec, batch_size=4, num_workers=2, output="numpy") as loader:
        loader.load_state_dict(state)
        tail = [plain(batch) for batch in loader]
    assert sorted(joined(head + tail)) == list(range(80))
    assert min(int(line) for log in tmp_path.glob("log*") for line in log.read_text().split()) == 48


def test_state_of_a_stream_may_hold_any_object() -> None:
    """It is pickled then; what is saved is still plain, for JSON, and exact."""
    spec = FactorySpec(streams.SavesObjects, 80)
    whole = read(spec, 2)
    with Loader(spec, batch_size=4, num_workers=2, output="numpy", faults=MANY) as loader:
        iterator = iter(loader)
        head = [plain(next(iterator)) for _ in range(7)]
        state = json.loads(json.dumps(loader.state_dict()))
        os.kill(loader.stats().worker_pids[0], 9)
        assert head + [plain(batch) for batch in iterator] == whole
    with Loader(spec, batch_size=4, num_workers=2, output="numpy") as loader:
        loader.load_state_dict(state)
        assert head + [plain(batch) for batch in loader] == whole
        loader.load_state_dict({**state, "sampler": [[3, "x"], None]})
        with pytest.raises(ConfigError, match="no states of streams"):
            iter(loader)


def test_stream_that_cannot_be_read_again_goes_on_and_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At most once: what was read and not delivered is missing, nothing comes twice, and a warning says so."""
    found = joined(read(FactorySpec(streams.Source, 80, str(tmp_path)), 2, faults=MANY))
    assert len(found) == len({*found})
    missing = {*range(80)} - {*found}
    assert 21 in missing
    assert len(missing) <= 3 * 4  # two batches in flight, and the one that was being made
    assert "can_replay" in caplog.text
    assert "at most once" in caplog.text


def test_stream_that_is_shorter_when_read_again_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It ends, without a sample repeated, and not in silence."""
    found = joined(read(FactorySpec(streams.Truncating, 60, str(tmp_path)), 1, faults=MANY))
    assert found[:16] == list(range(16))
    assert len(found) == len({*found})
    assert "could not be read again: it gave" in caplog.text


def test_sample_that_kills_again_and_again_ends_its_stream() -> None:
    """An error in its place that names stream and sample; the other streams are whole."""
    with Loader(FactorySpec(streams.AlwaysDiesAt, 40), batch_size=4, num_workers=2, output="numpy", faults=MANY) as loader:
        iterator, found, errors = iter(loader), [], []
        while True:
            try:
                found += plain(next(iterator))[0]
            except StopIteration:
                break
            except WorkerError as error:
                errors.append(str(error))
    assert len(errors) == 1
    assert errors[0].startswith("sample 3 of batch 0 of stream 1 ended 3 workers")
    assert "the rest of the stream is left out" in errors[0]
    assert sorted(found) == list(range(0, 40, 2))


def test_stream_of_a_worker_that_is_given_up_is_read_by_another(tmp_path: Path) -> None:
    """With its own worker's number, so that its part stays its part."""
    spec = FactorySpec(streams.DiesAt, 60, str(tmp_path), [21])
    assert read(spec, 3, faults=FaultPolicy(restarts=0)) == read(FactorySpec(streams.Sharded, 60), 3)


def test_batches_that_outgrow_their_slots_are_read_once() -> None:
    """None is fetched again for want of room, whatever else is queued behind it."""
    with Loader(FactorySpec(streams.Outgrows, 200), batch_size=2, num_workers=2, output="numpy") as loader:
        found = [batch[:, 0].tolist() for batch in loader]
        copied = loader.stats()
    assert sorted(joined(found)) == list(range(200))
    assert copied.num_stale == 0


def test_epochs_and_iterators_at_once_are_each_whole() -> None:
    """Two iterators over one loader, a third abandoned: each has streams of its own, which end with it."""
    with Loader(FactorySpec(streams.Sharded, 50), batch_size=4, num_workers=2, output="numpy") as loader:
        first, second, third = iter(loader), iter(loader), iter(loader)
        next(third)
        del third
        pairs = [(plain(a)[0], plain(b)[0]) for a, b in zip(first, second, strict=True)]
    for k in range(2):
        assert sorted(index for pair in pairs for index in pair[k]) == list(range(50))


def test_streams_of_an_abandoned_epoch_are_closed(tmp_path: Path) -> None:
    """What they hold open is let go, without waiting for the next epoch."""
    with Loader(FactorySpec(streams.Closes, 500, str(tmp_path)), batch_size=2, num_workers=2, output="numpy") as loader:
        for _ in range(3):
            iterator = iter(loader)
            next(iterator)
            assert wait_until(lambda: len(os.listdir(tmp_path)) == 2)
            del iterator
            assert wait_until(lambda: not os.listdir(tmp_path))
        list(loader)
        assert wait_until(lambda: not os.listdir(tmp_path))


def test_set_epoch_comes_before_the_first_sample_also_in_a_replacement(tmp_path: Path) -> None:
    """Every sample of an epoch has its number."""
    spec = FactorySpec(streams.NoticesEpochs, 40, str(tmp_path))
    with Loader(spec, batch_size=4, num_workers=2, output="numpy", faults=MANY) as loader:
        for epoch in (0, 1, 2):
            batches = [plain(batch) for batch in loader]
            assert sorted(index for batch in batches for index in batch[0]) == list(range(40))
            assert {number for batch in batches for number in (*batch[1], *batch[2])} == {epoch}
        assert loader.stats().num_restarts == 1


@pytest.mark.parametrize("changed", [{"num_workers": 3}, {"batch_size": 2}, {"num_workers": 0}])
def test_state_of_streams_is_refused_by_others(changed: dict[str, Any]) -> None:
    """The interleave is that of a number of workers and samples per batch: named, with the remedy."""
    options: dict[str, Any] = {"num_workers": 2, "batch_size": 4}
    with Loader(FactorySpec(streams.Sharded, 50), **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with Loader(FactorySpec(streams.Sharded, 50), **{**options, **changed}) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="the same num_workers, world_size and batch_size"):
            iter(loader)


def test_batch_size_none_takes_items_as_batches_and_drop_last_drops_per_stream() -> None:
    """As torch does."""
    with Loader(FactorySpec(streams.Sharded, 6), batch_size=None, num_workers=2, output="numpy") as loader:
        assert [item[0] for item in loader] == [0, 1, 2, 3, 4, 5]
    assert [batch[0] for batch in read(FactorySpec(streams.Sharded, 11), 2, drop_last=True)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert np.concatenate(read(FactorySpec(streams.Shuffles, 9), 0, drop_last=True)).size == 8


# --- what an attack found ------------------------------------------------------------------------------------------------


def test_state_after_the_last_batch_is_the_end_and_not_the_next_round(tmp_path: Path) -> None:
    """A dataset that begins anew by itself once it has ended is not read a second time, by a resumption or a replacement."""
    spec = FactorySpec(streams.SavesItself, 10, str(tmp_path))
    with Loader(spec, batch_size=4, num_workers=1, output="numpy", faults=MANY) as loader:
        iterator = iter(loader)
        head = [plain(next(iterator)) for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
        os.kill(loader.stats().worker_pids[0], 9)
        assert list(iterator) == []
    assert head == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with Loader(spec, batch_size=4, num_workers=1, output="numpy") as loader:
        loader.load_state_dict(state)
        assert list(loader) == []
        assert [plain(batch) for batch in loader] == head


def test_dataset_that_keeps_its_place_itself_is_read_by_one_iterator_at_a_time(tmp_path: Path) -> None:
    """A second one is told so; an epoch that was left in the middle does not move the next one."""
    spec = FactorySpec(streams.SavesItself, 30, str(tmp_path))
    with Loader(spec, batch_size=4, num_workers=1, output="numpy") as loader:
        first = iter(loader)
        assert plain(next(first)) == [0, 1, 2, 3]
        second = iter(loader)
        with pytest.raises(SampleError, match="read by one iterator at a time"):
            next(second)
        del second
        del first
        assert joined([plain(batch) for batch in loader]) == list(range(30))


def test_interrupt_during_a_replay_shifts_nothing() -> None:
    """Inline, where it is the user's own Ctrl-C: reading again begins again."""
    dataset = streams.InterruptsReplay(60)
    whole = read(dataset, 0)
    with Loader(dataset, batch_size=4, output="numpy") as loader:
        iterator = iter(loader)
        head = [plain(next(iterator)) for _ in range(8)]
        state = loader.state_dict()
    streams.InterruptsReplay.fuse = 21
    with Loader(dataset, batch_size=4, output="numpy") as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert head + [plain(batch) for batch in iterator] == whole


def test_batch_that_cannot_be_laid_out_takes_its_samples_and_no_others(tmp_path: Path) -> None:
    """Whether a slot was there or not, in a first epoch, a second, and after a death."""
    found = []
    for dies_at in (-1, 22):
        spec = FactorySpec(streams.OddRow, 40, str(tmp_path), dies_at)
        with Loader(spec, batch_size=4, num_workers=1, output="numpy", faults=MANY) as loader:
            for _ in range(2):
                iterator, epoch = iter(loader), []
                while True:
                    try:
                        epoch.append(next(iterator)[:, 0].tolist())
                    except StopIteration:
                        break
                    except LayoutError:
                        epoch.append("refused")
                found.append(epoch)
    expected: list[Any] = [[4 * k + j for j in range(4)] for k in range(10)]
    expected[4] = "refused"
    assert found == [expected] * 4


def test_replay_may_take_longer_than_a_batch() -> None:
    """Each batch that is read again has the time of one, and no sample is blamed for it."""
    spec = FactorySpec(streams.SavesSlowly, 100)
    # A batch takes 0.15 s, what is to be read again more than 2.
    with Loader(spec, batch_size=5, num_workers=1, output="numpy", timeout=1.5, faults=MANY) as loader:
        iterator = iter(loader)
        head = [plain(next(iterator)) for _ in range(14)]
        os.kill(loader.stats().worker_pids[0], 9)
        assert joined(head + [plain(batch) for batch in iterator]) == list(range(100))
        assert loader.stats().num_restarts == 1


def test_file_that_is_the_datasets_own_stays_open(tmp_path: Path) -> None:
    """Only generators are ended with their epoch."""
    path = tmp_path / "lines"
    path.write_text("a\nb\nc\n")
    with Loader(FactorySpec(streams.OwnFile, str(path)), batch_size=2, num_workers=1) as loader:
        for _ in range(3):
            assert list(loader) == [["a\n", "b\n"], ["c\n"]]


def test_stream_that_cannot_be_opened_is_an_error_once() -> None:
    """For each of the two; then they have ended, and a loop that tolerates errors comes to an end."""
    with Loader(FactorySpec(streams.CannotBeOpened), batch_size=2, num_workers=2) as loader:
        iterator = iter(loader)
        for _ in range(2):
            with pytest.raises(SampleError, match="no such stream"):
                next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


class Part(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_length_that_fails_is_no_length() -> None:
    """torch's chains of datasets have one, whatever they are made of."""
    with Loader(ChainDataset([Part(), Part()]), batch_size=4) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 0], [1, 2]]
        with pytest.raises(TypeError):
            len(loader)
    with Loader(FactorySpec(streams.LengthFails, 5), batch_size=4, num_workers=1, output="numpy") as loader:
        assert len(list(loader)) == 2


def test_streams_that_have_ended_are_not_batches_handed_over_out_of_order() -> None:
    """The state of an ordered epoch is a prefix, small, and every rank's, however uneven its streams."""
    with Loader(FactorySpec(streams.Silent, 100), batch_size=2, num_workers=8, output="numpy") as loader:
        iterator = iter(loader)
        for _ in range(20):
            next(iterator)
            state = loader.state_dict()
            assert state["above"] == []
            assert state["rank"] == -1
    with Loader(FactorySpec(streams.Silent, 100), batch_size=2, num_workers=8, output="numpy") as loader:
        loader.load_state_dict(state)
        assert joined([plain(batch) for batch in loader]) == list(range(40, 100))


def test_ranks_are_told_that_a_stream_is_theirs_to_shard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing promises them a share."""
    monkeypatch.setattr("ringloader.orders._said", set())  # it is said once per process
    with Loader(streams.Sharded(10), batch_size=4, rank=1, world_size=2) as loader:
        list(loader)
    assert "takes its part by get_worker_info().rank" in caplog.text
    assert "reads its share" not in caplog.text


def test_policy_that_does_not_apply_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Once, at construction where the dataset is known."""
    with Loader(streams.Sharded(10), batch_size=4, faults=FaultPolicy(on_bad_sample="skip")) as loader:
        for _ in range(2):
            list(loader)
    assert [r.message for r in caplog.records if "on_bad_sample='skip' does not apply" in r.message] == [caplog.messages[0]]
