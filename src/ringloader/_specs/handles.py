"""What lives in shared memory and goes to workers by descriptor: a spec or a pickle names it by a token.

Owns the table from tokens to objects of this process, and, in a worker, to the descriptors that came with the Setup message.
Arrays that lie in such memory are recognised by their address, so that a dataset may keep `shared["x"]` itself. Must not map or
create memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# One message carries them all, with the status page and the pickled dataset.
MAX_HANDLES = 100


class Shareable:
    """Base of objects in shared memory. `token` names the memory, the same wherever it is attached."""

    token: str

    def __init__(self, token: str | None = None) -> None:
        self.token = os.urandom(12).hex() if token is None else token
        _live[self.token] = self

    def forget(self) -> None:
        """It is closed: arrays that still lie in its memory are like any others."""
        _live.pop(self.token, None)

    def fileno(self) -> int:
        """The descriptor of the memory; the object's own."""
        raise NotImplementedError

    def lend(self) -> tuple[int, Callable[[], None]]:
        """Return another descriptor of the memory, for a loader that may outlive this object, and what closes it."""
        raise NotImplementedError

    def memory(self) -> np.ndarray[Any, Any]:
        """All of the memory, 1-D uint8."""
        raise NotImplementedError

    @classmethod
    def attach_token(cls, token: str) -> Any:
        """Return the object of this token, attached where it is not."""
        raise NotImplementedError


_live: weakref.WeakValueDictionary[str, Shareable] = weakref.WeakValueDictionary()
_received: dict[str, int] = {}
_attached: dict[str, Shareable] = {}  # in a worker: by token, attached once, for as long as the worker lives


def receive(tokens: Iterable[str], fds: Sequence[int]) -> None:
    """In a worker: these descriptors are the memory of these tokens."""
    _received.update(zip(tokens, fds, strict=True))


def descriptor_of(token: str) -> int:
    """The descriptor that came for a token. Raises LookupError."""
    return _received[token]


def keep(attached: Shareable) -> None:
    """Attach nothing of this token again."""
    _attached[attached.token] = attached


def find(token: str) -> Shareable | None:
    """The object of this process with a token."""
    return _attached.get(token) or _live.get(token)


def all_live() -> list[Shareable]:
    """Every object of this process that is not closed."""
    return list(_live.values())


def holder_of(array: np.ndarray[Any, Any]) -> tuple[Shareable, int] | None:
    """The object in whose memory an array lies, and the offset of its first element there; None for any other array."""
    if not _live or not array.nbytes or array.dtype.hasobject:
        return None
    low, high = _bounds(array)
    for holder in list(_live.values()):
        memory = holder.memory()
        start = memory.ctypes.data
        if start <= low and high <= start + memory.nbytes:
            return holder, array.ctypes.data - start
    return None


def _bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    low = high = array.ctypes.data
    for size, stride in zip(array.shape, array.strides, strict=True):
        reach = (size - 1) * stride
        low, high = low + min(0, reach), high + max(0, reach)
    return low, high + array.itemsize


def view_of(
    kind: type[Shareable],
    token: str,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: np.dtype[Any],
    writeable: bool,
) -> Any:
    """Return an array over attached memory, as writeable as it was: the inverse of `holder_of`."""
    memory = kind.attach_token(token).memory()
    view = np.ndarray(tuple(shape), dtype, memory, offset, tuple(strides))
    if writeable and not view.flags.writeable:
        return unguarded(view)
    view.flags.writeable = writeable
    return view


class _Unguarded:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def unguarded(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory as if it could be written to: torch has no read-only tensors. It is mapped privately, so that whoever
    does writes to pages of the process's own."""
    return np.asarray(_Unguarded(array))
