"""What `SharedArrays` and `SharedRecords` have in common: memory with a header, its mapping, and its name.

Owns how such memory is mapped, sent, found again and let go of, and where what a builder makes comes to lie. Who may build,
attach and remove what has a name is named.py's. Must not know what is in the memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ringloader._core.policy import check_duration
from ringloader._core.units import in_words
from ringloader._runtime import named, segment
from ringloader._runtime.lacks import RoomError
from ringloader._runtime.named import Descriptor, Partial
from ringloader._runtime.pages import Mapping, map_file
from ringloader._specs import handles
from ringloader._specs.handles import Shareable
from ringloader.errors import ClosedError, ConfigError

logger = logging.getLogger("ringloader")

Array = np.ndarray[Any, Any]
_Kind = TypeVar("_Kind", bound="Shared")

_TELL_S = 5.0
BUILD_TIMEOUT_S = 3600.0
# For what is there and held by somebody who removes it, or was stopped in the midst of that.
_ATTACH_S = 10.0
# It lies in the header, whose room is fixed before it is known.
_MAX_VERSION = 200


class Building(threading.local):
    """The file of a name that is being built on this thread: what is made first meanwhile is made there."""

    partial: Partial | None = None
    names: tuple[str, ...] = ()  # of all that are being built here, one inside the other

    def take(self) -> Partial | None:
        """The file, for the first that asks."""
        partial, self.partial = self.partial, None
        return partial


building = Building()


class Shared(Shareable):
    """Memory with a header; see `named` for its form."""

    KIND = ""

    def __init__(
        self, descriptor: Descriptor | None, facts: dict[str, Any], nbytes: int, *, token: str | None = None, fd: int = -1
    ) -> None:
        """`descriptor` is this object's own; without one, `fd` is somebody else's, and stays open."""
        super().__init__(token)
        self._descriptor, self._facts, self._nbytes = descriptor, facts, nbytes
        self._name = ""
        self._is_writable = bool(facts.get("writable"))
        self._given_fd = fd
        self._mapping: Mapping | None = None
        self._map(shared=self._is_writable)
        if descriptor is not None:
            # What has a name is in use, and its descriptor holds the lock, as long as anything of it is mapped.
            self._close_with_mapping(descriptor)

    def _close_with_mapping(self, descriptor: Descriptor) -> None:
        assert self._mapping is not None
        finalizer = weakref.finalize(self._mapping.memory, descriptor.close)
        finalizer.atexit = False

    def _map(self, *, shared: bool) -> None:
        """Map the memory: to be written to and seen by all, or privately. Then arrays over it are read-only, and tensors,
        which cannot be, write to pages of this process's own."""
        through = named.unlocked(self.fileno())
        try:
            self._mapping = map_file(through, self._nbytes, shared=shared)
        finally:
            os.close(through)
        self._memory: Array | None = self._mapping.array(self._nbytes)
        self._memory.flags.writeable = shared
        status = os.fstat(self.fileno())
        self._place = (status.st_dev, status.st_ino)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, all told."""
        return self._nbytes

    def fileno(self) -> int:
        """The descriptor of the memory. Raises ClosedError."""
        if self._descriptor is None:
            if self._given_fd < 0:
                raise ClosedError(f"the {type(self).__name__} was closed, and cannot be sent to workers any more")
            return self._given_fd
        if self._descriptor.fd < 0:
            self._reopen()
        return self._descriptor.fd

    def _reopen(self) -> None:
        """In a forked child, which has no descriptor of what has a name: find it again."""
        found = named.try_attach(self._name, time.monotonic() + _ATTACH_S) if self._name else None
        if found is not None:
            status = os.fstat(found.fd)
            if (status.st_dev, status.st_ino) == self._place:
                self._descriptor = found
                self._close_with_mapping(found)
                return
            found.close()
        raise ClosedError(
            f"the {type(self).__name__} belongs to the process that this one was forked from, and is not found by its name any "
            "more; attach it here"
        )

    def lend(self) -> tuple[int, Callable[[], None]]:
        """Return another descriptor of the memory, and what closes it. Raises ClosedError."""
        fd = self.fileno()
        other = self._descriptor.dup() if self._descriptor is not None else Descriptor(os.dup(fd), is_locked=False)
        return other.fd, other.close

    def memory(self) -> Array:
        """All of the memory, 1-D uint8, header included. Raises ClosedError."""
        if self._memory is None:
            raise ClosedError(f"the {type(self).__name__} was closed; what was taken from it before stays valid")
        return self._memory

    def close(self) -> None:
        """Let go of the memory. Arrays that were taken from it stay valid, as do other processes' attachments."""
        self.forget()
        self._descriptor, self._given_fd = None, -1
        self._mapping = self._memory = None

    def __enter__(self: _Kind) -> _Kind:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} is not pickled: give it to a Loader's dataset or FactorySpec, which sends it by descriptor, or let each "
            f"process attach it by name ({kind}.attach_or_build)"
        )

    @classmethod
    def attach_token(cls: type[_Kind], token: str) -> _Kind:
        """Return the object of a token: this process's own, or attached by the descriptor that came for it."""
        live = handles.find(token)
        if isinstance(live, cls):
            return live
        fd = handles.descriptor_of(token)
        nbytes, facts = named.read_header(fd, f"the {cls.__name__}")
        made = cls._over(None, facts, nbytes, token=token, fd=fd)
        handles.keep(made)
        return made

    @classmethod
    def _over(
        cls: type[_Kind],
        descriptor: Descriptor | None,
        facts: dict[str, Any],
        nbytes: int,
        *,
        token: str | None = None,
        fd: int = -1,
        name: str = "",
    ) -> _Kind:
        """Return an object over memory that is complete."""
        made = cls.__new__(cls)
        Shared.__init__(made, descriptor, facts, nbytes, token=token, fd=fd)
        made._name = name
        made._take_up()
        return made

    def _take_up(self) -> None:
        """Find what there is in the memory."""

    @classmethod
    def _copy_of(cls: type[_Kind], built: Any, *, writable: bool) -> _Kind:
        raise NotImplementedError

    @classmethod
    def attach(cls: type[_Kind], name: str, *, version: str = "") -> _Kind:
        """Attach what was built under a name on this machine.

        Raises ConfigError when there is nothing of that name and version, or it is damaged.
        """
        found = named.try_attach(named.check_name(name), time.monotonic() + _ATTACH_S)
        if found is None:
            raise ConfigError(f"nothing was built under the name {name!r} on this machine", option="name", value=name)
        try:
            return cls._checked(found, name, version, {})
        except BaseException:
            found.close()
            raise

    @classmethod
    def _checked(cls: type[_Kind], found: Descriptor, name: str, version: str, expected: dict[str, Any]) -> _Kind:
        nbytes, facts = named.read_header(found.fd, repr(name))
        if facts.get("kind") != cls.KIND:
            raise ConfigError(
                f"{name!r} holds {facts.get('kind')}, not {cls.KIND}; use another name", option="name", value=name
            )
        if facts.get("version") != version:
            raise ConfigError(
                f"{name!r} was built as version {facts.get('version')!r}, not {version!r}: remove it "
                "(ringloader.sharing.remove_leftovers), or give another name",
                option="version",
                value=version,
            )
        cls._check_layout(name, facts, expected)
        return cls._over(found, facts, nbytes, name=name)

    @classmethod
    def _check_layout(cls, name: str, facts: dict[str, Any], expected: dict[str, Any]) -> None:
        """Raise ConfigError for other arrays than these."""

    @classmethod
    def attach_or_build(
        cls: type[_Kind],
        name: str,
        builder: Callable[[], Any],
        *,
        version: str = "",
        timeout_s: float = BUILD_TIMEOUT_S,
        writable: bool = False,
    ) -> _Kind:
        """Attach what was built under `name` on this machine, by another rank or an earlier run; else build it here.

        `builder()` returns one of these, or what one is made of; what it makes first, by `SharedArrays.empty` say, lies in
        its place at once and is not copied. One process builds at a time, the others wait up to `timeout_s` seconds; if it
        dies, the next builds. It stays, for later runs, until `remove_leftovers` or a restart of the machine. `version` tells
        contents of one name apart.

        Raises ConfigError for a name that cannot be, one that holds something else, and a `/dev/shm` that is too small, with
        sizes; LoaderTimeoutError; what the builder raises.
        """

        return cls._attach_or_build(name, builder, version, timeout_s, writable, {})

    @classmethod
    def _attach_or_build(
        cls: type[_Kind],
        name: str,
        builder: Callable[[], Any],
        version: str,
        timeout_s: float,
        writable: bool,
        expected: dict[str, Any],
    ) -> _Kind:
        if not callable(builder):
            raise ConfigError(
                f"builder is {builder!r:.100}; give a function without arguments", option="builder", value=builder
            )
        if not isinstance(version, str) or len(version) > _MAX_VERSION:
            raise ConfigError(
                f"version is {version!r:.100}; give a text of up to {_MAX_VERSION} characters", option="version", value=version
            )
        check_duration("timeout_s", timeout_s)
        if name in building.names:
            raise ConfigError(
                f"the builder of {name!r} asks for {name!r} itself; give it another name", option="name", value=name
            )

        def build(partial: Partial) -> _Kind:
            outer, building.partial = building.partial, partial
            building.names = (*building.names, name)
            try:
                built = builder()
                if not (isinstance(built, cls) and partial.holds(built.fileno())):
                    if building.take() is None:
                        partial.begin()  # something lies there that is not what was returned, and may be read from
                    building.partial = partial
                    built = cls._copy_of(built, writable=writable)
            finally:
                building.partial, building.names = outer, building.names[:-1]
            facts = {**built._facts, "version": version, "writable": writable}
            cls._check_layout(name, facts, expected)
            assert partial.file is not None
            named.write_header(partial.file.fd, built._nbytes, facts)
            return cls._over(partial.file, facts, built._nbytes, name=name)

        return named.attach_or_build(name, lambda found: cls._checked(found, name, version, expected), build, timeout_s)


def reserve(nbytes: int) -> Descriptor:
    """Return a descriptor of so much reserved memory. Raises ConfigError with sizes."""
    partial = building.take()
    try:
        if partial is not None:
            assert partial.file is not None
            named.reserve(partial.file.fd, nbytes, partial.name)
            return partial.file.dup()
        piece = segment.Segment.create(nbytes)
    except RoomError as error:
        raise ConfigError(f"arrays of {in_words(nbytes)} cannot be shared: {error}", option="arrays", value=nbytes) from error
    fd, piece.fd = piece.fd, -1
    return Descriptor(fd, is_locked=False)


def _forget_in_child() -> None:
    """A forked child builds nothing that its parent has begun."""
    building.partial, building.names = None, ()


os.register_at_fork(after_in_child=_forget_in_child)


def told(items: Iterable[Any], total: int | None, words: str, progress: bool) -> Iterator[Any]:
    """Pass items on and say how far they are."""
    if progress:
        try:
            from rich.progress import track
        except ImportError:
            raise ConfigError("progress=True needs rich: pip install rich", option="progress", value=True) from None
        yield from track(items, description=f"sharing {words}", total=total)
        return
    told_s = time.monotonic()
    for count, item in enumerate(items):
        if not count & 1023 and time.monotonic() - told_s >= _TELL_S:
            told_s = time.monotonic()
            logger.info("%s %s of %s shared", f"{count:,}", words, "?" if total is None else f"{total:,}")
        yield item
