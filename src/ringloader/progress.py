"""How far the user is in an epoch, and an epoch that goes on from there.

Owns what `state_dict` says: batches that were handed over, not those made ahead. Kept by the loader beyond the iterator, which
may be dropped in mid-epoch. Must not change a session.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ringloader._core.batching import EpochPlan
from ringloader._core.session import Session
from ringloader._core.state import MAX_NAMED, State
from ringloader._core.streams import Streams, packed_form
from ringloader._runtime.keys import EXHAUSTED, ExceptKeys, KeySource, PlannedKeys, SampledKeys, StreamKeys, discard
from ringloader._runtime.options import Options
from ringloader.errors import ConfigError

__all__ = ["Place", "Progress", "deadly_keys", "name_keys", "own_state"]

# Of a key that was left out as much as tells it from others.
_MAX_NAME = 40
_MAX_KEY = 200


@dataclass(frozen=True, slots=True)
class Place:
    """Where an epoch begins: at the beginning, or where a saved one was. `above` as in `State`."""

    epoch: int
    position: int = 0
    above: tuple[int, ...] = ()
    sampler: Any = None

    @classmethod
    def of(cls, state: State) -> Place:
        """Return where a saved state was."""
        return cls(state.epoch, state.position, tuple(state.above), state.sampler)


class Progress:
    """One epoch of one loader.

    plan: our own order, None where a sampler of the user's decides, or an iterable dataset, which has `num_streams` streams.
    kept: numbers of the batches that have arrived at the iterator and not gone on to the user, oldest first.
    """

    def __init__(
        self, place: Place, options: Options, plan: EpochPlan | None, *, rank: int, world_size: int, num_streams: int = 0
    ) -> None:
        self.place = place
        self.is_over = False
        self.kept: tuple[int, ...] = ()
        self.session: Session | None = None
        self._plan = plan
        self._world_size = world_size
        self._options = options
        self._unit = options.batch_size or 1
        self.streams = self._take_up(num_streams) if num_streams else None
        self.source = self._make_source(rank)

    @property
    def is_planned(self) -> bool:
        """The order is ours: nobody sees how far ahead it is read."""
        return self._plan is not None

    def _make_source(self, rank: int) -> KeySource:
        source: KeySource
        if self.streams is not None:
            source = StreamKeys(self.streams, first=self.place.position, rank=rank, world_size=self._world_size)
        else:
            source = PlannedKeys(self._plan) if self._plan is not None else self._sampled(rank)
        return ExceptKeys(source, self.place.above) if self.place.above else source

    def _take_up(self, num_streams: int) -> Streams:
        """The streams of an iterable dataset, where they were left."""
        states = []
        try:
            for stream, known in enumerate(self.place.sampler or ()):
                if known is not None:
                    number, *saved = known
                    states.append((stream, int(number), packed_form(saved)))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the state has no states of streams in it ({error}); give what state_dict() returned",
                option="state",
                value=type(self.place.sampler).__qualname__,
            ) from error
        return Streams(num_streams, states, num_streams * self._options.prefetch_factor)

    def _sampled(self, rank: int) -> SampledKeys:
        place, opts = self.place, self._options
        batched = opts.batch_sampler is not None
        sampler = opts.batch_sampler if batched else opts.sampler
        iterator: Iterable[Any] = sampler
        if isinstance(place.sampler, str) and place.sampler == EXHAUSTED:  # an array would compare element by element
            iterator = _Exhausted()
        elif place.sampler is not None:
            if not callable(getattr(sampler, "load_state_dict", None)):
                kind = type(sampler).__qualname__
                raise ConfigError(
                    f"the state has a sampler's own state, and this loader's, a {kind}, has no load_state_dict",
                    option="state",
                    value=kind,
                )
            sampler.load_state_dict(place.sampler)
        elif place.position:
            iterator = _Rest(sampler, place.position)
        return SampledKeys(
            iterator,
            batch_size=opts.batch_size,
            batched=batched,
            drop_last=opts.drop_last,
            rank=rank,
            world_size=self._world_size,
            first=place.position if batched else place.position // self._unit,
            num_ahead=max(1, opts.num_workers) * opts.prefetch_factor,
        )

    def here(self) -> Place:
        """Where the user is: an epoch that begins there is the rest of this one."""
        session, source = self.session, self.source
        if self.is_over:
            return Place(self.place.epoch + 1)
        if session is None:
            return self.place
        # First how many there are: another thread may add to them meanwhile.
        num_submitted = session.num_submitted
        missing = {*session.batches, *self.kept}
        if session.in_hand is not None and not session.arrived:
            missing.add(session.in_hand.batch_id)
        first = min([*missing, num_submitted])
        index = source.index if isinstance(source, ExceptKeys) else int
        watermark = index(first)
        submitted = range(first, num_submitted)
        done = {*self.place.above, *(index(batch_id) for batch_id in submitted if batch_id not in missing)}
        while watermark in done:
            watermark += 1  # what was left out of this epoch from its beginning
        above = tuple(sorted(number - watermark for number in done if number > watermark and not self._is_gone(number)))
        # A sampler's state fits what comes next only where nothing is left out between.
        has_state = self._plan is None and (not above or self.streams is not None)
        state = source.sampler_state(watermark) if has_state else None
        return Place(self.place.epoch, self._position(watermark), above, state)

    def _is_gone(self, number: int) -> bool:
        """A batch that a stream never had was not handed over."""
        if self.streams is None:
            return False
        index, stream = divmod(self.place.position + number, self.streams.num_streams)
        return self.streams.is_gone(stream, index)

    def _position(self, num_batches: int) -> int:
        start = self.place.position
        if self.streams is not None:
            return start + num_batches
        if self._plan is None:
            return start + num_batches * (1 if self._options.batch_sampler is not None else self._unit)
        consumed = min(num_batches * self._unit, self._plan.num_samples)
        return min(self._plan.size, start + self._world_size * consumed)


class _Exhausted:
    """A sampler that gives no more in this epoch, as its saved state says."""

    def __iter__(self) -> Any:
        return iter(())

    def state_dict(self) -> Any:
        return EXHAUSTED

    def load_state_dict(self, state: Any) -> None:
        """Nothing is to be loaded."""


class _Rest:
    """A sampler without the keys that were taken from it before."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Any:
        iterator = iter(self._sampler)
        discard(iterator, self._count)
        return iterator


def name_keys(skipped: list[Any]) -> list[Any]:
    """The last keys that were left out, as a state can carry them."""
    return [key if type(key) is int else str(key)[:_MAX_NAME] for key in skipped[-MAX_NAMED:]]


def deadly_keys(keys: list[Any]) -> list[Any]:
    """The last keys that ended workers, those that a state carries as they are: numbers and short texts."""
    plain = [key for key in keys if type(key) is int or (type(key) is str and len(key) <= _MAX_KEY)]
    return plain[-MAX_NAMED:]


def own_state(options: Options) -> Any:
    """The user's sampler's own state between two epochs, None where it has none."""
    sampler = options.batch_sampler if options.batch_sampler is not None else options.sampler
    if callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None)):
        return copy.deepcopy(sampler.state_dict())
    return None
