"""Where the keys of an epoch's batches come from.

Owns the difference between our own order, which gives any batch at any time, and a user's sampler, which is an iterator to be
pulled exactly once and only on the user's own thread. `pull(i)` may be called again for the same batch: what was pulled is kept
until the next one is asked for, so an interrupt between pulling and passing on loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from ringloader._core.batching import EpochPlan
from ringloader._core.events import Keys
from ringloader._core.session import pack_keys
from ringloader.errors import ConfigError, LoaderError


class KeySource(Protocol):
    """Gives the keys of batch after batch; None after the last."""

    def pull(self, batch_id: int) -> Keys | None: ...


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


class SampledKeys:
    """A user's sampler of single keys, or of whole batches when `batch_size` is None and `batched`.

    Draws of these batches are keyed by rank and number: the place of a key in a global order is not known. They count down from
    -1, so that they never meet those of our own order.
    """

    def __init__(
        self, sampler: Iterable[Any], *, batch_size: int | None, batched: bool, drop_last: bool, rank: int, world_size: int
    ) -> None:
        self._iterator: Iterator[Any] = iter(sampler)
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
        if not self._pulled or (self._drop_last and len(self._pulled) < wanted):
            return None
        return self._pack(batch_id)

    def _pack(self, batch_id: int) -> Keys:
        keys = list(self._pulled[0]) if self._batched else self._pulled
        if not keys:
            raise ConfigError(
                f"batch_sampler gave an empty batch at position {batch_id}", option="batch_sampler", value=batch_id
            )
        position = -1 - (batch_id * self._world_size + self._rank)
        try:
            return pack_keys(keys, position)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"a key of batch {batch_id} cannot travel to a worker: {error}; keys are numbers, strings, bytes, and tuples, "
                "lists and dicts of them",
                option="batch_sampler" if self._batched else "sampler",
                value=keys[:4],
            ) from None


def num_sampled(sampler: Any, batch_size: int | None, *, batched: bool, drop_last: bool) -> int:
    """Batches that a sampler gives, from its own length. Raises TypeError when it has none."""
    size = len(sampler)
    if batched or batch_size is None:
        return size
    return size // batch_size if drop_last else -(-size // batch_size)
