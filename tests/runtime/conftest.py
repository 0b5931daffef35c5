"""What every test with real processes and memory is held to: nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from ringloader._core import scheduler

# A look for garbage that takes longer goes through modules: what a test has made is little.
_LONG_COLLECT_S = 0.01
# One unit for every duration in these tests, so that a slow machine stretches them all.
UNIT_S = float(os.environ.get("RINGLOADER_TEST_UNIT_S", "1.0"))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _shm_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("rl-")}


# What others have left on this machine is not for these tests to answer for.
_FOREIGN_NAMES = _shm_names()


def shm_names() -> set[str]:
    """Names of our segments in /dev/shm, but for those from before the tests began."""
    return _shm_names() - _FOREIGN_NAMES


def our_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if not _has_ended(child)]


def _has_ended(child: psutil.Process) -> bool:
    try:
        return bool(child.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True  # since it was listed


def our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("ringloader")}


def wait_until(condition: object, within_s: float = 5.0) -> bool:
    """Poll a condition of the outside world (a process that ends) until it holds or the time is over."""
    deadline_s = time.monotonic() + within_s * UNIT_S
    while time.monotonic() < deadline_s:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return bool(condition())  # type: ignore[operator]


@pytest.fixture(autouse=True, scope="session")
def _frozen() -> None:
    """What has been imported is there to stay: looking through torch's objects for garbage after every test took a third
    of the suite's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _heeds_interrupts() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and children inherit that: tests of Ctrl-C need it
    heard."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _spread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have batches spread over all workers however quick they are, as nearly all of them are here, and no more of them made
    ahead: a test with two workers is to be one with two. Those marked `packed` are about the difference."""
    if request.node.get_closest_marker("packed") is None:
        monkeypatch.setattr(scheduler, "_WAKE_NS", 0)
        monkeypatch.setattr(scheduler, "_AHEAD_NS", 0)


@pytest.fixture(autouse=True)
def _collects_silently() -> Iterator[None]:
    """What is raised in a signal handler while Python code runs for the collector is lost: Hypothesis has such code there."""
    saved = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(saved)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Fail a test that leaves a child, a thread, a descriptor or a name in /dev/shm."""
    before_fds, before_names = num_descriptors(), shm_names()
    before_children = {child.pid for child in our_children()}
    yield
    began_s = time.perf_counter()
    gc.collect()
    if time.perf_counter() - began_s > _LONG_COLLECT_S:
        gc.freeze()  # more was imported meanwhile
    assert wait_until(lambda: not our_threads()), f"threads left: {our_threads()}"
    assert wait_until(lambda: {c.pid for c in our_children()} <= before_children), f"children left: {our_children()}"
    # Another process of the test run may be between making a segment and taking its name away.
    assert wait_until(lambda: shm_names() <= before_names), f"names left: {shm_names() - before_names}"
    assert wait_until(lambda: num_descriptors() <= before_fds), f"{num_descriptors() - before_fds} descriptors left"
