"""A finished batch (the result of a collate_fn, or the one sample of `batch_size=None`) taken apart into leaves and values.

Nothing changes its type on the way: tensors and arrays become leaves, numbers and text travel inline, containers are rebuilt as
what they were, and what cannot be carried is refused with its path. Long lists of plain values are one inline value and are not
walked. Must not import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringloader._collate.columns import LEAF_NODE, VALUE_NODE, Asker, check_tensor, refuse_array
from ringloader._collate.containers import CONTAINERS, FormError, Rule, form_of, name_of, rule_of
from ringloader._collate.leaves import Source, Subtree, WholeArray
from ringloader._collate.structure import Keys, child_path, contents
from ringloader._core import dtypes, values
from ringloader._core.array_spec import ArraySpec
from ringloader._core.layout import MAX_DEPTH, Node, leaf_type


class Unwritten:
    """A leaf that the dataset is going to write."""

    __slots__ = ("leaf", "shape")
    joinable = None

    def __init__(self, spec: ArraySpec) -> None:
        self.leaf = leaf_type("tensor", spec.dtype, len(spec.shape))
        self.shape = spec.shape

    def write(self, slot: np.ndarray, offset: int) -> None:
        """Nothing is left to do."""

    def check(self) -> None:
        """Whatever the dataset writes fits."""


_PLAIN = frozenset((str, int, float, complex, bool, type(None), bytes, bytearray))
_NESTING = frozenset((list, tuple))
_ADVICE = "return tensors, arrays, numbers, text, or dicts, lists, tuples and dataclasses of them"


def walk_batch(batch: Any, path: str, keys: Keys, asker: Asker, convert: bool = False, *, specs: bool = False) -> Subtree:
    """Take a batch apart. With `convert`, arrays and numpy scalars become tensors as by torch's `default_convert`; with `specs`
    an `ArraySpec` is a leaf.

    Raises LayoutError for a value that cannot be carried.
    """
    walk = _Walk(keys, asker, specs)
    node = walk.visit(batch, path, convert, 0)
    return Subtree(node, walk.sources, walk.values)


class _Walk:
    def __init__(self, keys: Keys, asker: Asker, specs: bool) -> None:
        self._specs = specs
        self.sources: list[Source] = []
        self.values: list[Any] = []
        self._keys = keys
        self._asker = asker

    def visit(self, value: Any, path: str, convert: bool, depth: int) -> Node:
        kind = type(value)
        if kind in _PLAIN:
            return self._inline(value)
        if kind in _NESTING and _is_plain(value, convert, depth):
            return self._inline(list(value) if convert else value)
        rule = rule_of(kind)
        if rule is Rule.TENSOR:
            return self._tensor(value, path)
        if rule is Rule.ARRAY:
            return self._array(value, path, convert)
        if rule in CONTAINERS:
            return self._container(value, rule, path, convert, depth)
        if convert and isinstance(value, np.generic) and rule is not Rule.TEXT:
            return self._scalar(value, path)
        return self._other(value, path)

    def _inline(self, value: Any) -> Node:
        self.values.append(value)
        return VALUE_NODE

    def _other(self, value: Any, path: str) -> Node:
        if self._specs and type(value) is ArraySpec:
            self.sources.append(Unwritten(value))
            return LEAF_NODE
        try:
            values.encode(value)
        except (TypeError, ValueError, OverflowError) as error:
            kind = name_of(type(value))
            words = f"is of type {kind} in the batch of sample {self._keys[0]!r}, which cannot be carried: {_ADVICE}"
            raise self._keys.error(path, words, 0, type=kind) from error
        return self._inline(value)

    def _tensor(self, value: Any, path: str) -> Node:
        from ringloader._collate import tensors

        self.sources.append(tensors.WholeTensor(check_tensor(value, path, self._keys, 0, self._asker)))
        return LEAF_NODE

    def _array(self, value: np.ndarray, path: str, convert: bool) -> Node:
        dtype = dtypes.name_of(value.dtype)
        if type(value) not in (np.ndarray, np.memmap) and not convert:
            kind = name_of(type(value))
            words = (
                f"is a {kind} in the batch of sample {self._keys[0]!r}, which would be a plain array: return np.asarray of it"
            )
            raise self._keys.error(path, words, 0, type=kind)
        if convert:
            if dtype is None:
                raise refuse_array(value, path, self._keys, 0)
            self.sources.append(WholeArray(np.asarray(value), "tensor", dtype))
            return LEAF_NODE
        if value.dtype.kind not in "biufc":
            raise refuse_array(value, path, self._keys, 0)
        self.sources.append(WholeArray(np.asarray(value), "array", dtype or value.dtype.str))
        return LEAF_NODE

    def _scalar(self, value: Any, path: str) -> Node:
        return self._array(np.asarray(value), path, convert=True)

    def _container(self, value: Any, rule: Rule, path: str, convert: bool, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self._keys.error(path[:200], f"is nested deeper than {MAX_DEPTH} containers", 0)
        # torch's default_convert does not look into dataclasses.
        convert = convert and rule is not Rule.FIELDS
        try:
            form = form_of(value, rule, collating=convert)
        except FormError as error:
            words = f"is {error} (batch of sample {self._keys[0]!r})"
            raise self._keys.error(path, words, 0, type=name_of(type(value))) from error
        if form.prototype is not None:
            self.values.append(form.prototype)
        children = tuple(
            self.visit(child, child_path(path, rule, form, position), convert, depth + 1)
            for position, child in enumerate(contents(value, rule, form))
        )
        keys = form.keys if rule in (Rule.MAPPING, Rule.FIELDS) else ()
        return Node(form.kind, -1, form.type_name, keys, children)


def _is_plain(value: list[Any] | tuple[Any, ...], convert: bool, depth: int) -> bool:
    """Return whether a list holds plain values only, lists of them included: such a list is one inline value."""
    kinds = set(map(type, value))
    if kinds <= _PLAIN:
        return True
    # default_convert turns inner tuples into lists: those are walked.
    nesting = {list} if convert else _NESTING
    if depth > MAX_DEPTH or not kinds <= _PLAIN | nesting:
        return False
    return all(_is_plain(inner, convert, depth + 1) for inner in value if type(inner) in nesting)
