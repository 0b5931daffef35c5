"""The same bytes whatever the number of workers, with and without deaths, in any process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringloader import ConfigError, FactorySpec, FaultPolicy, Loader
from tests.runtime import determinism_datasets as datasets
from tests.runtime.determinism_datasets import digest

_KILLS = FaultPolicy(restarts=100, sample_deaths=100)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("Draws", (0, 2)),
        ("DrawsWithoutTorch", (0, 1, 2, 5)),
        ("SplitsInTheFactory", (0, 1, 2, 5)),
        ("ListsAFolder", (0, 1, 2, 5)),
    ],
)
def test_p01_epoch_has_one_digest_for_any_number_of_workers(kind: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    """Draws from random, numpy and torch, a split in the factory, an unsorted listing: equal for 0, 1, 2 and 5 workers (with
    torch, for 0 and 2), with and without deaths."""
    for k in range(40):
        (tmp_path / f"{k * 7919 % 1000:03d}").write_bytes(bytes([k]))
    spec = FactorySpec(getattr(datasets, kind), str(tmp_path))
    digests = {}
    for num_workers in counts:
        with Loader(spec, batch_size=6, shuffle=True, num_workers=num_workers, seed=3) as loader:
            digests[num_workers] = digest(loader)
    marks = tmp_path.parent / f"{tmp_path.name}-marks"
    marks.mkdir()
    deadly = FactorySpec(datasets.Deadly, spec, str(marks), [3, 30])
    with Loader(deadly, batch_size=6, shuffle=True, num_workers=2, seed=3, faults=_KILLS) as loader:
        digests["with deaths"] = digest(loader)  # type: ignore[index]
        assert loader.stats().num_restarts == 2
    assert len(set(digests.values())) == 1, digests


def test_p01_set_order_is_the_same_in_all_workers() -> None:
    """Workers share one hash seed: a class map made from a set agrees for 1, 2 and 5 workers (inline follows the parent's)."""
    digests = set()
    for num_workers in (1, 2, 5):
        with Loader(FactorySpec(datasets.ClassMap), batch_size=6, num_workers=num_workers) as loader:
            digests.add(digest(loader))
    assert len(digests) == 1


_SCRIPT = """
from ringloader import ConfigError, FactorySpec, Loader
from tests.runtime import determinism_datasets as datasets
from tests.runtime.determinism_datasets import digest
with Loader(FactorySpec(datasets.Draws, ""), batch_size=6, shuffle=True, num_workers=1, output="numpy") as loader:
    print(datasets.digest(loader))
with Loader(FactorySpec(datasets.ClassMap), batch_size=6, num_workers=2, output="numpy") as loader:
    print(datasets.digest(loader))
"""


def test_p01_two_processes_read_the_same_bytes() -> None:
    """Two runs of a script agree, also about set order, although each has a hash seed of its own."""
    root = Path(__file__).resolve().parents[2]
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": "random"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1] != ""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_seed_per_sample_makes_draws_independent_of_batch_size(num_workers: int) -> None:
    """seed_per="sample": a sample's draws are the same whatever batch it is in."""
    rows = []
    for batch_size in (4, 6):
        with Loader(
            FactorySpec(datasets.DrawsWithoutTorch, ""), batch_size=batch_size, num_workers=num_workers, seed_per="sample"
        ) as loader:
            rows.append(torch.cat(list(loader)))
    assert torch.equal(*rows)


def test_p06_ranks_draw_differently_and_share_the_permutation() -> None:
    """Two ranks together read each sample once, and no draw of one equals a draw of the other."""
    parts = []
    for rank in (0, 1):
        with Loader(
            FactorySpec(datasets.DrawsWithoutTorch, ""), batch_size=5, shuffle=True, num_workers=1, rank=rank, world_size=2
        ) as loader:
            parts.append(torch.cat(list(loader)))
    together = torch.cat(parts)
    assert sorted(together[:, 0].tolist()) == list(range(40))
    assert len(set(together[:, 3].tolist())) == 40


@pytest.mark.parametrize("num_workers", [0, 1])
def test_seed_per_sample_with_a_users_sampler_draws_each_sample_anew(num_workers: int) -> None:
    """Where no global position is known, draws are keyed by batch and place: none repeats."""
    order = [k * 7 % 40 for k in range(40)]
    with Loader(
        FactorySpec(datasets.DrawsWithoutTorch, ""), batch_size=4, num_workers=num_workers, seed_per="sample", sampler=order
    ) as loader:
        rows = torch.cat(list(loader))
    assert rows[:, 0].tolist() == order
    assert len(set(rows[:, 3].tolist())) == 40


def test_seed_drawn_anew_with_several_ranks_is_refused() -> None:
    """seed=None would give each rank an order of its own: samples missed and repeated."""
    with pytest.raises(ConfigError, match="seed=None with 2 ranks"):
        Loader(FactorySpec(datasets.DrawsWithoutTorch, ""), shuffle=True, seed=None, rank=0, world_size=2)


def test_inline_leaves_the_users_generators_alone() -> None:
    """num_workers=0 seeds for the dataset and puts the training program's own state back."""

    def state() -> Any:
        legacy: Any = np.random.get_state()
        return random.getstate(), legacy[1].tobytes(), torch.random.get_rng_state().numpy().tobytes()

    before = state()
    with Loader(FactorySpec(datasets.DrawsWithoutTorch, ""), batch_size=6, num_workers=0) as loader:
        for _ in loader:
            assert state() == before
    assert state() == before


def test_p16_torch_imported_by_a_sample_draws_seeded() -> None:
    """A worker that imports torch only inside a sample draws the same in its first batch as any other."""
    values = set()
    for num_workers in (1, 2):
        with Loader(FactorySpec(datasets.ImportsLate), batch_size=2, num_workers=num_workers) as loader:
            values.add(tuple(torch.cat(list(loader)).tolist()))
    assert len(values) == 1
    assert len(set(values.pop())) > 1


def test_rng_belongs_to_the_sample_whatever_the_batches_workers_and_ranks() -> None:
    """`get_worker_info().rng` gives each sample of an epoch draws of its own, the same however it is read."""
    found: list[dict[int, list[int]]] = []
    ways: list[dict[str, Any]] = [
        {"batch_size": 4},
        {"batch_size": 5, "num_workers": 2},
        {"batch_size": 3, "rank": 0, "world_size": 2},
        {"batch_size": 24, "epoch": 1},
    ]
    for options in ways:
        epoch = options.pop("epoch", 0)
        draws: dict[int, list[int]] = {}
        for rank in range(options.get("world_size", 1)):
            ranks = {"rank": rank} if "rank" in options else {}
            with Loader(FactorySpec(datasets.OwnDraws), shuffle=True, output="numpy", **{**options, **ranks}) as loader:
                loader.set_epoch(epoch)
                draws.update({int(row[0]): row[1:].tolist() for batch in loader for row in batch})
        found.append(draws)
    assert found[0] == found[1] == found[2]
    assert len({tuple(row) for draws in (found[0], found[3]) for row in draws.values()}) == 48


def test_rng_with_a_sampler_depends_on_batch_and_place() -> None:
    """Where no order of ours gives a position: still no two alike, and repeatable."""
    runs = []
    for num_workers in (0, 2):
        with Loader(
            FactorySpec(datasets.OwnDraws), batch_size=4, sampler=[5] * 8, num_workers=num_workers, output="numpy"
        ) as loader:
            runs.append([row[1:].tolist() for batch in loader for row in batch])
    assert runs[0] == runs[1]
    assert len(set(map(tuple, runs[0]))) == 8


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rng_does_not_go_on_where_another_try_left_off(num_workers: int) -> None:
    """A batch that is made again without a bad sample draws for the others what it would have drawn at once."""
    drawn = []
    for bad in (False, True):
        with Loader(
            FactorySpec(datasets.DrawsThenFails, bad),
            batch_size=2,
            num_workers=num_workers,
            faults=FaultPolicy(on_bad_sample="skip"),
        ) as loader:
            drawn.append(next(iter(loader))[0].item())
    assert drawn[0] == drawn[1]
