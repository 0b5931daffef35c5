"""What was found to go wrong with shared data, each once."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import socket
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringloader import ArrayDataset, ConfigError, FactorySpec, Loader, LoaderTimeoutError, SharedArrays, SharedRecords
from ringloader._runtime import named
from ringloader.sharing import leftovers, remove_leftovers
from tests.runtime.conftest import num_descriptors
from tests.runtime.sharing_datasets import Get, InPlace, Many
from tests.runtime.test_sharing import name

__all__ = ["name"]  # the fixture

_X = np.arange(32, dtype=np.float32).reshape(8, 4)


def seen(array: Any, num_workers: int = 1) -> tuple[bytes, str]:
    """Bytes and dtype of an array as a worker has it."""
    with Loader(Get(array), batch_size=1, num_workers=num_workers, output="numpy", worker_backend="process") as loader:
        (batch,) = list(loader)
    return batch["bytes"].tobytes(), batch["dtype"][0]


def in_child(act: Any) -> int:
    """Run something in a forked child; its exit code, 0 when it did not raise."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_child_forked_inside_a_builder_has_memory_of_its_own(name: str, tmp_path: Path) -> None:
    """What it shares goes nowhere near files that it has open."""
    precious = tmp_path / "precious"
    precious.write_text("precious data " * 10)

    def share() -> None:
        files = [os.open(precious, os.O_RDWR) for _ in range(8)]
        assert SharedRecords([1, 2, 3])[2] == 3
        assert (SharedArrays({"x": _X})["x"] == _X).all()
        assert len(files) == 8

    def build() -> dict[str, Any]:
        assert in_child(share) == 0
        return {"x": _X}

    with SharedArrays.attach_or_build(name, build) as arrays:
        assert (arrays["x"] == _X).all()
    assert precious.read_text() == "precious data " * 10


def test_child_forked_inside_a_builder_that_raises_takes_nothing_away(name: str) -> None:
    """It leaves through the parent's code, and the parent's half-built segment and lock are still there."""

    def build() -> SharedArrays:
        made = SharedArrays.empty({"x": (_X.shape, "float32")})
        pid = os.fork()
        if pid == 0:
            raise InterruptedError("in the child")
        os.waitpid(pid, 0)
        made["x"][...] = _X
        assert {f"{path}.partial", f"{path}.lock"} <= {f"/dev/shm/{entry}" for entry in os.listdir("/dev/shm")}
        return made

    path, parent = named.path_of(name), os.getpid()
    try:
        arrays = SharedArrays.attach_or_build(name, build)
    except InterruptedError:
        assert os.getpid() != parent
        os._exit(0)
    with arrays:
        assert (arrays["x"] == _X).all()
    assert (SharedArrays.attach(name)["x"] == _X).all()


def test_forked_child_sends_the_right_memory(name: str) -> None:
    """Of a name that its parent attached, while it attaches others itself; their locks are its own."""
    with SharedArrays.attach_or_build(name, lambda: {"x": _X}) as arrays:

        def act() -> None:
            with SharedArrays.attach_or_build(f"{name}-b", lambda: {"x": _X + 1}) as other:
                assert seen(arrays["x"])[0] == _X.tobytes()
                assert seen(other["x"])[0] == (_X + 1).tobytes()
                arrays.close()
                gc.collect()
                assert [one.is_used for one in leftovers() if one.name == f"{name}-b"] == [True]
                assert remove_leftovers(f"{name}-b") == []

        assert in_child(act) == 0
    assert remove_leftovers(f"{name}-b") == [f"{name}-b"]


def test_forked_child_sends_what_has_no_name_and_leaves_no_descriptor(name: str) -> None:
    """Ranks that are forked read what their parent made; what a child finds again by name is closed with its object."""
    unnamed = SharedArrays({"x": _X})
    with SharedArrays.attach_or_build(name, lambda: {"x": _X + 1}) as arrays:

        def act() -> None:
            assert seen(unnamed["x"])[0] == _X.tobytes()
            before = num_descriptors()
            for _ in range(2):
                assert seen(arrays["x"])[0] == (_X + 1).tobytes()
            assert num_descriptors() <= before + 1
            arrays.close()
            gc.collect()
            assert num_descriptors() <= before

        assert in_child(act) == 0
    assert seen(unnamed["x"])[0] == _X.tobytes()


def test_object_that_a_builder_made_and_did_not_return_stays_what_it_is(name: str) -> None:
    """It owns its memory, whatever comes to lie under the name, and when the builder raises, too."""
    kept: list[SharedArrays] = []

    def build() -> dict[str, Any]:
        made = SharedArrays.empty({"x": ((5,), "int32")})
        made["x"][...] = 7
        kept.append(made)
        if len(kept) == 1:
            raise OSError("not yet")
        return {"x": np.arange(3)}

    with pytest.raises(OSError, match="not yet"):
        SharedArrays.attach_or_build(name, build)
    with SharedArrays.attach_or_build(name, build) as arrays:
        assert (arrays["x"] == np.arange(3)).all()
        for one in kept:
            assert seen(one["x"])[0] == np.full(5, 7, np.int32).tobytes()
    kept.clear()
    del one


def test_fields_of_structured_rows_are_kept(tmp_path: Path) -> None:
    """Of a mapped file and of a view of shared memory."""
    dtype = np.dtype([("a", "<i4"), ("b", "<f4")])
    rows = np.array([(1, 2.5), (3, 4.5)], dtype)
    rows.tofile(tmp_path / "rows")
    assert seen(np.memmap(tmp_path / "rows", dtype, "r")) == (rows.tobytes(), str(dtype))
    arrays = SharedArrays({"x": np.arange(8, dtype="i4").reshape(2, 4)})
    assert seen(arrays["x"].view(dtype)) == (np.arange(8, dtype="i4").tobytes(), str(dtype))


class Mine(np.memmap):
    """A memmap with a habit of its own."""


@pytest.mark.parametrize("change", ["replaced", "unlinked", "by descriptor", "changed directory", "a subclass"])
def test_file_that_its_name_does_not_lead_to_is_sent(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have what the trainer has mapped, whatever is at that path now."""
    path = tmp_path / "rows"
    _X.tofile(path)
    array: Any
    if change == "changed directory":
        monkeypatch.chdir(tmp_path)
        array = np.memmap("rows", "f4", "r")
        monkeypatch.chdir("/")
    elif change == "by descriptor":
        with open(path, "rb") as file:
            array = np.memmap(f"/dev/fd/{file.fileno()}", "f4", "r")
    elif change == "a subclass":
        array = np.memmap(path, "f4", "r").view(Mine)
    else:
        array = np.memmap(path, "f4", "r")
    if change == "replaced":
        (tmp_path / "new").write_bytes(bytes(_X.nbytes))
        os.replace(tmp_path / "new", path)
    elif change == "unlinked":
        path.unlink()
    assert seen(array)[0] == _X.tobytes()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_transforms_in_place_over_a_mapped_file_work_and_stay_in_the_worker(mode: Any, tmp_path: Path) -> None:
    """No SIGSEGV, no read-only error, no change of the file."""
    path = tmp_path / "rows"
    _X.tofile(path)
    rows = np.memmap(path, "f4", mode, shape=_X.shape)
    with Loader(InPlace(rows), batch_size=8, num_workers=1) as loader:
        (batch,) = list(loader)
    assert torch.equal(batch, torch.from_numpy(_X + 1))
    assert path.read_bytes() == _X.tobytes()


def test_tensors_over_read_only_memory_write_to_their_own_process() -> None:
    """torch has no read-only tensors: what is written is nobody else's, and ends nobody."""
    arrays = SharedArrays({"x": torch.ones(8, 4, dtype=torch.bfloat16)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Loader(InPlace(arrays["x"]), batch_size=8, num_workers=1) as loader:
            assert [batch.mean().item() for batch in loader] == [2.0]
        tensor = arrays["x"]
    tensor[0] = 99
    assert (
        seen(arrays["x"].view(torch.int16).numpy(), 1)[0]
        == torch.ones(8, 4, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
    )


def test_read_only_view_of_writable_arrays_stays_read_only() -> None:
    """As the trainer has marked it."""
    arrays = SharedArrays({"x": _X}, writable=True)
    view = arrays["x"][2:4]
    view.flags.writeable = False
    kind, *rest = pickled_reduction(view)
    assert rest[-1] is False
    assert kind.__name__ == "view_of"


def pickled_reduction(array: Any) -> tuple[Any, ...]:
    from ringloader._specs.handles import holder_of, view_of

    held = holder_of(array)
    assert held is not None
    holder, offset = held
    return view_of, type(holder), holder.token, offset, array.shape, array.strides, array.dtype, array.flags.writeable


@pytest.mark.parametrize("wrap", [lambda value: (value,), lambda value: frozenset([value])])
def test_records_nested_too_deep_are_refused_and_not_a_crash(wrap: Any) -> None:
    """Unpacking each level takes stack of C."""
    value: Any = 1
    for _ in range(60):
        value = wrap(value)
    assert SharedRecords([value])[0] == value
    for _ in range(200):
        value = wrap(value)
    with pytest.raises(ConfigError, match="record 0 cannot be packed"):
        SharedRecords([value])


def test_closed_object_is_in_nobodys_way() -> None:
    """Other data can be sent, and what was taken from it before, as any other array."""
    arrays = SharedArrays({"x": _X})
    view = arrays["x"]
    arrays.close()
    with Loader(ArrayDataset(np.arange(40).reshape(20, 2)), batch_size=20, num_workers=1, output="numpy") as loader:
        assert len(list(loader)) == 1
    assert seen(view)[0] == _X.tobytes()


def test_many_views_cost_one_mapping(tmp_path: Path) -> None:
    """2,000 views in a worker: no descriptor for each, no second to start."""
    arrays = SharedArrays({f"k{k}": np.full(3, k) for k in range(2000)})
    with Loader(Many([arrays[key] for key in arrays]), batch_size=8, num_workers=1, output="numpy") as loader:
        ((fds, totals),) = list(loader)
    assert (totals == sum(range(2000))).all()
    assert fds.max() < 40


def test_file_locked_by_a_stopped_process_is_waited_for_with_an_end(name: str) -> None:
    """`timeout_s` holds there, too."""
    SharedArrays.attach_or_build(name, lambda: {"x": _X}).close()
    fd = os.open(named.path_of(name), os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(LoaderTimeoutError, match="has locked"):
        SharedArrays.attach_or_build(name, dict, timeout_s=0.2)
    os.close(fd)
    assert (SharedArrays.attach(name)["x"] == _X).all()


def test_builds_that_fail_leave_no_lock_file(name: str) -> None:
    """Nor does a layout that is refused: before the segment has its name."""
    for build, layout in ((lambda: 1 / 0, None), (lambda: {"x": _X}, {"x": ((9, 9), "float32")})):
        with pytest.raises((ZeroDivisionError, ConfigError)):
            SharedArrays.attach_or_build(name, build, layout=layout)
        assert [entry for entry in os.listdir("/dev/shm") if name in entry] == []
    with pytest.raises(ConfigError, match="layout of 'x'"):
        SharedArrays.attach_or_build(name, lambda: pytest.fail("built"), layout={"x": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("odd", ["link", "folder", "socket", "fifo", "name"])
def test_odd_entries_do_not_hide_the_others(odd: str, name: str) -> None:
    """leftovers and remove_leftovers pass them by; attaching such a one is a ConfigError that names it."""
    path = Path(named.path_of(f"{name}-odd" if odd != "name" else f"{name} odd"))
    if odd == "link":
        path.symlink_to("/etc/hostname")
    elif odd == "folder":
        path.mkdir()
    elif odd == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif odd == "fifo":
        os.mkfifo(path)
    else:
        path.touch()
    try:
        SharedArrays.attach_or_build(name, lambda: {"x": _X}).close()
        assert [one.name for one in leftovers() if one.name.startswith(name)] == [name]
        if odd != "name":
            with pytest.raises(ConfigError, match=r"cannot be used: .*; use another name"):
                SharedArrays.attach_or_build(f"{name}-odd", dict, timeout_s=1)
        assert remove_leftovers(name) == [name]
    finally:
        path.rmdir() if odd == "folder" else path.unlink()


def test_refused_loaders_leak_nothing() -> None:
    """Neither the dataset's bytes nor descriptors."""
    many: list[Any] = [SharedRecords([k]) for k in range(101)]
    before = num_descriptors()
    for _ in range(3):
        with pytest.raises(ConfigError, match="101 objects"):
            Loader(Get([np.zeros(1 << 20), many]), num_workers=1)
    assert num_descriptors() == before


def test_few_records_need_little_room() -> None:
    """Under a limit on file sizes of 1 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert SharedRecords([1, 2])[1] == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SharedRecords(3), "records is a int"),  # type: ignore[arg-type]
        (lambda: SharedRecords({"a": 1}), "records is a dict"),
        (lambda: SharedRecords("abc"), "records is a str"),
        (lambda: SharedArrays.from_rows([1]), "row 0 is a int"),  # type: ignore[list-item]
        (lambda: SharedArrays.from_rows([{"a": 1}, 2]), "row 1 is a int"),  # type: ignore[list-item]
        (lambda: SharedArrays.empty({1: ((2,), "f8")}), "layout is"),  # type: ignore[dict-item]
        (lambda: SharedArrays.empty({"x": ((0, 1 << 62), "f8")}), "layout of 'x'"),
        (lambda: SharedArrays.attach_or_build("n", 3), "builder is 3"),  # type: ignore[arg-type]
        (lambda: SharedArrays.attach_or_build("n", dict, timeout_s="3"), "timeout_s is '3'"),  # type: ignore[arg-type]
        (lambda: SharedArrays.attach_or_build("n", dict, version="v" * 300), "version is"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Any, words: str) -> None:
    """Before anything is built."""
    with pytest.raises(ConfigError, match=words):
        make()


def test_spec_of_shared_arrays_survives_forks_and_closes() -> None:
    """A loader holds descriptors of its own: replacements are started after the object is closed."""
    arrays = SharedArrays({"x": _X})
    with Loader(FactorySpec(Get, arrays["x"]), batch_size=1, num_workers=1, output="numpy") as loader:
        arrays.close()
        assert [batch["bytes"].tobytes() for batch in loader] == [_X.tobytes()]
