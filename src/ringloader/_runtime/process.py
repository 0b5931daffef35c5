"""One worker process: start, wait for its end, dump its stack, kill.

Owns the facts of a process: pid, pidfd, exit status. A worker is split off a template of its pool (template.py), or a fresh
interpreter; either way in a session of its own, so nothing of this process is forked, no terminal signal reaches it and its own
children can be ended with it. Must only ever wait for and signal what it started itself.
"""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

from ringloader._runtime.status import DUMP_SIGNAL, STAGES, STARTING, StatusPage

# One thread per worker: a pool of threads per process times the number of workers is more threads than cores.
_THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_DUMP_WAIT_S = 0.5
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
# -P keeps the working directory out of sys.path until the handshake brings the parent's own path: a ./socket.py there must not
# be imported instead of the standard library's.
_BOOTSTRAP = f"import sys; sys.path.append({_PACKAGE_ROOT!r}); "
_MAX_STREAM = 2
_PROGRAM = "from ringloader._runtime.worker import main; main({fd})"


class Splits(Protocol):
    """Makes workers in another way, where it can: see `Template`."""

    def split(self, fd: int) -> int | None: ...


class WorkerProcess:
    """A started worker; `sock` is our end of its pipe."""

    def __init__(self, pid: int, sock: socket.socket, page: StatusPage, popen: subprocess.Popen[bytes] | None = None) -> None:
        self._popen = popen
        self.sock = sock
        self.page = page
        self.pid = pid
        self.is_reaped = False
        self.returncode: int | None = None
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:
            self.pidfd = -1  # an old kernel or a sandbox without it: the owner waits in a thread

    @classmethod
    def start(cls, hash_seed: int, page: StatusPage, template: Splits) -> WorkerProcess:
        """Start a process that runs a worker. Raises OSError."""
        for launch in (template.split, functools.partial(_spawn_worker, hash_seed)):
            # A pair for each way: one that was split off and is not known must not read what the other gets.
            ours, theirs = socket_pair()
            try:
                started = launch(theirs.fileno())
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            if isinstance(started, int):
                return cls(started, ours, page)
            if started is not None:
                return cls(started.pid, ours, page, started)
            ours.close()
        raise AssertionError("an interpreter is started, or there is an error")

    def signal(self, number: int) -> None:
        """Send a signal unless the process has been reaped."""
        if not self.is_reaped:
            try:
                if self.pidfd >= 0:
                    signal.pidfd_send_signal(self.pidfd, number)
                else:
                    os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def dump_stack(self) -> None:
        """Have the worker write its Python stacks to its status page, and wait a moment for them."""
        try:
            if self.page.view().stage == STAGES[STARTING]:
                return  # it does not heed the signal yet, which would end it
            self.page.clear_trace()
            self.signal(DUMP_SIGNAL)
            deadline_s = time.monotonic() + _DUMP_WAIT_S
            before = ""
            while time.monotonic() < deadline_s:
                # Bounded: a process that is stopped or deep in the kernel never answers.
                time.sleep(0.005)
                trace = self.page.trace()
                if trace and trace == before:
                    return
                before = trace
        except ValueError:
            return  # it has ended by itself meanwhile, and whoever noticed has closed the page

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def reap(self, *, wait: bool) -> bool:
        """Collect the exit status if the process has ended; True when it has."""
        if self.is_reaped:
            return True
        options = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
        try:
            if os.waitid(os.P_PID, self.pid, options) is None:
                return False
        except ChildProcessError:
            # The user ignores SIGCHLD, so the kernel keeps no status: the process has ended if it is not there.
            if not wait and _exists(self.pid):
                return False
            self._mark_reaped(None)
            return True
        # Still a zombie, so its id is its own: children it left behind can be ended by their group without hitting a stranger.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except OSError:
            pass
        self._mark_reaped(self._wait())
        return True

    def _wait(self) -> int | None:
        """Collect the exit status; None when somebody else has."""
        if self._popen is not None:
            return self._popen.wait()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return None

    def _mark_reaped(self, returncode: int | None) -> None:
        self.is_reaped = True
        self.returncode = returncode
        if self._popen is not None:
            self._popen.returncode = returncode if returncode is not None else 0

    def close(self) -> None:
        """Let go of descriptors; the process should be reaped, or is abandoned."""
        if not self.is_reaped:
            # Abandoned on purpose. It ends some time, and somebody has to collect it, or it stays as a zombie.
            threading.Thread(target=self._wait, name=f"waits-for-{self.pid}", daemon=True).start()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        self.page.close()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def socket_pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Return two sockets, the second at a number that is no standard stream's, one of which may be closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    if theirs.fileno() > _MAX_STREAM:
        return ours, theirs
    try:
        return ours, socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, _MAX_STREAM + 1))
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


def _spawn_worker(hash_seed: int, fd: int) -> subprocess.Popen[bytes]:
    return spawn(_PROGRAM.format(fd=fd), (fd,), environment(hash_seed))


def spawn(program: str, fds: tuple[int, ...], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start an interpreter in a session of its own that runs a text of code and inherits descriptors. Raises OSError."""
    # A stream that is closed here is open for nothing there, from the first moment on: whatever the interpreter or a library
    # opens first would have its number, and get what is printed.
    stdout, stderr = (None if is_inherited(stream) else subprocess.DEVNULL for stream in (1, 2))
    return subprocess.Popen(
        [*interpreter(), "-c", _BOOTSTRAP + program],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=fds,
        start_new_session=True,
        env=environment,
    )


def is_inherited(fd: int) -> bool:
    """The descriptor is open, and a new process would have it too."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def interpreter() -> list[str]:
    """The command that starts one like this."""
    # The flags of this interpreter (-O, -X dev, -W ...), as multiprocessing passes them on.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P"]


def environment(hash_seed: int) -> dict[str, str]:
    """What workers find in `os.environ`: this process's, one thread per worker, and one hash seed for all."""
    found = dict(os.environ)
    for name in _THREAD_LIMITS:
        found.setdefault(name, os.environ.get("OMP_NUM_THREADS", "1"))
    if found.get("PYTHONHASHSEED", "random") == "random":
        found["PYTHONHASHSEED"] = str(hash_seed)
    return found
