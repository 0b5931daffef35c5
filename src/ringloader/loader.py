"""`Loader`: the iterator and context manager that users see.

Owns the options and the epoch counter; everything else is the engine's. An engine does not know its loader, so that dropping
the last reference to a loader ends its workers. Samplers run on the thread inside `iter` and `next` (iterators.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from ringloader._core.bad_samples import BadSamples
from ringloader._core.messages import Call
from ringloader._core.policy import FaultPolicy
from ringloader._core.state import State
from ringloader._runtime import backends, calls, cuda, lifetime, options, sources, wrapping
from ringloader._runtime.engine import Claim, Engine
from ringloader._runtime.locking import holding
from ringloader._runtime.ring import Ring
from ringloader._runtime.sources import close_all
from ringloader._specs import main_module
from ringloader.errors import ClosedError, ConfigError
from ringloader.factory import FactorySpec
from ringloader.iterators import DeviceIterator, LoaderIterator
from ringloader.orders import Orders
from ringloader.progress import Place, Progress, deadly_keys, name_keys, own_state
from ringloader.samplers import follow_epoch, resolve_rank, set_epoch
from ringloader.stats import LoaderStats

__all__ = ["Loader"]

logger = logging.getLogger("ringloader")


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
        pin_memory: bool | str | None = None,
        device: Any = None,
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
        sources.check_dataset(dataset)
        self.dataset = dataset
        self._rank, self._world_size = resolve_rank(self._options.rank, self._options.world_size)
        backend = backends.choose(dataset, self._options, self._rank, self._world_size)
        self._make_backend = backend.make
        self._drop_payload: weakref.finalize[..., Any] | None = None
        if backend.closing:
            self._drop_payload = weakref.finalize(self, close_all, backend.closing)
            self._drop_payload.atexit = False
        self._pin = self._check_cuda()
        self._epoch = 0
        self._engine: Engine | None = None
        # Re-entrant, and code of C: a signal handler on this thread may use the loader.
        self._engine_lock = threading.RLock()
        self._calls: list[Call] = []  # of methods, for workers to come
        self._call_ids = itertools.count()
        self._opening: set[object] = set()  # one for each thread between `iter` and its session
        self._is_closed = False
        self._past = LoaderStats()  # of engines that are gone (persistent_workers=False)
        self._wait_s = self._copy_s = 0.0
        self._owner_pid = os.getpid()
        self._copies: deque[cuda.Copy] = deque()  # to the device, whose time is not known yet
        self._num_batches = 0
        self._skipped = BadSamples()
        self._num_forgotten = 0  # skipped before a resumption, and known by their names at most
        self._named: list[object] = []  # those names
        self._deadly = BadSamples()  # samples that ended workers, for workers to come
        self._progress: Progress | None = None  # of the epoch begun last
        self._early: Progress | None = None  # the next one, begun before anybody has asked for it
        self._resumed: State | None = None  # where the next one goes on
        self._orders = Orders(dataset, self._options, (self._rank, self._world_size), backend.length, self._ask_facts)
        self._orders.say_sharding(is_seed_drawn=seed is None)

    # --- what torch's loader has too ------------------------------------------------------------------------------------

    def __iter__(self) -> LoaderIterator:
        """Start an epoch; several may run at once."""
        self._check_open()
        opening = object()
        try:
            self._opening.add(opening)
            engine = self._running()
            adopted = holding(self._engine_lock, self._adopt_early, engine)
            if adopted is not None:
                return adopted
            resumed = self._resumed
            progress, claim = self._begin(engine), Claim()
            try:
                progress.session = engine.open_session(
                    progress.place.epoch,
                    in_order=self._options.in_order,
                    streams=progress.streams,
                    pull=None if progress.streams is None else progress.source.pull,
                    owner=claim,
                )
            except BaseException:
                self._epoch, self._resumed = progress.place.epoch, resumed  # as if it had not been called
                raise
        except ClosedError:
            lifetime.stay_if_exiting()
            raise
        finally:
            self._opening.discard(opening)
        self._progress = progress
        return self._iterate(engine, progress)  # which owns the session from now on

    def _iterate(self, engine: Engine, progress: Progress) -> LoaderIterator:
        return (LoaderIterator if self._cuda_device is None else DeviceIterator)(self, engine, progress)

    def __len__(self) -> int:
        """Batches per epoch on this rank. Raises TypeError when a sampler, or an iterable dataset, has no length."""
        return self._orders.num_batches

    def __enter__(self) -> Loader:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def dataset_size(self) -> int:
        """Samples of the dataset; with a spec the workers report it, and are started for that. Raises FactoryError."""
        return self._orders.dataset_size

    def start(self) -> None:
        """Start the workers now and wait for the first; without it the first `iter` does. Raises FactoryError."""
        self._ask_facts()

    def close(self) -> None:
        """End the workers. Batches that are still held stay valid. Harmless a second time."""
        self._is_closed = True
        if self._engine is not None:
            self._engine.close()
        self._count_copies()
        lifetime.sweep()
        if self._drop_payload is not None:
            self._drop_payload()

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch; without it each `iter` counts on from the last."""
        if type(epoch) is not int or not 0 <= epoch < 1 << 63:
            raise ConfigError(f"epoch is {epoch!r}; give an int from 0 to 2**63 - 1", option="epoch", value=epoch)
        if self._resumed is not None and self._resumed.epoch != epoch:
            self._resumed = None
        if epoch != self._epoch:
            self._drop_early()
        self._epoch = epoch
        for sampler in (self._options.sampler, self._options.batch_sampler):
            set_epoch(sampler, epoch)

    def state_dict(self) -> dict[str, Any]:
        """What has been handed over of the epoch begun last, for `load_state_dict` of any rank, in this process or another.

        Plain values, under 1 kB with our own order. A batch counts once `next` has returned it or raised its error.
        """
        progress = self._progress
        if self._resumed is not None:
            return self._resumed.to_dict()
        if progress is None or progress.is_over:
            place = Place(self._epoch, sampler=own_state(self._options))
        else:
            place = progress.here()
        return State(
            **self._orders.identity(place.epoch),
            epoch=place.epoch,
            position=place.position,
            above=list(place.above),
            batch_size=self._options.batch_size or 1,
            rank=self._rank if place.above else -1,
            world_size=self._world_size,
            sampler=place.sampler,
            num_skipped=self._skipped.num_added + self._num_forgotten,
            skipped=name_keys([*self._named, *self._skipped]),
            deadly=deadly_keys(list(self._deadly)),
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next `iter` go on where `state` was saved, with any number of workers, ranks or samples per batch.

        Raises ConfigError for what is no state of this release or of another seed; the next `iter`, which knows the dataset,
        for one of another dataset or order.
        """
        self._check_open()
        saved = State.from_dict(state)
        saved.check(size=saved.size, seed=self._options.seed, order=saved.order, fingerprint=saved.fingerprint)
        opts = self._options
        sampled = opts.sampler is not None or opts.batch_sampler is not None
        saved.check_ranks(batch_size=opts.batch_size or 1, rank=self._rank, world_size=self._world_size, sampled=sampled)
        self.set_epoch(saved.epoch)
        self._drop_early()
        self._resumed = saved
        plain = [key for key in saved.skipped if type(key) is int]
        self._skipped, self._named = BadSamples(plain), [key for key in saved.skipped if type(key) is not int]
        for key in saved.deadly:
            self._deadly.add(key)
        self._num_forgotten = max(0, saved.num_skipped - len(plain))

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `dataset.method(*args, **kwargs)` in every worker, behind the batches that it has been asked for.

        A replacement repeats all such calls before its first batch. Arguments are what a `FactorySpec` takes. Returns what the
        method returned in each worker, plain values, by worker id. Threads share one dataset, which runs it once. Raises
        LoaderError when it raised in one.
        """
        self._check_open()
        arguments = calls.pack(method, args, kwargs)  # refused before a worker is started
        engine = self._running()
        self._drop_early()
        return engine.call(method, arguments)

    def indices(self, epoch: int, batch: int) -> np.ndarray[Any, Any]:
        """Return the keys of batch number `batch` of an epoch on this rank, `(batch_size,) int64`, without reading it.

        Raises IndexError outside the epoch, ConfigError where a sampler decides.
        """
        plan = self._orders.own_plan(epoch)
        if plan is None:
            raise ConfigError("indices() knows our own order alone; a sampler decides here", option="sampler", value=None)
        return plan.batch(batch)[0]

    def stats(self) -> LoaderStats:
        """What has happened so far."""
        num_skipped = self._skipped.num_added + self._num_forgotten
        past = dataclasses.replace(
            self._past, num_batches=self._num_batches, wait_s=self._wait_s, copy_s=self._copy_s, num_skipped=num_skipped
        )
        return past.with_engine(self._engine, is_closed=self._is_closed)

    @property
    def skipped(self) -> list[object]:
        """Keys of samples that were skipped or replaced as bad, in the order they were met: the last 10,000."""
        return [*self._named, *self._skipped]

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

    @property
    def _cuda_device(self) -> str | None:
        """The device that batches are copied to, None for none."""
        return None if self._options.device in (None, "cpu") else self._options.device

    def _check_cuda(self) -> str:
        """How to page-lock the ring ("off", "try" or "require"). Raises ConfigError for a device that is not there."""
        opts = self._options
        if opts.output == "torch":
            import ringloader._collate.tensors  # noqa: F401  # brings in torch, which tells what devices there are
        num_devices = cuda.CUDA.num_devices() if opts.pin_memory or self._cuda_device is not None else 0
        options.check_device(self._cuda_device, num_devices)
        if not opts.pin_memory or num_devices:
            return {False: "off", True: "try", "require": "require"}[opts.pin_memory]
        if opts.pin_memory == "require":
            raise ConfigError(
                "pin_memory='require', but torch sees no CUDA device; use pin_memory=True to go on without",
                option="pin_memory",
                value="require",
            )
        _warn_unpinned()
        return "off"

    def _running(self) -> Engine:
        """The engine, started."""
        engine = holding(self._engine_lock, self._made)
        engine.start()
        return engine

    def _made(self) -> Engine:
        if self._engine is None:
            ring = Ring(self._options.max_ring_bytes, cuda.CUDA, self._pin, self._cuda_device)
            is_pinned = self._pin != "off"
            wrap = wrapping.choose(self._options.output, self._cuda_device, pinned=is_pinned, cuda=cuda.CUDA)
            engine = Engine(self._options.policy, self._make_backend, ring, wrap)
            engine.belong_to(self)
            made = engine.scheduler.supervision.calls
            made.recorded, made.ids = self._calls, self._call_ids
            engine.scheduler.supervision.blame.deadly = self._deadly
            self._engine = engine
        return self._engine

    def _note_copy(self, copy: cuda.Copy) -> None:
        """Count the time of a copy once it is over."""
        self._copies.append(copy)
        self._count_copies()

    def _count_copies(self) -> None:
        # Any thread may be here, several at once.
        while self._copies and self._owner_pid == os.getpid() and not cuda.CUDA.is_capturing():
            try:
                copy = self._copies.popleft()
            except IndexError:
                return
            seconds = copy.seconds()
            if seconds is None:
                self._copies.appendleft(copy)
                return
            self._copy_s += seconds
        if self._cuda_device is not None and self._engine is not None and self._owner_pid == os.getpid():
            self._engine.delivery.prune()

    def _ended(self, engine: Engine) -> None:
        """An epoch is over: workers that are not to be kept go."""
        self._count_copies()
        if not self._options.persistent_workers:
            holding(self._engine_lock, self._end_last, engine)

    def _end_last(self, engine: Engine) -> None:
        if self._engine is engine and not engine.scheduler.sessions and not self._opening:
            # No more its own before it is closed: an interrupt in that must not leave the loader with one that is.
            self._past, self._engine = self.stats(), None
            try:
                engine.close()
            except BaseException:
                engine.post_close()
                raise

    # --- the next epoch, ahead of its time -------------------------------------------------------------------------------

    def _begin_early(self, engine: Engine, progress: Progress) -> Progress | None:
        """The next epoch, opened while the last batches of this one are made; None where nobody can say what it will be, or
        something else is going on."""
        opts = self._options
        if self._early is not None:
            return self._early
        facts = self._orders.facts or {}
        is_known = opts.sampler is None and opts.batch_sampler is None and not facts.get("has_set_epoch", True)
        follows = progress is self._progress and self._epoch == progress.place.epoch + 1 and self._resumed is None
        is_alone = len(engine.scheduler.sessions) == 1 and not engine.backend.shares_dataset
        if not (is_known and follows and is_alone and opts.persistent_workers) or self._is_closed or self._orders.is_iterable():
            return None
        place = Place(self._epoch)
        plan = self._orders.own_plan(place.epoch)
        early = Progress(place, opts, plan, rank=self._rank, world_size=self._world_size)
        early.session = engine.open_session(place.epoch, in_order=opts.in_order, is_early=True, owner=early)
        self._early = early
        return early

    def _adopt_early(self, engine: Engine) -> LoaderIterator | None:
        """The epoch that was begun early, if it is the one to come now. Held: the engine's lock."""
        early = self._early
        if early is None or early.session is None:
            return None
        is_there = early.session.session_id in engine.scheduler.sessions and early.session.is_early
        if not is_there or early.place.epoch != self._epoch or self._resumed is not None:
            self._drop_early()
            return None
        iterator = self._iterate(engine, early)
        early.session.is_early = False
        self._early = None
        self._progress, self._epoch = early, early.place.epoch + 1
        return iterator

    def _drop_early(self) -> None:
        """Something else is wanted."""
        early, self._early = self._early, None
        engine = self._engine
        if early is not None and early.session is not None and engine is not None and not engine.pump.is_closed:
            engine.close_session(early.session)

    def _begin(self, engine: Engine) -> Progress:
        """The next epoch, or the rest of one that was saved. Raises ConfigError for a state that does not fit."""
        self._orders.facts = engine.dataset_facts()
        resumed, place = holding(self._engine_lock, self._take_place)
        try:
            if resumed is not None:
                resumed.check(**self._orders.identity(resumed.epoch))
            for sampler in (self._options.sampler, self._options.batch_sampler):
                follow_epoch(sampler, place.epoch)
            plan = self._orders.own_plan(place.epoch, place.position)
            num_streams = max(1, self._options.num_workers) if self._orders.is_iterable() else 0
            if num_streams and self._world_size > 1:
                self._orders.say_unsharded()
            return Progress(place, self._options, plan, rank=self._rank, world_size=self._world_size, num_streams=num_streams)
        except BaseException:
            self._epoch, self._resumed = place.epoch, resumed  # as if it had not been called
            raise

    def _take_place(self) -> tuple[State | None, Place]:
        """Where an epoch that is begun now begins, and the state that says so. Held: the engine's lock."""
        resumed, self._resumed = self._resumed, None
        place = Place(self._epoch) if resumed is None else Place.of(resumed)
        self._epoch = place.epoch + 1
        return resumed, place

    def _ask_facts(self) -> dict[str, Any]:
        """Have a worker tell what the dataset is."""
        self._check_open()
        return self._running().dataset_facts()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the loader was closed; make a new one")


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
        logger.warning("pin_memory=True, but torch sees no CUDA device; batches are delivered unpinned")


_warned_unpinned = False
