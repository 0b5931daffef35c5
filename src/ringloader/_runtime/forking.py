"""The main program of the template: a process that has imported what workers do, and splits a worker off whenever it is asked.

Owns the split. A worker so made is a child of the training process, not of the template: its death, its exit status and its
own end with its parent are as those of any process that the training process starts. That takes a system call of its own, for
`fork` has no such thing: clone with CLONE_PARENT, and around it what the C library's `fork` does for a process of one thread,
its thread id and its list of robust mutexes. With more threads than one there would be more to do, and the template says that
it is unfit, as it does with another C library. Must import nothing of the user's. Source: clone(2), PR_GET_TID_ADDRESS of
prctl(2), get_robust_list(2).

One page is shared with the training process: int32 at 0, written by the kernel, is the process id of the last worker that was
split off, before that worker runs. So one whose template ends before it can answer is known all the same.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import importlib.util
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable

# What the template says first, and what it is asked for, with the numbers of the standard streams whose descriptors follow.
READY, UNFIT_WITH_TORCH, UNFIT, SPLIT = b"ready", b"with torch", b"unfit", b"split"
ANSWER = struct.Struct("<q")  # a process id, or an error number below 0
_STREAMS = (1, 2)
# Whether torch was there before anything of the user's: in the template, and in what is split off it.
has_torch = False
_PR_SET_PDEATHSIG, _PR_GET_TID_ADDRESS = 1, 40
_CLONE_PARENT, _CLONE_PARENT_SETTID, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x100000, 0x200000, 0x1000000
# By machine: the numbers of clone, set_robust_list and get_robust_list, and whether clone takes `tls` before `child_tid`. Its
# successor clone3 is refused in containers: filters cannot see what it is asked for.
_CALLS = {"x86_64": (56, 273, 274, False), "aarch64": (220, 99, 100, True)}


class Splitter:
    """Makes siblings of this process, and has the kernel note their ids at `note`. Raises OSError where that cannot be done."""

    def __init__(self, note: ctypes.c_int) -> None:
        if _num_threads() > 1:
            raise OSError(errno.EBUSY, "this process has several threads")
        if not os.confstr("CS_GNU_LIBC_VERSION"):
            raise OSError(errno.ENOSYS, "this is another C library than the one whose `fork` is done here")
        # Calls that keep the interpreter's lock: nothing else may run between what goes before the split and what comes after.
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        clone, self._set_robust_list, get_robust_list, is_tls_first = _CALLS.get(os.uname().machine, (-1, -1, -1, False))
        tid_address, self._robust_list, self._robust_nbytes = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        self._check(self._libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid_address), 0, 0, 0))
        found = ctypes.byref(self._robust_list), ctypes.byref(self._robust_nbytes)
        self._check(self._libc.syscall(get_robust_list, 0, *found))
        self._note = note
        flags = _CLONE_PARENT | _CLONE_PARENT_SETTID | _CLONE_CHILD_CLEARTID | _CLONE_CHILD_SETTID
        last = (0, tid_address.value) if is_tls_first else (tid_address.value, 0)
        self._arguments = [ctypes.c_void_p(word) for word in (clone, flags, 0, ctypes.addressof(note), *last)]

    def split(self) -> int:
        """Return the process id of the sibling, and 0 in it. Raises OSError."""
        python = ctypes.pythonapi
        python.PyOS_BeforeFork()
        pid = self._libc.syscall(*self._arguments)
        if pid == 0:
            self._libc.syscall(self._set_robust_list, self._robust_list, self._robust_nbytes)
            python.PyOS_AfterFork_Child()
            return 0
        number = ctypes.get_errno()
        python.PyOS_AfterFork_Parent()
        if pid < 0:
            raise OSError(number, os.strerror(number))
        return int(pid)

    @staticmethod
    def _check(result: int) -> None:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def serve(fd: int, page_fd: int, parent_pid: int, torch_origin: str, path: list[str]) -> int | None:
    """Split off workers until the other end of the socket `fd` is closed.

    With a `torch_origin` they have torch imported, if it is the one of that file on the search path `path`.
    Returns in each of them, with the descriptor of the worker's own socket, and with None when it is over.
    """
    with socket.socket(fileno=fd) as sock:
        try:
            return _serve(sock, page_fd, parent_pid, functools.partial(_import_torch, torch_origin, path))
        except (BrokenPipeError, ConnectionResetError):
            return None  # nobody is there to hear


def _serve(sock: socket.socket, page_fd: int, parent_pid: int, import_torch: Callable[[], bool]) -> int | None:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            return None  # it died before we were tied to it
        note = ctypes.c_int.from_buffer(mmap.mmap(page_fd, mmap.PAGESIZE))
        os.close(page_fd)
        from ringloader._runtime import building, worker  # noqa: F401  what every worker begins with

        splitter = Splitter(note)
    except (OSError, AttributeError):
        sock.send(UNFIT)
        return None
    if not import_torch() or _num_threads() > 1:
        sock.send(UNFIT_WITH_TORCH)
        return None
    # What is there by now is never garbage, and looking for some would write to pages that all workers share.
    gc.freeze()
    # Whoever waits for the end of what the training process wrote to shall not wait for this one.
    _give_streams(())
    sock.send(READY)
    while True:
        request, fds, _, _ = socket.recv_fds(sock, 64, 4, socket.MSG_CMSG_CLOEXEC)
        if not request:
            return None
        streams = request[len(SPLIT) :]
        try:
            pid = splitter.split() if len(fds) == 1 + len(streams) else -errno.EMFILE
        except OSError as error:
            pid = -(error.errno or errno.EINVAL)
        if pid == 0:
            _settle(dict(zip(streams, fds[1:], strict=True)))
            return fds[0]
        for each in fds:
            os.close(each)
        sock.send(ANSWER.pack(pid))


def _import_torch(origin: str, path: list[str]) -> bool:
    """Import torch if it is the one that the training process has; False where that fails, for it cannot be tried again."""
    global has_torch
    if not origin:
        return True
    sys.path[:] = path  # what torch takes up when it is imported, plug-ins say, is what it would find in a worker
    try:
        found = importlib.util.find_spec("torch")
        if found is not None and found.origin == origin:
            importlib.import_module("torch")
            has_torch = True
    except BaseException:
        return False
    return True


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _settle(streams: dict[int, int]) -> None:
    """Be a process of one's own, as a new one would be: a session, and the standard streams of the training process."""
    os.setsid()
    _give_streams(tuple(streams.items()))
    for fd in streams.values():
        os.close(fd)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    renew = getattr(threading.main_thread(), "_set_native_id", None)
    if renew is not None:
        renew()
    if has_torch:
        sys.modules["torch"].default_generator.seed()  # not what all of them begin with


def _give_streams(streams: tuple[tuple[int, int], ...]) -> None:
    given = dict(streams)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for stream in _STREAMS:
        os.dup2(given.get(stream, nothing), stream)
    os.close(nothing)
