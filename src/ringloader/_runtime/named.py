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
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ringloader._core import values
from ringloader._core.units import in_words
from ringloader._runtime import segment
from ringloader._runtime.lacks import RoomError
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
# How often a file is asked for, and in between.
_NUM_ASKED, _ASK_S = 5, 0.002
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


# --- descriptors and locks --------------------------------------------------------------------------------------------------


class Descriptor:
    """An open file with what locks it has. A forked child holds none: its copy is closed, or the lock would be kept by it.

    `is_locked` False: it never has any, and goes to children like any other descriptor.
    """

    def __init__(self, fd: int, *, is_locked: bool = True) -> None:
        self.fd = fd
        self._is_locked = is_locked
        if is_locked:
            _open_ones.add(self)

    def close(self) -> None:
        """Close it; harmless a second time, and in a forked child."""
        fd, self.fd = self.fd, -1
        _open_ones.discard(self)
        if fd >= 0:
            os.close(fd)

    def dup(self) -> Descriptor:
        """Another that holds the same lock."""
        return Descriptor(os.dup(self.fd), is_locked=self._is_locked)

    def try_lock(self, kind: int) -> bool:
        """Lock it (flock(2)) if nobody else has."""
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_at(self, path: str) -> bool:
        """Whether a path leads to this very file."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.lstat(path))
        except FileNotFoundError:
            return False


_open_ones: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _close_in_child() -> None:
    for one in list(_open_ones):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


def unlocked(fd: int) -> int:
    """Open the file of a descriptor once more: what is mapped through it holds no lock, here or in a forked child."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _open(path: str, flags: int) -> Descriptor:
    """Open a file of this user's. Raises FileNotFoundError; ConfigError for what is no file of this user's, or cannot be
    opened."""
    try:
        one = Descriptor(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise _in_the_way(path, str(error)) from error
    status = os.fstat(one.fd)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        one.close()
        raise _in_the_way(path, "it belongs to another user, or is no file")
    return one


def _in_the_way(path: str, words: str) -> ConfigError:
    return ConfigError(f"{path} cannot be used: {words}; use another name, or remove it by hand", option="name", value=path)


@contextmanager
def _building(name: str) -> Iterator[bool]:
    """Hold the lock of a name, if it can be had: whether it could. Its file goes where nothing has that name at the end."""
    path = path_of(name) + _LOCK
    one = _open(path, os.O_CREAT | os.O_RDWR)
    is_ours, owner_pid = False, os.getpid()
    try:
        # One that was removed between opening and locking is nobody's lock any more.
        is_ours = one.try_lock(fcntl.LOCK_EX) and one.is_at(path)
        yield is_ours
    finally:
        # A child that the builder forked, and that comes by here on its way out, is not the one that builds.
        if is_ours and owner_pid == os.getpid() and not os.path.lexists(path_of(name)):
            os.unlink(path)
        one.close()


# --- attach, build ----------------------------------------------------------------------------------------------------------


def try_attach(name: str, deadline_s: float) -> Descriptor | None:
    """Open the segment of a name and hold it; None when there is none. Raises LoaderTimeoutError."""
    path = path_of(name)
    while True:
        try:
            one = _open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        if one.try_lock(fcntl.LOCK_SH) and one.is_at(path):
            return one
        one.close()  # it is being removed
        if time.monotonic() > deadline_s:
            raise LoaderTimeoutError(
                f"another process has locked {path} for itself: one that was stopped while it removed it, perhaps", name=name
            )
        time.sleep(_LOOK_S)


class Partial:
    """The file of a name while it is being built."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = path_of(name) + _PARTIAL
        self._owner_pid = os.getpid()
        self.file: Descriptor | None = None

    def begin(self) -> None:
        """Make an empty file; what was there before stays valid for those who have it mapped."""
        self.drop()
        self.file = _open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR)

    def holds(self, fd: int) -> bool:
        """Whether a descriptor is of this very file."""
        return self.file is not None and os.path.samestat(os.fstat(self.file.fd), os.fstat(fd))

    def drop(self) -> bool:
        """Remove the file, if it is there; whether it was. In a forked child: nothing, for it is the parent's."""
        if self._owner_pid != os.getpid():
            return False
        if self.file is not None:
            self.file.close()
            self.file = None
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return False
        return True


def attach_or_build(
    name: str, attach: Callable[[Descriptor], _Made], build: Callable[[Partial], _Made], timeout_s: float
) -> _Made:
    """Attach the segment of a name, or have it built: by this process, or by another that has begun already.

    `attach` takes a descriptor, `build` an empty file that it has to fill. Raises LoaderTimeoutError.
    """
    check_name(name)
    began_s = quiet_s = time.monotonic()
    while True:
        found = try_attach(name, began_s + timeout_s)
        if found is not None:
            return _closing(found, attach)
        with _building(name) as is_ours:
            if is_ours:
                found = try_attach(name, began_s + timeout_s)  # somebody may have finished in between
                return _closing(found, attach) if found is not None else _build(name, build)
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


def _closing(found: Descriptor, use: Callable[[Descriptor], _Made]) -> _Made:
    try:
        return use(found)
    except BaseException:
        found.close()
        raise


def _build(name: str, build: Callable[[Partial], _Made]) -> _Made:
    """Held: the lock of the name."""
    partial = Partial(name)
    if partial.drop():
        logger.warning("%r was begun by a process that did not finish it; it is built anew", name)
    partial.begin()
    try:
        made = build(partial)
        assert partial.file is not None
        if not partial.file.try_lock(fcntl.LOCK_SH):
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
        raise RoomError(
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
    entries = {entry.removeprefix(prefix) for entry in os.listdir(_FOLDER) if entry.startswith(prefix)}
    names = {entry.removesuffix(_PARTIAL).removesuffix(_LOCK) for entry in entries}
    found = [_look(name, entries) for name in sorted(names) if _NAME.fullmatch(name)]
    return [one for one in found if one is not None]


def _look(name: str, entries: Collection[str]) -> Leftover | None:
    try:
        if name not in entries:
            nbytes = os.stat(path_of(name) + _PARTIAL).st_blocks * 512 if name + _PARTIAL in entries else 0
            with _building(name) as is_ours:
                return Leftover(name, "unfinished", nbytes, not is_ours)
        one = _open(path_of(name), os.O_RDWR)
    except (OSError, ConfigError):
        return None  # gone meanwhile, or not ours
    try:
        try:
            kind = str(read_header(one.fd, name)[1].get("kind", "unknown"))
        except (ConfigError, ValueError):
            kind = "unknown"
        return Leftover(name, kind, os.fstat(one.fd).st_blocks * 512, not _is_unused(one))
    finally:
        one.close()


def _is_unused(one: Descriptor) -> bool:
    """Whether nobody holds a file. To ask is to hold it for a moment, and others may be asking, too."""
    for _ in range(_NUM_ASKED):
        if one.try_lock(fcntl.LOCK_EX):
            return True
        time.sleep(_ASK_S)
    return False


def remove(name: str) -> bool:
    """Remove what there is of a name, unless somebody uses or builds it; whether anything was removed."""
    path, is_removed = path_of(check_name(name)), os.path.lexists(path_of(name) + _LOCK)
    was_there = os.path.lexists(path)
    with _building(name) as is_ours:
        if not is_ours:
            return False
        for each in (path + _PARTIAL, path):
            try:
                one = _open(each, os.O_RDWR)
            except FileNotFoundError:
                continue
            if _is_unused(one):
                os.unlink(each)
                is_removed = True
            elif each == path:
                is_removed = False
            one.close()
    return is_removed and not (was_there and os.path.lexists(path))
