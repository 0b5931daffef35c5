"""The words for an object that cannot be sent to a worker.

Owns the sentence of that `ConfigError`: which argument, which object in it, where that was defined, why not, what to do.
Must not decide what is sent: it is asked once something else has found that an object cannot be.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import reprlib
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from ringloader._specs.main_module import MAIN_NAMES, unreachable_reason
from ringloader._specs.references import reference_to
from ringloader.errors import ConfigError

_TO_MODULE_LEVEL = "move it to module level or use functools.partial of a module-level function"
_TO_FILE = "move it to an importable .py file"
_OPEN_INSIDE = "open it inside the factory"
_CREATE_INSIDE = "create it inside the factory, or pass what it is made from"
# Modules whose objects are handles of this process (files, connections, locks) rather than values.
_HANDLE_MODULES = frozenset(
    ["_io", "_thread", "_socket", "socket", "ssl", "sqlite3", "_sqlite3", "h5py", "lmdb", "mmap", "select", "multiprocessing",
     "threading", "zipfile", "tarfile", "zarr", "netCDF4", "subprocess", "tempfile", "gzip"]
)  # fmt: skip
# Enough to find a lambda in a list of transforms; a bound, so that a refusal never takes long.
_MAX_SEARCHED = 20_000


def refuse(value: Any, argument: str, *, error: BaseException | None = None, root: Any = None) -> ConfigError:
    """Return the error that says why `value`, found in `argument`, cannot be sent; `root` is the argument's own value.

    Facts: argument (a path such as "kwargs['cfg'].fn"), defined_at ("file:line" or None), reason, remedy.
    """
    place = _locate(value, argument, root)
    reason, remedy = _reason(value, error)
    where = defined_at(value)
    what = describe(value) + (f", defined at {where}" if where else "")
    return ConfigError(
        f"{place} cannot be sent to a worker process: {what}; {reason}; {remedy}",
        argument=place,
        defined_at=where,
        reason=reason,
        remedy=remedy,
    )


def describe(value: Any) -> str:
    """Say what `value` is in a few words: kind and qualified name, or type and a shortened repr."""
    if isinstance(value, type):
        return f"class {value.__qualname__!r}"
    if isinstance(value, types.FunctionType):
        return f"{'lambda' if value.__name__ == '<lambda>' else 'function'} {value.__qualname__!r}"
    type_name = f"{type(value).__module__}.{type(value).__qualname__}"
    if dataclasses.is_dataclass(value):
        return f"a {type_name}"  # its repr holds all its fields, which may be a whole dataset
    try:
        text = reprlib.repr(value)
    except Exception as error:
        text = f"<no repr: {type(error).__name__}>"
    return f"{text[:120]} of type {type_name}"


def defined_at(value: Any) -> str | None:
    """Return "file:line" of a function or class, None for anything else or when it is not known."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if isinstance(value, types.FunctionType):
        return f"{value.__code__.co_filename}:{value.__code__.co_firstlineno}"
    if not isinstance(value, type):
        return None
    try:
        path = inspect.getsourcefile(value)
        line = inspect.findsource(value)[1]
    except Exception:  # inspect raises OSError, TypeError and more for classes without source
        return _first_method_at(value)
    return f"{path}:{line + 1}"


def _first_method_at(cls: type) -> str | None:
    functions = [member for member in vars(cls).values() if isinstance(member, types.FunctionType)]
    return defined_at(functions[0]) if functions else None


def _reason(value: Any, error: BaseException | None) -> tuple[str, str]:
    if isinstance(value, (type, types.FunctionType)):
        return _reason_unnamed(value)
    text = f"{type(error).__name__}: {error}" if error is not None else "it has no importable name and cannot be pickled"
    if isinstance(value, io.IOBase):
        return "an open file belongs to the process that opened it", _OPEN_INSIDE
    module = type(value).__module__
    is_handle = module.partition(".")[0] in _HANDLE_MODULES or type(value).__name__ in ("lock", "RLock")
    return text, _OPEN_INSIDE if is_handle else _CREATE_INSIDE


def _reason_unnamed(value: type | types.FunctionType) -> tuple[str, str]:
    qualname, module = value.__qualname__, value.__module__
    in_main = module in MAIN_NAMES
    unreachable = unreachable_reason(qualname) if in_main else None
    if value.__name__ == "<lambda>":
        return "a lambda has no name that a worker could import", _TO_MODULE_LEVEL
    if "<locals>" in qualname:
        return "it is defined inside a function, so a worker cannot import it", _TO_MODULE_LEVEL
    if unreachable is not None:
        return unreachable, _TO_FILE
    if module not in sys.modules:
        return f"its module {module!r} is not one that can be imported", _TO_FILE
    if reference_to(value) is None:
        return (
            f"{module}:{qualname} is not this object, but another one or missing (renamed, replaced or decorated?)",
            _TO_MODULE_LEVEL,
        )
    return "it cannot be pickled", _CREATE_INSIDE


def _locate(value: Any, argument: str, root: Any) -> str:
    """Find `value`, or an instance of it, inside `root`, and return its path; `argument` when it is not found."""
    waiting = deque([(argument, root)])
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_SEARCHED:
        path, candidate = waiting.popleft()
        if candidate is value or (isinstance(value, type) and type(candidate) is value):
            return path
        if id(candidate) not in seen:
            seen.add(id(candidate))
            waiting.extend(_parts(path, candidate))
    return argument


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for index, element in enumerate(value[:_MAX_SEARCHED]):
            yield f"{path}[{index}]", element
    elif isinstance(value, dict):
        for key, element in list(value.items())[:_MAX_SEARCHED]:
            yield f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[...]", element
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func
        yield from _parts(f"{path}.args", value.args)
        yield from _parts(f"{path}.keywords", value.keywords)
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif not isinstance(value, (type, types.ModuleType, types.FunctionType)):
        for name, element in list(getattr(value, "__dict__", {}).items())[:_MAX_SEARCHED]:
            yield f"{path}.{name}", element
