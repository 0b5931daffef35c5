"""Faults in words: the exceptions that `next()` raises, from the facts the scheduler kept.

Owns the sentences. Must not decide anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ringloader._core import values
from ringloader._core.events import Death
from ringloader._core.messages import Failed, StartFailed
from ringloader._core.policy import FaultPolicy
from ringloader._core.room import room_sentence
from ringloader._core.scheduler import Scheduler
from ringloader._core.session import Batch, Fault, Session
from ringloader._core.supervision import scene, signal_name
from ringloader._core.units import counted, in_words
from ringloader._core.views import WorkerView
from ringloader._core.workers import Worker
from ringloader.errors import (
    ConfigError,
    FactoryError,
    LayoutError,
    LoaderError,
    RemoteError,
    RingFullError,
    SampleError,
    WorkerError,
)

_MAX_KEYS = 16
_CULPRITS = {"collate": "collate_fn", "set_epoch": "the dataset's set_epoch"}


def batch_error(batch: Batch, fault: Fault, policy: FaultPolicy, *, inline: bool) -> LoaderError:
    """The exception for a batch that could not be made."""
    limit = policy.sample_deaths
    worker = None if inline or fault.worker_id < 0 else fault.worker_id
    keys = batch.key_list()
    key = keys[fault.sample] if 0 <= fault.sample < len(keys) else None
    where = f"batch {batch.batch_id}" + ("" if worker is None else f", worker {worker}")
    if fault.failed is not None and fault.failed.kind == "unsharded":
        return ConfigError(
            "the iterable dataset is the same in every worker, and each sample would come once per worker: have its __iter__ "
            "take its part by ringloader.get_worker_info() (id, num_workers), or torch's in worker processes, or use "
            "num_workers=1; where the streams differ by themselves, set `is_sharded = True` on the dataset",
            option="dataset",
            value="iterable",
        )
    if batch.stream >= 0:
        return _stream_error(batch, fault, where, worker, limit)
    if fault.kind == "deadly":
        return WorkerError(
            f"nothing is left of {where}: its samples {_brief(keys)} have ended workers before, and are not tried again "
            f"(faults.on_bad_sample={policy.on_bad_sample!r})",
            index=key,
            batch=batch.batch_id,
            worker=None,
            indices=keys,
            deaths=0,
            **_death_facts({}),
        )
    if fault.failed is None:
        is_one = fault.sample >= 0
        deaths = batch.deaths.get(fault.sample, 0) if is_one else batch.num_range_deaths
        what = f"sample {key!r}" if is_one else f"fetching the {len(keys)} samples in one call, and none of them alone,"
        advice = "; faults.on_bad_sample='skip' or 'replace' leaves such samples out" if policy.on_bad_sample == "raise" else ""
        if not is_one:
            advice = "; make batches smaller, or leave __getitems__ and write_batch out"
        return WorkerError(
            f"{what} ended {_deaths(deaths, limit if is_one else deaths)}, {where} with indices {_brief(keys)}; "
            f"last: {fault.text}{advice}",
            index=key,
            batch=batch.batch_id,
            worker=worker,
            indices=keys,
            deaths=deaths,
            **_death_facts(fault.facts),
        )
    return _from_failed(batch, fault.failed, key, where, worker)


def _death_facts(known: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the last death: who it was, how it ended, and its stack."""
    code = known.get("returncode")
    return {
        "pid": int(known["who"].removeprefix("pid ")) if str(known.get("who", "")).startswith("pid ") else None,
        "incarnation": known.get("incarnation"),
        "returncode": code,
        "signal": signal_name(-code) if code is not None and code < 0 else None,
        "stack": known.get("trace", ""),
    }


def _deaths(deaths: int, limit: int) -> str:
    last = "" if deaths >= limit else ", and none is left to try it again"
    return f"{counted(deaths, 'worker')} (faults.sample_deaths={limit}){last}"


def _stream_error(batch: Batch, fault: Fault, where: str, worker: int | None, limit: int) -> LoaderError:
    place = f"sample {fault.sample} of batch {batch.number} of stream {batch.stream}"
    if fault.failed is not None:
        return _from_failed(batch, fault.failed, place, where, worker)
    deaths = batch.deaths.get(fault.sample, 0)
    return WorkerError(
        f"{place} ended {_deaths(deaths, limit)}, {where}; last: {fault.text}; the rest of the stream is left out",
        index=None,
        batch=batch.batch_id,
        worker=worker,
        indices=[],
        deaths=deaths,
        **_death_facts(fault.facts),
    )


def _from_failed(batch: Batch, failed: Failed, key: object, where: str, worker: int | None) -> LoaderError:
    error: LoaderError
    if failed.kind == "layout":
        packed = failed.facts.get("packed")
        facts = values.decode(packed) if isinstance(packed, bytes) else {}
        error = LayoutError(f"{failed.error} ({where})", **{**facts, "batch": batch.batch_id, "worker": worker})
    else:
        advice = "; a debugger needs num_workers=0" if failed.error_type.endswith("BdbQuit") else ""
        named = key if batch.stream >= 0 else f"sample {key!r}"
        who = _CULPRITS.get(failed.kind, "the dataset" if failed.sample < 0 else named)
        indices = "" if batch.stream >= 0 else f", indices {_brief(batch.key_list())}"
        error = SampleError(
            f"{who} raised {failed.error_type}: {failed.error}{advice} ({where}{indices})\n\n{failed.traceback}",
            index=None if batch.stream >= 0 else key,
            batch=batch.batch_id,
            worker=worker,
            indices=batch.key_list(),
            original_type=failed.error_type,
            original_message=failed.error,
        )
    error.__cause__ = RemoteError(failed.traceback or failed.error)
    return error


def rebuild_error(batch: Batch, error: Exception) -> LayoutError:
    """The exception for a batch that a worker made and this process cannot rebuild."""
    failure = LayoutError(
        f"batch {batch.batch_id} was made by a worker and cannot be rebuilt in this process: {type(error).__name__}: {error}; "
        "return types that both can import",
        path="batch",
        batch=batch.batch_id,
        samples=(),
    )
    failure.__cause__ = error
    return failure


def start_error(fault: StartFailed) -> FactoryError:
    """The exception for a dataset that could not be built."""
    error = FactoryError(
        f"{fault.stage} failed in a worker: {fault.error_type}: {fault.error}\n\n{fault.traceback}",
        stage=fault.stage,
        original_type=fault.error_type,
        original_message=fault.error,
    )
    error.__cause__ = RemoteError(fault.traceback)
    return error


def lost_error(scheduler: Scheduler, batch: Batch | None) -> LoaderError:
    """The exception for a pool in which no worker is left."""
    policy = scheduler.policy.faults
    last = f"; {batch.last_exit}" if batch is not None and batch.last_exit else ""
    which = f"; batch {batch.batch_id} with indices {_brief(batch.key_list())} is missing" if batch is not None else ""
    if not last and scheduler.supervision.last_death:
        last = f"; {scheduler.supervision.last_death['story']}"
    num_workers = scheduler.policy.num_workers
    who = (
        "the only worker has used up its restarts"
        if num_workers == 1
        else f"all {num_workers} workers have used up their restarts"
    )
    kind = WorkerError if scheduler.supervision.dataset_facts is not None else FactoryError
    return kind(
        f"{who} (faults.restarts={policy.restarts} within faults.window_s={policy.window_s:g} s){which}{last}",
        restarts=policy.restarts,
        batch=None if batch is None else batch.batch_id,
        indices=[] if batch is None else batch.key_list(),
        worker=scheduler.supervision.last_death.get("worker"),
        **_death_facts(scheduler.supervision.last_death),
    )


def full_error(scheduler: Scheduler, session: Session, holders: list[str], limit: int) -> LoaderError:
    """The exception for a ring without room for the next batch."""
    refusal = scheduler.room.refusal
    assert refusal is not None
    num_slots = len(scheduler.slots.by_id)
    if refusal.configured and not holders and num_slots < 2:
        return ConfigError(
            f"{room_sentence(refusal)}: at least two slots are needed; raise max_ring_bytes to "
            f"{2 * refusal.slot_nbytes:,} bytes or more, or make batches smaller",
            option="max_ring_bytes",
            value=limit,
        )
    if not holders:
        return RingFullError(
            f"no slot could be made for batch {session.num_delivered}: {room_sentence(refusal)}; free memory, or make batches "
            "smaller",
            num_slots=num_slots,
            holders=holders,
            needed_nbytes=refusal.slot_nbytes,
            limit_nbytes=limit,
        )
    held = ", ".join(holders[:5])
    return RingFullError(
        f"no slot is free for batch {session.num_delivered}: {len(scheduler.slots.by_id)} slots, held by batches you keep: "
        f"{held}; {room_sentence(refusal)}; clone() what you keep, release(batch), or raise max_ring_bytes",
        num_slots=num_slots,
        holders=holders,
        needed_nbytes=refusal.slot_nbytes,
        limit_nbytes=limit,
    )


def waiting_line(scheduler: Scheduler, session: Session, observe: Any, waited_s: float) -> str:
    """What a consumer has been waiting for, from the scheduler's tables and the status pages; nobody is disturbed."""
    batch = session.oldest()
    if batch is None:
        return f"still waiting after {waited_s:.0f} s for the sampler's next batch"
    parts = [f"still waiting after {waited_s:.0f} s for batch {batch.batch_id} ({batch.state.value})"]
    for worker in scheduler.workers.everyone():
        view = observe(worker.worker_id, worker.incarnation)
        doing = "no process" if view is None else _doing(scheduler, worker, view)
        mark = " has it" if worker.worker_id == batch.worker_id and batch.serial in worker.fills else ""
        parts.append(f"worker {worker.worker_id} ({worker.who}, {worker.state.value}){mark}: {doing}")
    if scheduler.is_starved(session):
        parts.append("no slot is free")
    if scheduler.room.refusal is not None:
        parts.append(f"the ring may not grow beyond {in_words(scheduler.slots.nbytes())}: {scheduler.room.refusal.reason}")
    return "; ".join(parts)


def _doing(scheduler: Scheduler, worker: Worker, view: WorkerView) -> str:
    """What a worker is at, and since when."""
    session_id, fill = worker.fills.get(view.serial, (-1, None))
    session = scheduler.sessions.get(session_id)
    batch = session.batches.get(fill.batch_id) if session is not None and fill is not None else None
    if batch is None:
        return view.stage
    since_s = time.monotonic() - view.began_s
    death = Death(None, view.serial, view.blamed, view.stage, num_samples=view.num_samples)
    return f"{scene(batch, death)}, begun {since_s:.1f} s ago"


def _brief(keys: list[object]) -> str:
    if len(keys) <= _MAX_KEYS:
        return repr(keys)
    return f"{repr(keys[:_MAX_KEYS])[:-1]}, ... {len(keys)} in all]"
