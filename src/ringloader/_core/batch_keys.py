"""The keys of one batch: how they are packed to travel.

Ints travel as packed int64, anything else as a coded list.
"""

from __future__ import annotations

import numpy as np

from ringloader._core import values
from ringloader._core.records import record


@record
class Keys:
    """The keys of one batch as they travel: packed int64 or a coded list. `position` keys its random draws."""

    packed: bytes
    int_keys: bool
    position: int


def pack_keys(keys: object, position: int) -> Keys:
    """Pack a batch's keys: an int64 array or ints as packed int64, anything else as a coded list.

    Raises TypeError for a key of a type that cannot travel.
    """
    if isinstance(keys, np.ndarray) and keys.dtype == np.int64:
        return Keys(keys.tobytes(), True, position)
    listed = list(keys)  # type: ignore[call-overload]
    if set(map(type, listed)) == {int}:
        try:
            return Keys(np.array(listed, np.int64).tobytes(), True, position)
        except OverflowError:
            pass
    return Keys(values.encode(listed), False, position)


def unpack_keys(keys: Keys) -> list[object]:
    """Return the keys as Python values."""
    if keys.int_keys:
        return np.frombuffer(keys.packed, np.int64).tolist()  # type: ignore[no-any-return]
    listed: list[object] = values.decode(keys.packed)
    return listed
