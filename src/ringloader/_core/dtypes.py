"""Element types by name: torch's names, numpy's storage for them, and torch's promotion rules without torch.

Owns the table of what a slot leaf may hold. Names are torch's without the "torch." ("float32", "bfloat16"): a worker that has
never imported torch writes them too. Must not import torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

_NUMPY_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
# Types that only torch knows, and a numpy type of the same size that carries their bytes.
_STORAGE_NAMES = {
    "bfloat16": "int16",
    "complex32": "int32",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "float4_e2m1fn_x2": "uint8",
}
_BY_NUMPY = {np.dtype(name): name for name in _NUMPY_NAMES}
_BY_NAME = {name: np.dtype(name) for name in _NUMPY_NAMES} | {name: np.dtype(held) for name, held in _STORAGE_NAMES.items()}
# torch has only copies and conversions to floats for these: it refuses to promote them to anything else.
_BARE_UNSIGNED = frozenset(("uint16", "uint32", "uint64"))


def name_of(dtype: np.dtype) -> str | None:
    """Return torch's name of a numpy dtype, or None where torch has none (text, objects, dates, foreign byte order)."""
    return _BY_NUMPY.get(dtype)


def numpy_dtype(value: object) -> np.dtype:
    """Return what numpy takes a value for: a type, a dtype or the name of one. Raises TypeError."""
    return np.dtype(value)  # type: ignore[call-overload,no-any-return]


def storage_of(name: str) -> np.dtype:
    """Return the numpy dtype whose arrays carry the bytes of `name`.

    Names outside torch's table are numpy's own (`"longdouble"`, `">f4"`). Raises ValueError for a name neither knows.
    """
    known = _BY_NAME.get(name)
    if known is not None:
        return known
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise ValueError(f"unknown dtype {name!r}") from error
    if dtype.kind not in "biufc":
        raise ValueError(f"dtype {name!r} is not numeric")
    return dtype


def is_torch_only(name: str) -> bool:
    """Return whether numpy cannot represent `name`."""
    return name in _STORAGE_NAMES


def is_known(name: str) -> bool:
    """Return whether a tensor leaf may have this dtype."""
    return name in _BY_NAME


@functools.cache
def promote(first: str, second: str) -> str | None:
    """Return what `torch.promote_types` gives for two numpy-representable names, or None where torch refuses."""
    if first == second:
        return first
    floats = [name for name in (first, second) if name.startswith(("float", "complex"))]
    if first in _BARE_UNSIGNED or second in _BARE_UNSIGNED:
        return floats[0] if floats and floats[0].startswith("float") else None
    if len(floats) == 1:
        return floats[0]
    return _BY_NUMPY[np.promote_types(_BY_NAME[first], _BY_NAME[second])]


def promote_all(names: Iterable[str]) -> str | None:
    """Return the common dtype of `names` in their order, or None where torch refuses one of the steps."""
    result: str | None = None
    for name in names:
        result = name if result is None else promote(result, name)
        if result is None:
            return None
    return result
