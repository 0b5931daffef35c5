"""The state of a loader between two batches, as it is saved.

Owns its form: numbers, texts and lists, the same on every rank, so that JSON and msgpack carry it and any rank can load what
another has saved; and the sentences for a state that does not fit. A position counts through the epoch's order, all ranks
together: what has been consumed is a prefix of it, so another number of workers, ranks or samples per batch can go on there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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
    counted from there (`in_order=False`); they bind `batch_size`, `rank` and `world_size`. rank: only with `above`, else -1,
    for the state is every rank's. size: samples of the dataset, -1: unknown. order: what the epoch's order is, and a digest of
    it. sampler: the sampler's own state, None if it has none. skipped, deadly: the last samples that were left out, and that
    ended workers.
    """

    epoch: int
    position: int
    above: list[int]
    batch_size: int
    rank: int
    world_size: int
    size: int
    seed: int
    order: str
    fingerprint: str
    sampler: Any
    num_skipped: int
    skipped: list[Any]
    deadly: list[Any] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, given: Any) -> State:
        """Take a saved state. Raises ConfigError for what is none."""
        if not isinstance(given, Mapping):
            raise _refused(f"is a {type(given).__qualname__}; give what state_dict() returned", given)
        if given.get("version") != VERSION or type(given["version"]) is not int:
            raise _refused(f"has version {given.get('version')!r}, this release reads {VERSION}", given.get("version"))
        given = {"deadly": [], **given}  # earlier releases did not have it
        names = [one.name for one in fields(cls)]
        missing = sorted({*names} - {*given})
        if missing:
            raise _refused(f"lacks {', '.join(missing)}; give what state_dict() returned", missing)
        values = {name: given[name] for name in names}
        for name, least in _COUNTS.items():
            if type(values[name]) is not int or not least <= values[name] < 1 << 63:
                raise _refused(f"has {name}={values[name]!r:.100}, which is no count", values[name])
        for name in ("order", "fingerprint"):
            if type(values[name]) is not str:
                raise _refused(f"has {name}={values[name]!r:.100}, which is no text", values[name])
        for name in ("above", "skipped", "deadly"):
            if not isinstance(values[name], (list, tuple)):
                raise _refused(f"has {name}={values[name]!r:.100}, which is no list", values[name])
            values[name] = list(values[name])
        above = values["above"]
        if any(type(number) is not int for number in above) or above != sorted({*above}) or (above and above[0] < 1):
            raise _refused(f"has above={above!r:.100}; these are numbers from 1 on, in order", above)
        return cls(**values)

    def check(self, *, size: int, seed: int, order: str, fingerprint: str) -> None:
        """Raise ConfigError, naming it, for what differs from the run that saved this state."""
        for name, now in (("size", size), ("seed", seed), ("order", order), ("fingerprint", fingerprint)):
            saved = getattr(self, name)
            if saved != now:
                raise _refused(f"was saved with {_WORDS[name]} {saved!r}, and this loader's is {now!r}: {_ADVICE[name]}", saved)

    def check_ranks(self, *, batch_size: int, rank: int, world_size: int, sampled: bool) -> None:
        """Raise ConfigError where other ranks or batches cannot take up the rest."""
        now = (batch_size, rank, world_size)
        if self.above and now != (self.batch_size, self.rank, self.world_size):
            raise _refused(
                f"was saved with in_order=False between batches of {self.batch_size} by rank {self.rank} of {self.world_size}; "
                f"these are batches of {batch_size} of rank {rank} of {world_size}: resume each rank from its own state, or "
                "save at the end of an epoch",
                self.above,
            )
        if sampled and self.position and world_size != self.world_size:
            raise _refused(
                f"was saved with a sampler on {self.world_size} ranks, and these are {world_size}: what each rank has taken "
                "from its own says nothing about others; leave the sampler out, or resume at the end of an epoch",
                self.world_size,
            )


# Fields that are numbers, and the least of each.
_COUNTS = {
    "epoch": 0,
    "position": 0,
    "batch_size": 1,
    "rank": -1,
    "world_size": 1,
    "size": -1,
    "seed": 0,
    "num_skipped": 0,
}
_WORDS = {
    "size": "a dataset of size",
    "seed": "seed",
    "order": "the order",
    "fingerprint": "the dataset's fingerprint",
}
_ADVICE = {
    "size": "positions in it mean nothing here",
    "seed": "the rest of the epoch would be another one; give the same seed",
    "order": "the rest of the epoch would be another one; give the same shuffle or sampler, and with an iterable dataset the "
    "same num_workers, world_size and batch_size",
    "fingerprint": "its samples are others",
}


def _refused(words: str, value: Any) -> ConfigError:
    return ConfigError(f"the state {words}", option="state", value=value)
