"""Reported cases around how long things live: views after close, threads, a full /dev/shm, names, exits, output,
descriptors."""

from __future__ import annotations

import gc
import logging
import os
import signal
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import posix_ipc
import pytest
import torch

from ringloader import FactorySpec, Loader
from ringloader._runtime import segment
from tests.runtime import more_case_datasets as cases
from tests.runtime.conftest import UNIT_S, num_descriptors, wait_until
from tests.runtime.running import Program, is_alive, line_of, may, run, running
from tests.runtime.sample_datasets import DiesOnce, Numbers

MIB = 1 << 20


def ring_mappings() -> int:
    """Mappings of segments in this process."""
    return sum("ringloader" in line or "/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines())


def address_space_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


def test_b54_last_view_gives_the_memory_back(capfd: pytest.CaptureFixture[str]) -> None:
    """Views outlive close and loader with their values; with the last one mapping and address space are gone, in silence."""
    gc.collect()
    mappings = ring_mappings()
    loader = Loader(FactorySpec(Numbers, 32, 1 << 18), batch_size=8, num_workers=1)
    rows, _ = next(iter(loader))
    view = rows[3].numpy()[5:9]
    loader.close()
    nbytes = loader.stats().ring_nbytes
    del loader
    gc.collect()
    assert (rows[:, -1] == torch.arange(8)).all()
    del rows
    gc.collect()
    assert view.tolist() == [3.0] * 4
    assert ring_mappings() == mappings + 1
    before = address_space_nbytes()
    del view
    gc.collect()
    assert ring_mappings() == mappings
    assert before - address_space_nbytes() >= 8 * (4 << 18), nbytes
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_b54_error_of_the_loop_is_what_is_seen(num_workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A ValueError of the user's own leaves the loader as it is, whatever batches are alive."""
    kept: list[Any] = []

    def train() -> None:
        with Loader(FactorySpec(Numbers, 64, 8192), batch_size=8, num_workers=num_workers) as loader:
            for rows, _ in loader:
                kept.append(rows[2])
                if len(kept) == 3:
                    raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$") as caught:
        train()
    assert caught.value.__context__ is None
    assert [int(row[0]) for row in kept] == [2, 10, 18]
    assert capfd.readouterr() == ("", "")


def test_b56_threads_each_with_a_loader_and_signals_left_alone(tmp_path: Path) -> None:
    """Loaders of two threads work, handlers stay as they were, and the user's own children keep their exit codes."""
    numbers = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    seen: list[list[int]] = [[], []]
    restarts: list[int] = []

    def read(k: int) -> None:
        (tmp_path / str(k)).mkdir()
        spec = FactorySpec(DiesOnce, 120, 8, str(tmp_path / str(k)), [5, 31, 77])
        with Loader(spec, batch_size=4, num_workers=2) as loader:
            for _, indices in loader:
                seen[k] += indices.tolist()
            restarts.append(loader.stats().num_restarts)

    threads = [threading.Thread(target=read, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    codes: list[int] = []
    while any(thread.is_alive() for thread in threads):
        codes.append(subprocess.run(["sh", "-c", f"exit {len(codes) % 7}"], check=False).returncode)
        assert [signal.getsignal(number) for number in numbers] == handlers
    for thread in threads:
        thread.join()
    assert seen == [list(range(120))] * 2
    assert restarts == [3, 3]
    assert codes == [k % 7 for k in range(len(codes))]
    assert [signal.getsignal(number) for number in numbers] == handlers


FILLED_SHM = """
import errno, os, signal, sys
from ringloader import FactorySpec, Loader
from tests.runtime.sample_datasets import Numbers
if __name__ == "__main__":
    import logging
    logging.disable()
    with Loader(FactorySpec(Numbers, 600, 4096), batch_size=8, num_workers=2, output="numpy") as loader:
        iterator, seen, kept = iter(loader), [], []
        for k, (rows, indices) in enumerate(iterator):
            assert (rows == indices[:, None]).all()
            seen += indices.tolist()
            if 10 <= k < 40:
                kept.append(rows)  # the ring has to grow
            if k == 5:
                fd = os.open("/dev/shm/others", os.O_CREAT | os.O_WRONLY)
                try:
                    while True:
                        os.write(fd, bytes(1 << 16))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                free = os.statvfs("/dev/shm")
                assert free.f_bavail * free.f_frsize < 1 << 16
            if k == 8:
                os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
        assert seen == list(range(600))
        assert [int(rows[0, 0]) for rows in kept] == list(range(80, 320, 8))
        print(loader.stats().num_restarts, loader.stats().num_segments > 1)
    with Loader(FactorySpec(Numbers, 64, 4096), batch_size=8, num_workers=2, output="numpy") as loader:
        print(sum(len(indices) for _, indices in loader), os.listdir("/dev/shm"))
"""


def test_b62_others_fill_shm_and_everything_goes_on(tmp_path: Path) -> None:
    """With /dev/shm filled after the start: right data, growth, a restart, an end, and a second loader."""
    mount = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
    if not may(["unshare", "-m", "sh", "-c", mount]):
        pytest.skip("this machine lets us mount no file system of our own")
    program = Program(prefix=("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"))
    done = run(tmp_path, FILLED_SHM, program=program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 True\n64 ['others']\n", "")


def test_b65_names_are_short_and_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name given to shm_open has at most 31 characters, whatever the pid, and none comes twice."""
    names: list[str] = []
    create = posix_ipc.SharedMemory

    def recorded(name: str, *args: Any, **kwargs: Any) -> Any:
        names.append(name)
        return create(name, *args, **kwargs)

    monkeypatch.setattr(posix_ipc, "SharedMemory", recorded)
    for _ in range(2):
        with Loader(Numbers(64), batch_size=8, num_workers=0) as loader:
            assert len(list(loader)) == 8
    assert len(names) >= 2
    monkeypatch.setattr(os, "getpid", lambda: 4_194_303)
    for _ in range(1000):
        segment.Segment.create(64).close()
    assert len(set(names)) == len(names) >= 1002
    assert max(map(len, names)) <= 31
    assert all(name.startswith("/") for name in names)


EXITS = """
import os, sys, threading, time
from ringloader import FactorySpec, Loader
from tests.runtime.more_case_datasets import Slow
from tests.runtime.sample_datasets import Numbers
if __name__ == "__main__":
    how, num_loaders, num_workers, output = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    loaders = [Loader(FactorySpec(Numbers, 400, 4096), batch_size=4, num_workers=num_workers, output=output)
               for _ in range(num_loaders)]
    iterators = [iter(loader) for loader in loaders]
    batches = [next(iterator) for iterator in iterators]
    cycle = [loaders, iterators, batches]
    cycle.append(cycle)
    if how == "thread":
        # One thread is inside next(), one still inside iter().
        late = [Loader(FactorySpec(Slow, 8, 3600.0), num_workers=1, output=output) for _ in range(2)]
        iterator = iter(late[0])
        threading.Thread(target=lambda: next(iterator), daemon=True).start()
        threading.Thread(target=lambda: next(iter(late[1])), daemon=True).start()
        while not all(loader.stats().worker_pids for loader in late):
            time.sleep(0.01)
        loaders += late
    print(*(pid for loader in loaders for pid in loader.stats().worker_pids), flush=True)
    sys.stdin.readline() if how == "term" else None
    if how == "exit3":
        sys.exit(3)
    if how == "error":
        raise LookupError("mine")
    if how == "_exit":
        os._exit(0)
    if how == "term":
        time.sleep(3600)
"""
HOW = {
    "plain": (("3", "4", "torch"), 0),
    "exit3": (("2", "2", "numpy"), 3),
    "error": (("2", "2", "numpy"), 1),
    "_exit": (("2", "2", "numpy"), 0),
    "term": (("2", "2", "numpy"), -signal.SIGTERM),
    "thread": (("2", "2", "numpy"), 0),
}


@pytest.mark.parametrize("how", HOW)
def test_b76_exit_is_quick_and_quiet_however_it_comes(how: str, tmp_path: Path) -> None:
    """Open loaders, live batches and a cycle: the program's own exit code, its own output only, no worker left."""
    arguments, code = HOW[how]
    names = set(os.listdir("/dev/shm"))
    with running(tmp_path, EXITS, how, *arguments) as process:
        pids = [int(pid) for pid in line_of(process).split()]
        began_s = time.monotonic()
        if how == "term":
            process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=20 * UNIT_S)
        assert time.monotonic() - began_s < 2.0 * UNIT_S
    assert len(pids) >= int(arguments[0]) * int(arguments[1])
    assert (process.returncode, out) == (code, "")
    if how == "error":
        assert errors.count("Traceback (most recent call last)") == 1
        assert errors.endswith("LookupError: mine\n")
    else:
        assert errors == ""
    assert wait_until(lambda: not any(map(is_alive, pids)), 5.0 if how in ("_exit", "term") else 0.0)
    assert set(os.listdir("/dev/shm")) <= names


def test_b83_output_of_workers_reaches_this_terminal(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """stdout, stderr and, set up by `worker_init_fn`, log lines with the worker's number; a healthy run warns of nothing."""
    caplog.set_level(logging.DEBUG)
    # With a sampler, nothing is read for the next epoch.
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "sampler": range(8)}
    with Loader(FactorySpec(cases.Talks, 8, 0), worker_init_fn=cases.log_to_stderr, **options) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(8))
    out, errors = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(f"printed {i}" for i in range(8))
    lines = errors.splitlines()
    assert sorted(line for line in lines if "complained" in line) == sorted(f"complained {i}" for i in range(8))
    logged = [line for line in lines if line.startswith("worker ")]
    assert sorted(line.partition(": ")[2] for line in logged) == [f"my.dataset: sample {i}" for i in range(8)]
    assert {line.partition(":")[0] for line in logged} <= {"worker 0", "worker 1"}
    assert len(lines) == 16
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_b83_flood_on_descriptor_1_harms_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Megabytes of raw bytes, frames of the protocol among them, are the user's output and nothing else."""
    nbytes = 1 << 18
    with Loader(FactorySpec(cases.Talks, 16, nbytes), batch_size=2, num_workers=2, sampler=range(16)) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(16))
        assert loader.stats().num_restarts == 0
    assert capfd.readouterr().out.count("\x00") == 16 * nbytes // 4


def _footprint() -> tuple[int, int, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return num_descriptors(), sum("ringloader" in line or "/dev/shm" in line for line in maps), len(os.listdir("/dev/shm"))


def test_b93_five_hundred_leaves_are_one_slot_and_handed_over_at_once() -> None:
    """Handing over is quick, and descriptors, mappings and names depend neither on leaves nor on batches."""
    footprints = []
    for num_leaves in (1, 500):
        with Loader(FactorySpec(cases.ManyLeaves, 1200, num_leaves), batch_size=1, num_workers=1) as loader:
            iterator, times_s = iter(loader), []
            for k in range(1000 if num_leaves == 1 else 100):
                if 0 < k < 30:
                    # What is timed is the hand-over of a batch that is there, not the wait for it.
                    assert wait_until(lambda session=iterator._session: session.head() is not None)
                began_s = time.perf_counter()
                batch = next(iterator)
                times_s.append(time.perf_counter() - began_s)
                assert len(batch) == num_leaves
                if k == 10:
                    footprints.append(_footprint())
            assert batch[f"k{num_leaves - 1}"].tolist() == [[float(num_leaves - 1)] * 256]
            footprints.append(_footprint())
            del batch
        assert statistics.median(times_s[1:30]) < 0.010 * UNIT_S
    assert len(set(footprints)) == 1, footprints


def test_b93_spec_of_ten_thousand_tensors_opens_no_descriptor() -> None:
    """Small tensors travel inside the spec, by value."""
    tensors = [torch.full((4,), float(k)) for k in range(10_000)]
    before = num_descriptors()
    with Loader(FactorySpec(cases.SumsOf, 4, tensors=tensors), batch_size=4, num_workers=1) as loader:
        (batch,) = list(loader)
        assert [column.tolist() for column in batch] == [[10_000] * 4, [0.0, 4.0, 8.0, 12.0]]
        del batch
        # A socket, a pidfd, a status page, the selector, the bell, the template's socket and page, and two for each segment.
        assert num_descriptors() - before <= 7 + 2 * loader.stats().num_segments
