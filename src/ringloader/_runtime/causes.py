"""What is likely to have ended a worker process, in words.

Owns the evidence beyond the exit status: the kernel's counts of processes ended for want of memory, and the stack that the
worker left. Must not decide what follows.
"""

from __future__ import annotations

import errno
import math
import signal
import time

from ringloader._runtime.memory import oom_kills
from ringloader._runtime.words import LAST_WORDS

# The kernel may end several workers at once: the first death that is looked into shows the growth, those after it do not.
_SAME_S = 2.0
_LOOK_S = 1.0


class OomCounts:
    """The kernel's out-of-memory killer, by its own counts: of the machine, and of our control groups."""

    def __init__(self) -> None:
        self._seen = oom_kills()
        self._grown_s = -math.inf
        self._looked_s = time.monotonic()

    def look(self) -> None:
        """Now and then, a second apart at least: what happened long before a death has nothing to do with it."""
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self.have_grown()

    def have_grown(self) -> bool | None:
        """Whether it has ended a process since the last look, or just before; None when the kernel does not count."""
        self._looked_s = time.monotonic()
        now = oom_kills()
        before, self._seen = self._seen, now
        if now is None or before is None:
            return None
        if now > before:
            self._grown_s = time.monotonic()
        return time.monotonic() - self._grown_s < _SAME_S


def start_failure(error: OSError) -> str:
    """Say why a process could not be started, and what can be done about it."""
    advice = _START_ADVICE.get(error.errno or 0)
    return f"{error}; {advice}" if advice else str(error)


_START_ADVICE = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n, RLIMIT_NOFILE), or keep fewer files open",
    errno.ENFILE: "this machine has too many files open (fs.file-max)",
    errno.EAGAIN: "raise the limit of processes (ulimit -u, or pids.max of the control group), or use fewer workers",
    errno.ENOMEM: "there is no memory left; use fewer workers",
}


def likely_cause(returncode: int | None, *, is_oom: bool | None, trace: str) -> str:
    """Say what an exit status is likely to mean; "" where it speaks for itself."""
    if trace.startswith(LAST_WORDS):
        return trace.removeprefix(LAST_WORDS).partition("\n")[0]
    if returncode is None:
        return ""
    if returncode >= 0:
        return "by sys.exit; the stack shows where" if "SystemExit" in trace else "by os._exit, or in native code"
    if returncode == -signal.SIGKILL:
        return _KILLED[is_oom]
    return _CAUSES.get(-returncode, "")


_KILLED = {
    True: "by the kernel's out-of-memory killer: fewer workers, smaller batches or a smaller prefetch_factor need less",
    False: "not by the kernel's out-of-memory killer, whose count has not moved: somebody sent it, or ulimit -t was reached",
    None: "by the kernel's out-of-memory killer, or by somebody: look at dmesg and at the memory limit",
}
_CAUSES: dict[int, str] = {
    signal.SIGBUS: "a memory-mapped file was truncated or its disk is full; the stack shows which",
    signal.SIGSEGV: "a fault in a compiled extension; the stack shows which call",
    signal.SIGABRT: "a compiled extension gave up; it has said why on stderr, if at all",
    signal.SIGILL: "a compiled extension has instructions that this processor does not know",
    signal.SIGFPE: "a compiled extension divided by zero",
    signal.SIGXFSZ: "a file grew beyond RLIMIT_FSIZE (ulimit -f)",
    signal.SIGXCPU: "its processor time is used up: RLIMIT_CPU (ulimit -t)",
    signal.SIGTERM: "by another process: a job scheduler, perhaps",
}
