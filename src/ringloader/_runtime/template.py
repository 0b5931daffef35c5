"""The template of a pool's workers, from the side of the training process.

Owns one process (forking.py) that has imported what workers do, and of which they are split off: a thousandth of a second and
2 MiB each, where a new interpreter takes a hundred times that and 20 MiB. It runs nothing of the user's, and is replaced when
what a new process would inherit has changed. Where it cannot be had, or does not answer, workers are started as interpreters of
their own. Only the thread that starts workers may use it, for the template dies with that one.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import threading
import time
from dataclasses import dataclass

from ringloader._runtime import forking
from ringloader._runtime.process import environment, spawn

_PROGRAM = (
    "from ringloader._runtime.forking import serve; from ringloader._runtime.worker import main; "
    "fd = serve({fd}, {torch_origin!r}); fd is None or main(fd)"
)
# A new interpreter is there after 0.1 s. One that takes much longer comes to be used when it is there.
_BOOT_S = 1.5
# One that imports torch takes seconds, as each worker would by itself. Only the first is waited for so long.
_TORCH_BOOT_S = 30.0
# How often it is looked whether the loader is still there, while a template is waited for.
_LOOK_S = 0.05
# Splitting takes a millisecond. A template that does not answer, stopped perhaps, keeps workers from being started meanwhile.
_ANSWER_S = 1.5
_KILL_S = 1.0
_MAX_LOST = 3
_NUM_LIMITS = 16
# What a kernel or a sandbox answers that does not know this way of making a process.
_UNKNOWN = (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG)


@dataclass(frozen=True)
class _Conditions:
    """What a process inherits from the one that starts it."""

    environment: dict[str, str]
    limits: tuple[tuple[int, int], ...]
    cores: frozenset[int]
    streams: tuple[int, ...]

    @classmethod
    def now(cls, hash_seed: int) -> _Conditions:
        limits = tuple(resource.getrlimit(number) for number in range(_NUM_LIMITS))
        streams = tuple(number for number in (1, 2) if _is_open(number))
        return cls(environment(hash_seed), limits, frozenset(os.sched_getaffinity(0)), streams)


class Template:
    """Makes workers of one hash seed, as long as it can."""

    def __init__(self, hash_seed: int, torch_origin: str = "") -> None:
        self.is_ending = False  # no more workers will be wanted: set by anybody
        self._hash_seed = hash_seed
        self._torch_origin = torch_origin
        self._popen: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._conditions: _Conditions | None = None
        self._is_ready = False
        self._is_first = True
        self._num_lost = 0
        self._is_unfit = os.environ.get("RINGLOADER_TEMPLATE") == "0"

    def split(self, fd: int) -> int | None:
        """Return the process id of a new worker on the socket `fd`; None where it must be started otherwise.

        Raises OSError when no process can be started at all.
        """
        if self._is_unfit:
            return None
        conditions = _Conditions.now(self._hash_seed)
        if self._popen is not None and conditions != self._conditions:
            self.close()
        wait_s = 0.0
        if self._popen is None:
            wait_s = _TORCH_BOOT_S if self._torch_origin and self._is_first else _BOOT_S
            self._is_first = False
            self._launch(conditions)
        if not self._is_ready and not self._hear(wait_s):
            return None
        return self._ask(fd, conditions.streams)

    def _launch(self, conditions: _Conditions) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            program = _PROGRAM.format(fd=theirs.fileno(), torch_origin=self._torch_origin)
            self._popen = spawn(program, theirs.fileno(), conditions.environment)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._sock, self._conditions, self._is_ready = ours, conditions, False

    def _hear(self, wait_s: float) -> bool:
        """Whether the template has said that it is ready."""
        word = self._receive(wait_s)
        if word is None:
            return False
        self._is_ready = word == forking.READY
        if not self._is_ready:
            # Perhaps it is torch that starts threads when it is imported: once more without.
            self._is_unfit = word == forking.UNFIT and not self._torch_origin
            self._torch_origin = ""
            self._lose()
        return self._is_ready

    def _ask(self, fd: int, streams: tuple[int, ...]) -> int | None:
        assert self._sock is not None
        assert self._popen is not None
        try:
            self._sock.settimeout(_ANSWER_S)
            socket.send_fds(self._sock, [forking.SPLIT + bytes(streams)], [fd, *streams])
        except OSError:
            self._lose()
            return None
        answer = self._receive(_ANSWER_S)
        if answer is None:
            # Ended first, so that nothing is said after the last look: a worker nobody knows of would stay as a zombie.
            self._popen.kill()
            self._popen.wait(_KILL_S)
            answer = self._receive(0.0)
        if not answer:
            self._lose()
            return None
        (pid,) = forking.ANSWER.unpack(answer)
        if -pid in _UNKNOWN:
            self._is_unfit = True
            self._lose()
            return None
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return int(pid)

    def _receive(self, wait_s: float) -> bytes | None:
        """What the template says, b"" when it has ended, None when it says nothing for so long."""
        assert self._sock is not None
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                self._sock.settimeout(max(0.0, min(left_s, _LOOK_S)))
                return self._sock.recv(64)
            except (TimeoutError, BlockingIOError):
                if left_s <= 0 or self.is_ending:
                    return None
            except OSError:
                return b""

    def _lose(self) -> None:
        self._num_lost += 1
        self._is_unfit = self._is_unfit or self._num_lost >= _MAX_LOST
        self.close()

    def close(self) -> None:
        """End the template; workers stay. A second call changes nothing."""
        popen, sock = self._popen, self._sock
        self._popen = self._sock = self._conditions = None
        self._is_ready = False
        if sock is not None:
            sock.close()
        if popen is not None:
            popen.kill()
            try:
                popen.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                threading.Thread(target=popen.wait, name=f"waits-for-{popen.pid}", daemon=True).start()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
