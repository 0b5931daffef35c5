"""Reported cases around memory: small /dev/shm, growing workers, descriptors, batches that are kept, things left behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ringloader import ConfigError, FactorySpec, Loader, RingFullError, release
from ringloader._runtime import memory
from tests.runtime import case_datasets as cases
from tests.runtime.conftest import num_descriptors, our_children, our_threads, shm_names, wait_until
from tests.runtime.running import Program, is_alive, line_of, may, run, running
from tests.runtime.sample_datasets import Numbers

MIB = 1 << 20

SMALL_SHM = """
import os, sys
from ringloader import ConfigError, FactorySpec, Loader
from tests.runtime.case_datasets import Filled
if __name__ == "__main__":
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
    spec = FactorySpec(Filled, 24, 10 << 20)
    with Loader(spec, batch_size=4, num_workers=2, output="numpy") as loader:
        for k, batch in enumerate(loader):
            assert batch.shape == (4, 10 << 20)
            assert all((batch[row] == 4 * k + row).all() for row in range(4))
        assert loader.stats().num_restarts == 0
        assert loader.stats().ring_nbytes > 64 << 20
    assert os.listdir("/dev/shm") == []
    with Loader(spec, batch_size=4, num_workers=2, output="numpy", max_ring_bytes=70 << 20) as loader:
        try:
            next(iter(loader))
        except ConfigError as error:
            print(error)
        assert loader.stats().num_restarts == 0
"""


def test_b01_small_shm_is_no_obstacle_and_a_lack_of_memory_is_a_sentence(tmp_path: Path) -> None:
    """Batches of 40 MiB pass where /dev/shm has 64 MiB; with too little memory allowed the error names sizes and option."""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if not may(["unshare", "-m", "sh", "-c", mount]):
        pytest.skip("this machine lets us mount no file system of our own")
    program = Program(prefix=("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"))
    done = run(tmp_path, SMALL_SHM, program=program)
    assert (done.returncode, done.stderr) == (0, "")
    assert "max_ring_bytes" in done.stdout
    assert "40.0 MiB" in done.stdout
    assert f"{2 * 40 * MIB:,} bytes" in done.stdout


def private_nbytes(loader: Loader) -> list[int]:
    """Memory of each worker that no other process can share; USS would count shared pages that nobody else has touched yet."""
    return [anonymous_nbytes(pid) for pid in loader.stats().worker_pids]


def is_idle(pid: int) -> bool:
    """The names are built, and the worker waits for work."""
    return bool(psutil.Process(pid).status() == psutil.STATUS_SLEEPING and anonymous_nbytes(pid) > 10 * MIB)


def anonymous_nbytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def test_b05_private_memory_of_workers_stays_flat() -> None:
    """Reading many small objects makes no worker grow: within 10 % over an epoch, below 1 MiB per epoch after."""
    with Loader(FactorySpec(cases.Names, 200_000), batch_size=1000, num_workers=2) as loader:
        loader.start()
        assert wait_until(lambda: all(is_idle(pid) for pid in loader.stats().worker_pids))
        early: list[int] = []
        after: list[list[int]] = []
        for _ in range(5):
            for k, batch in enumerate(loader):
                assert batch.tolist() == [18] * 1000
                if k == 10 and not early:
                    early = private_nbytes(loader)
            after.append(private_nbytes(loader))
    for worker, start in enumerate(early):
        assert start > 10 * MIB  # the names are really there
        assert after[0][worker] < 1.1 * start
        assert after[-1][worker] - after[0][worker] < 4 * MIB


def test_b05_large_objects_of_this_process_are_in_no_worker() -> None:
    """Neither what this process holds beside the dataset nor the arrays of a plain dataset are a worker's own memory."""
    held = [bytes([i % 251]) * 1000 for i in range(100_000)]
    plain = np.ones((8, 8 * MIB), np.uint8)
    before = num_descriptors()
    loader = Loader(plain, batch_size=2, num_workers=2)
    assert [int(batch.sum()) for batch in loader] == [16 * MIB] * 4
    assert max(private_nbytes(loader)) < 40 * MIB
    loader.close()
    assert num_descriptors() == before  # the pickled dataset is let go by `close`, not only with the loader
    with Loader(FactorySpec(Numbers, 40), batch_size=2, num_workers=2) as loader:
        assert len(list(loader)) == 20
        assert max(psutil.Process(pid).memory_info().rss for pid in loader.stats().worker_pids) < 80 * MIB
    assert len(held) == 100_000


DESCRIPTORS = """
import os, resource, sys
from ringloader import FactorySpec, Loader
from tests.runtime.case_datasets import ManyLeaves
num_leaves, prefetch_factor = map(int, sys.argv[1:])
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    def counts(loader):
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *loader.stats().worker_pids)]
    spec = FactorySpec(ManyLeaves, 800, num_leaves)
    with Loader(spec, batch_size=1, num_workers=4, prefetch_factor=prefetch_factor, output="numpy") as loader:
        for k, batch in enumerate(loader):
            assert len(batch) == num_leaves and all(leaf[0] == k for leaf in batch.values())
            if k == 10:
                early = counts(loader)
        late = counts(loader)
    assert all(b <= a + 5 for a, b in zip(early, late)), (early, late)
    print(max(late))
"""


def test_b07_descriptors_grow_neither_with_batches_nor_with_leaves(tmp_path: Path) -> None:
    """With 256 descriptors allowed the epoch completes; their number depends on neither leaves per batch nor prefetching."""
    counts = []
    for num_leaves, prefetch_factor in ((60, 4), (1, 4), (1, 16)):
        done = run(tmp_path, DESCRIPTORS, str(num_leaves), str(prefetch_factor))
        assert (done.returncode, done.stderr) == (0, "")
        counts.append(int(done.stdout))
    assert max(counts) - min(counts) <= 2
    assert max(counts) < 60


@pytest.mark.parametrize("hold", [lambda b: b["index"], lambda b: b["index"][:, 0:1], lambda b: b["index"].numpy()])
def test_b08_every_kept_batch_keeps_its_values(hold: Any) -> None:
    """A hundred times more batches than slots are kept, whole, as a slice or as numpy's view: each is as it was."""
    with Loader(FactorySpec(cases.Ids, 1500), batch_size=1, num_workers=1) as loader:
        kept = [hold(batch) for batch in loader]
        assert [int(rows[0, 0]) for rows in kept] == list(range(1500))
        assert [tuple(batch["index"][0].tolist()) for batch in list(loader)] == [(i, -i) for i in range(1500)]
        assert [int(rows[0, 0]) for rows in kept] == list(range(1500))
    assert [int(rows[0, 0]) for rows in kept] == list(range(1500))


@pytest.mark.parametrize("let_go", ["del", "release"])
def test_b08_full_ring_names_what_holds_it_and_goes_on_after_letting_go(let_go: str) -> None:
    """`RingFullError` says which leaves of which size hold how many slots; no batch is lost, and none changes."""
    kept: list[Any] = []
    with Loader(FactorySpec(cases.Filled, 60, 64 << 10), batch_size=2, num_workers=2, max_ring_bytes=MIB) as loader:
        iterator = iter(loader)
        with pytest.raises(RingFullError) as caught:
            kept.extend(iterator)
        num_held = len(kept)
        assert 4 <= num_held <= 8
        for part in (
            f"batch {num_held}",
            f"{num_held} by a leaf of shape (2, 65536), uint8, 131,072 bytes",
            "128.0 KiB",
            "clone() what you keep",
            f"max_ring_bytes={MIB}",
        ):
            assert part in str(caught.value)
        with pytest.raises(RingFullError):  # and again, rather than wait for ever
            next(iterator)
        assert [batch[1, -1].item() for batch in kept] == [2 * k + 1 for k in range(num_held)]
        if let_go == "release":
            for batch in kept:
                release(batch)
        kept.clear()
        rest = [(batch[0, 0].item(), batch[1, -1].item()) for batch in iterator]
        assert rest == [(2 * k, 2 * k + 1) for k in range(num_held, 30)]


def belongings() -> tuple[int, int, int, int]:
    return num_descriptors(), threading.active_count(), len(our_children()), len(shm_names())


def resident_nbytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.long
def test_b36_loaders_that_are_dropped_leave_nothing() -> None:
    """Sixty loaders made, begun and dropped: descriptors, threads, children and memory are as after the fifth."""
    before = belongings()
    early_nbytes = 0
    for cycle in range(60):
        loader = Loader(FactorySpec(Numbers, 1000), batch_size=10, num_workers=1)
        rows, indices = next(iter(loader))
        assert indices.tolist() == list(range(10))
        del loader, rows, indices
        if cycle % 10 == 5:
            assert wait_until(lambda: belongings() == before), (cycle, belongings(), before)
            early_nbytes = early_nbytes or resident_nbytes()
    assert wait_until(lambda: belongings() == before), (belongings(), before)
    assert resident_nbytes() - early_nbytes < 20 * MIB
    assert memory.ACCOUNT.nbytes == 0


def test_b36_iterators_that_are_abandoned_leave_nothing() -> None:
    """Two hundred epochs begun on one loader: the same workers, batch 0 of a fresh epoch each time, nothing grows."""
    with Loader(FactorySpec(cases.Epochs, 1000), batch_size=10, num_workers=2) as loader:
        pids = None
        for epoch in range(200):
            assert next(iter(loader)).tolist() == [epoch * 100 + i for i in range(10)]
            pids = pids or loader.stats().worker_pids
            assert loader.stats().worker_pids == pids
            if epoch == 5:
                early, early_nbytes, early_ring = belongings(), resident_nbytes(), loader.stats().ring_nbytes
        assert wait_until(lambda: belongings() <= early), (belongings(), early)
        assert resident_nbytes() - early_nbytes < 20 * MIB
        assert loader.stats().ring_nbytes <= 2 * early_ring
        assert len(our_threads()) == 1


FULL_RUN = """
import os, signal, sys
from ringloader import FactorySpec, Loader
from tests.runtime.case_datasets import Pid
from tests.runtime.conftest import wait_until
if __name__ == "__main__":
    loader = Loader(FactorySpec(Pid, 400), batch_size=10, num_workers=2, output="numpy")
    for epoch in range(2):
        got = []
        for k, batch in enumerate(loader):
            if sys.argv[1] == "kill" and k == 5:
                # What was killed in the epoch before may not have its successor yet.
                assert wait_until(lambda: len(loader.stats().worker_pids) == 2)
                os.kill(loader.stats().worker_pids[epoch], signal.SIGKILL)
            got += batch[:, 0].tolist()
        assert got == list(range(400))
    if sys.argv[1] == "kill":
        assert wait_until(lambda: loader.stats().num_restarts == 2)  # the other worker may have read all the rest
    if sys.argv[1] == "close":
        loader.close()
    print(loader.stats().num_restarts, *loader.stats().worker_pids)
"""


@pytest.mark.parametrize("end", ["close", "exit", "kill"])
def test_b40_a_run_says_nothing_and_leaves_nothing(end: str, tmp_path: Path) -> None:
    """Workers that attach, die and are replaced lose no memory of others; stderr has only the warnings of the deaths."""
    done = run(tmp_path, FULL_RUN, end, program=Program(flags=("-X", "dev", "-W", "error")))
    assert done.returncode == 0, done.stderr
    restarts, *pids = map(int, done.stdout.split())
    assert restarts == (2 if end == "kill" else 0)
    assert not any(is_alive(pid) for pid in pids)
    lines = done.stderr.splitlines()
    assert len([line for line in lines if "SIGKILL" in line]) == restarts
    assert "resource_tracker" not in done.stderr
    assert len(lines) == restarts, lines
    assert wait_until(lambda: shm_names() == set())


ENDLESS = """
import sys
from ringloader import FactorySpec, Loader
from tests.runtime.case_datasets import Filled
if __name__ == "__main__":
    with Loader(FactorySpec(Filled, 10 ** 6, 1 << 20), batch_size=4, num_workers=2, output="numpy") as loader:
        for k, batch in enumerate(loader):
            assert (batch[3] == (4 * k + 3) % 251).all()
            if k == 10:
                print(*loader.stats().worker_pids, loader.stats().ring_nbytes, flush=True)
                if sys.argv[1] == "short":
                    break
"""


def test_b41_kill_of_the_whole_group_leaves_no_memory_and_the_next_run_starts(tmp_path: Path) -> None:
    """SIGKILL to everything in the middle of an epoch: no process and no name stays, and so no byte; the run starts anew."""
    with running(tmp_path, ENDLESS, "endless") as process:
        *pids, ring_nbytes = map(int, line_of(process).split())
        assert ring_nbytes > 16 * MIB
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        assert wait_until(lambda: not any(is_alive(pid) for pid in pids))
        assert wait_until(lambda: shm_names() == set())
    done = run(tmp_path, ENDLESS, "short", within_s=10)
    assert (done.returncode, done.stderr) == (0, "")


TWENTY = """
import subprocess, sys
if __name__ == "__main__":
    runs = [subprocess.Popen([sys.executable, sys.argv[1]], stdout=subprocess.PIPE, text=True) for _ in range(int(sys.argv[2]))]
    print(*[(run.communicate()[0].strip(), run.returncode) for run in runs])
"""


def test_b41_loaders_started_at_one_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Many processes that start the same loader together all finish with right data."""
    one = tmp_path / "one.py"
    one.write_text(FULL_RUN.replace("sys.argv[1]", "'together'").replace("print(", "print('ok') or (").replace("400", "100"))
    done = run(tmp_path, TWENTY, str(one), "8", within_s=30)
    assert done.stdout.strip() == " ".join(["('ok', 0)"] * 8), done.stderr


def test_b01_bound_too_small_for_two_batches_is_a_config_error() -> None:
    """In this process too: the error comes from `next`, with the sizes and the option, and no worker was harmed."""
    with Loader(FactorySpec(cases.Filled, 8, MIB), batch_size=4, num_workers=1, max_ring_bytes=6 * MIB) as loader:
        with pytest.raises(ConfigError, match=rf"max_ring_bytes.*{2 * 4 * MIB:,} bytes") as caught:
            next(iter(loader))
        assert caught.value.option == "max_ring_bytes"
        assert loader.stats().num_restarts == 0
