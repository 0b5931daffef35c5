"""The watching thread: starts and kills workers, repairs after interrupts, pumps while no consumer does.

Owns the thread of one loader that lives exactly as long as its workers, which die with it. A daemon, so that it never keeps the
interpreter; joined by the exit hook (lifetime.py), so that it never runs into the teardown. Must not call torch, CUDA or user
code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ringloader._runtime.pump import Pump

# It takes over when no consumer has pumped for this long: faults in a long training step are met in it.
_ABSENT_S = 0.1
# How often it looks, when idle, whether its loader is still there.
_OWNER_LOOK_S = 1.0


class Watch:
    """Runs the thread; `is_over` says when to end, `end` is the last thing it does."""

    def __init__(self, pump: Pump, is_over: Callable[[], bool], end: Callable[[], None]) -> None:
        self._pump = pump
        self._is_over = is_over
        self._end = end

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="ringloader", daemon=True)
        self._pump.thread = thread
        thread.start()
        return thread

    def _run(self) -> None:
        pump = self._pump
        with pump.lock:  # whoever starts it has the lock
            if pump.thread is not threading.current_thread():
                return  # an interrupt broke into `start` so early that another one was started for it
        try:
            while not self._is_over():
                self._look()
        except BaseException as error:
            pump.failure = error  # raised by the next `next()`
        finally:
            pump.has_thread_ended = True
            self._end()
            with pump.lock:
                pump.changed.ring()

    def _look(self) -> None:
        pump = self._pump
        with pump.lock:
            if pump.is_dirty:
                pump.repair()
            absent_s = time.monotonic() - pump.last_pump_s
            is_led = pump.leader != 0 and time.monotonic() <= pump.leader_until_s
            is_idle = not is_led and absent_s >= _ABSENT_S
            pause_s = _ABSENT_S if is_led else _ABSENT_S - absent_s
        if pump.jobs:
            pump.run_jobs()
        elif is_idle:
            pump.step(pump.wait(_OWNER_LOOK_S))
        else:
            pump.thread_wanted.wait(max(0.001, pause_s))
