"""Pitfalls of processes and the system below: stopped parents, exits, forks, limits, signal masks, facts of death."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringloader import FactorySpec, Loader, LoaderError
from ringloader._runtime import memory, segment
from ringloader._runtime.lacks import RoomError
from tests.runtime import more_case_datasets as cases
from tests.runtime.conftest import UNIT_S, wait_until
from tests.runtime.running import is_alive, line_of, run, running
from tests.runtime.sample_datasets import HangsOnce, Numbers

MIB = 1 << 20

STOPPED = """
import sys
from ringloader import FactorySpec, Loader
from tests.runtime.more_case_datasets import Slow
if __name__ == "__main__":
    with Loader(FactorySpec(Slow, 8, 0.2), batch_size=1, num_workers=2, timeout=0.7, output="numpy") as loader:
        iterator = iter(loader)
        next(iterator)
        print(*loader.stats().worker_pids, flush=True)
        sys.stdin.readline()
        print(1 + sum(1 for _ in iterator), loader.stats().num_restarts, flush=True)
"""


@pytest.mark.parametrize("who", ["parent", "everybody"])
def test_p10_time_in_which_this_process_was_stopped_is_nobodys_fault(who: str, tmp_path: Path) -> None:
    """Stopped for twice the `timeout`, alone or with its workers, the parent kills none of them when it wakes."""
    with running(tmp_path, STOPPED) as process:
        workers = [int(pid) for pid in line_of(process).split()]
        pids = [process.pid, *(workers if who == "everybody" else [])]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.4)  # the length of the stop
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        out, errors = process.communicate("\n", timeout=20 * UNIT_S)
    assert (process.returncode, out, errors) == (0, "8 0\n", "")


def test_p10_main_thread_that_holds_the_interpreter_costs_no_worker() -> None:
    """A call that keeps every other thread out for longer than `timeout` is excused; hanging workers are still found."""
    with Loader(FactorySpec(cases.Slow, 8, 0.2), batch_size=1, num_workers=2, timeout=0.6) as loader:
        iterator = iter(loader)
        next(iterator)
        ctypes.PyDLL(None).usleep(1_200_000)
        assert sum(1 for _ in iterator) == 7
        assert loader.stats().num_restarts == 0


QUIET_EXIT = """
from ringloader import FactorySpec, Loader
from tests.runtime.sample_datasets import Numbers
if __name__ == "__main__":
    loader = Loader(FactorySpec(Numbers, 400), batch_size=4, num_workers=1, output="numpy", timeout=5.0)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    print(loader.stats().worker_pids[0], flush=True)
"""


def test_p13_exit_with_a_running_thread_is_clean_ten_times_of_ten(tmp_path: Path) -> None:
    """Neither an abort nor a hang nor a word, with the loader's own thread at work."""
    for k in range(10):
        folder = tmp_path / str(k)
        folder.mkdir()
        done = run(folder, QUIET_EXIT)
        assert (done.returncode, done.stderr) == (0, "")
        assert not is_alive(int(done.stdout))


def _child(folder: Path) -> int:
    assert wait_until(lambda: (folder / "child").exists())
    return int((folder / "child").read_text())


def test_p15_death_is_noticed_while_a_grandchild_holds_the_socket(tmp_path: Path) -> None:
    """No end of file will come: the process itself is watched."""
    spec = FactorySpec(cases.LeavesChild, 40, str(tmp_path), "fork")
    with Loader(spec, batch_size=2, num_workers=1) as loader:
        began_s = time.monotonic()
        assert [int(i) for _, indices in loader for i in indices] == list(range(40))
        assert time.monotonic() - began_s < 10 * UNIT_S
        assert loader.stats().num_restarts == 1
        child = _child(tmp_path)
        assert is_alive(child)
        os.kill(child, signal.SIGKILL)
        assert wait_until(lambda: not is_alive(child))


FORKED_CHILD = """
import os, time
from ringloader import FactorySpec, Loader
from tests.runtime.sample_datasets import Numbers
if __name__ == "__main__":
    loader = Loader(FactorySpec(Numbers, 400), batch_size=4, num_workers=2, output="numpy")
    next(iter(loader))
    child = os.fork()
    if child:
        print(child, *loader.stats().worker_pids, flush=True)
    time.sleep(60)
"""


def test_p15_workers_end_with_the_parent_while_its_forked_child_lives(tmp_path: Path) -> None:
    """A child of the parent holds every socket open; the workers are gone within a second all the same."""
    with running(tmp_path, FORKED_CHILD) as process:
        child, *workers = (int(pid) for pid in line_of(process).split())
        assert len(workers) == 2
        process.kill()
        try:
            assert wait_until(lambda: not any(map(is_alive, workers)), 1.0)
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


LACKS = {
    errno.ENOSPC: "the file system for shared memory is full",
    errno.ENOMEM: "the system has no memory or mappings left",
    errno.EFBIG: r"the limit on file sizes \(ulimit -f\) is lower",
    errno.EMFILE: r"this process has no descriptors left \(ulimit -n\)",
}


@pytest.mark.parametrize("number", LACKS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_p17_lack_of_anything_is_a_sentence(number: int, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel refuses when memory is reserved comes out of `next` in words, with the size; later it may work."""
    name = "memfd_create" if number == errno.EMFILE else "posix_fallocate"
    with Loader(FactorySpec(Numbers, 64, 8192), batch_size=8, num_workers=num_workers) as loader:
        loader.start()
        with monkeypatch.context() as patch:
            patch.setattr(segment, "_open_shm", lambda nbytes: None)
            patch.setattr(os, name, _refuse(number))
            with pytest.raises(LoaderError, match=LACKS[number]) as caught:
                next(iter(loader))
            assert "260.0 KiB" in str(caught.value)
        assert sum(len(indices) for _, indices in loader) == 64


def _refuse(number: int) -> Any:
    def call(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


SMALL_FILES = """
import resource
from ringloader import FactorySpec, Loader, LoaderError
from tests.runtime.sample_datasets import Numbers
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with Loader(FactorySpec(Numbers, 64, 131072), batch_size=8, num_workers=1, output="numpy") as loader:
        try:
            next(iter(loader))
        except LoaderError as error:
            print(error)
"""


def test_p17_limit_on_file_sizes_is_named(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, under which SIGXFSZ would end other programs."""
    done = run(tmp_path, SMALL_FILES)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ulimit -f" in done.stdout


GROUPS: dict[str, tuple[dict[str, str], int]] = {
    "no group": ({}, 8000 * MIB),
    "no limit": ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/memory.max": "max\n"}, 8000 * MIB),
    "own limit": ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/memory.max": "900"}, 500 * MIB),
    "limit of an ancestor": ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/memory.max": "600"}, 200 * MIB),
    "in a container": ({"/proc/self/cgroup": "0::/host/path\n", "/sys/fs/cgroup/memory.max": "700"}, 300 * MIB),
    "smallest of all": (
        {"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/memory.max": "900", "/sys/fs/cgroup/a/memory.max": "500"},
        100 * MIB,
    ),
    "version 1": (
        {"/proc/self/cgroup": "7:cpu:/x\n5:memory:/a\n", "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "650"},
        250 * MIB,
    ),
    "used up": ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "300"}, 0),
}


@pytest.mark.parametrize("name", GROUPS)
def test_p17_limits_of_control_groups_are_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit minus usage plus what the kernel gives back, the least over all ancestors and MemAvailable, for both versions."""
    given, expected = GROUPS[name]

    def read(path: str) -> str:
        if path == "/proc/meminfo":
            return f"MemTotal: 9 kB\nMemAvailable: {8000 * 1024} kB\n"
        folder, _, leaf = path.rpartition("/")
        limit = f"{folder}/memory.limit_in_bytes" if leaf.endswith("usage_in_bytes") else f"{folder}/memory.max"
        if leaf in ("memory.current", "memory.usage_in_bytes") and limit in given:
            return str(450 * MIB)
        if leaf == "memory.stat":
            return f"anon 1\ninactive_file {50 * MIB}\ntotal_inactive_file {50 * MIB}\n"
        if path not in given:
            raise FileNotFoundError(path)
        text = given[path]
        return str(int(text) * MIB) if text.strip().isdigit() else text

    monkeypatch.setattr(memory, "_read", read)
    assert memory.available_nbytes() == expected
    if name == "used up":
        with pytest.raises(RoomError, match="are needed and 0 bytes are available"):
            segment.Segment.create(4096)


FEW_FILES = """
import resource
from ringloader import FactorySpec, Loader
from tests.runtime.sample_datasets import Numbers
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with Loader(FactorySpec(Numbers, 5000), batch_size=1, num_workers=2, output="numpy") as loader:
        kept = list(loader)
        assert [int(indices[0]) for _, indices in kept] == list(range(5000))
        assert all((rows == indices[0]).all() for rows, indices in kept)
        print(len(kept), loader.stats().num_slots >= 5000, loader.stats().num_segments <= 64)
"""


def test_p21_five_thousand_kept_batches_under_256_descriptors(tmp_path: Path) -> None:
    """Descriptors grow with segments, and those are few."""
    done = run(tmp_path, FEW_FILES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5000 True True\n", "")


def test_p25_signal_mask_of_the_starting_thread_stays_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Workers begin with no signal blocked: they can be stopped, and a hanging one still shows its stack."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGINT})
    try:
        spec = FactorySpec(HangsOnce, 40, 8, str(tmp_path), [17])
        with Loader(spec, batch_size=4, num_workers=1, timeout=0.5 * UNIT_S) as loader:
            loader.start()
            (pid,) = loader.stats().worker_pids
            status = Path(f"/proc/{pid}/status").read_text()
            assert "\nSigBlk:\t0000000000000000\n" in status
            assert sum(len(indices) for _, indices in loader) == 40
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "in harm" in caplog.text


SHADOWED = """
import os, sys
from ringloader import FactorySpec, Loader
from tests.runtime.sample_datasets import Numbers
if __name__ == "__main__":
    os.chdir(sys.argv[1])
    with Loader(FactorySpec(Numbers, 8), batch_size=4, num_workers=1, output="numpy") as loader:
        print([indices.tolist() for _, indices in loader])
"""


def test_p25_modules_of_the_working_directory_do_not_shadow_pythons(tmp_path: Path) -> None:
    """A ./socket.py is not what a worker imports as socket."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("socket", "ctypes", "signal", "mmap"):
        (folder / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    done = run(tmp_path, SHADOWED, str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[[0, 1, 2, 3], [4, 5, 6, 7]]\n", "")


@pytest.mark.parametrize("ends_by", ["death", "close"])
def test_p25_children_of_a_worker_end_with_it(ends_by: str, tmp_path: Path) -> None:
    """What a dataset has started and left behind is ended with its worker's session."""
    if ends_by == "close":
        (tmp_path / "killed").touch()
    with Loader(FactorySpec(cases.LeavesChild, 40, str(tmp_path), "popen"), batch_size=2, num_workers=1) as loader:
        assert [int(i) for _, indices in loader for i in indices] == list(range(40))
        child = _child(tmp_path)
        if ends_by == "death":
            assert wait_until(lambda: not is_alive(child))
            assert loader.stats().num_restarts == 1
        else:
            assert is_alive(child)
    assert wait_until(lambda: not is_alive(child))


@pytest.fixture
def _ignored_children() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def _no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", _refuse(errno.EPERM))


def _read_with_a_fault(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """An epoch in which a worker dies of SIGSEGV; returns the warning."""
    with Loader(FactorySpec(cases.SegfaultsOnce, 40, str(folder)), batch_size=4, num_workers=2) as loader:
        began_s = time.monotonic()
        assert [int(i) for _, indices in loader for i in indices] == list(range(40))
        assert time.monotonic() - began_s < 8 * UNIT_S
        assert loader.stats().num_restarts == 1
        assert wait_until(lambda: len(loader.stats().worker_pids) == 2)
        psutil.Process(loader.stats().worker_pids[1]).kill()
        assert sum(len(indices) for _, indices in loader) == 40
        assert wait_until(lambda: loader.stats().num_restarts == 2)
        pids = loader.stats().worker_pids
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 3 * UNIT_S
    assert not any(map(is_alive, pids))
    return caplog.text


@pytest.mark.usefixtures("_ignored_children")
def test_p26_status_that_nobody_kept_is_called_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With SIGCHLD ignored a death is noticed at once, and not mistaken for an exit with code 0."""
    text = _read_with_a_fault(tmp_path, caplog)
    assert "unknown status" in text
    assert "code 0" not in text


@pytest.mark.usefixtures("_no_pidfd")
def test_p26_without_pidfd_deaths_are_noticed_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sandbox that refuses pidfd_open costs a thread per worker and nothing else."""
    assert "SIGSEGV" in _read_with_a_fault(tmp_path, caplog)
    assert wait_until(lambda: not any(thread.name == "ringloader-wait" for thread in threading.enumerate()))


@pytest.mark.usefixtures("_no_pidfd", "_ignored_children")
def test_p26_without_both_deaths_are_noticed_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither descriptor nor status: the end of a process still shows."""
    assert "unknown status" in _read_with_a_fault(tmp_path, caplog)
