"""What ended a process, from the evidence."""

from __future__ import annotations

import signal

import pytest

from ringloader._runtime import causes
from ringloader._runtime.causes import OomCounts, likely_cause
from ringloader._runtime.words import LAST_WORDS


class Clock:
    """A count and a time that the test moves."""

    def __init__(self) -> None:
        self.count: int | None = 7
        self.now_s = 100.0
        self.num_reads = 0

    def read(self) -> int | None:
        self.num_reads += 1
        return self.count


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(causes, "oom_kills", moved.read)
    monkeypatch.setattr("ringloader._runtime.causes.time.monotonic", lambda: moved.now_s)
    return moved


def test_growth_counts_for_all_deaths_of_that_moment_and_for_none_later(clock: Clock) -> None:
    """Several workers are ended at once; one that is killed a minute later is not."""
    counts = OomCounts()
    assert counts.have_grown() is False
    clock.count = 9
    assert counts.have_grown() is True
    clock.now_s += 0.5
    assert counts.have_grown() is True
    clock.now_s += 60
    assert counts.have_grown() is False


def test_growth_of_long_ago_says_nothing_of_a_death_now(clock: Clock) -> None:
    """Somebody else on this machine was ended while nobody looked: the looks in between have taken it in."""
    counts = OomCounts()
    clock.count = 8
    clock.now_s += 30
    counts.look()
    clock.now_s += 30
    assert counts.have_grown() is False


def test_looks_cost_nothing_more_often_than_once_a_second(clock: Clock) -> None:
    """Where every step drains, every step looks."""
    counts = OomCounts()
    for _ in range(1000):
        counts.look()
        clock.now_s += 0.001
    assert clock.num_reads <= 2


def test_kernel_that_does_not_count_is_no_evidence(clock: Clock) -> None:
    """Neither for nor against."""
    clock.count = None
    assert OomCounts().have_grown() is None


@pytest.mark.parametrize(
    ("returncode", "trace", "words"),
    [
        (None, "", ""),
        (0, "", "by os._exit, or in native code"),
        (3, "Traceback ...\nSystemExit: 3", "by sys.exit; the stack shows where"),
        (1, f"{LAST_WORDS}OSError: no descriptors\nTraceback ...", "OSError: no descriptors"),
        (-signal.SIGBUS, "", "a memory-mapped file was truncated or its disk is full; the stack shows which"),
        (-signal.SIGUSR1, "", ""),
    ],
)
def test_exit_status_in_words(returncode: int | None, trace: str, words: str) -> None:
    """A worker's own last words before any guess."""
    assert likely_cause(returncode, is_oom=None, trace=trace) == words
