"""The template of a pool's workers, from the side of the training process.

Owns one process (forking.py) that has imported what workers do, and of which they are split off: a thousandth of a second and
a few MiB each, where a new interpreter takes a hundred times that and 20 MiB. It runs nothing of the user's, and is replaced
when what a new process would inherit has changed. Where it cannot be had, or does not answer, workers are started as
interpreters of their own. Only the thread that starts workers may use it, for the template dies with that one.

Lost answers. A template that is asked and ends, or is ended because it says nothing, may have split a worker off before. Once
it is gone the page that it shares tells: that worker is taken as if the answer had come. One that cannot be ended, in the hands
of a debugger perhaps, is left to a thread that waits for its end and ends what it has left; the socket that this worker was
given is closed by then, and it serves nobody.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ringloader._runtime import forking
from ringloader._runtime.process import environment, interpreter, is_inherited, socket_pair, spawn

_PROGRAM = (
    "from ringloader._runtime.forking import serve; from ringloader._runtime.worker import main; "
    "fd = serve({fd}, {page_fd}, {pid}, {torch_origin!r}, {path!r}); fd is None or main(fd)"
)
# A new interpreter is there after 0.1 s. One that takes much longer comes to be used when it is there.
_BOOT_S = 1.5
# One that imports torch takes seconds, as each worker would by itself. Only the first is waited for so long.
_TORCH_BOOT_S = 30.0
# How often it is looked whether the loader is still there, while a template is waited for.
_LOOK_S = 0.05
# Splitting takes a millisecond. A template that does not answer, stopped perhaps, keeps workers from being started meanwhile.
_ANSWER_S = 1.0
_KILL_S = 1.0
_MAX_LOST = 3
_NUM_LIMITS = 16
# What a kernel or a sandbox answers that does not know this way of making a process.
_UNKNOWN = (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG)
# Lines of proc(5)'s status file that a new process has from its parent.
_INHERITED = (
    *("Umask", "Uid", "Gid", "Groups", "SigIgn", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Speculation_Store_Bypass"),
    "THP_enabled",
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
)


@dataclass(frozen=True)
class _Conditions:
    """What a process inherits from the one that starts it, and from the thread."""

    command: list[str]
    environment: dict[str, str]
    limits: tuple[tuple[int, int], ...]
    streams: tuple[int, ...]
    cores: frozenset[int]
    priority: tuple[int, int]
    status: tuple[str, ...]
    groups: tuple[str, ...]  # control groups, and how likely the kernel is to end it for want of memory
    places: tuple[str, ...]  # namespaces and the root of the file system

    @classmethod
    def now(cls, hash_seed: int) -> _Conditions:
        own = "/proc/thread-self"
        return cls(
            interpreter(),
            environment(hash_seed),
            tuple(resource.getrlimit(number) for number in range(_NUM_LIMITS)),
            tuple(number for number in (1, 2) if is_inherited(number)),
            frozenset(os.sched_getaffinity(0)),
            (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)),
            tuple(line for line in _read(f"{own}/status").splitlines() if line.partition(":")[0] in _INHERITED),
            (_read(f"{own}/cgroup"), _read("/proc/self/oom_score_adj")),
            (*_links(f"{own}/ns"), os.readlink(f"{own}/root")),
        )


class Template:
    """Makes workers of one hash seed, as long as it can."""

    def __init__(self, hash_seed: int, torch_origin: str = "", path: Sequence[str] = ()) -> None:
        self.is_ending = False  # no more workers will be wanted: set by anybody
        self._hash_seed = hash_seed
        self._torch_origin, self._path = torch_origin, list(path)
        self._popen: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._page: mmap.mmap | None = None
        self._conditions: _Conditions | None = None
        self._is_ready = False
        self._is_first = True
        self._num_lost = 0
        self._is_unfit = os.environ.get("RINGLOADER_TEMPLATE") == "0"

    def split(self, fd: int) -> int | None:
        """Return the process id of a new worker on the socket `fd`; None where it must be started otherwise, on another one."""
        if self._is_unfit:
            return None
        try:
            conditions = _Conditions.now(self._hash_seed)
        except OSError:
            return None  # a sandbox that does not say: what holds now is known to nobody
        if self._popen is not None and conditions != self._conditions:
            self.close()
        wait_s = 0.0
        if self._popen is None:
            wait_s = _TORCH_BOOT_S if self._torch_origin and self._is_first else _BOOT_S
            self._is_first = False
            try:
                self._launch(conditions)
            except OSError:
                return None  # what there is too little of may be enough for a worker
        if not self._is_ready and not self._hear(wait_s):
            return None
        return self._ask(fd, conditions.streams)

    def _launch(self, conditions: _Conditions) -> None:
        ours, theirs = socket_pair(socket.SOCK_SEQPACKET)
        page_fd = -1
        try:
            page_fd = os.memfd_create("ringloader-template", os.MFD_CLOEXEC)
            os.posix_fallocate(page_fd, 0, mmap.PAGESIZE)
            page = mmap.mmap(page_fd, mmap.PAGESIZE)
            numbers = {"fd": theirs.fileno(), "page_fd": page_fd, "pid": os.getpid()}
            program = _PROGRAM.format(**numbers, torch_origin=self._torch_origin, path=self._path)
            self._popen = spawn(program, (theirs.fileno(), page_fd), conditions.environment)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if page_fd >= 0:
                os.close(page_fd)
        self._sock, self._page, self._conditions, self._is_ready = ours, page, conditions, False

    def _hear(self, wait_s: float) -> bool:
        """Whether the template has said that it is ready."""
        word = self._receive(wait_s)
        if word is None:
            return False
        self._is_ready = word == forking.READY
        if not self._is_ready:
            self._is_unfit = word == forking.UNFIT
            # It may be torch whose import fails, ends the process or starts threads: the next one is without.
            self._torch_origin = ""
            self._lose()
        return self._is_ready

    def _ask(self, fd: int, streams: tuple[int, ...]) -> int | None:
        assert self._sock is not None
        assert self._page is not None
        page = memoryview(self._page).cast("i")
        page[0] = 0
        try:
            self._sock.settimeout(_ANSWER_S)
            socket.send_fds(self._sock, [forking.SPLIT + bytes(streams)], [fd, *streams])
            answer = self._receive(_ANSWER_S, patiently=True)
        except OSError:
            answer = b""
        if not answer:
            is_over = self._lose()
            return (page[0] or None) if is_over else None
        page[0] = 0  # what is noted there from now on is known to nobody
        (pid,) = forking.ANSWER.unpack(answer)
        if pid < 0:
            # With one process less there may be room for a worker; if not, the error that says so comes from there.
            self._is_unfit = -pid in _UNKNOWN
            self._lose()
            return None
        return int(pid)

    def _receive(self, wait_s: float, *, patiently: bool = False) -> bytes | None:
        """What the template says, b"" when it has ended, None when it says nothing for so long, or nobody will need it."""
        assert self._sock is not None
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                self._sock.settimeout(max(0.0, min(left_s, _LOOK_S)))
                return self._sock.recv(64)
            except (TimeoutError, BlockingIOError):
                if left_s <= 0 or (self.is_ending and not patiently):
                    return None
            except OSError:
                return b""

    def _lose(self) -> bool:
        self._num_lost += 1
        self._is_unfit = self._is_unfit or self._num_lost >= _MAX_LOST
        return self.close()

    def close(self) -> bool:
        """End the template; workers stay. False where it does not end yet. A second call changes nothing."""
        popen, sock, page = self._popen, self._sock, self._page
        self._popen = self._sock = self._page = self._conditions = None
        self._is_ready = False
        if sock is not None:
            sock.close()  # which ends it where it may not be sent signals any more
        if popen is None:
            return True
        _kill(popen)
        try:
            popen.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            name = f"waits-for-{popen.pid}"
            threading.Thread(target=_end_late, args=(popen, page), name=name, daemon=True).start()
            return False
        return True


def _kill(popen: subprocess.Popen[bytes]) -> None:
    try:
        popen.kill()
    except OSError:
        pass  # this process may have become another user's


def _end_late(popen: subprocess.Popen[bytes], page: mmap.mmap | None) -> None:
    """Wait for a template that cannot be ended yet, and end the worker that it may have split off last."""
    popen.wait()
    pid = memoryview(page).cast("i")[0] if page is not None else 0
    if pid:
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except OSError:
            pass  # it was known, and is reaped


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _links(folder: str) -> tuple[str, ...]:
    try:
        return tuple(os.readlink(f"{folder}/{name}") for name in sorted(os.listdir(folder)))
    except OSError:
        return ()
