"""`SharedRecords`: a sequence of Python records in one piece of shared memory.

Owns how records are packed one after the other, with their offsets behind them, and how memory grows while they are written.
"""

from __future__ import annotations

import operator
import os
from array import array as flat_array
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, overload

from ringloader._core import values
from ringloader._core.units import in_words
from ringloader._runtime import named, segment
from ringloader._runtime.lacks import RoomError
from ringloader._runtime.named import Descriptor
from ringloader._runtime.shared import Shared, building, told
from ringloader.errors import ClosedError, ConfigError

__all__ = ["SharedRecords"]

_CHUNK_NBYTES = 8 << 20


class SharedRecords(Shared, Sequence[Any]):
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
        partial = building.take()
        if partial is not None:
            assert partial.file is not None
            descriptor = partial.file.dup()
        else:
            descriptor = Descriptor(os.memfd_create("ringloader-records", os.MFD_CLOEXEC), is_locked=False)
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
        for place, record in enumerate(told(records, num_records, "records", progress)):
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
        assert self._mapping is not None
        view = self._mapping.view()
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
            except RoomError as error:
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
