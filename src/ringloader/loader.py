"""`Loader`: the iterator and context manager that users see.

Owns the options and the epoch counter; everything else is the engine's. An engine does not know its loader, so that dropping
the last reference to a loader ends its workers. Samplers run here, on the thread inside `iter` and `next`: the k-th `next`
has pulled the sampler up to k + prefetch_factor x num_workers batches, a function of k alone.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import numpy as np

from ringloader._core.batching import EpochPlan
from ringloader._core.events import Keys
from ringloader._core.layout import Layout, Placement
from ringloader._core.policy import FaultPolicy
from ringloader._core.session import Session
from ringloader._runtime import lifetime, options, sources
from ringloader._runtime.engine import Engine
from ringloader._runtime.inline import InlinePool
from ringloader._runtime.keys import KeySource, PlannedKeys, SampledKeys, num_sampled
from ringloader._runtime.pool import ProcessPool
from ringloader._runtime.worker_info import WorkerInfo
from ringloader._specs import main_module
from ringloader.errors import ClosedError, ConfigError, LoaderError
from ringloader.factory import FactorySpec
from ringloader.samplers import resolve_rank

__all__ = ["Loader", "LoaderStats", "release"]

logger = logging.getLogger("ringloader")


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderStats:
    """Counts since the loader was made. Durations in seconds, sizes in bytes.

    wait_s: time `next` spent, all told. copied_nbytes: bytes that were copied to make batches; equal to the batches' own bytes
    unless a custom `collate_fn` made them first. num_refilled: batches made again after a death or for want of room. num_stale:
    late answers that were dropped.
    """

    num_batches: int = 0
    num_samples: int = 0
    wait_s: float = 0.0
    copied_nbytes: int = 0
    num_restarts: int = 0
    num_refilled: int = 0
    num_stale: int = 0
    num_recoveries: int = 0
    num_slots: int = 0
    num_segments: int = 0
    ring_nbytes: int = 0
    worker_pids: tuple[int, ...] = ()


class Loader:
    """Iterates over a dataset in batches that lie in shared memory.

    `dataset` is a `FactorySpec`, an object with a `process_spec`, or a map-style dataset. The options are those of
    `torch.utils.data.DataLoader` where they have its names; README.md has the table. Batches are what torch's `default_collate`
    gives; each leaf larger than 16 KiB, and each small one without a far larger neighbour, is a view of a slot that workers
    leave alone until the last view of it is gone.

    Raises ConfigError for options that cannot work, before anything starts; FactoryError, at the first `iter`, `len` or
    `start`, when the dataset cannot be built.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = options.DEFAULT_BATCH_SIZE,
        shuffle: bool | None = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | None = 0,
        worker_backend: str | None = "auto",
        collate_fn: Callable[[list[Any]], Any] | str | FactorySpec | None = None,
        drop_last: bool | None = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = True,
        pin_memory: bool | None = False,
        timeout: float | None = None,
        faults: FaultPolicy | None = None,
        in_order: bool | None = True,
        seed: int | None = 0,
        seed_per: str | None = "batch",
        rank: int | None = None,
        world_size: int | None = None,
        worker_init_fn: Callable[[int], object] | str | FactorySpec | None = None,
        output: str | None = "torch",
        max_ring_bytes: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "dataset", "__class__")}
        _refuse_unguarded_main()
        self._options = options.check(given)
        self._is_seed_drawn = seed is None
        sources.check_dataset(dataset)
        self.dataset = dataset
        self._rank, self._world_size = resolve_rank(self._options.rank, self._options.world_size)
        self._wrap = _wrapper(self._options.output)
        self._make_backend: Callable[[int], Any]
        self._drop_payload: weakref.finalize[..., Any] | None = None
        self._length = -1
        self._prepare()
        if self._options.pin_memory:
            _warn_unpinned()
        self._epoch = 0
        self._engine: Engine | None = None
        # Re-entrant, and code of C: a signal handler on this thread may use the loader.
        self._engine_lock = threading.RLock()
        self._num_opening = 0  # threads between `iter` and their session
        self._is_closed = False
        self._past = LoaderStats()  # of engines that are gone (persistent_workers=False)
        self._wait_s = 0.0
        self._num_batches = 0
        self._skipped: list[object] = []
        self._say_sharding()

    # --- what torch's loader has too ------------------------------------------------------------------------------------

    def __iter__(self) -> LoaderIterator:
        """Start an epoch; several may run at once."""
        self._check_open()
        with self._engine_lock:
            self._num_opening += 1
        try:
            engine = self._running()
            source = self._key_source(engine)
            with self._engine_lock:
                epoch, self._epoch = self._epoch, self._epoch + 1
            session = engine.open_session(epoch, in_order=self._options.in_order)
        except ClosedError:
            lifetime.stay_if_exiting()
            raise
        finally:
            with self._engine_lock:
                self._num_opening -= 1
        return LoaderIterator(self, engine, session, source)

    def __len__(self) -> int:
        """Batches per epoch on this rank. Raises TypeError when a sampler has no length."""
        opts = self._options
        if opts.batch_sampler is not None:
            return num_sampled(opts.batch_sampler, None, batched=True, drop_last=False)
        if opts.sampler is not None:
            return num_sampled(opts.sampler, opts.batch_size, batched=False, drop_last=opts.drop_last)
        return len(self._plan(self.dataset_size, 0))

    def __enter__(self) -> Loader:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def dataset_size(self) -> int:
        """Samples of the dataset; with a spec the workers report it, and are started for that. Raises FactoryError."""
        if self._length < 0:
            self._check_open()
            self._length = self._running().dataset_facts()["length"]
        if self._length < 0:
            raise ConfigError("the dataset has no __len__; give a sampler or a batch_sampler", option="sampler", value=None)
        return self._length

    def start(self) -> None:
        """Start the workers now and wait for the first; without it the first `iter` does. Raises FactoryError."""
        self._check_open()
        self._running().dataset_facts()

    def close(self) -> None:
        """End the workers. Batches that are still held stay valid. Harmless a second time."""
        self._is_closed = True
        if self._engine is not None:
            self._engine.close()
        if self._drop_payload is not None:
            self._drop_payload()

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch; without it each `iter` counts on from the last."""
        if type(epoch) is not int or epoch < 0:
            raise ConfigError(f"epoch is {epoch!r}; give an int of at least 0", option="epoch", value=epoch)
        self._epoch = epoch
        for sampler in (self._options.sampler, self._options.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def stats(self) -> LoaderStats:
        """What has happened so far."""
        past = dataclasses.replace(self._past, num_batches=self._num_batches, wait_s=self._wait_s)
        engine = self._engine
        if engine is None:
            return dataclasses.replace(past, num_slots=0, num_segments=0, ring_nbytes=0, worker_pids=())
        scheduler = engine.scheduler
        return dataclasses.replace(
            past,
            num_samples=past.num_samples + engine.delivery.num_samples,
            copied_nbytes=past.copied_nbytes + engine.delivery.copied_nbytes,
            num_restarts=past.num_restarts + sum(worker.num_restarts for worker in scheduler.workers.all),
            num_refilled=past.num_refilled + scheduler.num_refilled,
            num_stale=past.num_stale + scheduler.num_stale,
            num_recoveries=past.num_recoveries + engine.pump.num_recoveries,
            num_slots=len(scheduler.slots.by_id),
            num_segments=len(engine.ring.segments),
            ring_nbytes=engine.ring.nbytes,
            worker_pids=() if self._is_closed else tuple(engine.pids()),
        )

    @property
    def skipped(self) -> list[object]:
        """Keys of samples that were skipped or replaced as bad, in the order they were met."""
        return list(self._skipped)

    @property
    def epoch(self) -> int:
        """The number of the next epoch."""
        return self._epoch

    def __getattr__(self, name: str) -> Any:
        # Options are attributes, as torch's are: batch_size, num_workers, sampler, ...
        checked = self.__dict__.get("_options")
        if checked is not None and name in options.Options.__dataclass_fields__:
            return getattr(checked, name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Settle what a worker is told; whatever a worker could not rebuild is refused here."""
        opts, dataset = self._options, self.dataset
        if opts.num_workers == 0:
            info = WorkerInfo(0, 0, opts.seed, self._rank, self._world_size)
            build = sources.inline_build(dataset, opts)
            self._length = len(dataset) if not isinstance(dataset, FactorySpec) and hasattr(dataset, "__len__") else -1
            self._make_backend = lambda wake_fd: InlinePool(build, info, opts.seed_per)
            return
        if opts.worker_backend == "thread":
            raise ConfigError(
                "worker_backend='thread' is not part of this version; use 'process' or num_workers=0",
                option="worker_backend",
                value="thread",
            )
        if opts.worker_backend == "auto":
            logger.info("worker_backend='auto': processes, the only backend of this version for num_workers > 0")
        settings, self._length = sources.worker_settings(dataset, opts, self._rank, self._world_size)
        if settings.payload_fd >= 0:
            self._drop_payload = weakref.finalize(self, os.close, settings.payload_fd)
            self._drop_payload.atexit = False
        self._make_backend = lambda wake_fd: ProcessPool(settings, wake_fd)

    def _running(self) -> Engine:
        """The engine, started."""
        with self._engine_lock:
            if self._engine is None:
                engine = Engine(self._options.policy, self._make_backend, self._options.max_ring_bytes, self._wrap)
                engine.belong_to(self)
                self._engine = engine
            engine = self._engine
        engine.start()
        return engine

    def _ended(self, engine: Engine) -> None:
        """An epoch is over: workers that are not to be kept go."""
        with self._engine_lock:
            is_last = self._engine is engine and not engine.scheduler.sessions and not self._num_opening
            if not self._options.persistent_workers and is_last:
                engine.close()
                self._past = self.stats()
                self._engine = None

    def _key_source(self, engine: Engine) -> KeySource:
        opts = self._options
        if opts.batch_sampler is None and opts.sampler is None:
            return PlannedKeys(self._plan(self.dataset_size, self._epoch))
        engine.dataset_facts()
        return SampledKeys(
            opts.batch_sampler if opts.batch_sampler is not None else opts.sampler,
            batch_size=opts.batch_size,
            batched=opts.batch_sampler is not None,
            drop_last=opts.drop_last,
            rank=self._rank,
            world_size=self._world_size,
        )

    def _plan(self, size: int, epoch: int) -> EpochPlan:
        opts = self._options
        return EpochPlan(
            size,
            opts.batch_size or 1,
            drop_last=opts.drop_last,
            shuffle=opts.shuffle,
            seed=opts.seed,
            epoch=epoch,
            rank=self._rank,
            world_size=self._world_size,
        )

    def _say_sharding(self) -> None:
        opts = self._options
        if self._world_size == 1 or opts.sampler is not None or opts.batch_sampler is not None:
            return
        if opts.shuffle and self._is_seed_drawn:
            raise ConfigError(
                f"seed=None with {self._world_size} ranks: each would draw an order of its own and samples would be missed and "
                "repeated; give every rank the same seed",
                option="seed",
                value=None,
            )
        if (self._rank, self._world_size) not in _said_sharding:
            _said_sharding.add((self._rank, self._world_size))
            logger.warning(
                "rank %d of %d reads its share of each epoch; world_size=1 has every rank read all of it",
                self._rank,
                self._world_size,
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the loader was closed; make a new one")


class LoaderIterator(Iterator[Any]):
    """One epoch of a loader."""

    def __init__(self, loader: Loader, engine: Engine, session: Session, source: KeySource) -> None:
        self._loader = loader
        self._engine = engine
        self._session = session
        self._source = source
        self._num_ahead = max(1, loader._options.num_workers) * loader._options.prefetch_factor
        if engine.backend.is_inline:
            self._num_ahead = 0  # nothing is made ahead on the caller's own time
        self._pulled: list[tuple[int, Keys]] = []
        self._is_pulled = False  # the sampler has no more
        self._is_over = False
        self._num_noted = 0  # of the session's skipped keys
        self._inside: dict[str, int] = {}  # the thread that is inside `next`
        engine.follow(self, session)

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch. Raises SampleError, LayoutError or WorkerError in place of one that cannot be made; the
        iterator can go on after them."""
        began_s = time.perf_counter()
        if self._is_over:
            raise StopIteration
        session, is_taken = self._session, False
        me = threading.get_ident()
        # One step of C code: two threads cannot both find nobody, and an interrupt leaves this thread as it was or inside.
        if self._inside.setdefault("thread", me) != me:
            raise LoaderError(
                "the iterator is in use by another thread; give each thread an iterator of its own, or take turns"
            )
        try:
            batch = self._engine.next_batch(session, self._pull(), ended=self._is_pulled)
            self._loader._num_batches += 1
            self._loader._wait_s += time.perf_counter() - began_s
            if len(session.skipped) > self._num_noted:
                self._note_skipped()
            # To a signal the last step and the return are one: an interrupt before has the batch delivered again, none comes
            # after.
            is_taken = True
            session.arrived = True
            return batch
        except (StopIteration, LoaderError) as ended:
            session.arrived = True
            if isinstance(ended, StopIteration):
                self._end()
            elif isinstance(ended, ClosedError):
                lifetime.stay_if_exiting()
            raise
        except BaseException:
            if is_taken:
                session.arrived = False
            raise
        finally:
            # A store, not `clear()`: signals are handled after calls, and from `arrived` on none may be.
            self._inside = {}

    def __len__(self) -> int:
        return len(self._loader)

    def _pull(self) -> list[tuple[int, Keys]]:
        """Pull the sampler up to what this call is due; return what the session has not got yet."""
        session, pulled = self._session, self._pulled
        num_delivered = session.num_delivered + (session.in_hand is not None and session.arrived)
        target = num_delivered + 1 + self._num_ahead
        while pulled and pulled[0][0] < session.num_submitted:
            pulled.pop(0)
        while not self._is_pulled and (batch_id := session.num_submitted + len(pulled)) < target:
            try:
                keys = self._source.pull(batch_id)
            except LoaderError:
                if pulled or session.batches or not session.arrived:
                    break  # what came before the error is delivered before it
                raise
            if keys is None:
                self._is_pulled = True
            else:
                pulled.append((batch_id, keys))
        return pulled

    def _note_skipped(self) -> None:
        """Tell the loader of each skipped key once, while the epoch runs: it may be abandoned."""
        keys = self._session.skipped[self._num_noted :]
        self._num_noted += len(keys)
        self._loader._skipped += [key for key in keys if key not in self._loader._skipped]

    def _end(self) -> None:
        self._is_over = True
        self._note_skipped()
        self._engine.close_session(self._session)
        self._loader._ended(self._engine)


def release(batch: Any) -> None:
    """Give the batch's slot back now, before its last view is gone; the batch must not be read any more.

    Harmless on anything that is no batch of ours, and any number of times.
    """
    for leaf in _leaves(batch):
        address = _address(leaf)
        if address is not None and any(engine.release(leaf, address) for engine in list(lifetime.ENGINES)):
            return


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (str, bytes)):
        return
    if isinstance(value, dict):
        for child in value.values():
            yield from _leaves(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _leaves(child)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None))
    else:
        yield value


def _address(leaf: Any) -> int | None:
    """Where a leaf's memory begins, for leaves of the kinds we hand out."""
    if isinstance(leaf, np.ndarray):
        return int(leaf.ctypes.data)
    storage = getattr(leaf, "untyped_storage", None)
    try:
        return None if storage is None else int(storage().data_ptr())
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # a tensor without memory of its own is none of ours


def _wrapper(output: str) -> Callable[[Layout, Placement, bytes, np.ndarray[Any, Any]], tuple[Any, list[Any]]]:
    if output == "numpy":
        from ringloader._collate.wrap import wrap_numpy as wrap
    else:
        from ringloader._collate.tensors import wrap
    return lambda layout, placement, inline, root: wrap(layout, placement, inline, root, True)


def _refuse_unguarded_main() -> None:
    if main_module.loading_main:
        raise ConfigError(
            "a loader was made while a worker imported the main script: put the part of the script that runs under "
            "`if __name__ == '__main__':`, or name the dataset by a module of its own",
            option="dataset",
            value="__main__",
        )


def _warn_unpinned() -> None:
    global _warned_unpinned
    if not _warned_unpinned:
        _warned_unpinned = True
        logger.warning("pin_memory=True: this version does not page-lock memory; batches are delivered unpinned")


_warned_unpinned = False
_said_sharding: set[tuple[int, int]] = set()
