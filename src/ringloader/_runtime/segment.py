"""Shared-memory segments: create, reserve, map. The only user of posix_ipc.

Owns the rule that memory is reserved before anyone writes to it, so that a lack of it is an exception here and never a SIGBUS
in whoever touches the page first. A segment is unlinked as soon as it is open and travels by descriptor: what has no name
cannot be left behind, whoever is killed. Where `/dev/shm` is too small a segment is a memfd. Must not know slots.
"""

from __future__ import annotations

import os

import posix_ipc

from ringloader._core.units import in_words
from ringloader._runtime import memory, pages
from ringloader._runtime.lacks import RoomError, translate
from ringloader._runtime.pages import Mapping

_SHM_DIR = "/dev/shm"
# Memory is reserved in steps this large, with a fresh look at what is left before each.
_STEP_NBYTES = 64 << 20
# 18 characters with the slash: systems exist that allow 31.
_NAME_PREFIX = "/rl-"


class Segment:
    """`nbytes` of reserved, zeroed shared memory with a descriptor to pass on and, once asked for, a mapping."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._mapping: Mapping | None = None

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Reserve a segment in `/dev/shm`, or as a memfd where that is too small. Raises RoomError."""
        check_room(nbytes)
        fd = _open_shm(nbytes)
        if fd is not None:
            try:
                reserve(fd, nbytes)
                return cls(fd, nbytes)
            except RoomError:
                os.close(fd)  # others filled /dev/shm meanwhile
            except BaseException:
                os.close(fd)
                raise
        fd = translate(os.memfd_create, "ringloader", os.MFD_CLOEXEC)
        try:
            reserve(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes)

    @property
    def mapping(self) -> Mapping:
        """The whole segment, shared and writable. It is unmapped when its last view is gone, not before."""
        return self._mapping if self._mapping is not None else self.map()

    def map(self) -> Mapping:
        """Map the segment if it is not mapped yet. Raises RoomError, and gives the memory back."""
        if self._mapping is None:
            try:
                self._mapping = map_shared(self.fd, self.nbytes)
            except RoomError:
                self.close()
                raise
        return self._mapping

    def close(self) -> None:
        """Let go of the descriptor and of our reference to the mapping; views stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._mapping = None


def map_shared(fd: int, nbytes: int) -> Mapping:
    """Map a segment for reading and writing, without touching its pages. Raises RoomError."""
    return translate(pages.map_file, fd, nbytes)


def check_room(nbytes: int) -> None:
    """Raise RoomError when this process should not take `nbytes` more."""
    available = memory.available_nbytes()
    usable = available - memory.margin_nbytes(available)
    if nbytes > usable:
        raise RoomError(f"{in_words(nbytes)} of memory are needed and {in_words(usable)} are available")


def _open_shm(nbytes: int) -> int | None:
    """Open an unlinked object in /dev/shm, or None when there is no room or no such file system."""
    try:
        stat = os.statvfs(_SHM_DIR)
        if nbytes > stat.f_bavail * stat.f_frsize:
            return None
        # Created empty and unlinked before it grows: killed in between, an empty name is all that could stay.
        name = f"{_NAME_PREFIX}{os.urandom(7).hex()}"
        shared = None
        try:
            shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
            posix_ipc.unlink_shared_memory(name)
        except BaseException:
            _forget_name(name)
            if shared is not None:
                shared.close_fd()
            raise
    except (OSError, posix_ipc.Error):
        return None
    os.set_inheritable(shared.fd, False)
    fd: int = shared.fd
    return fd


def _forget_name(name: str) -> None:
    """Take a name away, if it is there: an interrupt may have come between making it and knowing that it was made."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except (OSError, posix_ipc.Error):
        pass


def reserve(fd: int, nbytes: int, start: int = 0) -> None:
    """Reserve a file's bytes from `start` on, in huge pages where that can be. Raises RoomError."""
    huge = pages.HugePages(fd, nbytes)
    try:
        for at in range(start, nbytes, _STEP_NBYTES):
            step = min(_STEP_NBYTES, nbytes - at)
            if at:
                check_room(nbytes - at)
            translate(huge.ask, at, step)
            translate(os.posix_fallocate, fd, at, step)
    finally:
        huge.close()
