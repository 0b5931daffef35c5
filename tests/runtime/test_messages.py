"""Every message that a user reads when something goes wrong, word for word.

tests/messages.txt is what they are; to change it, run this test with RINGLOADER_WRITE_MESSAGES=1 and read the difference. The
messages of each run are written to build/messages.txt.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringloader import ClosedError, FactoryError, FactorySpec, FaultPolicy, Loader, LoaderError, SampleRetry
from ringloader._core import supervision
from ringloader._runtime import causes, engine, segment
from ringloader._runtime.lacks import RoomError
from ringloader._runtime.process import WorkerProcess
from tests.runtime import message_datasets as data
from tests.runtime.conftest import wait_until
from tests.runtime.sample_datasets import Numbers

_ROOT = Path(__file__).parents[2]
_GOLDEN = _ROOT / "tests" / "messages.txt"
_WRITTEN = _ROOT / "build" / "messages.txt"
_ONCE = FaultPolicy(sample_deaths=1)


class Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname}: {record.getMessage()}")


@contextmanager
def logged() -> Iterator[list[str]]:
    logger, log = logging.getLogger("ringloader"), Log()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    try:
        yield log.texts
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)


def make(kind: Any, *args: Any, **options: Any) -> Loader:
    arguments = (20,) if kind in (Numbers,) or issubclass(kind, data.At7) else ()
    options = {"batch_size": 4, "num_workers": 1, "prefetch_factor": 1, "output": "numpy", **options}
    return Loader(FactorySpec(kind, *arguments, *args), **options)


def read(loader: Loader) -> list[str]:
    """Read an epoch; return the errors in it, and what was logged meanwhile."""
    errors: list[str] = []
    with logged() as texts:
        try:
            iterator = iter(loader)
        except LoaderError as error:
            return [*texts, shown(error)]
        while True:
            try:
                next(iterator)
            except StopIteration:
                return [*texts, *errors]
            except LoaderError as error:
                errors.append(shown(error))
                if "used up" in str(error) or isinstance(error, FactoryError):
                    return [*texts, *errors]


def shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def reading(kind: Any, **options: Any) -> Callable[[], list[str]]:
    def bring_about() -> list[str]:
        with make(kind, **options) as loader:
            return read(loader)

    return bring_about


def _out_of_memory() -> list[str]:
    """The kernel's count moves while the worker dies."""
    counts = iter(range(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causes, "oom_kills", lambda: next(counts))
        return reading(data.KilledAt7, faults=_ONCE)()


def _uncounted() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causes, "oom_kills", lambda: None)
        return reading(data.KilledAt7, faults=_ONCE)()


def _unreapable() -> list[str]:
    """A worker that SIGKILL does not end, for all that can be seen."""
    reap = WorkerProcess.reap
    ended: list[bool] = []

    def late(process: WorkerProcess, *, wait: bool) -> bool:
        return reap(process, wait=wait) if ended else False

    with pytest.MonkeyPatch.context() as patch, make(data.HangsAt7, timeout=0.3, faults=FaultPolicy(sample_deaths=1)) as loader:
        patch.setattr(WorkerProcess, "reap", late)
        iterator = iter(loader)
        next(iterator)
        object.__setattr__(loader._engine.scheduler.supervision.policy, "unreaped_s", 0.2)  # type: ignore[union-attr]
        with logged() as texts:
            errors = []
            try:
                next(iterator)
            except LoaderError as error:
                errors.append(shown(error))
            ended.append(True)
            found = [*texts, *errors]
        patch.undo()
        return found


def _waiting(folder: Path) -> list[str]:
    path = folder / "go"
    with pytest.MonkeyPatch.context() as patch, make(data.WaitsAt7, str(path)) as loader, logged() as texts:
        loader.start()
        patch.setattr(engine, "_QUIET_S", 0.3)
        iterator = iter(loader)
        next(iterator)
        say = loader._engine._say_waiting  # type: ignore[union-attr]

        def say_and_go(*given: Any) -> None:
            say(*given)
            path.touch()

        patch.setattr(loader._engine, "_say_waiting", say_and_go)
        next(iterator)
        return texts[:1]


def _ring_full() -> list[str]:
    with Loader(FactorySpec(Numbers, 400, 8192), batch_size=8, num_workers=1, output="numpy", max_ring_bytes=1 << 20) as loader:
        kept = []
        try:
            for batch in loader:
                kept.append(batch)
        except LoaderError as error:
            return [shown(error)]
    raise AssertionError("the ring was not full")


def _no_room() -> list[str]:
    """The machine has nothing left."""

    def refuse(nbytes: int) -> None:
        raise RoomError(f"{nbytes:,} bytes are needed and 0 bytes are available")

    with pytest.MonkeyPatch.context() as patch, make(Numbers) as loader:
        loader.start()
        patch.setattr(segment, "check_room", refuse)
        return read_first(loader)


def read_first(loader: Loader) -> list[str]:
    with logged() as texts:
        try:
            next(iter(loader))
        except LoaderError as error:
            return [*texts, shown(error)]
    raise AssertionError("no error")


def _no_descriptors() -> list[str]:
    """RLIMIT_NOFILE stands in the way of a worker."""
    loader = make(Numbers, faults=FaultPolicy(restarts=1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with loader:
        num_open = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 3, hard))
        try:
            return read(loader)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _changed_code(folder: Path) -> list[str]:
    module = folder / "code_that_changes.py"
    module.write_text("from tests.runtime.message_datasets import KilledAt7\n\ndef make():\n    return KilledAt7(20)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with Loader(FactorySpec("code_that_changes:make"), batch_size=4, num_workers=1, output="numpy", faults=_ONCE) as loader:
            loader.start()
            module.write_text(module.read_text() + "# another line\n")
            return [text for text in read(loader) if "changed" in text]


def _stopped() -> list[str]:
    """A worker that is stopped while it waits for work, and then gets some."""
    with make(Numbers, timeout=0.4) as loader:
        iterator = iter(loader)
        next(iterator)
        (worker,) = loader._engine.scheduler.workers.all  # type: ignore[union-attr]
        assert wait_until(lambda: not worker.fills)
        os.kill(loader.stats().worker_pids[0], signal.SIGSTOP)
        with logged() as texts:
            assert len(list(iterator)) == 4
            return texts


def _recycled() -> list[str]:
    with make(Numbers, faults=FaultPolicy(max_batches_per_worker=2)) as loader, logged() as texts:
        list(loader)
        assert wait_until(lambda: any("gives way" in text for text in texts))
        return [text for text in texts if "gives way" in text][:1]


def _closed() -> list[str]:
    loader = make(Numbers)
    loader.close()
    try:
        iter(loader)
    except ClosedError as error:
        return [shown(error)]
    raise AssertionError("it was open")


def _another_process() -> list[str]:
    source = (
        "import os, warnings\nfrom ringloader import FactorySpec, Loader, LoaderError\n"
        "from tests.runtime.sample_datasets import Numbers\n"
        "loader = Loader(FactorySpec(Numbers, 20), num_workers=1, output='numpy')\nlist(loader)\n"
        "warnings.simplefilter('ignore')\n"  # from 3.12 on Python warns of a fork beside threads
        "if os.fork() == 0:\n    try:\n        list(loader)\n    except LoaderError as error:\n"
        "        print(f'{type(error).__name__}: {error}', flush=True)\n    os._exit(0)\nos.wait()\nloader.close()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "src")])}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=30, env=environment, check=True
    )
    assert done.stderr == ""
    return [done.stdout.strip()]


def cases(folder: Path) -> dict[str, Callable[[], list[str]]]:
    """Every situation of which there is something to say, by its name in the file."""
    return {
        "the dataset raises": reading(data.RaisesAt7),
        "the dataset raises, inline": reading(data.RaisesAt7, num_workers=0),
        "the dataset raises after retries": reading(data.RaisesAt7, faults=FaultPolicy(retry=SampleRetry(2, backoff_s=0.001))),
        "samples do not fit together": reading(data.RaggedAt7),
        "the factory raises": reading(data.FailsWhenBuilt),
        "the factory ends the worker": reading(data.DiesWhenBuilt, faults=FaultPolicy(restarts=1, backoff_s=0.01)),
        "the factory hangs": reading(data.HangsWhenBuilt, faults=FaultPolicy(restarts=0, start_timeout_s=1.0)),
        "workers build different datasets": reading(data.Differs, num_workers=2),
        "a worker is killed by somebody, once too often for its sample": reading(data.KilledAt7, faults=_ONCE),
        "a worker is killed by the out-of-memory killer": _out_of_memory,
        "a worker is killed, and the kernel does not count": _uncounted,
        "an extension faults": reading(data.SegfaultsAt7, faults=_ONCE),
        "a mapped file is truncated": reading(data.LosesItsFileAt7, faults=_ONCE),
        "the dataset calls sys.exit": reading(data.ExitsAt7, faults=_ONCE),
        "the dataset calls os._exit": reading(data.LeavesAt7, faults=_ONCE),
        "a bad sample is skipped": reading(data.KilledAt7, faults=FaultPolicy(sample_deaths=1, on_bad_sample="skip")),
        "a worker exceeds timeout": reading(data.HangsAt7, timeout=0.4, faults=_ONCE),
        "a worker begins none of its batches": _stopped,
        "a worker makes no progress within a sample": reading(data.HangsAt7, faults=FaultPolicy(sample_deaths=1, stall_s=0.4)),
        "a worker has used up its restarts": reading(data.KilledAt7, faults=FaultPolicy(restarts=0)),
        "a worker cannot be ended": _unreapable,
        "a worker writes bytes that are no message": reading(data.GarblesAt7, faults=FaultPolicy(restarts=0)),
        "a stream that cannot be read again": reading(data.Lines, faults=FaultPolicy(sample_deaths=1)),
        "nothing arrives for a while": lambda: _waiting(folder),
        "the ring is full of batches that are kept": _ring_full,
        "there is no memory for a slot": _no_room,
        "no worker can be started for want of descriptors": _no_descriptors,
        "code has changed since the start": lambda: _changed_code(folder),
        "a worker gives way to a successor": _recycled,
        "the loader was closed": _closed,
        "the loader is another process's": _another_process,
    }


_RULES = (
    (r"pid \d+", "pid PID"),
    (r"had made \d+ batches", "had made N batches"),
    (r"process \d+", "process PID"),
    (r"worker \d (\(incarnation 1\) built another)", r"worker N \1"),  # whichever comes second
    (r"0x[0-9a-f]+", "0xADDRESS"),
    (r"(?<=0xADDRESS) \[[^\]]*\](?= \(most recent call first\))", ""),  # from 3.14 on stack dumps name the thread
    (r"Current thread's C stack trace [^\n]*\n(  [^\n]*\n)+\n", ""),  # and have the frames of C as well
    (r"\d+\.\d+ s\b", "N.N s"),
    (r"length \d+ instead of \d+", "length N instead of N"),
    (r'(?m)^\s*File "[^"]*/ringloader/[^\n]*\n(    \s*[^\s][^\n]*\n)?(\s*[\^~]+\n)?', ""),
    (r'(?m)^(\s*File )"[^"]*/([^/"]+)", line \d+', r'\1"\2", line N'),
    (r"(?m)^\s*[\^~]+\n", ""),
    (r"/[^\s:,;]*/(code_that_changes.py)", r"FOLDER/\1"),
    (r"(?m)^\s*File \"<frozen [^\n]*\n", ""),
    (r'(?m)^\s*File "<string>"[^\n]*\n', ""),
    (r"(?m)^Extension modules: [^\n]*\n?", ""),
    (r"\n{3,}", "\n\n"),
)


def plain(text: str) -> str:
    """Leave out what differs from run to run: process ids, addresses, durations, lines of our own files in a stack."""
    text += "\n"
    for pattern, words in _RULES:
        text = re.sub(pattern, words, text)
    return text.strip()


@pytest.mark.timeout(150)
@pytest.mark.long
def test_every_message_is_what_was_read_and_agreed(tmp_path: Path) -> None:
    """What happened, to which sample, why, and what to do: as in tests/messages.txt."""
    sections = []
    for name, bring_about in cases(tmp_path).items():
        found = [plain(text) for text in bring_about()]
        assert found, name
        sections.append(f"=== {name}\n\n" + "\n\n".join(found) + "\n")
    text = "\n".join(sections)
    _WRITTEN.parent.mkdir(exist_ok=True)
    _WRITTEN.write_text(text)
    if os.environ.get("RINGLOADER_WRITE_MESSAGES") == "1":
        _GOLDEN.write_text(text)
    assert text == _GOLDEN.read_text()


def test_facts_of_a_death_are_attributes_of_the_error() -> None:
    """A program can act on them without reading the sentence."""
    with make(data.SegfaultsAt7, faults=_ONCE) as loader, pytest.raises(LoaderError) as caught:
        list(loader)
    error = caught.value
    assert (error.index, error.batch, error.indices, error.worker) == (7, 1, [4, 5, 6, 7], 0)
    assert (error.signal, error.returncode, error.incarnation) == ("SIGSEGV", -11, 1)
    assert "happen" in error.stack
    assert error.pid > 0
    assert supervision.describe_exit(-11) == "was killed by SIGSEGV"
    with make(data.KilledAt7, faults=FaultPolicy(restarts=0)) as loader, pytest.raises(LoaderError) as caught:
        list(loader)
    assert (caught.value.signal, caught.value.deaths, caught.value.worker) == ("SIGKILL", 1, 0)
    assert np.int64(caught.value.batch) == 1
