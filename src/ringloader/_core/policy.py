"""What may go wrong how often: `FaultPolicy`, and the sizes of a pool.

Owns the checked options that the state machines read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ringloader.errors import ConfigError

ON_BAD_SAMPLE = ("raise", "skip", "replace")
# A process that SIGKILL has not ended after this long hangs in the kernel.
UNREAPED_S = 5.0


_MAX_RETRIES = 1000


@dataclass(frozen=True, slots=True)
class SampleRetry:
    """Fetch a sample again when the dataset raised one of `on`, up to `times` times, for faults that pass by themselves.

    backoff_s: wait before the first of these, doubling to `max_backoff_s`; it counts as time spent on the batch (`timeout`) and
    on the sample (`stall_s`). The sample is fetched with the draws of the first time. Where the dataset fetches a batch in one
    call, the call is repeated. Not for iterable datasets: an iterator that raised has ended.

    Raises ConfigError for a value that cannot be.
    """

    times: int = 3
    on: type[Exception] | tuple[type[Exception], ...] = (OSError,)
    backoff_s: float = 0.1
    max_backoff_s: float = 10.0

    def wait_s(self, attempt: int) -> float:
        """How long to wait after so many failed retries."""
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** min(attempt, 64))

    @property
    def total_wait_s(self) -> float:
        """All waits for one sample together."""
        return sum(self.wait_s(attempt) for attempt in range(self.times))

    def __post_init__(self) -> None:
        check_count("SampleRetry.times", self.times, least=1)
        if self.times > _MAX_RETRIES:
            raise ConfigError(
                f"SampleRetry.times is {self.times}; give {_MAX_RETRIES} at most", option="SampleRetry.times", value=self.times
            )
        for name in ("backoff_s", "max_backoff_s"):
            check_duration(f"SampleRetry.{name}", getattr(self, name))
        kinds = self.on if isinstance(self.on, tuple) else (self.on,)
        if not kinds or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
            raise ConfigError(
                f"SampleRetry.on is {self.on!r:.100}; give a subclass of Exception, or a tuple of such",
                option="SampleRetry.on",
                value=self.on,
            )
        object.__setattr__(self, "on", kinds)


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """How faults are met. Durations in seconds.

    restarts: replacements per worker within `window_s`; with one more death it is given up. backoff_s: wait before the second
    of several restarts with no batch made in between, doubling to `max_backoff_s`. stall_s: no progress within one sample.
    None: no limit. start_timeout_s: for import, build and init together. sample_deaths: deaths during one sample until it
    counts as bad. on_bad_sample: "raise"; "skip" leaves it out; "replace" puts another sample of the same batch in its place,
    or of the batch before. retry: fetch a sample again that raised, before it counts as bad.

    Worker processes are replaced, between batches and by a successor that is started first, when they have more private memory
    than `max_worker_rss` bytes (RssAnon, proc(5): shared pages do not count), or have made `max_batches_per_worker` batches.

    Raises ConfigError for a value that cannot be.
    """

    restarts: int = 3
    window_s: float = 600.0
    backoff_s: float = 0.1
    max_backoff_s: float = 10.0
    stall_s: float | None = 600.0
    start_timeout_s: float | None = None
    sample_deaths: int = 3
    on_bad_sample: str = "raise"
    retry: SampleRetry | None = None
    max_worker_rss: int | None = None
    max_batches_per_worker: int | None = None

    def __post_init__(self) -> None:
        check_count("faults.restarts", self.restarts, least=0)
        check_count("faults.sample_deaths", self.sample_deaths, least=1)
        for name in ("window_s", "backoff_s", "max_backoff_s"):
            check_duration(f"faults.{name}", getattr(self, name))
        for name in ("stall_s", "start_timeout_s"):
            if getattr(self, name) is not None:
                check_duration(f"faults.{name}", getattr(self, name), positive=True)
        for name, least in (("max_worker_rss", 1 << 20), ("max_batches_per_worker", 1)):
            if getattr(self, name) is not None:
                check_count(f"faults.{name}", getattr(self, name), least=least)
        if self.retry is not None and not isinstance(self.retry, SampleRetry):
            raise ConfigError(
                f"faults.retry is {self.retry!r:.100}; give a SampleRetry or None", option="faults.retry", value=self.retry
            )
        if self.retry is not None and self.stall_s is not None and self.retry.total_wait_s >= self.stall_s:
            raise ConfigError(
                f"faults.retry waits {self.retry.total_wait_s:g} s for one sample, and faults.stall_s={self.stall_s:g} ends a "
                "worker that makes no progress for so long: give fewer times or a smaller max_backoff_s, or raise stall_s",
                option="faults.retry",
                value=self.retry,
            )
        if self.on_bad_sample not in ON_BAD_SAMPLE:
            choices = ", ".join(map(repr, ON_BAD_SAMPLE))
            raise ConfigError(
                f"faults.on_bad_sample is {self.on_bad_sample!r}; choose one of {choices}",
                option="faults.on_bad_sample",
                value=self.on_bad_sample,
            )

    @property
    def recycles(self) -> bool:
        """Healthy workers are to be replaced."""
        return self.max_worker_rss is not None or self.max_batches_per_worker is not None


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """The checked options a pool runs by; `num_workers` at least 1 (inline counts as one).

    num_copied: slots that copies to a device may be reading at any time. unreaped_s: how long a worker that was killed may take
    to end before the run goes on without it and its slots; 0 where nothing can be killed. recycles: a healthy worker can be
    replaced by another. num_beside: workers that can run at the same time as the training process, at least 1.
    """

    num_workers: int
    prefetch_factor: int
    timeout_s: float | None = None
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    num_copied: int = 0
    unreaped_s: float = UNREAPED_S
    recycles: bool = True
    num_beside: int = 1 << 16

    @property
    def num_in_flight(self) -> int:
        """Batches that may be pulled and not yet handed over."""
        return self.num_workers * self.prefetch_factor


def check_count(option: str, value: object, *, least: int) -> None:
    """Raise ConfigError unless `value` is an int (no bool) of at least `least`."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{option} is {value!r}; give an int of at least {least}", option=option, value=value)


def check_duration(option: str, value: object, *, positive: bool = False) -> None:
    """Raise ConfigError unless `value` is a finite number of seconds."""
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or value < 0 or (positive and value == 0):  # type: ignore[operator]
        kind = "positive" if positive else "non-negative"
        raise ConfigError(f"{option} is {value!r}; give a {kind} finite number of seconds", option=option, value=value)
