"""Short digests of a dataset's plain attributes, to see whether two workers built the same dataset.

Owns the digest's bounds: the cost does not grow with the container. Only plain values count (numbers, text, bytes, None, paths,
numpy arrays and scalars, and lists, tuples, dicts and sets of them); other objects are left out, as their bytes may differ for
no reason. Two equal values of one type have one digest, in every process; unequal ones may share it where elements were
not sampled. Must not call methods of user classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ringloader._core.blake2 import blake2b

# Elements looked at per container, by depth: a list of 3 million strings costs 256 looks, a list of lists at most 256 × 16 × 4.
_SAMPLED = (256, 16, 4, 2)
# Text, bytes and the bytes of an array are hashed whole up to this size, else their ends and a few places between.
_WHOLE_NBYTES = 64 << 10
# A set has no order to sample by, so it is hashed whole, sorted, or by its length alone.
_WHOLE_SET = 1024

_SCALARS = (bool, int, float, complex, type(None))


def attribute_digests(dataset: object) -> dict[str, str]:
    """Return a 16-digit hexadecimal digest for each plain attribute, in sorted order of their names.

    Sensitive to the order of lists, tuples and dicts. Costs a few milliseconds at most per attribute, however large.
    """
    digests = {name: value_digest(value) for name, value in sorted(attributes(dataset).items())}
    return {name: digest for name, digest in digests.items() if digest is not None}


def value_digest(value: Any) -> str | None:
    """Return the digest of one value, None when it is not plain."""
    hasher = blake2b(digest_size=8)
    return hasher.hexdigest() if _feed(hasher, value, 0) else None


def attributes(instance: object) -> dict[str, Any]:
    """Return the instance's own attributes, those in `__slots__` included."""
    found = dict(getattr(instance, "__dict__", {}))
    for cls in type(instance).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(instance, name):
                found.setdefault(name, getattr(instance, name))
    return found


def _feed(hasher: Any, value: Any, depth: int) -> bool:
    """Feed the hasher a value; False, with the type's name fed, when it is not plain."""
    kind = type(value)
    hasher.update(kind.__name__.encode("utf-8", "replace") + b"\0")
    if kind in _SCALARS:
        hasher.update(_scalar_bytes(value))
    elif kind is str:
        _feed_text(hasher, value)
    elif kind in (bytes, bytearray):
        _feed_bytes(hasher, memoryview(value))
    elif kind.__module__.partition(".")[0] == "pathlib" and hasattr(value, "__fspath__"):
        hasher.update(str(value).encode("utf-8", "surrogateescape"))
    elif isinstance(value, np.generic) and kind.__module__ == "numpy":
        hasher.update(value.dtype.str.encode() + value.tobytes())
    elif kind is np.ndarray:
        _feed_array(hasher, value)
    elif isinstance(value, (list, tuple, dict, set, frozenset)):
        _feed_container(hasher, value, depth)
    else:
        return False
    return True


def _scalar_bytes(value: Any) -> bytes:
    # The decimal digits of a huge int would take quadratic time, and may be refused.
    return f"{value:x};".encode() if type(value) is int else repr(value).encode() + b";"


def _feed_text(hasher: Any, text: str) -> None:
    hasher.update(f"{len(text)}:".encode())
    if len(text) > _WHOLE_NBYTES:
        text = "".join(text[start : start + 64] for start in _spread(len(text) - 63, 256))
    hasher.update(text.encode("utf-8", "surrogatepass"))


def _feed_bytes(hasher: Any, content: memoryview) -> None:
    hasher.update(f"{len(content)}:".encode())
    if len(content) <= _WHOLE_NBYTES:
        hasher.update(content)
        return
    for start in _spread(len(content) - 63, 256):
        hasher.update(content[start : start + 64])


def _feed_array(hasher: Any, array: np.ndarray[Any, Any]) -> None:
    hasher.update(f"{array.dtype.str}{array.shape}".encode())
    if array.dtype.hasobject:
        return
    if array.nbytes <= _WHOLE_NBYTES:
        hasher.update(array.tobytes())
        return
    # Element by element: a fancy index on a flat view of a non-contiguous array would copy all of it.
    for index in _spread(array.size, 256):
        hasher.update(array[np.unravel_index(index, array.shape)].tobytes())


def _feed_container(hasher: Any, container: Any, depth: int) -> None:
    length = len(container)
    hasher.update(f"{length}[".encode())
    if depth < len(_SAMPLED):
        if isinstance(container, (set, frozenset)):
            _feed_set(hasher, container, depth)
        else:
            for element in _sampled(container, _SAMPLED[depth]):
                _feed(hasher, element, depth + 1)
    hasher.update(b"]")


def _sampled(container: Any, count: int) -> Iterable[Any]:
    if not isinstance(container, dict):
        return (container[index] for index in _spread(len(container), count))
    # A dict can be entered at its two ends only; walking to the middle of a large one takes milliseconds.
    pairs = dict.items(container)
    if len(container) <= count:
        ends: Iterable[tuple[Any, Any]] = pairs
    else:
        ends = itertools.chain(itertools.islice(pairs, count // 2), itertools.islice(reversed(pairs), count // 2))
    return itertools.chain.from_iterable(ends)


def _feed_set(hasher: Any, elements: Any, depth: int) -> None:
    if len(elements) > _WHOLE_SET:
        return
    parts = []
    for element in elements:
        part = blake2b(digest_size=8)
        _feed(part, element, depth + 1)
        parts.append(part.digest())
    hasher.update(b"".join(sorted(parts)))


def _spread(length: int, count: int) -> Iterable[int]:
    """Return at most `count` indices over `range(length)`, first and last included."""
    if length <= count:
        return range(length)
    return [math.floor(step * (length - 1) / (count - 1)) for step in range(count)]
