"""Which samples the batches of any epoch of a loader have, and what tells its orders from others.

Owns what is known of the dataset: its facts, which with a spec only workers can tell, are asked for when they are first needed.
Must not know an epoch that runs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from ringloader._core.batching import EpochPlan
from ringloader._runtime import building, sources
from ringloader._runtime.keys import num_sampled
from ringloader._runtime.options import Options
from ringloader.errors import ConfigError
from ringloader.factory import FactorySpec, find_process_spec
from ringloader.samplers import describe

__all__ = ["Orders"]

logger = logging.getLogger("ringloader")


class Orders:
    """The orders of one loader, on its rank.

    ranks: this one and how many there are. length: samples of the dataset where this process knows them, else -1. ask: has a
    worker tell the facts, and starts some for that; a method, whose object this does not keep alive.
    """

    def __init__(
        self, dataset: Any, options: Options, ranks: tuple[int, int], length: int, ask: Callable[[], dict[str, Any]]
    ) -> None:
        self.facts: dict[str, Any] | None = None  # of the dataset, as far as they are known
        self._dataset = dataset
        self._options = options
        self._rank, self._world_size = ranks
        self._length = length
        self._ask = weakref.WeakMethod(ask)
        self._streams_known: bool | None = None  # whether the dataset is an iterable one
        if not self._is_built_elsewhere():
            self.is_iterable()  # refuses options that such a one cannot have

    def known_facts(self) -> dict[str, Any]:
        """The facts of the dataset. Raises FactoryError, ClosedError."""
        if self.facts is None:
            self.facts = self.ask()
        return self.facts

    def ask(self) -> dict[str, Any]:
        """Ask for the facts, once more if need be."""
        ask = self._ask()
        assert ask is not None, "a loader outlives its orders"
        return ask()

    @property
    def dataset_size(self) -> int:
        """Samples of the dataset. Raises ConfigError where it has no length, FactoryError."""
        if self._length < 0:
            self._length = self.ask()["length"]
        if self._length < 0:
            raise ConfigError("the dataset has no __len__; give a sampler or a batch_sampler", option="sampler", value=None)
        return self._length

    @property
    def num_batches(self) -> int:
        """Batches per epoch on this rank. Raises TypeError when a sampler, or an iterable dataset, has no length."""
        opts = self._options
        if opts.batch_sampler is not None:
            return num_sampled(opts.batch_sampler, None, batched=True, drop_last=False)
        if opts.sampler is not None:
            return num_sampled(opts.sampler, opts.batch_size, batched=False, drop_last=opts.drop_last)
        if self.is_iterable():  # last: with a spec only workers know, and a sampler's length needs none
            return self._num_streamed()
        return len(self.plan(0))

    def _num_streamed(self) -> int:
        """By torch's rule."""
        length: int = self.known_facts()["stream_length"]
        opts = self._options
        if length < 0:
            raise TypeError("the iterable dataset has no __len__, so the number of its batches is not known")
        size = opts.batch_size or 1
        return length // size if opts.drop_last else -(-length // size)

    def _is_built_elsewhere(self) -> bool:
        return isinstance(self._dataset, FactorySpec) or find_process_spec(self._dataset) is not None

    def is_iterable(self) -> bool:
        """Whether the dataset is read from its beginning on. Raises ConfigError for options that such a one cannot have."""
        if self._streams_known is None:
            if self._is_built_elsewhere():
                is_iterable = bool(self.known_facts()["iterable"])
            else:
                is_iterable = building.is_iterable(self._dataset)
            if is_iterable:
                sources.check_stream_options(self._options)
                self._say_what_does_not_apply()
            self._streams_known = is_iterable
        return self._streams_known

    def _say_what_does_not_apply(self) -> None:
        faults = self._options.faults
        if faults.retry is not None:
            logger.warning("faults.retry does not apply to an iterable dataset: an iterator that raised has ended")
        if faults.on_bad_sample != "raise":
            logger.warning(
                "faults.on_bad_sample=%r does not apply to an iterable dataset: a sample that raises is an error of its batch",
                faults.on_bad_sample,
            )

    def own_plan(self, epoch: int, start: int = 0) -> EpochPlan | None:
        """Our own order of an epoch, None where a sampler of the user's decides, or an iterable dataset."""
        if self._options.batch_sampler is not None or self._options.sampler is not None or self.is_iterable():
            return None
        return self.plan(epoch, start)

    def plan(self, epoch: int, start: int = 0) -> EpochPlan:
        """The order of an epoch from a position on."""
        opts = self._options
        return EpochPlan(
            self.dataset_size,
            opts.batch_size or 1,
            drop_last=opts.drop_last,
            shuffle=opts.shuffle,
            seed=opts.seed,
            epoch=epoch,
            rank=self._rank,
            world_size=self._world_size,
            start=start,
        )

    def identity(self, epoch: int) -> dict[str, Any]:
        """What a saved state must have in common with this loader."""
        facts = self.known_facts()
        return {
            "size": facts["length"],
            "seed": self._options.seed,
            "order": self._order(epoch),
            "fingerprint": facts["fingerprint"],
        }

    def _order(self, epoch: int) -> str:
        """What decides an epoch's order, and a digest of it where it is ours."""
        opts = self._options
        if self.is_iterable():
            return f"streams of {max(1, opts.num_workers)} workers, {self._world_size} ranks, batch_size={opts.batch_size}"
        plan = self.own_plan(epoch)
        if plan is None:
            if opts.batch_sampler is not None:
                return f"batch_sampler {describe(opts.batch_sampler, epoch)}"
            return f"sampler {describe(opts.sampler, epoch)}"
        permutation = plan.permutation
        return "sequential" if permutation is None else f"{permutation.algorithm} {permutation.digest()}"

    def say_sharding(self, *, is_seed_drawn: bool) -> None:
        """Say once that ranks share the samples. Raises ConfigError where each would draw an order of its own."""
        opts = self._options
        if self._world_size == 1 or opts.sampler is not None or opts.batch_sampler is not None:
            return
        if opts.shuffle and is_seed_drawn:
            raise ConfigError(
                f"seed=None with {self._world_size} ranks: each would draw an order of its own and samples would be missed and "
                "repeated; give every rank the same seed",
                option="seed",
                value=None,
            )
        if isinstance(self._dataset, FactorySpec) or not building.is_iterable(self._dataset):
            self._say_once("rank %d of %d reads its share of each epoch; world_size=1 has every rank read all of it")

    def say_unsharded(self) -> None:
        """Say once that streams are not shared among ranks by the loader."""
        self._say_once(
            "rank %d of %d: an iterable dataset is not sharded by the loader, it takes its part by "
            "get_worker_info().rank and .world_size"
        )

    def _say_once(self, words: str) -> None:
        if (self._rank, self._world_size, words) not in _said:
            _said.add((self._rank, self._world_size, words))
            logger.warning(words, self._rank, self._world_size)


_said: set[tuple[int, int, str]] = set()
