"""What `iter(loader)` gives: one epoch, batch after batch, on the host or on a device.

Owns how far the sampler is pulled, and the last step of a hand-over: from the moment a batch counts as arrived until `next`
returns nothing is called, so that no signal can come between. Must not change a loader but for its counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from ringloader._core.bad_samples import BadSamples
from ringloader._core.batch_keys import Keys
from ringloader._runtime import lifetime
from ringloader._runtime.cuda import Copy
from ringloader._runtime.engine import Engine
from ringloader._runtime.options import Options
from ringloader._runtime.wrapping import Arriving
from ringloader.errors import ClosedError, LoaderError
from ringloader.progress import Progress

__all__ = ["DeviceIterator", "LoaderIterator"]


class Owner(Protocol):
    """What an iterator needs of its loader."""

    _options: Options
    _num_batches: int
    _wait_s: float
    _skipped: BadSamples

    def __len__(self) -> int: ...

    def _note_copy(self, copy: Copy) -> None: ...

    def _begin_early(self, engine: Engine, progress: Progress) -> Progress | None: ...

    def _ended(self, engine: Engine) -> None: ...


class LoaderIterator(Iterator[Any]):
    """One epoch of a loader.

    `keeps`: what arrives stays in `_ahead` until a subclass passes it on, whatever breaks in between.
    """

    keeps = False

    def __init__(self, loader: Owner, engine: Engine, progress: Progress) -> None:
        assert progress.session is not None
        self._loader = loader
        self._engine = engine
        self._progress = progress
        self._session = progress.session
        self._source = progress.source
        self._num_ahead = max(1, loader._options.num_workers) * loader._options.prefetch_factor
        if engine.backend.is_inline:
            self._num_ahead = 0  # nothing is made ahead on the caller's own time
        elif progress.is_planned:
            self._session.max_depth = loader._options.max_prefetch
        self._pulled: list[tuple[int, Keys]] = []
        self._is_pulled = False  # the sampler has no more
        self._is_over = False
        self._num_noted = 0  # of the session's skipped keys
        self._inside: dict[str, int] = {}  # the thread that is inside `next`
        self._ahead: Any = None
        engine.follow(self, self._session)

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch. Raises SampleError, LayoutError or WorkerError in place of one that cannot be made; the
        iterator can go on after them."""
        began_s = time.perf_counter()
        if self._is_over:
            raise StopIteration
        session, is_taken = self._session, False
        in_hand, had_arrived = session.in_hand, session.arrived
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
            if session.skipped.num_added > self._num_noted:
                self._note_skipped()
            # To a signal the last step and the return are one: an interrupt before has the batch delivered again, none comes
            # after.
            is_taken = True
            if self.keeps:
                progress = self._progress
                progress.kept = (*progress.kept, session.in_hand.batch_id)  # type: ignore[union-attr]
                self._ahead = batch
            session.arrived = True
            return batch
        except (StopIteration, LoaderError) as ended:
            if had_arrived or session.in_hand is not in_hand:
                session.arrived = True  # the error stands for a batch; one from before it says nothing about the last
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
        num_ahead = self._engine.scheduler.num_ahead(session) if self._num_ahead else 0
        target = num_delivered + session.num_gone - len(self._progress.kept) + 1 + num_ahead
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
                target += session.streams is not None and session.streams.is_gone(*session.streams.of(keys))
        if self._is_pulled and not pulled and self._num_ahead:
            self._prepare_next()
        return pulled

    def _prepare_next(self) -> None:
        """The epoch has nothing more to be made: have the first batches of the next one made, so many as were in flight."""
        early = self._loader._begin_early(self._engine, self._progress)
        if early is None or early.session is None:
            return
        num_due = self._num_ahead - len(self._session.batches)
        first = early.session.num_submitted
        found = [(batch_id, early.source.pull(batch_id)) for batch_id in range(first, num_due)]
        batches = [(batch_id, keys) for batch_id, keys in found if keys is not None]
        if batches:
            self._engine.submit_early(early.session, batches)

    def _note_skipped(self) -> None:
        """Tell the loader of each skipped key once, while the epoch runs: it may be abandoned."""
        skipped = self._session.skipped
        for key in skipped.since(self._num_noted):
            self._loader._skipped.add(key)
        self._num_noted = skipped.num_added

    def _end(self) -> None:
        self._is_over = self._progress.is_over = True
        self._note_skipped()
        self._engine.close_session(self._session)
        self._loader._ended(self._engine)


class DeviceIterator(LoaderIterator):
    """One epoch of a loader with a `device`: batches are copied there, one ahead of the user if it is ready in time.

    Beside the batch that the user still holds, two of ours are on the device at most: the one that is handed over and the one
    ahead.
    """

    keeps = True

    def __init__(self, loader: Owner, engine: Engine, progress: Progress) -> None:
        super().__init__(loader, engine, progress)
        self._current: Arriving | None = None
        self._failure: BaseException | None = None  # of looking ahead
        self._using: dict[str, int] = {}  # the thread that is inside `next`

    def __next__(self) -> Any:
        """Return the next batch, which the stream that is current now waits for. Raises as on the host."""
        me = threading.get_ident()
        if self._using.setdefault("thread", me) != me:
            raise LoaderError(
                "the iterator is in use by another thread; give each thread an iterator of its own, or take turns"
            )
        try:
            if self._current is None and self._ahead is None:
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                if self._is_over:
                    raise StopIteration
            self._engine.check_usable()
            if self._engine.ring.cuda.is_capturing():
                raise LoaderError("a batch cannot be copied to the device while a graph is captured; call next before or after")
            if self._current is None and self._ahead is None:
                self._engine.throttle()
                super().__next__()
            began_s = time.perf_counter()
            if self._current is None:
                self._current, self._ahead = self._ahead, None
            if self._ahead is None:
                self._look_ahead()
            current = self._current
            current.copy.arrive()
            if not current.is_noted:
                current.is_noted = True
                self._loader._note_copy(current.copy)
            self._loader._wait_s += time.perf_counter() - began_s
            value = current.value
            # From here to the return nothing is called: an interrupt comes before, and the batch is still there, or after.
            progress = self._progress
            progress.kept = progress.kept[1:]
            self._current = None
            return value
        finally:
            self._using = {}

    def _look_ahead(self) -> None:
        """Start the copy of the following batch, if it is ready."""
        if self._is_over or self._failure is not None:
            return
        try:
            self._engine.throttle()
            got = self._engine.try_next_batch(self._session, self._pull(), ended=self._is_pulled)
        except LoaderError as error:
            self._failure = error  # told by the next call: there is a batch to hand over first
            return
        if self._session.skipped.num_added > self._num_noted:
            self._note_skipped()
        if isinstance(got, BaseException):
            self._failure = got  # likewise
            self._session.arrived = True
        elif got is not None:
            self._loader._num_batches += 1
            progress = self._progress
            progress.kept = (*progress.kept, self._session.in_hand.batch_id)  # type: ignore[union-attr]
            self._ahead = got[0]
            self._session.arrived = True
