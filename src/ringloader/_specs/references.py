"""Names of importable objects: object to "module:qualname", and back.

Owns the rule for the user's main script: in the training process it is `__main__`; in a worker the same file is loaded under
`MAIN_ALIAS`, so that its guarded part does not run, and both names find it. A reference made in a worker is turned back into
`__main__` here. Must not import a user's module before it is asked for one.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

MAIN_ALIAS = "__ringloader_main__"


def reference_to(value: Any) -> str | None:
    """Return "module:qualname" when importing that name gives this very object, else None."""
    module_name = getattr(value, "__module__", None)
    qualname = getattr(value, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(qualname, str) or "<" in qualname:
        return None
    if module_name == MAIN_ALIAS:
        module_name = "__main__"
    module = sys.modules.get(module_name)
    if module is None or _walk(module, qualname) is not value:
        return None
    return f"{module_name}:{qualname}"


def resolve(reference: str) -> Any:
    """Import "module:qualname". Raises ImportError or AttributeError as the import system does."""
    module_name, _, qualname = reference.partition(":")
    value: Any = importlib.import_module(module_name)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value


def _walk(module: Any, qualname: str) -> Any:
    value = module
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value
