"""The injector of the soak: what goes wrong, how often, and to whom, all drawn from one seed.

It harms only processes that the soak's own loaders have started, and the soak itself.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType

import soak_datasets as data
from soak_readers import Interrupted, Reader

# Relative frequencies. Two in three are kills: a run of ten minutes is to have a thousand.
_WEIGHTS = {
    "kill": 200,
    "kill all": 4,
    "stop": 12,
    "hang": 32,
    "slow": 16,
    "raise": 20,
    "exit": 12,
    "abort": 12,
    "garbage": 10,
    "torn": 10,
    "print": 10,
    "nice": 4,
    "fill /dev/shm": 4,
    "interrupt": 20,
    "pause": 1,
    "unreapable": 1,
}
_RATE = 4.0  # per second
# What comes rarely, and once at least.
_FIRST = ("unreapable", "pause", "fill /dev/shm", "kill all")
_ALARM_S = 0.0005
_FILL_S = 1.5
_STOP_S = 2.5
_PAUSE_S = 1.5
_UNREAPABLE_S = 9.0  # beyond the five seconds after which a worker that does not end is left alone
_PTRACE_ATTACH, _PTRACE_CONT = 16, 7
# Traces a process and is stopped: what it traces can be killed, but not reaped by its parent.
_TRACER = f"""
import ctypes, os, signal, sys
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
if libc.ptrace({_PTRACE_ATTACH}, pid, None, None):
    sys.exit(1)
os.waitpid(pid, 0)
libc.ptrace({_PTRACE_CONT}, pid, None, None)
print("traced", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
_PAUSER = f"""
import os, signal, sys, time
pid = int(sys.argv[1])
os.kill(pid, signal.SIGSTOP)
time.sleep({_PAUSE_S})
os.kill(pid, signal.SIGCONT)
"""


class Injector:
    """Makes things go wrong on a thread of its own; `main` are the readers of the main thread, which can be interrupted."""

    def __init__(self, readers: list[Reader], main: list[Reader], controls: list[data.Control], seed: int) -> None:
        self.done: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._readers, self._main, self._controls = readers, main, controls
        self._rng = random.Random(seed)
        self._end = threading.Event()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._wants_interrupt = False
        self._first = list(_FIRST)
        self._faults: dict[str, Callable[[], bool]] = {
            "kill": self._kill,
            "kill all": self._kill_all,
            "stop": self._stop,
            "nice": self._nice,
            "fill /dev/shm": self._fill,
            "interrupt": self._interrupt,
            "pause": self._pause,
            "unreapable": self._unreapable,
            **{kind: lambda kind=kind: self._ask(kind) for kind in data.KINDS},  # type: ignore[misc]
        }
        self._thread = threading.Thread(target=self._run, name="injector", daemon=True)

    def start(self) -> None:
        """Begin; on the main thread, which takes the signals."""
        signal.signal(signal.SIGALRM, self._on_alarm)
        self._thread.start()

    def end(self) -> None:
        """Inject nothing more, and take back what was meant to pass."""
        self._end.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(10)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        for _, undo in self._later:
            undo()
        self._later.clear()

    def _run(self) -> None:
        try:
            while not self._end.wait(self._rng.expovariate(_RATE)):
                now_s = time.monotonic()
                for due in [due for due in self._later if due[0] <= now_s]:
                    due[1]()
                    self._later.remove(due)
                drawn = self._rng.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0]
                kind = self._first.pop() if self._first else drawn
                self.done[kind] += self._faults[kind]()
        except BaseException as error:
            self.failure = error

    def _after(self, seconds: float, undo: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, undo))

    def _worker(self) -> int:
        """A worker of ours, 0 if none is there."""
        pids = [pid for reader in self._readers for pid in reader.pids()]
        return self._rng.choice(pids) if pids else 0

    def _ask(self, kind: str) -> bool:
        number = self._rng.choice([one.number for one in self._readers if kind not in one.job.spared])
        self._controls[number].ask(kind)
        return True

    def _kill(self) -> bool:
        return _signal(self._worker(), signal.SIGKILL)

    def _kill_all(self) -> bool:
        """Every worker of one loader at once, as for want of memory."""
        pids = self._rng.choice(self._readers).pids()
        return sum(_signal(pid, signal.SIGKILL) for pid in pids) > 0

    def _stop(self) -> bool:
        pid = self._worker()
        self._after(self._rng.random() * _STOP_S, lambda: _signal(pid, signal.SIGCONT) and None)
        return _signal(pid, signal.SIGSTOP)

    def _nice(self) -> bool:
        """Starve a worker of processor time."""
        try:
            os.setpriority(os.PRIO_PROCESS, self._worker() or -1, 19)
        except OSError:
            return False
        return True

    def _fill(self) -> bool:
        """Take all there is left of a small /dev/shm, for a while."""
        path = f"/dev/shm/soak-{self._rng.randrange(1 << 30)}"
        free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
        if free > 128 << 20:
            return False  # it is not ours alone
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(fd, 0, max(1, free))
        except OSError:
            pass  # somebody was quicker
        finally:
            os.close(fd)
        self._after(_FILL_S, lambda: os.unlink(path))
        return True

    def _interrupt(self) -> bool:
        self._wants_interrupt = True
        signal.setitimer(signal.ITIMER_REAL, _ALARM_S, _ALARM_S)
        return True

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if not self._wants_interrupt or not any(reader.is_inside for reader in self._main):
            return
        # Only code of the loader: between its return and the next line of the reader a batch could be lost by the reader.
        if frame is not None and "ringloader" in frame.f_code.co_filename:
            self._wants_interrupt = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interrupted

    def _pause(self) -> bool:
        """Stop this whole process, as a suspended job is, while its workers go on."""
        subprocess.Popen([sys.executable, "-c", _PAUSER, str(os.getpid())]).wait()
        return True

    def _unreapable(self) -> bool:
        """Kill a worker that cannot be reaped for a while."""
        pid = self._worker()
        if not pid:
            return False
        tracer = subprocess.Popen([sys.executable, "-c", _TRACER, str(pid)], stdout=subprocess.PIPE, text=True)
        assert tracer.stdout is not None
        is_traced = tracer.stdout.readline().strip() == "traced"

        def let_go() -> None:
            tracer.kill()
            tracer.wait()
            assert tracer.stdout is not None
            tracer.stdout.close()

        if not is_traced:
            let_go()
            return False
        _signal(pid, signal.SIGKILL)
        self._after(_UNREAPABLE_S, let_go)
        return True


def _signal(pid: int, number: int) -> bool:
    """Signal a worker; False when it has just ended."""
    if not pid:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
