"""Keys of samples that are no good, the latest of them.

Owns a bounded list of keys that answers quickly whether one is in it. Must not know why they are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# Names for a person to look into, and samples not to be tried again: a run of weeks must not fill its memory with them.
MAX_KEYS = 10_000


class BadSamples:
    """The last `limit` different keys that were added, oldest first."""

    def __init__(self, keys: Iterable[object] = (), limit: int = MAX_KEYS) -> None:
        self._limit = limit
        self._keys: dict[object, object] = {}
        self.num_added = 0
        for key in keys:
            self.add(key)

    def add(self, key: object) -> bool:
        """Take a key in; False when it is there already."""
        token = _token(key)
        if token in self._keys:
            return False
        self._keys[token] = key
        self.num_added += 1
        if len(self._keys) > self._limit:
            del self._keys[next(iter(self._keys))]
        return True

    def since(self, num_before: int) -> list[object]:
        """Return the keys that were added after the first `num_before`, as far as they are still known."""
        num_new = self.num_added - num_before
        return list(self._keys.values())[-num_new:] if num_new > 0 else []

    def __contains__(self, key: object) -> bool:
        return _token(key) in self._keys

    def __iter__(self) -> Iterator[object]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)


def _token(key: object) -> object:
    try:
        hash(key)
    except TypeError:
        return repr(key)  # a list of keys, say
    return key
