"""What can be seen of a worker from outside.

Owns the facts that a backend observes and the decisions about hangs and growth read.
"""

from __future__ import annotations

from ringloader._core.records import record


@record
class WorkerView:
    """What a worker's status page says: the Fill in progress (-1: none), its sample, when it began, and the stage in words.

    is_fetching: `num_samples` samples from `sample` on are fetched in one call, and to blame for what happens. trace: its
    stack, once it was taken. private_nbytes: memory that is its own, 0 where that is not known.
    """

    serial: int
    sample: int
    began_s: float
    stage: str
    is_fetching: bool = False
    trace: str = ""
    num_samples: int = 1
    private_nbytes: int = 0

    @property
    def blamed(self) -> int:
        """The first place that is to blame for what happens now, -1: none."""
        return self.sample if self.is_fetching else -1
