"""Where the keys of an epoch's batches come from.

Owns the difference between our own order, which gives any batch at any time, and a user's sampler, which is an iterator to be
pulled exactly once and only on the user's own thread. `pull(i)` may be called again for the same batch: what was pulled is kept
until the next one is asked for, so an interrupt between pulling and passing on loses nothing.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from ringloader._core.batch_keys import Keys, pack_keys
from ringloader._core.batching import EpochPlan
from ringloader._core.streams import Streams, saved_form, stream_keys
from ringloader.errors import ConfigError, LoaderError

# Stands for the state of a sampler that gives no more in this epoch.
EXHAUSTED = "exhausted"


class KeySource(Protocol):
    """Gives the keys of batch after batch; None after the last."""

    def pull(self, batch_id: int) -> Keys | None: ...

    def sampler_state(self, num_batches: int) -> Any:
        """The user's sampler's own state after so many batches, None where it has none or is none."""


class PlannedKeys:
    """Our own order: a function of the batch number."""

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._num_batches = plan.num_batches

    def pull(self, batch_id: int) -> Keys | None:
        if batch_id >= self._num_batches:
            return None
        keys, position = self._plan.batch(batch_id)
        return Keys(keys.tobytes(), True, position)

    def sampler_state(self, num_batches: int) -> Any:
        return None


class ExceptKeys:
    """Another source without some of its batches: those that were handed over before a resumption."""

    def __init__(self, source: KeySource, left_out: Sequence[int]) -> None:
        self._source = source
        self._left_out = sorted(left_out)
        self._next = 0

    def index(self, batch_id: int) -> int:
        """The number that a batch has in the other source."""
        for index in self._left_out:
            batch_id += index <= batch_id
        return batch_id

    def pull(self, batch_id: int) -> Keys | None:
        index = self.index(batch_id)
        while self._next < index:
            self._source.pull(self._next)  # a sampler is an iterator: what is left out has to be taken, too
            self._next += 1
        return self._source.pull(index)

    def sampler_state(self, num_batches: int) -> Any:
        return self._source.sampler_state(num_batches)


class StreamKeys:
    """The batches of an iterable dataset, in their fixed interleave. `first` is the number of this epoch's first batch here."""

    def __init__(self, streams: Streams, *, first: int, rank: int, world_size: int) -> None:
        self._streams = streams
        self._first = first
        self._rank, self._world_size = rank, world_size

    def pull(self, batch_id: int) -> Keys | None:
        if self._streams.are_over:
            return None
        index = self._first + batch_id
        number, stream = divmod(index, self._streams.num_streams)
        return stream_keys(stream, number, -1 - (index * self._world_size + self._rank))

    def sampler_state(self, num_batches: int) -> Any:
        """Per stream its latest [number, packing, state] from which the rest of the epoch can be reached, None without one."""
        streams, index = self._streams, self._first + num_batches
        found = []
        for stream in range(streams.num_streams):
            known = streams.state_before(stream, -(-(index - stream) // streams.num_streams))
            found.append(None if known is None else [known[0], *saved_form(known[1])])
        return found if any(found) else None


class SampledKeys:
    """A user's sampler of single keys, or of whole batches when `batch_size` is None and `batched`.

    Draws of these batches are keyed by rank and number: the place of a key in a global order is not known. They count down from
    -1, so that they never meet those of our own order. `first`: batches that were taken before a resumption. A sampler's own
    state is noted after each batch until the next one but `num_ahead` is asked for.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        batch_size: int | None,
        batched: bool,
        drop_last: bool,
        rank: int,
        world_size: int,
        first: int = 0,
        num_ahead: int = 0,
    ) -> None:
        self._iterator: Iterator[Any] = iter(sampler)
        self._save = _find_save(sampler, self._iterator)
        self._first = first
        self._saved: OrderedDict[int, Any] = OrderedDict()
        self._num_saved = num_ahead + 2
        if self._save is not None:
            self._saved[0] = copy.deepcopy(self._save())
        self._batch_size = batch_size
        self._batched = batched
        self._drop_last = drop_last
        self._rank, self._world_size = rank, world_size
        self._pulled: list[Any] = []
        self._pulled_id = -1
        self._failure: BaseException | None = None

    def pull(self, batch_id: int) -> Keys | None:
        if self._failure is not None:
            raise LoaderError(
                f"the sampler raised {type(self._failure).__name__} earlier and cannot go on; start a new iteration"
            ) from self._failure
        if batch_id != self._pulled_id:
            # Set before pulling: keys that came before an interrupt are still in the list when this is called again.
            self._pulled, self._pulled_id = [], batch_id
        wanted = 1 if self._batched or self._batch_size is None else self._batch_size
        try:
            # In one call of C code, so that no interrupt can fall between the iterator and the list.
            self._pulled.extend(islice(self._iterator, wanted - len(self._pulled)))
        except BaseException as error:
            self._failure = error
            raise
        if self._save is not None and batch_id + 1 not in self._saved:
            # A sampler that has come to its end begins anew by itself: its state would be that of the next epoch.
            is_over = len(self._pulled) < wanted
            self._saved[batch_id + 1] = EXHAUSTED if is_over else copy.deepcopy(self._save())
            while len(self._saved) > self._num_saved:
                self._saved.popitem(last=False)
        if not self._pulled or (self._drop_last and len(self._pulled) < wanted):
            return None
        return self._pack(batch_id)

    def _pack(self, batch_id: int) -> Keys:
        keys = list(self._pulled[0]) if self._batched else self._pulled
        if not keys:
            raise ConfigError(
                f"batch_sampler gave an empty batch at position {batch_id}", option="batch_sampler", value=batch_id
            )
        position = -1 - ((self._first + batch_id) * self._world_size + self._rank)
        try:
            return pack_keys(keys, position)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"a key of batch {batch_id} cannot travel to a worker: {error}; keys are numbers, strings, bytes, and tuples, "
                "lists and dicts of them",
                option="batch_sampler" if self._batched else "sampler",
                value=keys[:4],
            ) from None

    def sampler_state(self, num_batches: int) -> Any:
        return self._saved.get(num_batches)


def _find_save(sampler: Any, iterator: Iterator[Any]) -> Callable[[], Any] | None:
    """What gives the state of a sampler in the middle of an epoch: its iterator's method, or its own."""
    for holder in (iterator, sampler):
        if callable(getattr(holder, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None)):
            save: Callable[[], Any] = holder.state_dict  # type: ignore[union-attr]
            return save
    return None


def discard(iterator: Iterator[Any], count: int) -> None:
    """Take so many keys from an iterator, and forget them."""
    deque(islice(iterator, count), maxlen=0)


def num_sampled(sampler: Any, batch_size: int | None, *, batched: bool, drop_last: bool) -> int:
    """Batches that a sampler gives, from its own length. Raises TypeError when it has none."""
    size = len(sampler)
    if batched or batch_size is None:
        return size
    return size // batch_size if drop_last else -(-size // batch_size)
