"""Named segments: one copy per machine, built by one process and attached by all others, now and later.

Owns the files `/dev/shm/ringloader.<uid>.<name>` (mode 0600), their header, and who may build, attach and remove them.

    0       8 bytes   magic
    8       u32       version of this form
    12      u32       CRC-32 of the facts
    16      u64       bytes of the whole file
    24      u32       bytes of the facts
    28      facts     packed by `values.encode`
    4096·k  data

Who may die when, and what then frees the others:
- the builder: it writes to `<name>.partial` and holds the lock of `<name>.lock` (flock). The kernel frees the lock with the
  process; the next builder takes it, removes the partial file and begins anew. A file gets its name by a rename once it is
  complete, so nobody ever finds half of one.
- a user: it holds a shared lock of the file itself, on a descriptor that forked children close. Whoever gets an exclusive lock
  knows that nobody uses the file. No process id is looked at: those of another container mean nothing here.
- a remover: it takes both locks first. Who has just opened the file finds it without a name, and looks again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ringloader._core import values
from ringloader._core.units import in_words
from ringloader._runtime import segment
from ringloader.errors import ConfigError, LoaderError, LoaderTimeoutError

logger = logging.getLogger("ringloader")

_Made = TypeVar("_Made")

_FOLDER = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAGIC = b"RLSHARED"
_VERSION = 1
_HEAD = struct.Struct("<8sIIQI")
PAGE_NBYTES = 4096
_LOOK_S = 0.02
_QUIET_S = 10.0
_PARTIAL, _LOCK = ".partial", ".lock"


def check_name(name: object) -> str:
    """Return a name that a segment can have. Raises ConfigError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith((_PARTIAL, _LOCK)):
        raise ConfigError(
            f"name is {name!r:.120}; give up to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
            option="name",
            value=name,
        )
    return name


def path_of(name: str) -> str:
    """Where the segment of a name of this user lies."""
    return f"{_FOLDER}/ringloader.{os.geteuid()}.{name}"


# --- header ---------------------------------------------------------------------------------------------------------------


def data_offset(facts: dict[str, Any]) -> int:
    """Where the data begins, behind a header with these facts."""
    nbytes = _HEAD.size + len(values.encode(facts))
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def write_header(fd: int, nbytes: int, facts: dict[str, Any]) -> None:
    """Write the header of a complete file."""
    packed = values.encode(facts)
    os.pwrite(fd, _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(packed), nbytes, len(packed)) + packed, 0)


def read_header(fd: int, what: str) -> tuple[int, dict[str, Any]]:
    """Return size and facts of a file. Raises ConfigError, which names the file, for one that is not whole or not ours."""
    size = os.fstat(fd).st_size
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size or head[:8] != _MAGIC:
        raise _refused(what, "is no segment of this package, or was never finished")
    _, version, checksum, nbytes, facts_nbytes = _HEAD.unpack(head)
    if version != _VERSION:
        raise _refused(what, f"has form {version}, and this release reads form {_VERSION}")
    if nbytes != size:
        raise _refused(what, f"has {size:,} bytes, and its header says {nbytes:,}: it was cut or has grown")
    packed = os.pread(fd, facts_nbytes, _HEAD.size)
    if len(packed) != facts_nbytes or zlib.crc32(packed) != checksum:
        raise _refused(what, "has a damaged header")
    return nbytes, values.decode(packed)


def _refused(what: str, words: str) -> ConfigError:
    return ConfigError(
        f"{what} {words}; remove it (ringloader.sharing.remove_leftovers) or use another name", option="name", value=what
    )


# --- locks ----------------------------------------------------------------------------------------------------------------

# Descriptors whose locks are this process's alone: a forked child would hold them for as long as it lives.
_own: set[int] = set()


def _close_in_child() -> None:
    for fd in _own:
        try:
            os.close(fd)
        except OSError:
            pass
    _own.clear()


os.register_at_fork(after_in_child=_close_in_child)


def close(fd: int) -> None:
    """Close a descriptor that `attach` or `build` opened; harmless in a forked child, where it is closed already."""
    if fd in _own:
        _own.discard(fd)
        os.close(fd)


def dup(fd: int) -> int:
    """Return another descriptor that holds the same lock."""
    other = os.dup(fd)
    _own.add(other)
    return other


def unlocked(fd: int) -> int:
    """Open the file of a descriptor once more: what is mapped through it holds no lock, here or in a forked child."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _open(path: str, flags: int) -> int:
    """Open a file of this user's. Raises ConfigError for somebody else's, OSError as open(2) does."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise _refused(path, "belongs to another user, or is no file")
    _own.add(fd)
    return fd


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _building(name: str) -> Iterator[bool]:
    """Hold the lock of a name, if it can be had: whether it could."""
    path = path_of(name) + _LOCK
    fd = _open(path, os.O_CREAT | os.O_RDWR)
    try:
        # One that was removed between opening and locking is nobody's lock any more.
        yield _try_lock(fd, fcntl.LOCK_EX) and _is_at(fd, path)
    finally:
        close(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


# --- attach, build ----------------------------------------------------------------------------------------------------------


def try_attach(name: str) -> int | None:
    """Open the segment of a name and hold it; None when there is none."""
    path = path_of(name)
    while True:
        try:
            fd = _open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        if _try_lock(fd, fcntl.LOCK_SH) and _is_at(fd, path):
            return fd
        close(fd)  # it is being removed
        time.sleep(_LOOK_S)


class Partial:
    """The file of a name while it is being built."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = path_of(name) + _PARTIAL
        self.fd = -1

    def begin(self) -> None:
        """Make an empty file; what was there before stays valid for those who have it mapped."""
        self.drop()
        self.fd = _open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR)

    def drop(self) -> bool:
        """Remove the file, if it is there; whether it was."""
        if self.fd >= 0:
            close(self.fd)
            self.fd = -1
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return False
        return True


def attach_or_build(name: str, attach: Callable[[int], _Made], build: Callable[[Partial], _Made], timeout_s: float) -> _Made:
    """Attach the segment of a name, or have it built: by this process, or by another that has begun already.

    `attach` takes a descriptor, `build` an empty file that it has to fill. Raises LoaderTimeoutError.
    """
    check_name(name)
    began_s = quiet_s = time.monotonic()
    while True:
        fd = try_attach(name)
        if fd is not None:
            return _closing(fd, attach)
        with _building(name) as is_ours:
            if is_ours:
                fd = try_attach(name)  # somebody may have finished in between
                return _closing(fd, attach) if fd is not None else _build(name, build)
        now_s = time.monotonic()
        if now_s - began_s > timeout_s:
            raise LoaderTimeoutError(
                f"another process has been building {name!r} for {now_s - began_s:.0f} s (timeout_s={timeout_s:g}); raise "
                "timeout_s, or look whether it hangs",
                name=name,
                timeout_s=timeout_s,
            )
        if now_s - quiet_s >= _QUIET_S:
            quiet_s = now_s
            logger.warning("still waiting after %.0f s for another process to build %r", now_s - began_s, name)
        time.sleep(_LOOK_S)


def _closing(fd: int, use: Callable[[int], _Made]) -> _Made:
    try:
        return use(fd)
    except BaseException:
        close(fd)
        raise


def _build(name: str, build: Callable[[Partial], _Made]) -> _Made:
    """Held: the lock of the name."""
    partial = Partial(name)
    if partial.drop():
        logger.warning("%r was begun by a process that did not finish it; it is built anew", name)
    partial.begin()
    try:
        made = build(partial)
        if not _try_lock(partial.fd, fcntl.LOCK_SH):
            raise LoaderError(f"the new segment {name!r} is locked by somebody else")
        os.rename(partial.path, path_of(name))
    except BaseException:
        partial.drop()
        raise
    return made


def reserve(fd: int, nbytes: int, name: str) -> None:
    """Reserve a named file's bytes. Raises RoomError with needed and free bytes: there is no way round `/dev/shm` here."""
    free = os.statvfs(_FOLDER)
    free_nbytes = free.f_bavail * free.f_frsize
    missing = nbytes - os.fstat(fd).st_blocks * 512
    if missing > free_nbytes:
        raise segment.RoomError(
            f"{name!r} needs {in_words(missing)} in {_FOLDER}, and {in_words(free_nbytes)} are free: make that file system "
            "larger (docker run --shm-size, mount -o remount,size=), or share without a name"
        )
    segment.check_room(max(0, missing))
    segment.reserve(fd, nbytes)


# --- what is there ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leftover:
    """A named segment of this user on this machine. `kind`: "arrays", "records", "unfinished" or "unknown"."""

    name: str
    kind: str
    nbytes: int
    is_used: bool


def leftovers() -> list[Leftover]:
    """List the named segments of this user, used or not, by name."""
    prefix = os.path.basename(path_of(""))
    found = []
    for entry in sorted(os.listdir(_FOLDER)):
        name = entry.removeprefix(prefix)
        if entry.startswith(prefix) and not name.endswith(_LOCK):
            one = _look(name)
            if one is not None:
                found.append(one)
    return found


def _look(name: str) -> Leftover | None:
    try:
        fd = _open(path_of(name), os.O_RDWR)
    except (FileNotFoundError, ConfigError):
        return None
    try:
        nbytes = os.fstat(fd).st_blocks * 512
        if name.endswith(_PARTIAL):
            with _building(name.removesuffix(_PARTIAL)) as is_ours:
                return Leftover(name.removesuffix(_PARTIAL), "unfinished", nbytes, not is_ours)
        try:
            kind = str(read_header(fd, name)[1].get("kind", "unknown"))
        except (ConfigError, ValueError):
            kind = "unknown"
        return Leftover(name, kind, nbytes, not _try_lock(fd, fcntl.LOCK_EX))
    finally:
        close(fd)


def remove(name: str) -> bool:
    """Remove what there is of a name, unless somebody uses or builds it; whether anything was removed."""
    path, is_removed = path_of(check_name(name)), False
    with _building(name) as is_ours:
        if not is_ours:
            return False
        for each in (path + _PARTIAL, path):
            try:
                fd = _open(each, os.O_RDWR)
            except FileNotFoundError:
                continue
            if _try_lock(fd, fcntl.LOCK_EX):
                os.unlink(each)
                is_removed = True
            close(fd)
        if not os.path.exists(path):
            os.unlink(path + _LOCK)
    return is_removed
