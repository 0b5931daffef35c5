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


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """How faults are met. Durations in seconds.

    restarts: replacements per worker within `window_s`; with one more death it is given up. backoff_s: wait before the second
    of several restarts with no batch made in between, doubling to `max_backoff_s`. stall_s: no progress within one sample.
    None: no limit. start_timeout_s: for import, build and init together. sample_deaths: deaths during one sample until it
    counts as bad. on_bad_sample: "raise"; "skip" leaves it out; "replace" puts another sample of the same batch in its place,
    or of the batch before.

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

    def __post_init__(self) -> None:
        check_count("faults.restarts", self.restarts, least=0)
        check_count("faults.sample_deaths", self.sample_deaths, least=1)
        for name in ("window_s", "backoff_s", "max_backoff_s"):
            check_duration(f"faults.{name}", getattr(self, name))
        for name in ("stall_s", "start_timeout_s"):
            if getattr(self, name) is not None:
                check_duration(f"faults.{name}", getattr(self, name), positive=True)
        if self.on_bad_sample not in ON_BAD_SAMPLE:
            choices = ", ".join(map(repr, ON_BAD_SAMPLE))
            raise ConfigError(
                f"faults.on_bad_sample is {self.on_bad_sample!r}; choose one of {choices}",
                option="faults.on_bad_sample",
                value=self.on_bad_sample,
            )


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """The checked options a pool runs by; `num_workers` at least 1 (inline counts as one).

    num_copied: slots that copies to a device may be reading at any time. unreaped_s: how long a worker that was killed may take
    to end before the run goes on without it and its slots; 0 where nothing can be killed.
    """

    num_workers: int
    prefetch_factor: int
    timeout_s: float | None = None
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    num_copied: int = 0
    unreaped_s: float = UNREAPED_S

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
