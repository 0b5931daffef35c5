"""Plain Python values as bytes, and back, with their types kept.

Owns the one extended msgpack coding that sampler keys, spec arguments and the parts of a batch that cannot live in a slot
travel in. msgpack alone turns tuples into lists and enums into ints; here every value either comes back equal and of the same
type or is refused with `TypeError`. Must not pickle.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import msgpack
import numpy as np

_TUPLE, _BIG_INT, _NUMPY_SCALAR, _COMPLEX, _SET, _FROZENSET, _PATH, _BYTEARRAY, _SLICE, _NUMPY_TEXT = range(1, 11)
# A message over this size is a mistake (a dataset in an argument, an image in a string), and would stall the pipe for everyone.
MAX_VALUE_NBYTES = 1 << 30
_LOOK_INSIDE = frozenset([bytearray, memoryview, list, dict])


def encode(value: Any) -> bytes:
    """Pack None, bool, int of any size, float, complex, str (lone surrogates too), bytes, bytearray, numpy scalars, Path,
    slice, and lists, tuples, sets and dicts (any of these as keys) of them.

    Raises TypeError or ValueError for any other type, subclasses of the above included.
    """
    try:
        marked = _mark_buffers(value)
    except RecursionError:
        raise ValueError("a value nested too deep to be packed") from None
    packed: bytes = msgpack.packb(marked, default=_to_ext, strict_types=True, unicode_errors="surrogatepass")
    return packed


def decode(packed: bytes | memoryview) -> Any:
    """Unpack what `encode` packed. Raises ValueError for anything else."""
    if len(packed) > MAX_VALUE_NBYTES:
        raise ValueError(f"a packed value of {len(packed)} bytes, over the limit of {MAX_VALUE_NBYTES}")
    return msgpack.unpackb(packed, ext_hook=_from_ext, strict_map_key=False, unicode_errors="surrogatepass")


def _mark_buffers(value: Any) -> Any:
    """Wrap what msgpack would pack as bytes without asking, which makes a bytearray come back as bytes."""
    kind = type(value)
    if kind is bytearray:
        return msgpack.ExtType(_BYTEARRAY, bytes(value))
    if kind is memoryview:
        raise TypeError("builtins.memoryview has no plain form")
    if kind is list and not _LOOK_INSIDE.isdisjoint(map(type, value)):
        return [_mark_buffers(element) for element in value]
    if kind is dict and not _LOOK_INSIDE.isdisjoint(map(type, value.values())):
        return {key: _mark_buffers(element) for key, element in value.items()}
    return value


# How many values that are packed within others are being packed here.
_depth: ContextVar[int] = ContextVar("depth", default=0)
# Each level is unpacked within the last, on the stack of C.
_MAX_DEPTH = 64


def _encode_within(value: Any) -> bytes:
    level = _depth.get()
    if level >= _MAX_DEPTH:
        raise ValueError(f"tuples or sets nested deeper than {_MAX_DEPTH} levels")
    token = _depth.set(level + 1)
    try:
        return encode(value)
    finally:
        _depth.reset(token)


def _to_ext(value: Any) -> msgpack.ExtType:
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _encode_within(list(value)))
    if kind is int:
        return msgpack.ExtType(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, np.complex128(value).tobytes())
    if kind is set or kind is frozenset:
        return msgpack.ExtType(_SET if kind is set else _FROZENSET, _encode_within(list(value)))
    if kind is slice:
        return msgpack.ExtType(_SLICE, _encode_within([value.start, value.stop, value.step]))
    if isinstance(value, (np.str_, np.bytes_)) and kind in (np.str_, np.bytes_):
        return msgpack.ExtType(_NUMPY_TEXT, encode(value.item()))
    if isinstance(value, (np.number, np.bool_)) and kind.__module__ == "numpy":
        return msgpack.ExtType(_NUMPY_SCALAR, encode([value.dtype.str, value.tobytes()]))
    if kind.__module__.partition(".")[0] == "pathlib" and hasattr(value, "__fspath__"):
        return msgpack.ExtType(_PATH, encode([kind.__name__, str(value)]))
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} has no plain form")


def _from_ext(code: int, payload: bytes) -> Any:
    if code == _TUPLE:
        return tuple(decode(payload))
    if code == _BIG_INT:
        return int.from_bytes(payload, "little", signed=True)
    if code == _COMPLEX:
        return complex(np.frombuffer(payload, np.complex128)[0])
    if code == _SET:
        return set(decode(payload))
    if code == _FROZENSET:
        return frozenset(decode(payload))
    if code == _BYTEARRAY:
        return bytearray(payload)
    if code == _SLICE:
        return slice(*decode(payload))
    if code == _NUMPY_TEXT:
        text = decode(payload)
        return np.str_(text) if isinstance(text, str) else np.bytes_(text)
    if code == _NUMPY_SCALAR:
        dtype, raw = decode(payload)
        return np.frombuffer(raw, np.dtype(dtype))[0]
    if code == _PATH:
        name, text = decode(payload)
        import pathlib  # late: workers that get no path start lighter

        return getattr(pathlib, name)(text)
    raise ValueError(f"unknown extension type {code}")
