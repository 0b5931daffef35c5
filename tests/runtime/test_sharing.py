"""Data that all processes of a machine share, with real processes that die in the middle."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringloader import (
    ArrayDataset,
    ClosedError,
    ConfigError,
    FactorySpec,
    Loader,
    LoaderTimeoutError,
    SharedArrays,
    SharedRecords,
)
from ringloader._runtime import named
from ringloader.sharing import leftovers, remove_leftovers
from tests.runtime.conftest import wait_until
from tests.runtime.running import ROOT, line_of, may, run, running
from tests.runtime.sharing_datasets import Over, OwnArray, OwnMemmap, Writes

_X = np.arange(100 * 8, dtype=np.float32).reshape(100, 8)
_Y = np.arange(100)


@pytest.fixture
def name() -> Iterator[str]:
    """A name of this test's own; nothing of it is left."""
    chosen = f"test-{uuid.uuid4().hex[:12]}"
    yield chosen
    gc.collect()
    remove_leftovers(chosen)
    left = [entry for entry in os.listdir("/dev/shm") if chosen in entry]
    assert left == []


def shared(**options: Any) -> SharedArrays:
    return SharedArrays({"x": _X, "y": _Y}, **options)


# --- without a name -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", ["spec", "plain", "array dataset"])
def test_shared_arrays_and_records_reach_workers_as_they_are(how: str, num_workers: int) -> None:
    """As arguments of a spec, inside a plain dataset, and as an ArrayDataset."""
    arrays, records = shared(), SharedRecords([{"n": 3 * i} for i in range(100)])
    dataset: Any = FactorySpec(Over, arrays, records) if how == "spec" else Over(arrays, records)
    dataset = ArrayDataset(arrays) if how == "array dataset" else dataset
    with Loader(dataset, batch_size=10, num_workers=num_workers, output="numpy") as loader:
        for k, batch in enumerate(loader):
            rows = slice(10 * k, 10 * k + 10)
            assert (batch["x"] == _X[rows]).all()
            assert (batch["y"] == _Y[rows]).all()
            assert how == "array dataset" or (batch["n"] == 3 * _Y[rows]).all()


def test_shared_arrays_are_sent_by_descriptor_a_few_bytes_on_the_wire() -> None:
    """The spec of 40 MB is small, and so is the pickle of a dataset that keeps views of them."""
    arrays = SharedArrays({"x": np.zeros((10_000, 1000), np.float32), "y": np.zeros(10_000)})
    assert len(FactorySpec(Over, arrays).to_wire()) < 500
    from ringloader.factory import pickle_dataset

    pickled = pickle_dataset(Over(arrays))
    assert pickled.nbytes < 1000
    assert pickled.buffers == []
    assert pickled.handles == (arrays,)


def test_shared_arrays_cost_each_worker_nothing() -> None:
    """64 MB that every worker reads are in no worker's private memory."""
    arrays = SharedArrays({"x": np.ones((4096, 4096), np.float32), "y": np.zeros(4096)})
    with Loader(FactorySpec(Over, arrays), batch_size=64, num_workers=2, output="numpy") as loader:
        for _ in loader:
            pass
        from ringloader._runtime.memory import private_nbytes

        assert max(map(private_nbytes, loader.stats().worker_pids)) < 48 << 20


@pytest.mark.parametrize("writable", [False, True])
def test_read_only_arrays_refuse_writing_and_writable_ones_are_seen_by_all(writable: bool) -> None:
    """In workers and here; a writable array is a cache that all fill."""
    arrays = shared(writable=writable)
    with Loader(FactorySpec(Writes, arrays), batch_size=10, num_workers=2, output="numpy") as loader:
        written = np.concatenate(list(loader))
    assert (written == int(writable)).all()
    assert (arrays["x"][:, 0] == (_Y + 1000 if writable else _X[:, 0])).all()
    if not writable:
        with pytest.raises(ValueError, match="read-only"):
            arrays["x"][0] = 1


def test_empty_arrays_are_filled_in_place() -> None:
    """Nothing is copied; workers see what was filled in before they started, and later."""
    arrays = SharedArrays.empty({"x": ((100, 8), "float32"), "y": ((100,), np.int64)})
    arrays["x"][...] = _X
    arrays["y"][...] = _Y
    with Loader(FactorySpec(Over, arrays), batch_size=100, num_workers=1, output="numpy") as loader:
        (batch,) = list(loader)
    assert (batch["x"] == _X).all()


def test_arrays_from_rows_and_what_rows_may_not_be() -> None:
    """Rows of a generator with a length; rows that differ, too few, too many are refused by place."""
    made = SharedArrays.from_rows(({"x": _X[i], "y": i} for i in range(100)), 100)
    assert (made["x"] == _X).all()
    assert (made["y"] == _Y).all()
    assert not made["x"].flags.writeable
    rows: list[dict[str, Any]] = [{"x": _X[i]} for i in range(5)]
    for wrong, words in (([*rows, {"x": _X[0, :4]}], "row 5 has 'x' of shape"), ([*rows, {"z": 1}], "row 5 has the names")):
        with pytest.raises(ConfigError, match=words):
            SharedArrays.from_rows(wrong)
    with pytest.raises(ConfigError, match="there are 5 rows, and length=6"):
        SharedArrays.from_rows(iter(rows), 6)
    with pytest.raises(ConfigError, match="more than 4 rows"):
        SharedArrays.from_rows(iter(rows), 4)
    with pytest.raises(ConfigError, match="give length="):
        SharedArrays.from_rows(iter(rows))


def test_tensors_of_every_dtype_come_back_as_they_went() -> None:
    """bfloat16 too, as a tensor over the shared memory."""
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b": torch.tensor(3.5),
        "c": torch.zeros(0, 4),
        "d": torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
    }
    made = SharedArrays(tensors)
    assert torch.equal(made["a"], tensors["a"])
    for key in "bcd":
        assert torch.equal(torch.from_numpy(made[key].copy()), tensors[key])


@pytest.mark.parametrize("arrays", [{}, {"x": ["text"]}, {"x": np.array(["a"])}, {1: _X}, _X])
def test_what_no_tensor_holds_is_refused(arrays: Any) -> None:
    """By name."""
    with pytest.raises(ConfigError, match="arra"):
        SharedArrays(arrays)


def test_views_outlive_close_and_the_memory_goes_with_the_last() -> None:
    """A closed object gives nothing new; what was taken from it stays; no descriptor is left."""
    arrays, records = shared(), SharedRecords(["a", "b"])
    view = arrays["x"][5:7]
    arrays.close()
    records.close()
    arrays.close()
    assert (view == _X[5:7]).all()
    uses: list[Callable[[], Any]] = [lambda: arrays["x"], lambda: records[0]]
    for use in uses:
        with pytest.raises(ClosedError, match="was closed"):
            use()
    with pytest.raises(ClosedError, match="cannot be sent"):
        Loader(FactorySpec(Over, arrays), num_workers=1)


def test_workers_keep_the_memory_when_the_maker_lets_go() -> None:
    """The loader holds what its dataset refers to; replacements get it, too."""
    spec = FactorySpec(Over, shared())
    gc.collect()
    with Loader(spec, batch_size=10, num_workers=1, output="numpy") as loader:
        del spec
        gc.collect()
        iterator = iter(loader)
        next(iterator)
        os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
        assert sum(len(batch["y"]) for batch in iterator) == 90


def test_other_processes_are_told_how_to_get_it() -> None:
    """Plain pickling is refused with what to do."""
    for value in (shared(), SharedRecords([1])):
        with pytest.raises(TypeError, match="attach_or_build"):
            pickle.dumps(value)


def test_too_many_shared_objects_are_refused_early() -> None:
    """One message carries their descriptors."""
    many = [SharedRecords([k]) for k in range(101)]
    with pytest.raises(ConfigError, match="101 objects in shared memory, of 100 at most"):
        Loader(FactorySpec(Over, many), num_workers=1)


def test_writes_to_a_plain_dataset_stay_in_that_worker() -> None:
    """Its arrays are mapped privately: the trainer's own copy and other workers' see nothing."""
    dataset = OwnArray(64)
    with Loader(dataset, batch_size=8, num_workers=2, output="numpy") as loader:
        for _ in range(2):
            assert all((batch >= 1).all() for batch in loader)
        own = [pid for pid in loader.stats().worker_pids]  # noqa: C416
        assert len(own) == 2
    assert (dataset.rows == 0).all()


def test_memmap_inside_a_plain_dataset_is_mapped_anew_and_not_sent(tmp_path: Path) -> None:
    """The file's bytes do not go through the pickle."""
    path = tmp_path / "rows.npy"
    np.save(path, _X)
    from ringloader.factory import pickle_dataset

    assert pickle_dataset(OwnMemmap(str(path))).buffers == []
    with Loader(OwnMemmap(str(path)), batch_size=10, num_workers=1, output="numpy") as loader:
        rows, kept = zip(*loader, strict=True)
    assert (np.concatenate(rows) == _X).all()
    assert np.concatenate(kept).all()


# --- records ------------------------------------------------------------------------------------------------------------------


def test_records_are_a_sequence_of_what_went_in() -> None:
    """Types kept, negative indices, slices, iteration, numpy integers; IndexError outside."""
    given = [{"a": 1, "b": (2, "x")}, [1, b"bytes", None], "text", 2**70, 1.5, {"t": np.float32(1)}, True]
    records = SharedRecords(given)
    assert list(records) == given
    assert [type(record) for record in records] == [type(record) for record in given]
    assert records[-1] is True
    assert records[np.int64(2)] == "text"  # type: ignore[call-overload]
    assert records[1:4] == given[1:4]
    assert records[::-2] == given[::-2]
    assert len(records) == 7
    for index in (7, -8):
        with pytest.raises(IndexError):
            records[index]
    assert list(SharedRecords([])) == []
    assert list(SharedRecords(str(k) for k in range(3))) == ["0", "1", "2"]


def test_record_that_cannot_be_packed_is_named_by_its_place() -> None:
    """And nothing is left of the others."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"record 2 cannot be packed: builtins\.object"):
        SharedRecords([1, 2, object()])
    assert len(os.listdir("/proc/self/fd")) == before


def test_records_of_many_megabytes_are_whole() -> None:
    """Beyond one chunk of the writer; a record larger than a chunk, too."""
    given = [bytes([k % 256]) * (1 << 20) for k in range(20)] + [b"y" * (20 << 20), b""]
    records = SharedRecords(given)
    assert all(records[k] == one for k, one in enumerate(given))


# --- with a name -------------------------------------------------------------------------------------------------------------


def test_name_is_built_once_and_attached_from_then_on(name: str) -> None:
    """The second call does not call its builder; another version, kind, layout is refused by name."""
    first = SharedArrays.attach_or_build(name, lambda: {"x": _X})
    second = SharedArrays.attach_or_build(name, lambda: pytest.fail("built twice"))
    assert (second["x"] == _X).all()
    assert second["x"].flags.writeable is False
    assert os.stat(named.path_of(name)).st_mode & 0o777 == 0o600
    assert f".{os.geteuid()}." in named.path_of(name)
    with pytest.raises(ConfigError, match="built as version '', not 'v2'"):
        SharedArrays.attach_or_build(name, dict, version="v2")
    with pytest.raises(ConfigError, match="holds arrays, not records"):
        SharedRecords.attach_or_build(name, list)
    with pytest.raises(ConfigError, match=r"holds .*and .* is expected"):
        SharedArrays.attach_or_build(name, dict, layout={"x": ((100, 9), "float32")})
    third = SharedArrays.attach_or_build(name, dict, layout={"x": ((100, 8), "float32")})
    assert (SharedArrays.attach(name)["x"] == _X).all()
    for one in (first, second, third):
        one.close()


def test_what_the_builder_makes_lies_in_its_place_at_once(name: str) -> None:
    """`empty` in the builder is the segment itself; an intermediate one is not, and stays readable."""
    places: list[int] = []

    def build() -> SharedArrays:
        made = SharedArrays.empty({"x": (_X.shape, "float32")})
        places.append(os.fstat(made.fileno()).st_ino)
        made["x"][...] = _X
        return made

    with SharedArrays.attach_or_build(name, build) as arrays:
        assert os.fstat(arrays.fileno()).st_ino == places[0]
        assert (arrays["x"] == _X).all()
    remove_leftovers(name)

    def build_from_another() -> dict[str, Any]:
        scratch = SharedArrays.empty({"z": ((100, 16), "float32")})
        scratch["z"][:, :8] = _X
        return {"x": scratch["z"][:, :8]}

    with SharedArrays.attach_or_build(name, build_from_another) as arrays:
        assert (arrays["x"] == _X).all()


def test_builder_that_raises_leaves_nothing_and_the_next_builds(name: str) -> None:
    """Its exception comes through."""

    def fail() -> Any:
        SharedArrays.empty({"x": ((10,), "int64")})
        raise OSError("the file server is away")

    with pytest.raises(OSError, match="the file server is away"):
        SharedArrays.attach_or_build(name, fail)
    assert [one for one in leftovers() if one.name == name] == []
    with SharedRecords.attach_or_build(name, lambda: [{"n": 1}]) as records:
        assert records[0] == {"n": 1}


def test_builder_may_build_another_name_but_not_its_own(name: str) -> None:
    """One inside the other is fine; itself is refused, instead of waiting for itself."""

    def build() -> SharedArrays:
        with SharedRecords.attach_or_build(f"{name}-inner", lambda: [{"n": k} for k in range(100)]) as inner:
            made = SharedArrays.empty({"x": ((100,), "int64")})
            made["x"][...] = [record["n"] for record in inner]
            return made

    with SharedArrays.attach_or_build(name, build) as arrays:
        assert (arrays["x"] == _Y).all()
    assert remove_leftovers(f"{name}-inner", name) == [f"{name}-inner", name]
    with pytest.raises(ConfigError, match=r"asks for .* itself"):
        SharedArrays.attach_or_build(name, lambda: SharedArrays.attach_or_build(name, dict))


_BUILDER = """
import sys, time
import numpy as np
from ringloader import SharedArrays
def build():
    print("building", flush=True)
    made = SharedArrays.empty({"x": ((1000, 1000), "float32")})
    made["x"][:500] = 1
    if sys.argv[2] == "slow":
        time.sleep(60)
    if sys.argv[2] == "pause":
        time.sleep(0.5)
    made["x"][...] = 7
    return made
arrays = SharedArrays.attach_or_build(sys.argv[1], build)
print("attached", float(arrays["x"].sum()), flush=True)
sys.stdin.read() if False else time.sleep(float(sys.argv[3]))
"""


def test_builder_killed_half_way_is_followed_by_the_next(name: str, tmp_path: Path) -> None:
    """kill -9 in the middle: the lock goes with it, its half is never read, the next builds all of it."""
    with running(tmp_path, _BUILDER, name, "slow", "0") as process:
        assert line_of(process) == "building"
        waiting = threading.Thread(target=lambda: found.append(SharedArrays.attach_or_build(name, lambda: {"x": _X})))
        found: list[SharedArrays] = []
        waiting.start()
        time.sleep(0.1)
        assert not found
        assert [(one.name, one.kind, one.is_used) for one in leftovers() if one.name == name] == [(name, "unfinished", True)]
        process.kill()
        waiting.join(20)
    assert (found[0]["x"] == _X).all()
    found[0].close()


def test_two_builders_at_once_are_one(name: str, tmp_path: Path) -> None:
    """Four processes, one builds, all have the same."""
    with running(tmp_path, _BUILDER, name, "pause", "0") as first, running(tmp_path, _BUILDER, name, "pause", "0") as second:
        outputs = [process.communicate(timeout=30)[0] for process in (first, second)]
    assert "".join(outputs).count("building") == 1
    assert all("attached 7000000.0" in output for output in outputs)


def test_waiting_for_a_builder_has_an_end(name: str, tmp_path: Path) -> None:
    """`timeout_s` is an error that says how long and for what."""
    with running(tmp_path, _BUILDER, name, "slow", "0") as process:
        assert line_of(process) == "building"
        with pytest.raises(LoaderTimeoutError, match=rf"has been building '{name}' for .*timeout_s=0.3"):
            SharedArrays.attach_or_build(name, dict, timeout_s=0.3)


def test_attached_process_that_is_killed_uses_nothing_any_more(name: str, tmp_path: Path) -> None:
    """In use while it lives, whoever built it; removed only when nobody uses it."""
    with running(tmp_path, _BUILDER, name, "quick", "60") as process:
        assert line_of(process) == "building"
        assert line_of(process).startswith("attached")
        assert [one.is_used for one in leftovers() if one.name == name] == [True]
        assert remove_leftovers(name) == []
        with SharedArrays.attach(name) as arrays:
            process.kill()
            process.wait()
            assert [one.is_used for one in leftovers() if one.name == name] == [True]
            assert remove_leftovers(name) == []
            assert float(arrays["x"].sum()) == 7e6
        assert wait_until(lambda: [one.is_used for one in leftovers() if one.name == name] == [False])
    assert remove_leftovers(name) == [name]
    with pytest.raises(ConfigError, match="nothing was built"):
        SharedArrays.attach(name)


def test_workers_count_as_users_and_end_with_a_killed_parent(name: str, tmp_path: Path) -> None:
    """kill -9 of a trainer with workers: nobody uses the name any more, and what was built is still whole."""
    source = (
        "import sys, time\nimport numpy as np\nfrom ringloader import FactorySpec, Loader, SharedArrays\n"
        "from tests.runtime.sharing_datasets import Over\n"
        "arrays = SharedArrays.attach_or_build(sys.argv[1], lambda: {'x': np.ones((64, 8)), 'y': np.arange(64)})\n"
        "loader = Loader(FactorySpec(Over, arrays), batch_size=8, num_workers=2, output='numpy')\n"
        "iterator = iter(loader)\nnext(iterator)\narrays.close()\nprint('reading', flush=True)\ntime.sleep(60)\n"
    )
    with running(tmp_path, source, name) as process:
        assert line_of(process) == "reading"
        assert [one.is_used for one in leftovers() if one.name == name] == [True]
        process.kill()
        process.wait()
        assert wait_until(lambda: [one.is_used for one in leftovers() if one.name == name] == [False])
    with SharedArrays.attach(name) as arrays:
        assert (arrays["y"] == np.arange(64)).all()


def test_forked_child_is_no_user(name: str) -> None:
    """Its copy of the lock is closed: a child that lives on does not keep the name in use."""
    arrays = SharedArrays.attach_or_build(name, lambda: {"x": _X})
    view = arrays["x"]
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_fd)
        os.read(read_fd, 1)
        os._exit(0 if (view == _X).all() else 1)
    os.close(read_fd)
    arrays.close()
    assert [one.is_used for one in leftovers() if one.name == name] == [True], "a view is a use"
    del view
    # The child lets go as soon as it runs.
    assert wait_until(lambda: [one.is_used for one in leftovers() if one.name == name] == [False])
    assert remove_leftovers(name) == [name]
    os.close(write_fd)
    assert os.waitpid(pid, 0)[1] == 0  # what it has mapped is still there


def test_attach_after_removal_builds_anew_and_old_views_stay(name: str) -> None:
    """A name taken away under a user is another segment from then on."""
    first = SharedArrays.attach_or_build(name, lambda: {"x": _X})
    os.unlink(named.path_of(name))
    with SharedArrays.attach_or_build(name, lambda: {"x": _X + 1}) as second:
        assert (second["x"] == _X + 1).all()
        assert (first["x"] == _X).all()
    first.close()


@pytest.mark.parametrize("harm", ["truncated", "grown", "other form", "facts", "empty", "text"])
def test_damaged_segment_is_refused_by_name_and_never_read(harm: str, name: str) -> None:
    """Each with what is wrong and what to do; it can be removed."""
    SharedArrays.attach_or_build(name, lambda: {"x": _X}).close()
    path = Path(named.path_of(name))
    content = bytearray(path.read_bytes())
    changed = {
        "truncated": content[:-4096],
        "grown": content + bytes(100),
        "other form": content[:8] + b"\x09" + content[9:],
        "facts": content[:40] + b"\xff" + content[41:],
        "empty": b"",
        "text": b"hello",
    }
    path.write_bytes(bytes(changed[harm]))
    uses: list[Callable[[], Any]] = [lambda: SharedArrays.attach(name), lambda: SharedArrays.attach_or_build(name, dict)]
    for use in uses:
        with pytest.raises(ConfigError, match=rf"'{name}' .*remove_leftovers"):
            use()
    assert remove_leftovers(name) == [name]


@pytest.mark.parametrize("wrong", ["", "a/b", "../x", "x" * 101, "a.partial", 3, ".x"])
def test_names_that_cannot_be_are_refused(wrong: Any) -> None:
    """Before anything is made."""
    with pytest.raises(ConfigError, match="name is"):
        SharedArrays.attach_or_build(wrong, dict)


def test_link_in_the_place_of_a_segment_is_not_followed(name: str, tmp_path: Path) -> None:
    """Somebody else's file cannot be read or written through a name in /dev/shm."""
    target = tmp_path / "file"
    target.write_text("mine")
    os.symlink(target, named.path_of(name))
    with pytest.raises((OSError, ConfigError)):
        SharedArrays.attach_or_build(name, lambda: {"x": _X}, timeout_s=1.0)
    assert target.read_text() == "mine"
    os.unlink(named.path_of(name))


def test_small_shm_is_no_obstacle_without_a_name_and_an_error_with_sizes_with_one(tmp_path: Path) -> None:
    """64 MB of /dev/shm: 100 MB go to a memfd; under a name they are refused, with needed and free bytes, and nothing stays."""
    if not may(["unshare", "-m", "true"]):
        pytest.skip("no mount namespaces here")
    source = (
        "import os, subprocess\nsubprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64m', 'tmpfs', '/dev/shm'], check=True)\n"
        "import numpy as np\nfrom ringloader import ConfigError, SharedArrays, SharedRecords\n"
        "x = np.ones((100, 1 << 17))\nassert (SharedArrays({'x': x})['x'] == 1).all()\n"
        "for build in (lambda: SharedArrays.attach_or_build('big', lambda: {'x': x}),\n"
        "              lambda: SharedRecords.attach_or_build('big', lambda: (bytes(1 << 20) for _ in range(100)))):\n"
        "    try:\n        build()\n    except ConfigError as error:\n        print(error)\n"
        "print(os.listdir('/dev/shm'))\n"
    )
    from tests.runtime.running import Program

    done = run(tmp_path, source, program=Program(prefix=("unshare", "-m")))
    assert done.stderr == ""
    first, second, left = done.stdout.splitlines()
    assert "'big' needs 100.0 MiB in /dev/shm, and 64.0 MiB are free" in first
    assert "in /dev/shm, and " in second
    assert left in ("[]", "['ringloader.0.big.lock']")


@pytest.mark.long
def test_four_ranks_build_once(name: str, tmp_path: Path) -> None:
    """Four processes started by torchrun's rules, with gloo: one copy, built once, the same for all."""
    source = (
        "import os, sys\nimport numpy as np\nimport torch.distributed as dist\n"
        "from ringloader import ArrayDataset, Loader, SharedArrays\n"
        "dist.init_process_group('gloo')\n"
        "def build():\n    print('built', flush=True)\n    return {'x': np.arange(400)}\n"
        "arrays = SharedArrays.attach_or_build(sys.argv[1], build)\n"
        "with Loader(ArrayDataset(arrays), batch_size=10, num_workers=1) as loader:\n"
        "    total = sum(int(batch['x'].sum()) for batch in loader)\n"
        "print('inode', os.fstat(arrays.fileno()).st_ino, total, flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    script = tmp_path / "ranks.py"
    script.write_text(source)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script), name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("built") == 1
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("inode")]
    assert len(lines) == 4
    assert len({line[1] for line in lines}) == 1
    assert sum(int(line[2]) for line in lines) == sum(range(400))
