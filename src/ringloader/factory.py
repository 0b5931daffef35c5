"""Factory specs: how a dataset is named in the parent and built in a worker.

Owns the wire form of a spec and of the callables that go with it (`collate_fn`, `worker_init_fn`), and the checks that refuse,
in the parent and before any process starts, what a worker could not rebuild. A spec keeps the wire form only: what the caller
does to an argument after construction changes nothing. Must not import torch or a target's module.

Wire form, packed by `encode`: a node is a list that starts with a one-letter kind.

    ["v", bytes]                        a plain value, encoded
    ["r", "module:qualname"]            an importable callable or class
    ["s", target, args, kwargs, main]   a nested spec, built before the call that takes it
    ["f", function, args, kwargs]       a functools.partial
    ["l" | "t", nodes]                  a list or tuple
    ["d", [[key bytes, node], ...]]     a dict
    ["p", bytes]                        a pickle
    ["h", "module:class", token]        an object in shared memory, whose descriptor travels beside
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringloader._core.values import decode, encode
from ringloader._specs import handles, payload
from ringloader._specs.handles import Shareable
from ringloader._specs.main_module import MAIN_NAMES, unreachable_reason
from ringloader._specs.payload import MAX_PICKLE_NBYTES, PickledDataset
from ringloader._specs.references import reference_to, resolve
from ringloader._specs.refusals import describe, refuse
from ringloader._specs.targets import check_reference
from ringloader.errors import ConfigError, FactoryError, ProtocolError

__all__ = ["FactorySpec"]

Node = list[Any]

# Containers nested deeper go into one pickle, which says so itself when that is too deep as well.
_MAX_DEPTH = 32


class FactorySpec:
    """A call that builds an object in every worker: `FactorySpec("project.data:make_dataset", "/data", size=224)`.

    `target` is "module:name" or an importable callable; a `functools.partial` of one becomes its target and arguments.
    Arguments are plain values, paths, numpy scalars, importable callables and classes, nested specs, objects with a
    `process_spec`, and lists, tuples and dicts of these; an argument with anything else in it is pickled, and its size logged.
    Mutable arguments are taken as they are now, and every `build` gets fresh copies.

    Raises ConfigError, which names the argument, the object in it, where that was defined, and what to do.
    """

    __slots__ = ("_handles", "_node")
    _node: Node
    _handles: tuple[Shareable, ...]

    def __init__(self, target: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        while isinstance(target, functools.partial):
            args, kwargs = (*target.args, *args), {**target.keywords, **kwargs}
            target = target.func
        function = _callable_node(target, "target")
        arg_nodes = [_argument_node(value, f"args[{index}]") for index, value in enumerate(args)]
        kwarg_nodes = {name: _argument_node(value, f"kwargs[{name!r}]") for name, value in kwargs.items()}
        parts = [function, *arg_nodes, *kwarg_nodes.values()]
        self._handles = tuple({handle.token: handle for part in parts for handle in part.handles}.values())
        self._node = [
            "s",
            function.node,
            [part.node for part in arg_nodes],
            {name: part.node for name, part in kwarg_nodes.items()},
            any(part.needs_main for part in parts),
            [handle.token for handle in self._handles],
        ]

    @property
    def needs_main(self) -> bool:
        """True when something in it refers to the user's `__main__`, which a worker then has to load first."""
        return bool(self._node[4])

    @property
    def handles(self) -> tuple[Shareable, ...]:
        """What it refers to in shared memory, kept as long as the spec is."""
        return self._handles

    @property
    def references(self) -> set[str]:
        """What `build` imports, as "module:qualname"."""
        return set(_references_in(self._node))

    def import_target(self) -> None:
        """Import what `build` will call, so that a slow or failing import shows as such. Raises what the import raises."""
        if self._node[1][0] == "r":
            _from_node(self._node[1])

    def build(self) -> Any:
        """Import the target and call it, nested specs first. Raises what the import and the calls raise."""
        return _from_node(self._node)

    def to_wire(self) -> bytes:
        """Return the spec as bytes for the control pipe."""
        return encode(self._node)

    @classmethod
    def from_wire(cls, wire: bytes | memoryview, /) -> FactorySpec:
        """Rebuild a spec from `to_wire`; imports nothing. Raises ProtocolError for other bytes."""
        node = _decode_node(wire)
        if len(node) != 6 or node[0] != "s":
            raise ProtocolError("bytes that are no factory spec")
        spec = object.__new__(cls)
        spec._node = node
        found = [handles.find(token) for token in node[5]]
        spec._handles = tuple(handle for handle in found if handle is not None)
        return spec

    def __repr__(self) -> str:
        return _node_repr(self._node)

    def __eq__(self, other: object) -> bool:
        return self._node == other._node if isinstance(other, FactorySpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_wire())

    def __reduce__(self) -> Any:
        return FactorySpec.from_wire, (self.to_wire(),)


def check_callable(value: str | Callable[..., Any], argument: str) -> str:
    """Return "module:qualname" for a callable that a worker can import. Raises ConfigError for any other value."""
    if isinstance(value, str):
        check_reference(value, argument)
        return value
    if not callable(value):
        raise _not_callable(value, argument)
    reference = _reference(value)
    if reference is None or not _reachable(reference):
        raise refuse(value, argument)
    return reference


def callable_to_wire(fn: str | FactorySpec | Callable[..., Any], argument: str) -> bytes:
    """Pack a callable option: importable, "module:name", a spec whose `build` gives it, a partial, or a picklable object.

    Raises ConfigError that names `argument`.
    """
    return pack_callable(fn, argument)[0]


def pack_callable(fn: str | FactorySpec | Callable[..., Any], argument: str) -> tuple[bytes, tuple[Shareable, ...]]:
    """The same, with what the callable refers to in shared memory."""
    part = _callable_node(fn, argument)
    return encode([part.node, part.needs_main]), part.handles


def callable_from_wire(wire: bytes | memoryview) -> Callable[..., Any]:
    """Import, build or load the callable. Raises what that raises, and FactoryError when the result is no callable."""
    value = _from_node(_decode_node(wire)[0])
    if not callable(value):
        raise FactoryError(f"a callable was expected, its factory returned {describe(value)}")
    result: Callable[..., Any] = value
    return result


def callable_needs_main(wire: bytes | memoryview) -> bool:
    """Say whether a worker has to load the user's `__main__` before `callable_from_wire`."""
    return bool(_decode_node(wire)[1])


def callable_references(wire: bytes | memoryview) -> set[str]:
    """What `callable_from_wire` imports, as "module:qualname"."""
    return set(_references_in(_decode_node(wire)[0]))


def _references_in(node: Any) -> Iterator[str]:
    if isinstance(node, list) and len(node) == 2 and node[0] == "r":
        yield node[1]
    elif isinstance(node, (list, dict)):
        for part in node.values() if isinstance(node, dict) else node:
            yield from _references_in(part)


def pickle_dataset(dataset: Any, max_nbytes: int = MAX_PICKLE_NBYTES) -> PickledDataset:
    """Pickle a plain dataset once for all workers, its large buffers out of band; objects in it with a spec as their spec.

    `max_nbytes` bounds what is not out of band. Raises ConfigError as a spec does for an argument, with "dataset" as its name.
    """
    return payload.pickle_in_parts(dataset, find_process_spec, max_nbytes)


def unpickle_dataset(pickle: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """Load what `pickle_dataset` made. Arrays and tensors lie in `buffers` in place, and are as writable as these."""
    return payload.unpickle(pickle, buffers)


def find_process_spec(value: Any) -> FactorySpec | None:
    """Return the spec of an object that is one or has one (`process_spec`: a spec or a function that returns it), else None."""
    if isinstance(value, FactorySpec):
        return value
    # Looked up statically first: objects that answer every attribute (mocks, proxies) have no spec.
    if isinstance(value, type) or not (
        hasattr(type(value), "process_spec") or "process_spec" in getattr(value, "__dict__", ())
    ):
        return None
    found = value.process_spec
    if callable(found) and not isinstance(found, FactorySpec):
        found = found()
    return found if isinstance(found, FactorySpec) else None


def _reference(value: Any) -> str | None:
    """Like `reference_to`; finds class methods too, and knows the main script's name in a child of multiprocessing."""
    if isinstance(value, types.MethodType) and isinstance(value.__self__, type):
        owner = _reference(value.__self__)
        found = inspect.getattr_static(value.__self__, value.__name__, None)
        return f"{owner}.{value.__name__}" if owner is not None and isinstance(found, classmethod) else None
    reference = reference_to(value)
    module_name, _, qualname = (reference or "").partition(":")
    return f"__main__:{qualname}" if module_name in MAIN_NAMES else reference


def _reachable(reference: str) -> bool:
    module_name, _, qualname = reference.partition(":")
    return module_name not in MAIN_NAMES or unreachable_reason(qualname) is None


def _not_callable(value: Any, argument: str) -> ConfigError:
    return ConfigError(f'{argument} is {describe(value)}, not a callable or "module:name"', argument=argument)


# -- values to nodes, each with "refers to __main__"


class _NoNodeError(Exception):
    """The value holds something that only a pickle can carry."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One argument, or the target, as a node."""

    node: Node
    needs_main: bool
    handles: tuple[Shareable, ...] = ()


def _callable_node(value: Any, argument: str) -> _Part:
    if isinstance(value, str):
        check_reference(value, argument)
        return _Part(["r", value], value.partition(":")[0] in MAIN_NAMES)
    if not callable(value) and find_process_spec(value) is None:
        raise _not_callable(value, argument)
    return _argument_node(value, argument)


def _argument_node(value: Any, argument: str) -> _Part:
    writer = _NodeWriter(argument)
    try:
        node = writer.write(value, 0)
        if writer.nbytes > MAX_PICKLE_NBYTES:
            raise payload.too_large(value, argument, MAX_PICKLE_NBYTES)
        return _Part(node, writer.needs_main, tuple(writer.handles))
    except _NoNodeError:
        pickled = payload.pickle_argument(value, argument, find_process_spec)
        return _Part(["p", pickled.pickle], pickled.needs_main, pickled.handles)


class _NodeWriter:
    """Turns one argument into a node, unless something in it needs a pickle: then all of it goes into one, sharing kept."""

    def __init__(self, argument: str) -> None:
        self.needs_main = False
        self.nbytes = 0
        self.handles: list[Shareable] = []
        self._argument = argument

    def write(self, value: Any, depth: int) -> Node:
        plain = _try_encode(value)
        if plain is not None:
            self.nbytes += len(plain)
            return ["v", plain]
        if depth > _MAX_DEPTH:
            raise _NoNodeError
        if type(value) in (list, tuple):
            return ["l" if type(value) is list else "t", [self.write(element, depth + 1) for element in value]]
        if type(value) is dict:
            return ["d", [[self._key(key), self.write(element, depth + 1)] for key, element in value.items()]]
        if type(value) is functools.partial and not vars(value):
            args = [self.write(element, depth + 1) for element in value.args]
            kwargs = {name: self.write(element, depth + 1) for name, element in value.keywords.items()}
            return ["f", self.write(value.func, depth + 1), args, kwargs]
        return self._write_object(value)

    def _write_object(self, value: Any) -> Node:
        if isinstance(value, Shareable):
            self.handles.append(value)
            return ["h", f"{type(value).__module__}:{type(value).__qualname__}", value.token]
        try:
            spec = find_process_spec(value)
        except ConfigError as error:
            raise ConfigError(f"{self._argument}: {error}", **{**error.facts, "argument": self._argument}) from None
        if spec is not None:
            self.needs_main |= spec.needs_main
            self.handles += spec.handles
            return spec._node
        reference = _reference(value) if callable(value) else None
        if reference is None:
            raise _NoNodeError
        if not _reachable(reference):
            raise refuse(value, self._argument)
        self.needs_main |= reference.partition(":")[0] in MAIN_NAMES
        return ["r", reference]

    def _key(self, key: Any) -> bytes:
        plain = _try_encode(key)
        if plain is None:
            raise _NoNodeError
        return plain


def _try_encode(value: Any) -> bytes | None:
    try:
        return encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


# -- nodes to values


def _decode_node(wire: bytes | memoryview) -> Node:
    try:
        node = decode(wire)
    except Exception as error:  # msgpack has no common base for what it raises
        raise ProtocolError("bytes that are no packed spec or callable") from error
    if not isinstance(node, list) or len(node) < 2:
        raise ProtocolError("bytes that are no packed spec or callable")
    return node


def _from_node(node: Node) -> Any:
    kind = node[0]
    if kind == "v":
        return decode(node[1])
    if kind == "r":
        return resolve(node[1])
    if kind == "p":
        return payload.unpickle(node[1])
    if kind == "h":
        return resolve(node[1]).attach_token(node[2])
    if kind in ("l", "t"):
        elements = [_from_node(element) for element in node[1]]
        return elements if kind == "l" else tuple(elements)
    if kind == "d":
        return {decode(key): _from_node(element) for key, element in node[1]}
    if kind in ("s", "f"):
        function, args, kwargs = _from_node(node[1]), *_arguments(node)
        return function(*args, **kwargs) if kind == "s" else functools.partial(function, *args, **kwargs)
    raise ProtocolError(f"a spec with a part of unknown kind {kind!r}")


def _arguments(node: Node) -> tuple[list[Any], dict[str, Any]]:
    return [_from_node(arg) for arg in node[2]], {name: _from_node(arg) for name, arg in node[3].items()}


def _node_repr(node: Node) -> str:
    kind = node[0]
    if kind == "v":
        return reprlib.repr(decode(node[1]))
    if kind == "r":
        return str(node[1])
    if kind == "p":
        return f"<pickle of {len(node[1])} bytes>"
    if kind == "h":
        return f"<{node[1].partition(':')[2]} in shared memory>"
    if kind in ("l", "t"):
        text = ", ".join(_node_repr(element) for element in node[1])
        return f"[{text}]" if kind == "l" else f"({text}{',' if len(node[1]) == 1 else ''})"
    if kind == "d":
        return "{" + ", ".join(f"{decode(key)!r}: {_node_repr(element)}" for key, element in node[1]) + "}"
    return _call_repr("FactorySpec" if kind == "s" else "functools.partial", node[1], node[2], node[3])


def _call_repr(name: str, function: Node, args: Sequence[Node], kwargs: Mapping[str, Node]) -> str:
    target = repr(function[1]) if function[0] == "r" else _node_repr(function)
    parts = [target, *map(_node_repr, args), *(f"{key}={_node_repr(value)}" for key, value in kwargs.items())]
    return f"{name}({', '.join(parts)})"
