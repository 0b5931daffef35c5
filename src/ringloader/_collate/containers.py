"""Containers of samples and batches: what each type is, and how one is rebuilt in another process around new contents.

Owns the rules by type (`rule_of`, in the order of torch's `default_collate`) and the form of a container: the kind of node, the
importable name of its type, and, where an instance has state of its own, a pickled prototype whose contents are None.
Must not import torch: a tensor can only be met where torch is imported already.
"""

from __future__ import annotations

import collections
import copy
import copyreg
import dataclasses
import io
import pickle
import sys
import types
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from enum import Enum
from typing import Any

import numpy as np

from ringloader._core.layout import Kind
from ringloader._specs.references import MAIN_ALIAS, reference_to, resolve


class Rule(Enum):
    """How values of a type are collated. Looked up by identity: Enum's own hash is a Python call, and there is one per leaf."""

    __hash__ = object.__hash__

    ARRAY = "array"
    TENSOR = "tensor"
    NUMBER = "number"
    TEXT = "text"
    MAPPING = "mapping"
    NAMED = "namedtuple"
    SEQUENCE = "sequence"
    FIELDS = "dataclass"
    UNKNOWN = "unknown"


CONTAINERS = frozenset((Rule.MAPPING, Rule.NAMED, Rule.SEQUENCE, Rule.FIELDS))
_rules: dict[type, Rule] = {}
# Types whose own name is not where they can be imported from.
_KNOWN_NAMES: dict[type, str] = {types.MappingProxyType: "types:MappingProxyType"}


class FormError(Exception):
    """A container cannot be carried; the text says why, the caller adds path and sample."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A container without its contents: `keys` are dict keys, field names, or positions.

    `prototype` is a pickled instance for the kinds that end in "-like". `reusable` says that another instance of the same type
    with the same keys has the same form.
    """

    kind: Kind
    type: type
    keys: tuple[Any, ...]
    type_name: str = ""
    prototype: bytes | None = None
    reusable: bool = False


def rule_of(kind: type) -> Rule:
    """Return how values of this type are collated."""
    rule = _rules.get(kind)
    if rule is None:
        rule = _rules[kind] = _find_rule(kind)
    return rule


def _find_rule(kind: type) -> Rule:
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor_type is not None and issubclass(kind, tensor_type):
        return Rule.TENSOR
    if issubclass(kind, np.ndarray):
        return Rule.ARRAY
    if issubclass(kind, (np.bool_, np.number, float, int)):
        return Rule.NUMBER
    if issubclass(kind, (str, bytes)):
        return Rule.TEXT
    if issubclass(kind, Mapping):
        return Rule.MAPPING
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return Rule.NAMED
    if issubclass(kind, Sequence):
        return Rule.SEQUENCE
    return Rule.FIELDS if dataclasses.is_dataclass(kind) else Rule.UNKNOWN


def name_of(kind: type) -> str:
    """Return "module.qualname", or the bare name of a builtin."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def form_of(value: Any, rule: Rule, collating: bool) -> Form:
    """Return the form of a container.

    `collating`: `value` is the first sample, and the form follows torch's `default_collate`: tuples become lists, and a type
    that cannot be rebuilt becomes a plain dict or list. Otherwise it is a finished batch, and nothing may change silently.
    Raises FormError for what cannot be carried.
    """
    kind = type(value)
    if kind is dict:
        return Form(Kind.DICT, kind, tuple(value), reusable=True)
    if kind is list or (collating and rule is Rule.SEQUENCE and issubclass(kind, tuple)):
        return Form(Kind.LIST, kind, tuple(range(len(value))), reusable=True)
    if kind is tuple:
        return Form(Kind.TUPLE, kind, tuple(range(len(value))))
    if issubclass(kind, tuple):
        return _tuple_form(value, collating)
    try:
        if rule is Rule.MAPPING:
            return _mapping_form(value, collating)
        if rule is Rule.FIELDS:
            return _fields_form(value, collating)
        return _sequence_form(value, collating)
    except FormError:
        raise
    except Exception as error:
        raise FormError(f"a {name_of(kind)}, which cannot be taken apart ({error})") from error


def _reference(kind: type) -> str:
    reference = _KNOWN_NAMES.get(kind) or reference_to(kind)
    if reference is None:
        raise FormError(f"whose type {name_of(kind)} cannot be imported by its name: define it at the top level of a module")
    return reference


def _tuple_form(value: tuple[Any, ...], collating: bool) -> Form:
    if not collating and getattr(value, "__dict__", None):
        kind = name_of(type(value))
        raise FormError(f"a {kind} with attributes of its own, which would be lost: return a dict or a dataclass")
    return Form(Kind.NAMED, type(value), tuple(range(len(value))), _reference(type(value)), reusable=True)


def _fields_form(value: Any, collating: bool) -> Form:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    if not collating:
        names += [name for name in getattr(value, "__dict__", ()) if name not in names]
    return Form(Kind.FIELDS, type(value), tuple(names), _reference(type(value)), reusable=True)


def _mapping_form(value: Mapping[Any, Any], collating: bool) -> Form:
    kind, keys = type(value), tuple(value)
    if kind is collections.OrderedDict and not vars(value):
        return Form(Kind.MAPPING, kind, keys, _reference(kind), reusable=True)
    if isinstance(value, MutableMapping) and _has_no_state(value):
        return Form(Kind.MAPPING, kind, keys, _reference(kind))
    try:
        if isinstance(value, MutableMapping):
            return Form(Kind.MAPPING_LIKE, kind, keys, prototype=_prototype(value, keys))
        kind(dict.fromkeys(keys))  # type: ignore[call-arg]
    except TypeError as error:
        if collating:
            return Form(Kind.DICT, kind, keys)
        raise FormError(f"a {name_of(kind)}, which cannot be rebuilt ({error}): return a dict") from error
    return Form(Kind.MAPPING_FROM, kind, keys, _reference(kind))


def _sequence_form(value: Sequence[Any], collating: bool) -> Form:
    kind, keys = type(value), tuple(range(len(value)))
    if isinstance(value, list) and _has_no_state(value):
        return Form(Kind.SEQUENCE, kind, keys, _reference(kind))
    try:
        if isinstance(value, MutableSequence):
            return Form(Kind.SEQUENCE_LIKE, kind, keys, prototype=_prototype(value, keys))
        kind([None for _ in keys])  # type: ignore[call-arg]
    except TypeError as error:
        if collating:
            return Form(Kind.LIST, kind, keys)
        raise FormError(f"a {name_of(kind)}, which cannot be rebuilt ({error}): return a list") from error
    return Form(Kind.SEQUENCE_FROM, kind, keys, _reference(kind))


def _has_no_state(value: Any) -> bool:
    reduced = value.__reduce_ex__(4) if isinstance(value, (dict, list)) else ()
    return len(reduced) == 5 and reduced[0] is copyreg.__newobj__ and reduced[1] == (type(value),) and not reduced[2]  # type: ignore[attr-defined]


def _prototype(value: Any, keys: tuple[Any, ...]) -> bytes:
    """Return a pickled shallow copy of `value` with None under every key. Raises TypeError where a copy cannot be filled."""
    kind = type(value)
    _reference(kind)
    kept = [value[key] for key in keys]
    clone = copy.copy(value)
    for key in keys:
        clone[key] = None
    shared = [(key, held) for key, held in zip(keys, kept, strict=True) if held is not None and value[key] is None]
    for key, held in shared:
        value[key] = held
    if shared:
        raise FormError(f"a {name_of(kind)} whose copy shares its contents: give the type a __copy__, or return a dict or list")
    try:
        return pickle.dumps(clone, 5)
    except Exception as error:
        raise FormError(f"a {name_of(kind)} that cannot be pickled ({error})") from error


class _PrototypeUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, name: str) -> Any:
        return resolve(f"__main__:{name}") if module_name == MAIN_ALIAS else super().find_class(module_name, name)


def load_prototype(prototype: bytes) -> Any:
    """Unpickle what a form carries; types of a worker's main script are those of this process."""
    return _PrototypeUnpickler(io.BytesIO(prototype)).load()


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield what lies in a tree of mappings, lists, tuples and dataclasses, in order; text counts as one value."""
    if isinstance(value, Mapping):
        for child in value.values():
            yield from leaves_of(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from leaves_of(child)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_of(getattr(value, field.name, None))
    elif not isinstance(value, (str, bytes)):
        yield value
