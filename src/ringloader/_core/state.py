"""The state of a loader between two batches, as it is saved.

Owns its form: numbers, texts and lists, the same on every rank, so that JSON and msgpack carry it and any rank can load what
another has saved; and the sentences for a state that does not fit. A position counts through the epoch's order, all ranks
together: what has been consumed is a prefix of it, so another number of workers, ranks or samples per batch can go on there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ringloader.errors import ConfigError

VERSION = 1
# How many of the keys that were left out are named.
MAX_NAMED = 16


@dataclass(frozen=True, slots=True)
class State:
    """What has been handed over.

    epoch: its number. position: of the epoch's order, how much all ranks together have consumed; with a sampler of the user's,
    how many keys, or batches of a `batch_sampler`, were taken from it. above: batches beyond that which were handed over, too,
    counted from there (`in_order=False`); they bind `batch_size` and `world_size`. size: samples of the dataset, -1: unknown.
    order: what the epoch's order is, and a digest of it. sampler: the sampler's own state, None if it has none.
    """

    epoch: int
    position: int
    above: list[int]
    batch_size: int
    world_size: int
    size: int
    seed: int
    order: str
    fingerprint: str
    sampler: Any
    num_skipped: int
    skipped: list[Any]

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, given: Any) -> State:
        """Take a saved state. Raises ConfigError for what is none."""
        if not isinstance(given, Mapping):
            raise _refused(f"is a {type(given).__qualname__}; give what state_dict() returned", given)
        if given.get("version") != VERSION:
            raise _refused(f"has version {given.get('version')!r}, this release reads {VERSION}", given.get("version"))
        names = [field.name for field in fields(cls)]
        missing = sorted({*names} - {*given})
        if missing:
            raise _refused(f"lacks {', '.join(missing)}; give what state_dict() returned", missing)
        values = {name: given[name] for name in names}
        for name in ("epoch", "position", "batch_size", "world_size", "num_skipped"):
            if type(values[name]) is not int or values[name] < 0:
                raise _refused(f"has {name}={values[name]!r}, which is no count", values[name])
        values["above"] = list(values["above"])
        values["skipped"] = list(values["skipped"])
        return cls(**values)

    def check(self, *, size: int, seed: int, order: str, fingerprint: str) -> None:
        """Raise ConfigError, naming it, for what differs from the run that saved this state."""
        for name, now in (("size", size), ("seed", seed), ("order", order), ("fingerprint", fingerprint)):
            saved = getattr(self, name)
            if saved != now:
                raise _refused(f"was saved with {_WORDS[name]} {saved!r}, and this loader's is {now!r}: {_ADVICE[name]}", saved)

    def check_above(self, *, batch_size: int, world_size: int) -> None:
        """Batches that were handed over out of order can be left out only where batches are the same ones."""
        if self.above and (batch_size, world_size) != (self.batch_size, self.world_size):
            raise _refused(
                f"was saved with in_order=False between batches of {self.batch_size} on {self.world_size} ranks; these are "
                f"batches of {batch_size} on {world_size}: resume with the former once, or save at the end of an epoch",
                self.above,
            )


_WORDS = {
    "size": "a dataset of size",
    "seed": "seed",
    "order": "the order",
    "fingerprint": "the dataset's fingerprint",
}
_ADVICE = {
    "size": "positions in it mean nothing here",
    "seed": "the rest of the epoch would be another one; give the same seed",
    "order": "the rest of the epoch would be another one; give the same shuffle or sampler",
    "fingerprint": "its samples are others",
}


def _refused(words: str, value: Any) -> ConfigError:
    return ConfigError(f"the state {words}", option="state", value=value)
