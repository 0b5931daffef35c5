"""Reported cases around the end: Ctrl-C, a parent that is killed, threads that end, pid 1."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from ringloader import FactorySpec, Loader
from tests.runtime import case_datasets as cases
from tests.runtime.conftest import UNIT_S, shm_names, wait_until
from tests.runtime.running import Program, is_alive, line_of, may, run, running

INTERRUPTED = """
import os, sys
from ringloader import FactorySpec, Loader
from tests.runtime.case_datasets import NeverEnding, Pid
from tests.runtime.conftest import wait_until
how, marks = sys.argv[1:]
if __name__ == "__main__":
    loader = Loader(FactorySpec(NeverEnding, 100, 40, "deaf", marks), batch_size=2, num_workers=4, output="numpy")
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(20)]
    assert wait_until(lambda: any(name.startswith("stuck") for name in os.listdir(marks)))
    print(*loader.stats().worker_pids, flush=True)
    if how == "uncaught":
        next(iterator)
    try:
        next(iterator)
    except KeyboardInterrupt:
        pass
    print("caught", flush=True)
    if how == "again":
        loader.close()
        print("closed", flush=True)
    with Loader(FactorySpec(Pid, 8), batch_size=4, num_workers=2, output="numpy") as other:
        print([batch[:, 0].tolist() for batch in other], flush=True)
    loader.close()
"""


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C: the terminal sends SIGINT to the foreground process group."""
    os.killpg(process.pid, signal.SIGINT)


def started(process: subprocess.Popen[str]) -> list[int]:
    """The ids of the workers, once the program waits in `next`."""
    pids = [int(pid) for pid in line_of(process).split()]
    assert len(pids) == 4
    # "S": it sleeps in a system call, after the line was printed.
    stat = Path(f"/proc/{process.pid}/stat")
    assert wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")
    return pids


def test_b26_ctrl_c_in_next_is_one_keyboard_interrupt(tmp_path: Path) -> None:
    """One traceback, the exit status of SIGINT, and nobody left: while every worker is deaf and in the middle of a sample."""
    marks = tmp_path / "marks"
    marks.mkdir()
    with running(tmp_path, INTERRUPTED, "uncaught", str(marks)) as process:
        pids = started(process)
        began_s = time.monotonic()
        interrupt(process)
        _, errors = process.communicate(timeout=10 * UNIT_S)
        assert time.monotonic() - began_s < 3 * UNIT_S
    assert process.returncode in (-signal.SIGINT, 130)
    assert errors.count("Traceback") == 1
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids), within_s=3)
    assert wait_until(lambda: shm_names() == set())


def test_b26_after_ctrl_c_a_new_loader_works_and_the_old_one_closes(tmp_path: Path) -> None:
    """A program that catches the interrupt goes on with both, in silence."""
    marks = tmp_path / "marks"
    marks.mkdir()
    with running(tmp_path, INTERRUPTED, "caught", str(marks)) as process:
        pids = started(process)
        interrupt(process)
        out, errors = process.communicate(timeout=10 * UNIT_S)
    assert (process.returncode, errors) == (0, "")
    assert out.splitlines() == ["caught", "[[0, 1, 2, 3], [4, 5, 6, 7]]"]
    assert not any(is_alive(pid) for pid in pids)


def test_b26_second_ctrl_c_during_close_also_ends_everything(tmp_path: Path) -> None:
    """Within 3 s of the second interrupt the program is over and no worker is left."""
    marks = tmp_path / "marks"
    marks.mkdir()
    with running(tmp_path, INTERRUPTED, "again", str(marks)) as process:
        pids = started(process)
        interrupt(process)
        assert line_of(process) == "caught"
        began_s = time.monotonic()
        interrupt(process)
        _, errors = process.communicate(timeout=10 * UNIT_S)
        assert time.monotonic() - began_s < 3 * UNIT_S
    assert process.returncode in (-signal.SIGINT, 130)
    assert errors.count("Traceback") == 1
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids), within_s=3)


PARENT = """
import os, sys
from ringloader import FactorySpec, Loader
from tests.runtime.case_datasets import NeverEnding, SlowBuild
from tests.runtime.conftest import wait_until
where, marks = sys.argv[1:]
if __name__ == "__main__":
    if where == "sample":
        spec = FactorySpec(NeverEnding, 100, 8, "deaf", marks)
        # Out of order both workers get batches, quick ones, too.
        loader = Loader(spec, batch_size=1, num_workers=2, in_order=False, output="numpy")
        iterator = iter(loader)
        got = [next(iterator) for _ in range(8)]
        assert wait_until(lambda: sum(name.startswith("stuck") for name in os.listdir(marks)) == 2)
        print(*loader.stats().worker_pids, flush=True)
        next(iterator)
    loader = Loader(FactorySpec(SlowBuild, 100, 3600.0), num_workers=2, output="numpy")
    engine = loader._running()
    assert wait_until(lambda: len(engine.pids()) == 2)
    print(*engine.pids(), flush=True)
    loader.start()
"""


@pytest.mark.parametrize("where", ["sample", "start"])
def test_b42_killed_parent_takes_its_workers_along(where: str, tmp_path: Path) -> None:
    """SIGKILL to the parent alone: deaf workers in an hour's sample, or not even ready yet, are gone within a second or so."""
    marks = tmp_path / "marks"
    marks.mkdir()
    with running(tmp_path, PARENT, where, str(marks)) as process:
        pids = [int(pid) for pid in line_of(process).split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        assert wait_until(lambda: not any(is_alive(pid) for pid in pids), within_s=1 if where == "sample" else 5)
    assert wait_until(lambda: shm_names() == set())


def test_b42_workers_started_from_a_thread_outlive_it() -> None:
    """The parent-death signal comes when the starting thread ends; that is never the user's."""
    loader = Loader(FactorySpec(cases.Pid, 40), batch_size=2, num_workers=2)
    first: list[int] = []
    thread = threading.Thread(target=lambda: first.extend(next(iter(loader))[:, 0].tolist()))
    thread.start()
    thread.join()
    assert first == [0, 1]
    pids = loader.stats().worker_pids
    with loader:
        rows = torch.cat(list(loader))
        assert rows[:, 0].tolist() == list(range(40))
        assert set(rows[:, 1].tolist()) <= set(pids)
        assert loader.stats().num_restarts == 0


FIRST_PROCESS = """
import os, signal
import logging
from ringloader import FactorySpec, Loader
from tests.runtime.case_datasets import Pid
if __name__ == "__main__":
    logging.disable()
    print(os.getpid())
    with Loader(FactorySpec(Pid, 40), batch_size=2, num_workers=2, output="numpy") as loader:
        for epoch in range(3):
            assert [i for batch in loader for i in batch[:, 0].tolist()] == list(range(40))
        os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
        while not loader.stats().num_restarts:  # the other worker may have read an epoch before it is known
            assert [i for batch in loader for i in batch[:, 0].tolist()] == list(range(40))
        print(loader.stats().num_restarts)
"""


def test_b42_program_that_is_pid_1_has_its_workers(tmp_path: Path) -> None:
    """In a container's first process every epoch completes, and dead workers are replaced."""
    prefix = ("unshare", "-fp", "--mount-proc")
    if not may([*prefix, "true"]):
        pytest.skip("this machine lets us make no process namespace")
    done = run(tmp_path, FIRST_PROCESS, program=Program(prefix=prefix))
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n1\n", "")
