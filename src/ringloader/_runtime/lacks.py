"""What the system has too little of, in words.

Owns the sentences for errors of memory, mappings and descriptors. Must import light: workers start with it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")

_LACKS = {
    errno.ENOSPC: "the file system for shared memory is full",
    errno.ENOMEM: "the system has no memory or mappings left",
    errno.EFBIG: "the limit on file sizes (ulimit -f) is lower",
    errno.EMFILE: "this process has no descriptors left (ulimit -n)",
    errno.ENFILE: "the system has no descriptors left",
}


class RoomError(Exception):
    """There is no room for a segment; the text says needed and free bytes."""


def translate(call: Callable[..., _Result], *args: Any) -> _Result:
    """Run a system call; a lack of anything becomes a RoomError in words."""
    try:
        return call(*args)
    except OSError as error:
        if error.errno in _LACKS:
            raise RoomError(f"a shared-memory segment could not be made: {_LACKS[error.errno]}") from error
        raise
