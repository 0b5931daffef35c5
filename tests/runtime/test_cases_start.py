"""Reported cases around the start of workers: scripts, notebooks, forks, threads, handles, start methods."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from ringloader import ConfigError, FactoryError, FactorySpec, FaultPolicy, Loader
from tests.runtime import case_datasets as cases
from tests.runtime.conftest import UNIT_S
from tests.runtime.running import Program, run, running
from tests.runtime.sample_datasets import Numbers

NO_GUARD = """
import sys
from ringloader import FactorySpec, Loader
print("script body", flush=True)
class Mine:
    def __len__(self): return 8
    def __getitem__(self, i): return i
target = Mine if sys.argv[1] == "main" else "tests.runtime.case_datasets:Pid"
loader = Loader(FactorySpec(target, *([8] if target is not Mine else [])), batch_size=2, num_workers=2, output="numpy")
print(sum(1 for batch in loader), "batches", flush=True)
"""


@pytest.mark.parametrize("where", ["module", "main"])
def test_b06_script_without_guard_works_or_says_what_it_needs(where: str, tmp_path: Path) -> None:
    """A dataset of another module just works; one of the script itself ends in one error that names the guard."""
    largest = 0
    with running(tmp_path, NO_GUARD, where) as process:
        deadline_s = time.monotonic() + 10 * UNIT_S
        while process.poll() is None and time.monotonic() < deadline_s:
            try:
                largest = max(largest, len(psutil.Process(process.pid).children(recursive=True)))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.005)
        out, errors = process.communicate(timeout=10 * UNIT_S)
    assert 1 <= largest <= 3  # two workers and what they are split off
    if where == "module":
        assert (process.returncode, out, errors) == (0, "script body\n4 batches\n", "")
    else:
        assert process.returncode == 1
        assert "`if __name__ == '__main__':`" in errors
        assert errors.count("FactoryError") == 1
        assert "4 batches" not in out


def test_b13_workers_start_side_by_side(tmp_path: Path) -> None:
    """No worker waits for another to be ready: here each waits in its constructor until all four are there."""
    with Loader(FactorySpec(cases.Meets, 16, str(tmp_path), 4), batch_size=2, num_workers=4) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(16))


def test_b13_second_epoch_has_the_same_processes_and_begins_at_once() -> None:
    """Workers are started once; a spec stays small whatever it builds."""
    spec = FactorySpec(cases.Names, 200_000)
    assert len(spec.to_wire()) < 10_000
    with Loader(spec, batch_size=100, num_workers=2) as loader:
        pids, firsts = [], []
        for _ in range(3):
            began_s = time.monotonic()
            iterator = iter(loader)
            next(iterator)
            firsts.append(time.monotonic() - began_s)
            pids.append(loader.stats().worker_pids)
            del iterator
        assert len(set(pids)) == 1
        assert len(set(pids[0])) == 2
        assert max(firsts[1:]) < 0.5 * UNIT_S


STAGES = {
    "importing": (FactorySpec("tests.runtime.scripts.never_imported:Anything"), None),
    "building the dataset": (FactorySpec(cases.SlowBuild, 4, 3600.0), None),
    "running init": (FactorySpec(Numbers), cases.hang_in_init),
}


@pytest.mark.parametrize("stage", STAGES)
def test_b13_start_that_takes_too_long_is_named_by_its_stage(stage: str) -> None:
    """After `start_timeout_s` the error says in which stage the workers were."""
    spec, init_fn = STAGES[stage]
    faults = FaultPolicy(start_timeout_s=1.0 * UNIT_S, restarts=0)
    with Loader(spec, num_workers=2, worker_init_fn=init_fn, faults=faults) as loader:
        began_s = time.monotonic()
        with pytest.raises(FactoryError, match=f"stage: {stage}") as caught:
            loader.start()
        assert 1.0 * UNIT_S <= time.monotonic() - began_s < 4 * UNIT_S
    assert "faults.start_timeout_s" in str(caught.value)


FORK_HOOK = """
import os, signal, sys
import numpy as np
calls = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
os.register_at_fork(before=lambda: os.write(calls, b"b"), after_in_child=lambda: os.write(calls, b"c"))
from ringloader import FactorySpec, Loader
from tests.runtime.case_datasets import Pid
if __name__ == "__main__":
    import logging
    logging.disable()
    with Loader(FactorySpec(Pid, 400), batch_size=4, num_workers=2, output="numpy") as loader:
        got = [row for batch in loader for row in batch.tolist()]
        assert [row[0] for row in got] == list(range(400))
        iterator = iter(loader)
        next(iterator)
        os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
        assert sum(len(batch) for batch in iterator) == 396
        assert loader.stats().num_restarts == 1
    print(len({row[1] for row in got} - {os.getpid()}) > 0)
    if os.fork() == 0:
        os._exit(0)
    os.wait()
"""


def test_b18_workers_are_not_forked_from_this_process(tmp_path: Path) -> None:
    """Hooks of `os.register_at_fork` are not called for a start or a restart; a real fork at the end shows that they work."""
    calls = tmp_path / "calls"
    done = run(tmp_path, FORK_HOOK, str(calls))
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert calls.read_bytes() == b"bc"


def test_b22_thread_pools_used_before_the_start_do_no_harm() -> None:
    """With OpenMP and BLAS warm in this process, workers that use both finish, 3 of 3 times."""
    expected = cases.Multiplies(4)[0]
    assert torch.ones(1 << 22).sum() == 1 << 22
    for _ in range(3):
        began_s = time.monotonic()
        with Loader(FactorySpec(cases.Multiplies, 4), batch_size=2, num_workers=1) as loader:
            assert torch.cat(list(loader)).tolist() == [expected] * 4
        assert time.monotonic() - began_s < 20 * UNIT_S


MAIN_DATASET = """
import os
from ringloader import ConfigError, FactorySpec, Loader
print("script body", flush=True)
class Mine:
    def __len__(self): return 8
    def __getitem__(self, i): return i
if __name__ == "__main__":
    print("guarded part", flush=True)
    refused = 0
    for dataset in (FactorySpec(Mine), Mine()) if os.environ.get("ACCEPT") else (Mine,  Mine()):
        try:
            spec = FactorySpec(Mine) if dataset is Mine else dataset
            with Loader(spec, batch_size=4, num_workers=1, output="numpy", worker_backend="process") as loader:
                print([batch.tolist() for batch in loader], flush=True)
        except ConfigError as error:
            print("refused", "Mine" in str(error), "__main__" in str(error), "move it to an importable .py file" in str(error))
"""


def test_b25_dataset_of_a_script_works_and_the_guarded_part_runs_once(tmp_path: Path) -> None:
    """A class of the running script reaches its workers, as a spec and as an instance."""
    done = run(tmp_path, MAIN_DATASET, program=Program(environment=(("ACCEPT", "1"),)))
    assert (done.returncode, done.stderr) == (0, "")
    batches = "[[0, 1, 2, 3], [4, 5, 6, 7]]"
    lines = done.stdout.splitlines()
    assert lines.count("guarded part") == 1
    assert lines.count(batches) == 2
    assert lines.count("script body") == 3  # here and in the two workers, which load the class from it


def test_b25_dataset_of_an_interactive_main_is_refused_at_construction(tmp_path: Path) -> None:
    """Where `__main__` has no file, both forms are refused before a worker starts, in words."""
    done = run(
        tmp_path, f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {MAIN_DATASET!r}]).returncode)"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["script body", "guarded part", *["refused True True True"] * 2]


def test_b28_handle_opened_in_the_constructor_gives_right_values(tmp_path: Path) -> None:
    """Each worker has a file offset of its own, and this process never opens the file at all: 3 of 3 times."""
    path = tmp_path / "v.bin"
    path.write_bytes(np.arange(4000, dtype="<u4").tobytes())
    for _ in range(3):
        with Loader(FactorySpec(cases.OpenFile, str(path)), batch_size=8, num_workers=4) as loader:
            assert torch.cat(list(loader)).tolist() == list(range(4000))
            links = [
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")
            ]
            assert str(path) not in links


def test_b28_handles_as_arguments_are_refused_by_name() -> None:
    """Open files, connections and locks are refused at construction, naming the argument."""
    connection = sqlite3.connect(":memory:")
    with open(__file__) as file:
        for name, handle in (("file", file), ("connection", connection), ("lock", threading.Lock())):
            with pytest.raises(ConfigError, match=rf"kwargs\['{name}'\].*inside the factory"):
                Loader(FactorySpec(cases.Constant, 4, **{name: handle}), num_workers=2)
    connection.close()


def test_b38_workers_have_one_thread_unless_the_user_set_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool of a worker has one thread, set before any library is loaded; what the user exports wins."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for given, expected in ((None, 1), ("2", 2)):
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        with Loader(FactorySpec(cases.ThreadFacts, 2), batch_size=1, num_workers=1) as loader:
            assert torch.cat(list(loader)).tolist() == [[expected] * 3] * 2
    assert os.environ.get("OPENBLAS_NUM_THREADS") is None


START_METHOD = """
import multiprocessing, sys
when, method = sys.argv[1:]
if when == "before":
    multiprocessing.set_start_method(method, force=True)
import ringloader
from tests.runtime.case_datasets import Pid
if __name__ == "__main__":
    assert when == "before" or multiprocessing.get_start_method(allow_none=True) is None
    if when == "after":
        multiprocessing.set_start_method(method, force=True)
    expected = multiprocessing.get_start_method(allow_none=True)
    with ringloader.Loader(ringloader.FactorySpec(Pid, 8), batch_size=4, num_workers=1, output="numpy") as loader:
        print([batch[:, 0].tolist() for batch in loader])
    assert multiprocessing.get_start_method(allow_none=True) == expected
"""


@pytest.mark.parametrize(("when", "method"), [("before", "fork"), ("after", "spawn"), ("after", "forkserver"), ("never", "")])
def test_b43_start_method_changes_nothing_and_is_not_changed(when: str, method: str, tmp_path: Path) -> None:
    """The same script does the same under every start method, which is as it was after import and use."""
    done = run(tmp_path, START_METHOD, when, method)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[[0, 1, 2, 3], [4, 5, 6, 7]]\n", "")
