"""The base class of datasets that workers rebuild by themselves.

Owns the record of how an instance was made, and the comparison that tells whether it still is as its constructor left it. Only
then may a worker call the constructor again instead of being sent the instance. Must not import torch.
"""

from __future__ import annotations

import abc
import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ringloader._core.digests import attributes, value_digest
from ringloader.errors import ConfigError
from ringloader.factory import FactorySpec

__all__ = ["Dataset", "dataset"]

_log = logging.getLogger("ringloader")

_RECORD = "_ringloader_record"


class _RecordingMeta(abc.ABCMeta):
    """Notes class and arguments after the whole chain of `__init__`s has run, so that subclasses need not do anything."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__call__(*args, **kwargs)
        made: type = type(instance)  # a __new__ may return an instance of another class
        if made is cls:
            # object.__setattr__: a frozen dataclass refuses the ordinary way.
            object.__setattr__(instance, _RECORD, _Record(instance, args, kwargs))
        return instance


class Dataset(metaclass=_RecordingMeta):
    """Base class whose instances are rebuilt in every worker from their class and constructor arguments.

    Works for dataclasses, frozen ones too, and beside `torch.utils.data.Dataset` as a second base. The arguments live as long
    as the instance does. An instance that was changed after construction is pickled as it is instead.
    """

    @property
    def process_spec(self) -> FactorySpec | None:
        """The spec that builds an equal instance; None, with one log line, when this one was changed or not made by a call.

        Seen are attributes bound anew, added and deleted, and changes inside lists, dicts and other plain values as far as a
        bounded sample shows them. Raises ConfigError when a worker can't import the class or take an argument.
        """
        record = vars(self).get(_RECORD)
        if not isinstance(record, _Record):
            _log.info("%s was copied or unpickled, not made by a call: it is pickled as it is", type(self).__qualname__)
            return None
        change = record.find_change(self)
        if change is not None:
            record.log_once(type(self), change)
            return None
        try:
            return FactorySpec(type(self), *record.args, **record.kwargs)
        except ConfigError as error:
            raise ConfigError(f"dataset of class {type(self).__qualname__!r}: {error}", **error.facts) from None


def dataset(
    *,
    size: int | Callable[[], int],
    get_item: Callable[[Any], Any],
    process_spec: FactorySpec | Mapping[str, Any] | None = None,
) -> FunctionDataset:
    """Return the map-style dataset of two functions: `size`, a number or what gives it, and `get_item`, from key to sample.

    `process_spec` says how workers build an equal one: a `FactorySpec`, or a mapping with "factory" and, if need be, "args" and
    "kwargs". Without it the dataset is pickled, which takes importable functions.

    Raises ConfigError for what is none of these.
    """
    if not callable(size) and (type(size) is not int or size < 0):
        raise ConfigError(f"size is {size!r}; give an int of at least 0, or a function", option="size", value=size)
    if not callable(get_item):
        raise ConfigError(f"get_item is {get_item!r}; give a function of one key", option="get_item", value=get_item)
    return FunctionDataset(size, get_item, _as_spec(process_spec))


def _as_spec(given: FactorySpec | Mapping[str, Any] | None) -> FactorySpec | None:
    if given is None or isinstance(given, FactorySpec):
        return given
    if not isinstance(given, Mapping) or "factory" not in given or set(given) - {"factory", "args", "kwargs"}:
        raise ConfigError(
            f"process_spec is {given!r:.200}; give a FactorySpec, or a mapping with 'factory', 'args' and 'kwargs'",
            option="process_spec",
            value=given,
        )
    args, kwargs = given.get("args", ()), given.get("kwargs", {})
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping):
        raise ConfigError(
            f"process_spec has args={args!r:.100} and kwargs={kwargs!r:.100}; give a list and a mapping",
            option="process_spec",
            value=given,
        )
    return FactorySpec(given["factory"], *args, **kwargs)


class FunctionDataset:
    """What `dataset` returns."""

    def __init__(self, size: int | Callable[[], int], get_item: Callable[[Any], Any], process_spec: FactorySpec | None) -> None:
        self._size, self._get_item = size, get_item
        self.process_spec = process_spec

    def __len__(self) -> int:
        return self._size() if callable(self._size) else self._size

    def __getitem__(self, key: Any) -> Any:
        return self._get_item(key)


class _Record:
    """How an instance was made, and what it looked like then."""

    def __init__(self, instance: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args = args
        self.kwargs = dict(kwargs)
        self._attributes = {name: _Trace(value) for name, value in _own_attributes(instance).items()}
        self._argument_digests = self._digest_arguments()
        self._logged = False

    def find_change(self, instance: object) -> str | None:
        """Name the first attribute or argument that is not as it was, None when all are."""
        now = _own_attributes(instance)
        for name, trace in self._attributes.items():
            if name not in now:
                return f"attribute {name!r} was deleted"
            if not trace.fits(now[name]):
                return f"attribute {name!r} was changed"
        for name in now:
            if name not in self._attributes:
                return f"attribute {name!r} was added"
        for name, digest in self._digest_arguments().items():
            if self._argument_digests[name] != digest:
                return f"the constructor's argument {name} was changed in place"
        return None

    def log_once(self, cls: type, change: str) -> None:
        """Say why the instance is not rebuilt."""
        if not self._logged:
            self._logged = True
            _log.info("%s: %s after construction: the dataset is pickled as it is, not rebuilt", cls.__qualname__, change)

    def _digest_arguments(self) -> dict[str, str | None]:
        named = {f"{index}": value for index, value in enumerate(self.args)} | {repr(k): v for k, v in self.kwargs.items()}
        return {name: value_digest(value) for name, value in named.items()}

    def __reduce__(self) -> Any:
        # A pickle or deep copy of the instance does not take the constructor's arguments along.
        return _no_record, ()


class _Trace:
    """What is remembered of an attribute's value, without keeping it alive."""

    def __init__(self, value: Any) -> None:
        self._type = type(value)
        self._id = id(value)
        self._digest = value_digest(value)
        try:
            self._ref: weakref.ref[Any] | None = weakref.ref(value)
        except TypeError:
            self._ref = None

    def fits(self, value: Any) -> bool:
        """Say whether this is the same value; an equal number or text counts as the same."""
        if type(value) is not self._type or value_digest(value) != self._digest:
            return False
        if isinstance(value, (int, float, complex, str, bytes, type(None))) and self._digest is not None:
            return True
        return id(value) == self._id and (self._ref is None or self._ref() is value)


def _own_attributes(instance: object) -> dict[str, Any]:
    """The attributes that count: not the record itself, nor what a `cached_property` has filled in."""
    found = attributes(instance)
    return {
        name: value
        for name, value in found.items()
        if name != _RECORD and not isinstance(getattr(type(instance), name, None), functools.cached_property)
    }


def _no_record() -> None:
    return None
