"""One leaf of all samples of a batch, turned into what is written to the slot.

Owns the rules for a column: arrays are joined, numbers follow torch's rule for the whole list, text stays a list, what only
torch can judge is handed to torch. Fast path first: rows are taken to agree, numpy refuses in C if they do not, and only then
is the column looked at row by row (`strict`) to promote dtypes or to find the words. Must not import torch; tensors are handled
by `tensors`, which is imported when the first one is met, so torch is there already.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringloader._collate.containers import CONTAINERS, Rule, name_of, rule_of
from ringloader._collate.leaves import ArrayRows, Inline, Outcome, RowsOf, Run, Source, Subtree, WholeArray, Written
from ringloader._collate.structure import ADVICE, Keys, Leaf, describe
from ringloader._core import dtypes
from ringloader._core.layout import ALIGNMENT, Kind, Node, leaf_type
from ringloader._core.values import encode
from ringloader.errors import LayoutError

# From so many leaves on, each by itself costs more than looking for a run.
_LEAST_RUN = 4
LEAF_NODE = Node(Kind.LEAF)
VALUE_NODE = Node(Kind.VALUE)


class Asker:
    """What the columns of one Collator need to know: the output, how to warn, and how to walk a tree that torch made."""

    __slots__ = ("_warn", "numpy_only", "pad", "walk")

    def __init__(self, output: str, warn: Callable[[str], None]) -> None:
        self.numpy_only = output == "numpy"
        self._warn = warn
        self.walk: Callable[[Any, str, Keys], Subtree]
        # What joins rows that differ in length, if that is wanted; None for rows that it leaves to the others.
        self.pad: Callable[[Sequence[Any], Leaf, Keys, Asker], Source | None] | None = None

    def warn_of_grad(self, path: str) -> None:
        """Say once that a tensor was detached."""
        self._warn(path)

    def accepts(self, kind: type) -> bool:
        """Return whether torch has a collate rule for a type that we have none for."""
        return not self.numpy_only and "torch" in sys.modules and _tensors().has_collate_rule(kind)


def _tensors() -> Any:
    from ringloader._collate import tensors

    return tensors


def gather(values: Sequence[Any], leaf: Leaf, keys: Keys, asker: Asker, strict: bool) -> Outcome:
    """Return what becomes of one leaf of all samples. Raises LayoutError; without `strict`, `Source.write` may raise later."""
    kind = type(values[0])
    rule = rule_of(kind)
    kinds = set(map(type, values))
    if rule is Rule.TEXT:
        if any(rule_of(other) is not Rule.TEXT for other in kinds):
            _check_plain(values, leaf, keys)
        return Inline(values if leaf.in_sequence else list(values))
    if rule is Rule.NUMBER:
        if len(kinds) == 1 or all(rule_of(other) is Rule.NUMBER for other in kinds):
            return _numbers(values, kinds, leaf, keys)
    elif rule is Rule.ARRAY:
        if len(kinds) == 1 or all(rule_of(other) is Rule.ARRAY for other in kinds):
            if asker.pad is not None and (padded := asker.pad(values, leaf, keys, asker)) is not None:
                return padded
            return _arrays(values, kind, leaf, keys, strict)
    elif rule is Rule.TENSOR and all(rule_of(other) is Rule.TENSOR for other in kinds):
        if asker.pad is not None and (padded := asker.pad(values, leaf, keys, asker)) is not None:
            return padded
        return _tensor_rows(values, kinds, leaf, keys, asker, strict)
    return _irregular(values, leaf, keys, asker)


def gather_run(columns: Sequence[Sequence[Any]]) -> list[Source] | None:
    """Return what becomes of leaves that were a run in an earlier batch; None where first rows say that they are none in this
    one. `Source.write` may raise later, as for any leaf."""
    first = columns[0][0]
    kind = _run_kind(first)
    # Rows behind the first ones are looked at where they are joined.
    if kind is None or any(type(column[0]) is not kind[0] or _dtype_and_shape(column[0]) != kind[1:] for column in columns):
        return None
    is_array = type(first) is np.ndarray
    dtype = dtypes.name_of(first.dtype) if is_array else _tensors().dtype_name(first.dtype)
    rows_of: RowsOf = ArrayRows if is_array else _tensors().TensorRows
    if dtype is None:
        return None
    shape = (len(columns[0]), *first.shape)
    if not first.nbytes or first.nbytes * shape[0] % ALIGNMENT:
        # There are gaps between them: each is a leaf of its own.
        is_one = all(set(map(type, column)) == {kind[0]} for column in columns)
        return [rows_of(column, dtype, False) for column in columns] if is_one else None
    leaf = leaf_type("tensor", dtype, len(shape))
    return [Run(columns, leaf, shape, rows_of), *(Written(leaf, shape) for _ in columns[1:])]


def find_runs(flat: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return which leaves of a sample, first and one behind the last, are arrays or tensors of one dtype and shape."""
    runs = []
    first = 0
    for kind, group in itertools.groupby(map(_run_kind, flat)):
        end = first + len(list(group))
        if kind is not None and end - first >= _LEAST_RUN:
            runs.append((first, end))
        first = end
    return tuple(runs)


def _run_kind(value: Any) -> tuple[type, Any, Any] | None:
    """What leaves of a run have in common: type, dtype and shape; None for a value that is in none."""
    kind = type(value)
    if kind is not np.ndarray and (rule_of(kind) is not Rule.TENSOR or not _tensors().is_joined(value)):
        return None
    return (kind, *_dtype_and_shape(value)) if value.ndim else None


_dtype_and_shape = operator.attrgetter("dtype", "shape")


def _check_plain(values: Sequence[Any], leaf: Leaf, keys: Keys) -> None:
    """Refuse what torch would hand over as it is, beside text, but a message cannot carry."""
    for row, value in enumerate(values):
        try:
            encode(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise _refuse_types(leaf, keys, row, type(values[0]), type(value)) from error


def _arrays(values: Sequence[np.ndarray], kind: type, leaf: Leaf, keys: Keys, strict: bool) -> Source:
    first = values[0]
    dtype = dtypes.name_of(first.dtype)
    if dtype is None:
        raise refuse_array(first, leaf.path, keys, 0)
    if kind is not np.ndarray:
        values = list(map(np.asarray, values))
        first = values[0]
    if not strict:
        return ArrayRows(values, dtype, cast=False)
    names = {dtype: None}
    for row, value in enumerate(values):
        name = dtypes.name_of(value.dtype)
        if name is None:
            raise refuse_array(value, leaf.path, keys, row)
        if value.shape != first.shape:
            raise refuse_shape(leaf.path, keys, row, first.shape, value.shape)
        names[name] = None
    common = dtypes.promote_all(names)
    if common is None:
        raise refuse_dtypes(leaf.path, keys, names, [dtypes.name_of(value.dtype) for value in values])
    return ArrayRows(values, common, cast=True)


def _tensor_rows(values: Sequence[Any], kinds: set[type], leaf: Leaf, keys: Keys, asker: Asker, strict: bool) -> Source:
    tensors = _tensors()
    strict = strict or len(kinds) > 1 or not tensors.is_plain(values[0])
    if strict:
        values = [check_tensor(value, leaf.path, keys, row, asker) for row, value in enumerate(values)]
        for row, value in enumerate(values):
            if value.shape != values[0].shape:
                raise refuse_shape(leaf.path, keys, row, values[0].shape, value.shape)
    names = tensors.dtype_names(values if strict else values[:1])
    common = tensors.promote_all(names) if len(names) > 1 else names[0]
    if common is None:
        raise refuse_dtypes(leaf.path, keys, names, [tensors.dtype_name(value.dtype) for value in values])
    _check_output(common, leaf.path, keys, asker)
    source: Source = tensors.TensorRows(values, common, cast=len(names) > 1)
    return source


def check_tensor(value: Any, path: str, keys: Keys, row: int, asker: Asker) -> Any:
    """Return a tensor as a plain, detached one. Raises LayoutError for one that has no place in host memory."""
    tensors = _tensors()
    reason = tensors.refusal(value)
    if reason is not None:
        raise keys.error(path, f"is {reason[0]} in sample {keys[row]!r}: {reason[1]}", row, type=name_of(type(value)))
    if value.requires_grad:
        asker.warn_of_grad(path)
    _check_output(tensors.dtype_name(value.dtype), path, keys, asker, row)
    return value.detach()


def _check_output(dtype: str, path: str, keys: Keys, asker: Asker, row: int = 0) -> None:
    if asker.numpy_only and dtypes.is_torch_only(dtype):
        words = f"has dtype {dtype} in sample {keys[row]!r}, which numpy does not have: convert it, or use output='torch'"
        raise keys.error(path, words, row, dtype=dtype)


def _numbers(values: Sequence[Any], kinds: set[type], leaf: Leaf, keys: Keys) -> Source:
    name = _number_dtype(values, kinds)
    if name is None:
        found = sorted(name_of(kind) for kind in kinds)
        raise keys.error(
            leaf.path, f"holds {' and '.join(found)}, which torch does not combine: {ADVICE}", 0, types=tuple(found)
        )
    try:
        return WholeArray(np.array(values, dtypes.storage_of(name)), "tensor", name)
    except (OverflowError, TypeError, ValueError) as error:
        row = next((row for row, value in enumerate(values) if not _fits(value, name)), 0)
        words = f"is {_short(values[row])} in sample {keys[row]!r}, which does not fit {name}: return a smaller number, or text"
        raise keys.error(leaf.path, words, row, dtype=name) from error


def _fits(value: Any, name: str) -> bool:
    try:
        np.array([value], dtypes.storage_of(name))
    except (OverflowError, TypeError, ValueError):
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 256 else f"an integer of {value.bit_length()} bits"
    return text if len(text) <= 80 else text[:77] + "..."


_EXACT = {int: "int64", float: "float64", bool: "bool"}


def _number_dtype(values: Sequence[Any], kinds: set[type]) -> str | None:
    """Return the dtype torch gives to a list of numbers, or None where it refuses."""
    first = type(values[0])
    if len(kinds) == 1 and first in _EXACT:
        return _EXACT[first]
    if issubclass(first, float) and not issubclass(first, np.generic):
        # torch's rule for a leading float; it would drop an imaginary part.
        return None if any(issubclass(kind, (np.complexfloating, np.timedelta64)) for kind in kinds) else "float64"
    names = [_scalar_dtype(kind) for kind in (dict.fromkeys(map(type, values)))]
    known = [name for name in names if name is not None]
    common = dtypes.promote_all(known) if len(known) == len(names) else None
    # torch does not read numpy's bool as an integer.
    return None if common is not None and "int" in common and np.bool_ in kinds else common


def _scalar_dtype(kind: type) -> str | None:
    if issubclass(kind, np.generic):
        return _numpy_scalar_dtype(kind)  # type: ignore[arg-type]  # numpy's stubs take hash(type) for hash(scalar)
    if issubclass(kind, bool):
        return "bool"
    if issubclass(kind, int):
        return "int64"
    return _tensors().default_dtype_name() if "torch" in sys.modules else "float32"


@functools.cache
def _numpy_scalar_dtype(kind: type) -> str | None:
    # A date difference counts as a number in numpy; no tensor dtype has its name.
    return dtypes.name_of(np.dtype(kind)) if issubclass(kind, (np.bool_, np.number)) else None


def _irregular(values: Sequence[Any], leaf: Leaf, keys: Keys, asker: Asker) -> Outcome:
    """Let torch judge a column of several types; what it gives is carried like the result of a collate_fn."""
    first = type(values[0])
    row = next((row for row, value in enumerate(values) if type(value) is not first), 0)
    other = type(values[row])
    if not asker.numpy_only and all(_torch_may_take(type(value), asker) for value in values):
        try:
            batch = _tensors().collate_irregular(list(values))
        except LayoutError:
            raise
        except Exception as error:
            raise _refuse_types(leaf, keys, row, first, other) from error
        return asker.walk(batch, leaf.path, keys)
    raise _refuse_types(leaf, keys, row, first, other)


def _torch_may_take(kind: type, asker: Asker) -> bool:
    rule = rule_of(kind)
    return kind is complex or (rule not in CONTAINERS and rule is not Rule.UNKNOWN) or asker.accepts(kind)


def _refuse_types(leaf: Leaf, keys: Keys, row: int, first: type, other: type) -> LayoutError:
    words = (
        f"is {describe(other)} in sample {keys[row]!r}, but {describe(first)} in sample {keys[0]!r}, "
        f"which have no common form: {ADVICE}"
    )
    return keys.error(leaf.path, words, 0, row, types=(name_of(first), name_of(other)))


def refuse_array(array: np.ndarray, path: str, keys: Keys, row: int) -> LayoutError:
    """Return the error for an array of a dtype that no tensor has."""
    advice = {
        "U": "return text with .tolist()",
        "S": "return bytes with .tolist()",
        "O": "return numbers of one dtype, or .tolist()",
        "M": "return numbers with .astype('int64')",
        "m": "return numbers with .astype('int64')",
        "V": "return a dict of its fields",
        "T": "return text with .tolist()",
    }.get(array.dtype.kind, "convert it with .astype")
    if not array.dtype.isnative and array.dtype.kind in "biufc":
        advice = "its byte order is not this machine's; convert it with .astype(array.dtype.newbyteorder('='))"
    found = f"is an array of dtype {array.dtype} in sample {keys[row]!r}"
    words = f"{found}, which no tensor can hold: {advice}, or pass a collate_fn"
    return keys.error(path, words, row, dtype=str(array.dtype))


def refuse_shape(path: str, keys: Keys, row: int, expected: Sequence[int], found: Sequence[int]) -> LayoutError:
    """Return the error for a row of another shape than the first."""
    words = (
        f"has shape {list(found)} in sample {keys[row]!r}, but {list(expected)} in sample {keys[0]!r}: "
        "samples of one batch must have equal shapes; resize or pad them, or pass a collate_fn"
    )
    return keys.error(path, words, 0, row, shapes=(list(expected), list(found)))


def refuse_dtypes(path: str, keys: Keys, names: Any, column: Sequence[str | None]) -> LayoutError:
    """Return the error for dtypes that torch does not promote."""
    found = list(names)
    row = next((row for row, name in enumerate(column) if name != column[0]), 0)
    words = (
        f"has dtype {column[row]} in sample {keys[row]!r}, but {column[0]} in sample {keys[0]!r}: "
        f"torch has no common dtype for {' and '.join(found)}; convert them"
    )
    return keys.error(path, words, 0, row, dtypes=tuple(found))
