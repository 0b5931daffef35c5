"""The README says what is so: its example runs, its tables are complete, and what no other test shows is shown here."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import ringloader
import ringloader.orders as orders_module
from ringloader import ConfigError, FactoryError, FactorySpec, FaultPolicy, Loader

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Datasets and functions for workers, in a module that is not this one: a worker need not import pytest.
CLAIMS = """
import torch
from ringloader import get_worker_info

class Unlike:
    def __init__(self):
        self.size = 40 + get_worker_info().id
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return index

class Asks:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        theirs, ours = torch.utils.data.get_worker_info(), get_worker_info()
        return theirs.id, theirs.num_workers, theirs.seed - ours.seed, theirs.dataset is self, ours.num_workers

class Images:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.arange(24.0).reshape(2, 3, 4) + index

class Together(Images):
    def __getitems__(self, indices):
        if indices == [2, 3]:
            raise OSError("these two together are too much")
        if 1 in indices:
            raise OSError("no such record")
        return [self[index] for index in indices]

def twice(samples):
    batch = torch.stack(samples).to(memory_format=torch.channels_last)
    return batch, batch
"""


@pytest.fixture
def claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an importable module that holds `CLAIMS`."""
    name = f"readme_claims_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CLAIMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def section(title: str) -> str:
    """The text under one heading."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert found is not None, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the tables in a text, headings left out."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_readme_commands_come_first_and_exist() -> None:
    """The first block of code names the two commands, and they can be run."""
    first = README.split("```")[1]
    commands = [line.split()[0] for line in first.splitlines()[1:]]
    assert commands == ["scripts/quickstart", "scripts/test"]
    for command in commands:
        assert (ROOT / command).stat().st_mode & 0o111


def test_readme_example_runs_as_it_stands(tmp_path: Path) -> None:
    """The files of the example, written as shown, train for three epochs, say so, and print no warning."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", README, re.M | re.S)
    for name, source in blocks:
        (tmp_path / name).write_text(source)
    assert [name for name, _ in blocks] == ["curve.py", "train.py"]
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


_PHOTOS = """
import os
import numpy
from PIL import Image
os.makedirs("photos")
for number in range(8):
    name = f"photos/{'cat' if number % 2 else 'dog'}_{number:03}.jpg"
    Image.fromarray(numpy.full((40, 48, 3), number * 30, numpy.uint8)).save(name)
"""
_OF_PHOTOS = """
            assert images.shape == (4, 32, 32, 3) and labels.dtype.is_signed and {*labels.tolist()} <= {0, 1}
"""
_OF_WINDOWS = """
    assert inputs.shape == targets.shape == (64, 128) and (inputs[:, 1:] == targets[:, :-1]).all()
"""
_OF_PADDING = """
            assert mask.shape == (20, 7)
"""
# Other test runs on this machine must not find it.
_NAME = f"readme-{os.getpid()}"
_OF_SHARED = f"""
    from ringloader.sharing import remove_leftovers
    loader.close()
    arrays.close()
    del loader
    assert remove_leftovers("{_NAME}") == ["{_NAME}"]
"""
_SHARDING = "rank 1 of 2 reads its share of each epoch; world_size=1 has every rank read all of it\n"
# What a snippet needs to run, and what shows that its comments are true; by what it begins with.
_SCRIPTS = {
    "from image_folders import": (_PHOTOS, _OF_PHOTOS),
    "import numpy as np\nfrom ringloader import FactorySpec, Loader, SharedArrays": ("", _OF_SHARED),
    "import numpy as np\nfrom ringloader import Loader, TokenWindows": ("", _OF_WINDOWS),
    "import numpy as np\nfrom ringloader import Loader, pad_collate": ("", _OF_PADDING),
    "from ringloader import FactorySpec, Loader, get_worker_info": ("", ""),
    "import torch\nfrom ringloader import ArrayDataset, DistributedSampler, Loader": ("", ""),
    "import torch\nfrom ringloader import ArrayDataset, Loader": ("", ""),
    "import torch\nfrom ringloader import Loader, tensor_dataset": ("", ""),
}


@pytest.mark.parametrize("start", _SCRIPTS, ids=lambda start: re.sub(r"\\W+", "-", start[-40:]))
def test_readme_snippets_run_as_they_stand(tmp_path: Path, start: str) -> None:
    """Each is a script of its own, silent, and asserts what it claims."""
    (block,) = [found for found in re.findall(r"^```python\n(.*?)^```", README, re.M | re.S) if found.startswith(start)]
    before, after = _SCRIPTS[start]
    block = block.replace("pictures-v1", _NAME)
    (tmp_path / "snippet.py").write_text(before + block + after)
    done = subprocess.run(
        [sys.executable, "snippet.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == ("" if "rank=1" not in block else _SHARDING)


def test_readme_options_table_is_the_signature_of_loader() -> None:
    """Every option is in the table and nothing else is, in order, with its default."""
    table = rows(section("Options").partition("`FaultPolicy`, a frozen")[0])
    expected = list(inspect.signature(Loader.__init__).parameters.values())[1:]
    assert [names(row[0])[0] for row in table] == [parameter.name for parameter in expected]
    for row, parameter in zip(table[1:], expected[1:], strict=True):
        assert row[1] == f"`{parameter.default!r}`".replace("'", '"')


def test_readme_fault_table_is_the_policy() -> None:
    """Every field of `FaultPolicy` is in its table, in order, with its default."""
    table = rows(section("Options").partition("`FaultPolicy`, a frozen")[2])
    expected = [(f"`{field.name}`", f"`{field.default!r}`".replace("'", '"')) for field in dataclasses.fields(FaultPolicy)]
    assert [tuple(row[:2]) for row in table] == expected


def test_readme_mentions_every_public_name() -> None:
    """Whatever can be imported from the package is spoken of."""
    spoken = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", README))))
    assert set(ringloader.__all__) - spoken == set()


def test_readme_comparison_covers_every_option_of_dataloader() -> None:
    """Each option of torch's loader says whether it is the same, better or different here."""
    table = rows(section("Coming from DataLoader"))
    known = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    assert known <= {name for row in table for name in names(row[0])}
    assert {row[1] for row in table} <= {"same", "better", "different"}


def test_readme_pin_memory_without_cuda_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pin_memory` without CUDA warns once and delivers unpinned."""
    monkeypatch.setattr("ringloader.loader._warned_unpinned", False)
    for _ in range(2):
        with Loader(range(4), batch_size=4, pin_memory=True) as loader:
            assert not next(iter(loader)).is_pinned()
    assert [record.levelno for record in caplog.records if "unpinned" in record.message] == [logging.WARNING]
    with pytest.raises(ConfigError, match="pin_memory"):
        Loader(range(4), pin_memory=True, output="numpy")


def test_readme_workers_that_build_other_datasets_are_an_error(claims: str) -> None:
    """A second worker with another length is a FactoryError that names both and the usual causes."""

    def read(loader: Loader) -> None:
        for _ in range(1000):  # the first worker to be ready may have read an epoch before the second is
            list(loader)

    with (
        Loader(FactorySpec(f"{claims}:Unlike"), batch_size=1, num_workers=2) as loader,
        pytest.raises(FactoryError, match=r"length 4[01] instead of 4[01].*usual causes"),
    ):
        read(loader)


def test_readme_workers_of_one_epoch_end_with_it() -> None:
    """With `persistent_workers=False` each epoch has workers of its own, and none stay."""
    with Loader(range(8), batch_size=4, num_workers=1, persistent_workers=False, drop_last=True) as loader:
        pids = []
        for _ in range(2):
            for batch in loader:
                assert len(batch) == 4
                pids.append(loader.stats().worker_pids)
            assert loader.stats().worker_pids == ()
    assert len(set(pids)) == 2


def test_readme_out_of_order_epoch_has_every_batch_once() -> None:
    """With `in_order=False` nothing is lost or repeated."""
    with Loader(range(64), batch_size=4, num_workers=2, in_order=False) as loader:
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(64))


@pytest.mark.parametrize(("num_workers", "num_ahead"), [(0, 0), (1, 3)])
def test_readme_sampler_is_pulled_by_calls_of_next_alone(num_workers: int, num_ahead: int) -> None:
    """The k-th `next` has pulled k batches and those in flight, however long the loader was left alone in between."""
    pulled: list[int] = []
    sampler = (pulled.append(key) or key for key in range(40))  # type: ignore[func-returns-value]
    with Loader(range(40), batch_size=2, sampler=sampler, num_workers=num_workers, prefetch_factor=3) as loader:
        iterator = iter(loader)
        loader.start()
        assert pulled == []
        for k in range(1, 6):
            next(iterator)
            time.sleep(0.15 if k == 2 else 0.0)  # long enough for the loader's own thread to take over
            assert len(pulled) == 2 * (k + num_ahead)


def test_readme_ranks_with_torchs_sampler_are_not_sharded_twice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DistributedSampler decides alone, and gets its epoch from the loader; without one the loader shards, and says so."""
    monkeypatch.setattr(orders_module, "_said", set())  # it is said once per process
    read = []
    for rank in range(2):
        sampler = DistributedSampler(range(16), num_replicas=2, rank=rank)  # type: ignore[var-annotated, arg-type]
        with Loader(range(16), batch_size=4, sampler=sampler, rank=rank, world_size=2) as loader:
            loader.set_epoch(3)
            read += torch.cat(list(loader)).tolist()
        assert sampler.epoch == 3
    assert sorted(read) == list(range(16))
    assert "share of each epoch" not in caplog.text
    with Loader(range(16), batch_size=8, rank=1, world_size=2) as loader:
        assert next(iter(loader)).tolist() == list(range(1, 16, 2))
    assert "rank 1 of 2 reads its share of each epoch" in caplog.text


def test_readme_worker_info_is_torchs_too(claims: str) -> None:
    """In a worker torch's `get_worker_info` answers as ours does, with a seed of the worker's own."""
    with Loader(FactorySpec(f"{claims}:Asks"), batch_size=2, num_workers=2) as loader:
        for ids, theirs, offsets, is_own, ours in loader:
            assert theirs.tolist() == ours.tolist() == [2, 2]
            assert offsets.tolist() == ids.tolist()
            assert is_own.all()


def test_readme_collation_loses_memory_format_and_aliasing(claims: str) -> None:
    """A channels_last result arrives contiguous with the same values, one tensor at two places as two."""
    spec = FactorySpec(f"{claims}:Images")
    with Loader(spec, batch_size=4, num_workers=1, collate_fn=f"{claims}:twice") as loader:
        first, second = next(iter(loader))
    assert first.is_contiguous()
    assert torch.equal(first[2], torch.arange(24.0).reshape(2, 3, 4) + 2)
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_readme_samples_fetched_together_have_no_index_in_an_error(claims: str) -> None:
    """What no sample brings about by itself has no index and is not skipped; one that fails alone is."""
    faults = FaultPolicy(on_bad_sample="skip")
    with Loader(FactorySpec(f"{claims}:Together"), batch_size=2, num_workers=1, faults=faults) as loader:
        iterator = iter(loader)
        assert len(next(iterator)) == 1
        assert loader.skipped == [1]
        with pytest.raises(ringloader.SampleError) as caught:
            next(iterator)
        assert (caught.value.index, caught.value.indices) == (None, [2, 3])
