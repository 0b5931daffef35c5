"""References given as text, checked in the parent.

Owns what can be said of "module:name" before it is imported: its form, whether there is such a module, and, for a module
that is here already, whether the name gives a callable. Must not import the module: that is for the worker to do.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from ringloader._specs.main_module import MAIN_NAMES, unreachable_reason
from ringloader._specs.refusals import describe
from ringloader.errors import ConfigError


def check_reference(reference: str, argument: str) -> None:
    """Raise ConfigError, with `argument` as its name, unless a worker can find a callable under "module:name".

    Only a module that is imported already is looked into.
    """
    module_name, colon, qualname = reference.partition(":")
    parts = [*module_name.split("."), *qualname.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise ConfigError(f'{argument} is {reference!r}, not of the form "module:name"', argument=argument, reference=reference)
    if module_name in MAIN_NAMES and (reason := unreachable_reason(qualname)) is not None:
        remedy = "move it to an importable .py file"
        raise ConfigError(f"{argument} is {reference!r}; {reason}; {remedy}", argument=argument, reason=reason, remedy=remedy)
    module = sys.modules.get(module_name)
    if module is not None:
        _check_attribute(module, qualname, argument, reference)
    elif not _module_exists(module_name, argument):
        raise ConfigError(
            f"{argument} is {reference!r}, and there is no module {module_name!r} on sys.path; "
            "start Python where it can be imported, install it, or correct the name",
            argument=argument,
            reference=reference,
        )


def _check_attribute(module: Any, qualname: str, argument: str, reference: str) -> None:
    value = module
    for part in qualname.split("."):
        owner = value
        try:
            value = getattr(owner, part)
        except AttributeError:
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                return  # asked by the module itself while it is imported: the name may come later
            import difflib  # late: only an error needs it

            close = difflib.get_close_matches(part, dir(owner), n=3)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise ConfigError(
                f"{argument} is {reference!r}, and {module.__name__!r} has no {qualname!r}{hint}",
                argument=argument,
                reference=reference,
            ) from None
    if not callable(value):
        raise ConfigError(f"{argument} is {reference!r}, which is {describe(value)}, not a callable", argument=argument)


def _module_exists(name: str, argument: str) -> bool:
    """Find a module without importing anything; its parents only as the last resort, for packages with a path of their own."""
    path: Any = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:depth]), path)
        if spec is None:
            break
        if depth == len(parts):
            return True
        path = spec.submodule_search_locations
        if path is None:
            return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    except Exception as error:  # the package's own code runs here
        raise ConfigError(
            f"{argument} names module {name!r}, whose package cannot be imported: {error!r}", argument=argument
        ) from error


def _find_spec(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = find(name, path) if find is not None else None
        except Exception:  # a finder may need the parent package imported; the caller's last resort then does so
            return None
        if spec is not None:
            return spec
    return None
