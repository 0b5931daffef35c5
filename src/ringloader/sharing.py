"""Data that all processes of a machine share: named arrays, and sequences of records.

Owns `SharedArrays` and `SharedRecords`: one piece of shared memory each, written once by the process that makes it, sent to
workers by descriptor (a token on the wire), attached there without a copy, and freed with the last that uses it. With a name it
is one copy per machine, found by ranks and later runs; who builds, attaches and removes those is `_runtime/named.py`'s.
"""

from __future__ import annotations

import logging
import mmap
import operator
import os
import sys
import threading
import time
import weakref
from array import array as flat_array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from types import TracebackType
from typing import Any, TypeVar, overload

import numpy as np

from ringloader._core import dtypes, values
from ringloader._core.policy import check_duration
from ringloader._core.units import in_words
from ringloader._runtime import named, segment
from ringloader._runtime.named import Descriptor, Leftover, Partial, leftovers
from ringloader._specs import handles
from ringloader._specs.handles import Shareable
from ringloader.arrays import as_array
from ringloader.errors import ClosedError, ConfigError

__all__ = ["Leftover", "SharedArrays", "SharedRecords", "leftovers", "remove_leftovers"]

logger = logging.getLogger("ringloader")

Array = np.ndarray[Any, Any]
_Kind = TypeVar("_Kind", bound="_Shared")

_ALIGNMENT = 64
_CHUNK_NBYTES = 8 << 20
_TELL_S = 5.0
_BUILD_TIMEOUT_S = 3600.0
# For what is there and held by somebody who removes it, or was stopped in the midst of that.
_ATTACH_S = 10.0
# It lies in the header, whose room is fixed before it is known.
_MAX_VERSION = 200


class _Building(threading.local):
    """The file of a name that is being built on this thread: what is made first meanwhile is made there."""

    partial: Partial | None = None
    names: tuple[str, ...] = ()  # of all that are being built here, one inside the other

    def take(self) -> Partial | None:
        """The file, for the first that asks."""
        partial, self.partial = self.partial, None
        return partial


_building = _Building()


class _Shared(Shareable):
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
        self._mapping: mmap.mmap | None = None
        self._map(shared=self._is_writable)
        if descriptor is not None:
            # What has a name is in use, and its descriptor holds the lock, as long as anything of it is mapped.
            finalizer = weakref.finalize(self._mapping, descriptor.close)
            finalizer.atexit = False

    def _map(self, *, shared: bool) -> None:
        """Map the memory: to be written to and seen by all, or privately. Then arrays over it are read-only, and tensors,
        which cannot be, write to pages of this process's own."""
        through = named.unlocked(self.fileno())
        try:
            flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
            self._mapping = mmap.mmap(through, self._nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(through)
        self._memory: Array | None = np.frombuffer(self._mapping, np.uint8)
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
                return
            found.close()
        raise ClosedError(
            f"the {type(self).__name__} belongs to the process that this one was forked from, and is not found by its name any "
            "more; attach it here"
        )

    def lend(self) -> tuple[int, Callable[[], None]]:
        """Return another descriptor of the memory, and what closes it. Raises ClosedError."""
        fd = self.fileno()
        other = self._descriptor.dup() if self._descriptor is not None else Descriptor(os.dup(fd))
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
        _Shared.__init__(made, descriptor, facts, nbytes, token=token, fd=fd)
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
        timeout_s: float = _BUILD_TIMEOUT_S,
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
        if name in _building.names:
            raise ConfigError(
                f"the builder of {name!r} asks for {name!r} itself; give it another name", option="name", value=name
            )

        def build(partial: Partial) -> _Kind:
            outer, _building.partial = _building.partial, partial
            _building.names = (*_building.names, name)
            try:
                built = builder()
                if not (isinstance(built, cls) and partial.holds(built.fileno())):
                    if _building.take() is None:
                        partial.begin()  # something lies there that is not what was returned, and may be read from
                    _building.partial = partial
                    built = cls._copy_of(built, writable=writable)
            finally:
                _building.partial, _building.names = outer, _building.names[:-1]
            facts = {**built._facts, "version": version, "writable": writable}
            cls._check_layout(name, facts, expected)
            assert partial.file is not None
            named.write_header(partial.file.fd, built._nbytes, facts)
            return cls._over(partial.file, facts, built._nbytes, name=name)

        return named.attach_or_build(name, lambda found: cls._checked(found, name, version, expected), build, timeout_s)


def _reserved(nbytes: int) -> Descriptor:
    """Return a descriptor of so much reserved memory. Raises ConfigError with sizes."""
    partial = _building.take()
    try:
        if partial is not None:
            assert partial.file is not None
            named.reserve(partial.file.fd, nbytes, partial.name)
            return partial.file.dup()
        piece = segment.Segment.create(nbytes)
    except segment.RoomError as error:
        raise ConfigError(f"arrays of {in_words(nbytes)} cannot be shared: {error}", option="arrays", value=nbytes) from error
    fd, piece.fd = piece.fd, -1
    return Descriptor(fd)


def _forget_in_child() -> None:
    """A forked child builds nothing that its parent has begun."""
    _building.partial, _building.names = None, ()


os.register_at_fork(after_in_child=_forget_in_child)


class SharedArrays(_Shared, Mapping[str, Any]):
    """Named arrays in shared memory: `SharedArrays({"x": x, "y": y})`.

    Takes numpy arrays and CPU tensors, and copies each once. `shared["x"]` is a numpy array over the shared memory, of the same
    dtype and shape; for dtypes that numpy does not have (bfloat16, float8), a tensor. As an argument of a `FactorySpec`, or
    inside a dataset, it goes to workers by descriptor; there, and here, its arrays cannot be written to unless `writable`, with
    which every process sees what any of them writes. The memory is freed when the last process lets go of it.

    Raises ConfigError for what no tensor holds, and for arrays that do not fit into memory, with sizes.
    """

    KIND = "arrays"

    def __init__(self, arrays: Mapping[str, Any], *, writable: bool = False) -> None:
        if not isinstance(arrays, Mapping) or not arrays or not all(isinstance(name, str) for name in arrays):
            raise ConfigError(
                f"arrays is {arrays!r:.120}; give a dict of arrays by name", option="arrays", value=type(arrays).__qualname__
            )
        held = {name: as_array(value, name) for name, value in arrays.items()}
        self._make({name: (array.shape, dtype) for name, (array, dtype) in held.items()}, writable)
        for name, (source, _) in held.items():
            _write(self.fileno(), self._start + self._leaves[name][2], source)
        if not writable:
            self._freeze()

    @classmethod
    def empty(cls, layout: Mapping[str, tuple[Sequence[int], Any]], *, writable: bool = False) -> SharedArrays:
        """Return arrays of zeros to fill in place: `{"x": (shape, dtype)}`. Here they can be written to; in workers as said by
        `writable`. Raises ConfigError."""
        if not isinstance(layout, Mapping) or not layout or not all(isinstance(name, str) for name in layout):
            raise ConfigError(f"layout is {layout!r:.120}; give a dict of (shape, dtype)", option="layout", value=layout)
        made = cls.__new__(cls)
        made._make({name: _shape_and_dtype(name, given) for name, given in layout.items()}, writable)
        return made

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], length: int | None = None, *, progress: bool = False, writable: bool = False
    ) -> SharedArrays:
        """Return arrays whose rows are these: each a dict of arrays or numbers, of the same shapes and dtypes.

        `length`: how many there are, where `len(rows)` does not say. `progress` shows a bar (needs rich); else a line is logged
        now and then. Raises ConfigError for rows that differ, or another number of them.
        """
        if length is None:
            if not isinstance(rows, Sized):
                raise ConfigError("rows has no length; give length=", option="length", value=None)
            length = len(rows)
        iterator = iter(rows)
        first = next(iterator, None)
        if first is None or length < 1:
            raise ConfigError(f"there are no rows (length={length}); give one at least", option="rows", value=length)
        if not isinstance(first, Mapping):
            raise ConfigError(f"row 0 is a {type(first).__qualname__}; give dicts", option="rows", value=0)
        held = {name: as_array(_row_array(value), name) for name, value in first.items()}
        made = cls.empty({name: ((length, *array.shape), dtype) for name, (array, dtype) in held.items()}, writable=writable)
        views = {name: made._view(name) for name in held}
        count = 0
        for row in _told(_chained(first, iterator), length, "rows", progress):
            if not isinstance(row, Mapping):
                raise ConfigError(f"row {count} is a {type(row).__qualname__}; give dicts", option="rows", value=count)
            if count >= length or row.keys() != held.keys():
                what = f"more than {length} rows" if count >= length else f"row {count} has the names {sorted(row)}"
                raise ConfigError(f"rows: {what}, and {sorted(held)} were expected", option="rows", value=count)
            for name, value in row.items():
                found, dtype = as_array(_row_array(value), name)
                if found.shape != held[name][0].shape or dtype != held[name][1]:
                    raise ConfigError(
                        f"row {count} has {name!r} of shape {list(found.shape)}, {dtype}, and row 0 of "
                        f"{list(held[name][0].shape)}, {held[name][1]}; give rows that are alike",
                        option="rows",
                        value=count,
                    )
                views[name][count] = found
            count += 1
        if count != length:
            raise ConfigError(f"there are {count} rows, and length={length} was given", option="length", value=length)
        if not writable:
            made._freeze()
        return made

    def __getitem__(self, name: str) -> Any:
        leaf = self._leaves[name]
        view = self._view(name)
        if not dtypes.is_torch_only(leaf[0]):
            return view
        from ringloader._collate import tensors

        return tensors.from_array(view if view.flags.writeable else handles.unguarded(view), leaf[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {dtype}{list(shape)}" for name, (dtype, shape, _) in self._leaves.items())
        return f"SharedArrays({parts})"

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def _make(self, layout: Mapping[str, tuple[tuple[int, ...], str]], writable: bool) -> None:
        leaves, offset = [], 0
        for name, (shape, dtype) in layout.items():
            leaves.append([name, dtype, list(shape), offset])
            nbytes = int(np.prod(shape, dtype=object)) * dtypes.storage_of(dtype).itemsize
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        facts = {"kind": self.KIND, "leaves": leaves, "version": "", "writable": writable}
        nbytes = _header_nbytes(facts) + offset
        descriptor = _reserved(nbytes)
        try:
            named.write_header(descriptor.fd, nbytes, facts)
            super().__init__(descriptor, {**facts, "writable": True}, nbytes)
        except BaseException:
            descriptor.close()
            raise
        self._facts = facts
        self._take_up()

    def _take_up(self) -> None:
        self._leaves: dict[str, tuple[str, list[int], int]] = {
            name: (dtype, shape, offset) for name, dtype, shape, offset in self._facts["leaves"]
        }
        self._start = _header_nbytes(self._facts)

    def _view(self, name: str) -> Array:
        dtype, shape, offset = self._leaves[name]
        return np.ndarray(tuple(shape), dtypes.storage_of(dtype), self.memory(), self._start + offset)

    def _freeze(self) -> None:
        """From now on nothing is to be written here."""
        descriptor, self._descriptor = self._descriptor, None
        assert descriptor is not None
        self._descriptor = descriptor.dup()  # the old one closes with the old mapping
        self._map(shared=False)
        finalizer = weakref.finalize(self._mapping, self._descriptor.close)
        finalizer.atexit = False

    @classmethod
    def _copy_of(cls, built: Any, *, writable: bool) -> SharedArrays:
        return cls(built, writable=writable)

    @classmethod
    def attach_or_build(
        cls,
        name: str,
        builder: Callable[[], Any],
        *,
        version: str = "",
        timeout_s: float = _BUILD_TIMEOUT_S,
        writable: bool = False,
        layout: Mapping[str, tuple[Sequence[int], Any]] | None = None,
    ) -> SharedArrays:
        """As described above; `layout` is what the arrays have to be, by name: `{"x": (shape, dtype)}`."""
        expected = {leaf: _shape_and_dtype(leaf, given) for leaf, given in layout.items()} if layout is not None else {}
        return cls._attach_or_build(name, builder, version, timeout_s, writable, expected)

    @classmethod
    def _check_layout(cls, name: str, facts: dict[str, Any], expected: dict[str, Any]) -> None:
        found = {leaf: (tuple(shape), dtype) for leaf, dtype, shape, _ in facts["leaves"]}
        if expected and found != expected:
            raise ConfigError(
                f"{name!r} holds {found}, and {expected} is expected; remove it (ringloader.sharing.remove_leftovers), or use "
                "another name",
                option="layout",
                value=found,
            )


class SharedRecords(_Shared, Sequence[Any]):
    """A sequence of Python records in shared memory: `SharedRecords(rows)`.

    Records are dicts, lists, tuples, str, bytes, numbers, None and what else a `FactorySpec` takes as plain values, packed one
    after the other. `records[i]` unpacks one, new each time: so nothing in worker processes grows by being read, as lists of
    objects do that were forked. Slices give lists. Goes to workers as `SharedArrays` does. Building it takes the memory of the
    result and little more; `progress` shows a bar (needs rich), else a line is logged now and then.

    Raises ConfigError for a record of another type, named by its place, and when memory is too small, with sizes.
    """

    KIND = "records"

    def __init__(self, records: Iterable[Any], *, progress: bool = False) -> None:
        if not isinstance(records, Iterable) or isinstance(records, (Mapping, str, bytes)):
            kind = type(records).__qualname__
            raise ConfigError(
                f"records is a {kind}; give a list of records, or an iterable of them", option="records", value=kind
            )
        facts: dict[str, Any] = {"kind": self.KIND, "num": 0, "offsets": 0, "version": "", "writable": False}
        partial = _building.take()
        if partial is not None:
            assert partial.file is not None
            descriptor = partial.file.dup()
        else:
            descriptor = Descriptor(os.memfd_create("ringloader-records", os.MFD_CLOEXEC))
        try:
            writer = _Writer(descriptor.fd, partial.name if partial is not None else "", named.PAGE_NBYTES)
            offsets = self._write_all(records, writer, progress)
            writer.write(bytes(-writer.position % 8))
            facts.update(num=len(offsets) - 1, offsets=writer.position)
            writer.write(offsets.tobytes())
            nbytes = writer.finish()
            named.write_header(descriptor.fd, nbytes, facts)
            super().__init__(descriptor, facts, nbytes)
        except BaseException:
            descriptor.close()
            raise
        self._take_up()

    @staticmethod
    def _write_all(records: Iterable[Any], writer: _Writer, progress: bool) -> flat_array[int]:
        num_records = len(records) if isinstance(records, Sized) else None
        offsets = flat_array("Q", [writer.position])
        for place, record in enumerate(_told(records, num_records, "records", progress)):
            try:
                writer.write(values.encode(record))
            except (TypeError, ValueError, OverflowError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"record {place} cannot be packed: {error}; give dicts, lists, texts, bytes and numbers",
                    option="records",
                    value=place,
                ) from error
            offsets.append(writer.position)
        return offsets

    def _take_up(self) -> None:
        view = memoryview(self._mapping)  # type: ignore[arg-type]
        start, num = self._facts["offsets"], self._facts["num"]
        self._data: memoryview | None = view
        self._offsets: memoryview | None = view[start : start + 8 * (num + 1)].cast("Q")
        self._num: int = num

    def close(self) -> None:
        """Let go of the memory."""
        self._data = self._offsets = None
        super().close()

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        offsets, data = self._offsets, self._data
        if offsets is None or data is None:
            raise ClosedError("the SharedRecords was closed")
        if isinstance(index, slice):
            return [values.decode(data[offsets[k] : offsets[k + 1]]) for k in range(*index.indices(self._num))]
        place = index if type(index) is int else operator.index(index)
        if place < 0:
            place += self._num
        if not 0 <= place < self._num:
            raise IndexError(f"index {index} of {self._num} records")
        return values.decode(data[offsets[place] : offsets[place + 1]])

    def __repr__(self) -> str:
        return f"SharedRecords({self._num:,} records, {in_words(self._nbytes)})"

    @classmethod
    def _copy_of(cls, built: Any, *, writable: bool) -> SharedRecords:
        return cls(built)


class _Writer:
    """Writes to the end of memory that grows, reserved before it is written to."""

    def __init__(self, fd: int, name: str, start: int) -> None:
        self.position: int = start
        self._fd, self._name = fd, name
        self._pending = bytearray()
        self._written = start
        self._reserved = 0

    def write(self, chunk: bytes) -> None:
        self._pending += chunk
        self.position += len(chunk)
        if len(self._pending) >= _CHUNK_NBYTES:
            self._flush()

    def _flush(self) -> None:
        end = self._written + len(self._pending)
        if end > self._reserved:
            unit = _CHUNK_NBYTES if end > _CHUNK_NBYTES else named.PAGE_NBYTES
            wanted = -(-end // unit) * unit
            try:
                if self._name:
                    named.reserve(self._fd, wanted, self._name)
                else:
                    segment.check_room(wanted - self._reserved)
                    segment.reserve(self._fd, wanted, self._reserved)
            except segment.RoomError as error:
                raise ConfigError(f"records cannot be shared: {error}", option="records", value=wanted) from error
            self._reserved = wanted
        view = memoryview(self._pending)
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], self._written + done)
        view.release()
        self._pending.clear()
        self._written = end

    def finish(self) -> int:
        """Write what is left, give back what was reserved too much; returns the size of all."""
        self._flush()
        os.ftruncate(self._fd, self.position)
        return self.position


def remove_leftovers(*names: str) -> list[str]:
    """Remove the named segments of this user that nobody uses, or of these those; return the names of what was removed."""
    found = names or tuple(dict.fromkeys(one.name for one in leftovers() if not one.is_used))
    return [name for name in found if named.remove(name)]


def _header_nbytes(facts: dict[str, Any]) -> int:
    # The version is written later; a name is at most this long, and must not move the data.
    return named.data_offset({**facts, "version": "", "writable": False}) + named.PAGE_NBYTES


def _shape_and_dtype(name: str, given: Any) -> tuple[tuple[int, ...], str]:
    try:
        shape, dtype = given
        sizes = tuple(operator.index(size) for size in ((shape,) if hasattr(shape, "__index__") else shape))
        if isinstance(dtype, str) and dtypes.is_torch_only(dtype):
            return sizes, dtype
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(dtype, torch.dtype):
            known = str(dtype).removeprefix("torch.")
        else:
            known = dtypes.name_of(np.dtype(dtype)) or ""
        if not known or any(not 0 <= size < 1 << 48 for size in sizes):
            raise ValueError(f"no tensor has dtype {dtype} and shape {shape}")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"layout of {name!r} is {given!r:.100}: {error}; give (shape, dtype)", option="layout", value=name
        ) from error
    return sizes, known


def _row_array(value: Any) -> Any:
    torch = sys.modules.get("torch")
    return value if torch is not None and isinstance(value, torch.Tensor) else np.asarray(value)


def _write(fd: int, offset: int, source: Array) -> None:
    """Write an array's elements at a place of the memory.

    By write(2), piece by piece: twice as fast as through a new mapping, whose pages fault in one by one.
    """
    rows = source.reshape(1) if source.ndim == 0 else source
    step = max(1, len(rows) * _CHUNK_NBYTES // max(1, rows.nbytes))
    for start in range(0, len(rows), step):
        piece = np.ascontiguousarray(rows[start : start + step]).reshape(-1).view(np.uint8).data
        done = 0
        while done < len(piece):
            done += os.pwrite(fd, piece[done:], offset + done)
        offset += len(piece)


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _told(items: Iterable[Any], total: int | None, words: str, progress: bool) -> Iterator[Any]:
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
