"""`LoaderStats`: what has happened so far."""

from __future__ import annotations

import dataclasses

from ringloader._runtime.engine import Engine

__all__ = ["LoaderStats"]


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderStats:
    """Counts since the loader was made. Durations in seconds, sizes in bytes.

    wait_s: time `next` spent, all told. copied_nbytes: bytes that were copied to make batches; equal to the batches' own bytes
    unless a custom `collate_fn` made them first. num_refilled: batches made again after a death or for want of room. num_stale:
    late answers that were dropped. num_retried: fetches that failed and were tried again (`faults.retry`). num_recycled:
    healthy workers that gave way to a successor. num_skipped: different samples that were left out or replaced. pinned_nbytes:
    page-locked bytes of the ring. copy_s: time of copies to `device`, measured there.
    """

    num_batches: int = 0
    num_samples: int = 0
    wait_s: float = 0.0
    copied_nbytes: int = 0
    num_restarts: int = 0
    num_refilled: int = 0
    num_stale: int = 0
    num_recoveries: int = 0
    num_retried: int = 0
    num_recycled: int = 0
    num_skipped: int = 0
    num_slots: int = 0
    num_segments: int = 0
    ring_nbytes: int = 0
    pinned_nbytes: int = 0
    copy_s: float = 0.0
    worker_pids: tuple[int, ...] = ()

    def with_engine(self, engine: Engine | None, *, is_closed: bool) -> LoaderStats:
        """Add what the present engine has counted, or has, to what those before it had."""
        if engine is None:
            return dataclasses.replace(self, num_slots=0, num_segments=0, ring_nbytes=0, pinned_nbytes=0, worker_pids=())
        scheduler = engine.scheduler
        return dataclasses.replace(
            self,
            num_samples=self.num_samples + engine.delivery.num_samples,
            copied_nbytes=self.copied_nbytes + engine.delivery.copied_nbytes,
            num_restarts=self.num_restarts + sum(worker.num_restarts for worker in scheduler.workers.all),
            num_refilled=self.num_refilled + scheduler.num_refilled,
            num_stale=self.num_stale + scheduler.num_stale,
            num_recoveries=self.num_recoveries + engine.pump.num_recoveries,
            num_retried=self.num_retried + scheduler.num_retried,
            num_recycled=self.num_recycled + scheduler.supervision.recycling.num_recycled,
            num_slots=len(scheduler.slots.by_id),
            num_segments=len(engine.ring.segments),
            ring_nbytes=engine.ring.nbytes,
            pinned_nbytes=engine.ring.pins.nbytes,
            worker_pids=() if is_closed else tuple(engine.pids()),
        )
