"""The environment of worker processes: what they are told for themselves alone, and what the user finds in it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ringloader import FactorySpec, Loader
from ringloader._runtime import environment
from ringloader._runtime.environment import Environment, past_caches_nbytes
from tests.runtime.process_datasets import Facts
from tests.runtime.test_template import AFTER_IT, BEFORE_TORCH

_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
_OTHER = "glibc.malloc.check=0"
_LINKER = Path("/lib64/ld-linux-x86-64.so.2")

only_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the tunable is one of x86")


@pytest.mark.parametrize(
    ("batch_size", "nbytes"),
    [
        (0, 0),
        (1, 0),
        (3, 0),
        (4, 4 << 20),
        (16, 1 << 20),
        (32, 512 << 10),
        (64, 256 << 10),
        (100, 167772),
        (128, 128 << 10),
        (10**9, 128 << 10),
    ],
)
@only_x86
def test_size_of_rows_follows_from_the_batch(batch_size: int, nbytes: int) -> None:
    """Rows that make a batch of 16 MiB, within bounds; nothing is set where few rows make a batch."""
    assert past_caches_nbytes(batch_size) == nbytes


def test_other_machines_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tunable is of x86."""
    uname = os.uname()
    monkeypatch.setattr(os, "uname", lambda: type(uname)([*uname[:4], "aarch64"]))
    assert past_caches_nbytes(64) == 0
    assert environment.TUNABLES not in {k: v for k, v in Environment(0, 64).now().items() if k not in os.environ}


@only_x86
@pytest.mark.skipif(not _LINKER.exists(), reason="another C library")
@pytest.mark.parametrize("batch_size", [16, 64, 4096])
@pytest.mark.parametrize("given", [None, _OTHER])
def test_the_c_library_takes_the_size(batch_size: int, given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc drops what is out of its bounds or misspelt, without a word; this is what it says that it took."""
    monkeypatch.delenv(environment.TUNABLES, raising=False)
    if given is not None:
        monkeypatch.setenv(environment.TUNABLES, given)
    told = subprocess.run([_LINKER, "--list-tunables"], env=Environment(0, batch_size).now(), capture_output=True, text=True)
    if told.returncode:
        pytest.skip("this glibc does not list its tunables")
    found = re.search(rf"^{re.escape(_TUNABLE)}: (0x[0-9a-f]+)", told.stdout, re.MULTILINE)
    assert found is not None
    assert int(found[1], 16) == past_caches_nbytes(batch_size)


@only_x86
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("given", [None, "", _OTHER, f"{_TUNABLE}=0x100000", f"{_OTHER}:{_TUNABLE}=0x100000"])
def test_workers_are_told_and_the_users_code_finds_its_own(
    is_split: bool, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process begins with the size, unless the user has set one; `os.environ` there, and with it any child, is as here."""
    monkeypatch.delenv(environment.TUNABLES, raising=False)
    if given is not None:
        monkeypatch.setenv(environment.TUNABLES, given)
    if not is_split:
        monkeypatch.setenv("RINGLOADER_TEMPLATE", "0")
    with Loader(FactorySpec(Facts, 64), batch_size=64, num_workers=1, output="numpy") as loader:
        began, found, childs = loader.call("tunables")[0]
        if _TUNABLE in (given or ""):
            assert began == given
        else:
            assert began == f"{given}:{_TUNABLE}=0x40000" if given else f"{_TUNABLE}=0x40000"
        assert [found, childs] == [given or None] * 2
        assert not [
            name for name in loader.call("facts")[0]["environment"] if "TUNABLES" in name and name != environment.TUNABLES
        ]
    assert os.environ.get(environment.TUNABLES) == given
    assert not [name for name in os.environ if name.startswith("RINGLOADER_GIVEN")]


@only_x86
def test_worker_that_begins_again_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Becoming a fresh interpreter changes nothing of it."""
    monkeypatch.delenv(environment.TUNABLES, raising=False)
    first, name = "begins_before_torch", "begins_again"
    (tmp_path / f"{first}.py").write_text(BEFORE_TORCH)
    (tmp_path / f"{name}.py").write_text(AFTER_IT.format(first=first) + "\nfrom tests.runtime.process_datasets import Facts\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, first, ModuleType(first))
    with Loader(FactorySpec(importlib.import_module(name).Facts, 64), batch_size=64, num_workers=1) as loader:
        assert loader.call("tunables") == [[f"{_TUNABLE}=0x40000", None, None]]


@pytest.mark.parametrize("size", ["64", None, -1, True, RuntimeError()])
def test_batch_sampler_that_says_nothing_sensible_is_no_error(size: object) -> None:
    """What it says of its size is a hint, and it need say nothing."""

    class Batches(list):  # type: ignore[type-arg]
        @property
        def batch_size(self) -> object:
            if isinstance(size, Exception):
                raise size
            return size

    with Loader(FactorySpec(Facts, 4), batch_sampler=Batches([[0, 1], [2, 3]]), num_workers=1, output="numpy") as loader:
        assert [indices.tolist() for _, indices in loader] == [[0, 1], [2, 3]]
        assert environment.TUNABLES in os.environ or loader.call("tunables")[0][0] is None


@only_x86
def test_batch_sampler_of_torch_says_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's does."""
    from torch.utils.data import BatchSampler, SequentialSampler

    monkeypatch.delenv(environment.TUNABLES, raising=False)
    sampler = BatchSampler(SequentialSampler(range(64)), 32, drop_last=False)
    with Loader(FactorySpec(Facts, 64), batch_sampler=sampler, num_workers=1, output="numpy") as loader:
        assert loader.call("tunables")[0][0] == f"{_TUNABLE}=0x80000"
