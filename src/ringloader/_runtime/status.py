"""The status page: how the training process knows what a worker is doing without asking it.

One memfd per worker, mapped by both sides. Byte map, one writer each:

    0     worker  int64 serial of the Fill in progress, -1 for none
    8     worker  int64 place of the sample in progress within the batch, -1 before the first
    16    worker  int64 monotonic time in ns at which this Fill began
    24    worker  int64 stage, an index into STAGES
    32    worker  int64 batches made by this incarnation
    40    worker  int64 number of samples that are fetched in one call, from the sample in progress on
    64    parent  int64 serial of a Fill to stop between two samples
    4096  worker  text: Python stacks written by faulthandler on a fatal signal or on request, zero filled

Words are aligned and written whole. A reader may see the words of two moments; what it decides from them it can take back.
"""

from __future__ import annotations

import mmap
import os
import signal

from ringloader._core.views import WorkerView

STAGES = (
    "starting the interpreter",
    "importing",
    "building the dataset",
    "running init",
    "idle",
    "fetching",
    "collating",
    "sending",
    "populating memory",
    "reading again",
    "running a method",
)
STARTING, IMPORTING, BUILDING, INIT, IDLE, FETCHING, COLLATING, SENDING, POPULATING, READING_AGAIN, CALLING = range(len(STAGES))
_SERIAL, SAMPLE_WORD, _BEGAN, _STAGE, _MADE, _NUM, CANCEL_WORD = 0, 1, 2, 3, 4, 5, 8
TRACE_OFFSET = 4096
_TRACE_NBYTES = 28 << 10
# The signal that makes a worker write its stacks; high, so that datasets are unlikely to use it.
DUMP_SIGNAL = signal.SIGRTMAX - 2
PAGE_NBYTES = TRACE_OFFSET + _TRACE_NBYTES


class StatusPage:
    """A mapped status page."""

    def __init__(self, fd: int) -> None:
        self._mapping = mmap.mmap(fd, PAGE_NBYTES)
        self.words = memoryview(self._mapping)[:TRACE_OFFSET].cast("q")

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new page."""
        fd = os.memfd_create("ringloader-status", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, PAGE_NBYTES)
            os.pwrite(fd, (-1).to_bytes(8, "little", signed=True) * 2, 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def begin(self, serial: int, began_ns: int) -> None:
        words = self.words
        words[SAMPLE_WORD], words[_NUM], words[_BEGAN], words[_SERIAL] = -1, 1, began_ns, serial

    def fetch_together(self, sample: int, num_samples: int) -> None:
        """So many samples are fetched in one call."""
        self.words[_NUM], self.words[SAMPLE_WORD] = num_samples, sample

    def end(self, *, made: bool) -> None:
        words = self.words
        words[_SERIAL], words[_STAGE] = -1, IDLE
        words[_MADE] += made

    def stage(self, stage: int) -> None:
        self.words[_STAGE] = stage

    def cancel(self, serial: int) -> None:
        """Ask, from the parent, for a Fill to be stopped between two samples."""
        self.words[CANCEL_WORD] = serial

    def view(self) -> WorkerView:
        words = self.words
        stage = words[_STAGE]
        return WorkerView(
            words[_SERIAL],
            words[SAMPLE_WORD],
            words[_BEGAN] / 1e9,
            STAGES[stage] if 0 <= stage < len(STAGES) else "unknown",
            stage == FETCHING,
            self.trace() if self._mapping[TRACE_OFFSET] else "",
            words[_NUM],
        )

    def trace(self) -> str:
        """The stacks written so far."""
        return self._mapping[TRACE_OFFSET:PAGE_NBYTES].rstrip(b"\0").decode(errors="replace").strip()

    def write_trace(self, text: str) -> None:
        """Put a stack there for a worker that cannot do it itself, cut to what fits."""
        self.clear_trace()
        packed = text.encode(errors="replace")[-_TRACE_NBYTES:]
        self._mapping[TRACE_OFFSET : TRACE_OFFSET + len(packed)] = packed

    def clear_trace(self) -> None:
        self._mapping[TRACE_OFFSET:PAGE_NBYTES] = bytes(_TRACE_NBYTES)

    def close(self) -> None:
        self.words.release()
        self._mapping.close()
