"""A dataset whose worker dies at a named point, a given number of times over all workers.

Runs inside workers only: the factory puts the fault into this process's own copy of the package.
"""

from __future__ import annotations

import mmap
import os
import signal
import tempfile
from typing import Any

import numpy as np

from ringloader._core import messages as msg
from ringloader._core import protocol
from ringloader._runtime.pipe import BlockingPipe
from tests.runtime.sample_datasets import first_time

POINTS = (
    "in_the_build",
    "before_a_row_copy",
    "in_a_row_copy",
    "after_a_row_copy",
    "before_the_pipe_write",
    "in_the_pipe_write",
    "after_the_pipe_write",
    "while_room_is_made",
)
# Large enough that rows are copied straight into the slot, one by one.
ROW_NBYTES = 64 << 10


def make(point: str, marks: str, times: int, size: int) -> Rows:
    """Build the dataset and arm the fault."""
    fuse = Fuse(marks, times)
    if point == "in_the_build":
        fuse.blow()
    if point in ("before_the_pipe_write", "in_the_pipe_write", "after_the_pipe_write", "while_room_is_made"):
        _arm_pipe(point, fuse)
    return Rows(size, point, fuse)


class Fuse:
    """Kills this process, as often as there are marks left."""

    def __init__(self, marks: str, times: int) -> None:
        self.marks, self.times = marks, times

    def is_live(self) -> bool:
        """Take one of the deaths, if any is left."""
        return any(first_time(self.marks, str(k)) for k in range(self.times))

    def blow(self) -> None:
        if self.is_live():
            os.kill(os.getpid(), signal.SIGKILL)


class Rows:
    """Sample i is a row of ROW_NBYTES bytes that depend on i alone."""

    def __init__(self, size: int, point: str, fuse: Fuse) -> None:
        self.size, self.point, self.fuse = size, point, fuse

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if self.point == "before_a_row_copy":
            self.fuse.blow()
        if self.point == "after_a_row_copy" and i % 4 == 3:
            self.fuse.blow()  # three rows of this batch lie in the slot
        if self.point == "in_a_row_copy" and i % 4 == 1 and self.fuse.is_live():
            return torn_row(i)
        return row(i)


def row(i: int) -> Any:
    return np.arange(i, i + ROW_NBYTES // 8, dtype=np.int64)


def torn_row(i: int) -> Any:
    """A row whose second half cannot be read: copying it ends this process with SIGBUS in the middle."""
    with tempfile.TemporaryFile() as file:
        file.write(row(i).tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), ROW_NBYTES)
        os.ftruncate(file.fileno(), ROW_NBYTES // 2)
        return np.frombuffer(mapped, np.int64)


def _arm_pipe(point: str, fuse: Fuse) -> None:
    send = BlockingPipe.send

    def deadly_send(self: BlockingPipe, message: msg.Message) -> None:
        if isinstance(message, msg.NeedRoom) and point == "while_room_is_made":
            send(self, message)
            fuse.blow()
            return
        if not isinstance(message, msg.Filled) or point == "while_room_is_made":
            send(self, message)
            return
        if point == "before_the_pipe_write":
            fuse.blow()
        if point == "in_the_pipe_write" and fuse.is_live():
            frame = protocol.encode(message)
            self._sock.sendall(frame[: len(frame) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, message)
        if point == "after_the_pipe_write":
            fuse.blow()

    BlockingPipe.send = deadly_send  # type: ignore[method-assign]
