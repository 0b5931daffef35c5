"""The user's main script: how a worker finds what is defined there.

Owns the rule that a worker loads the script under another name, so that the part guarded by `if __name__ == "__main__":` does
not run, and the check, in the parent, that a name of `__main__` will be there then. Must not run anything in the parent.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, Literal

from ringloader._specs.references import MAIN_ALIAS

# "__mp_main__" is what multiprocessing's spawn calls the script in its children, where a loader may be used too (DDP).
MAIN_NAMES = ("__main__", MAIN_ALIAS, "__mp_main__")

# True while a worker runs the user's script: a loader made meanwhile comes from a script without the guard.
loading_main: bool = False

_loaded: MainModule | None = None


@dataclass(frozen=True)
class MainModule:
    """What a worker needs to load the script: a file ("path") or the name given to `python -m` ("module")."""

    kind: Literal["path", "module"]
    where: str

    def to_wire(self) -> dict[str, str]:
        """Return the plain dict for the control pipe."""
        return {"kind": self.kind, "where": self.where}

    @classmethod
    def from_wire(cls, plain: Mapping[str, Any]) -> MainModule:
        """Rebuild from `to_wire`. Raises ValueError for anything else."""
        kind, where = plain.get("kind"), plain.get("where")
        if kind not in ("path", "module") or not isinstance(where, str):
            raise ValueError(f"no description of a main module: {plain!r}")
        return cls(kind, where)


def describe_main() -> MainModule | None:
    """Describe the running script; None for a notebook, a shell, `-c` or stdin, which no other process can load."""
    if _loaded is not None:
        return _loaded
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if isinstance(name, str) and name != "__main__":
        return MainModule("module", name)
    path = getattr(main, "__file__", None)
    if isinstance(path, str) and os.path.isfile(path):
        return MainModule("path", os.path.abspath(path))
    return None


def load_main(description: MainModule) -> ModuleType:
    """Run the script under `MAIN_ALIAS` and put it in `sys.modules` under every name of `MAIN_NAMES`.

    Does nothing the second time. Raises what the script raises; ImportError when it calls `sys.exit` on the way.
    """
    global loading_main, _loaded
    if _loaded == description:
        return sys.modules[MAIN_ALIAS]
    module, code = _prepare(description)
    before = {name: sys.modules.get(name) for name in MAIN_NAMES}
    sys.modules.update(dict.fromkeys(MAIN_NAMES, module))
    loading_main, _loaded = True, description
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        _loaded = None
        _restore(before)
        if isinstance(error, SystemExit):
            raise ImportError(
                f"{description.where} called sys.exit() while a worker loaded it; "
                'put what is to run once under `if __name__ == "__main__":`'
            ) from error
        raise
    finally:
        loading_main = False
    return module


def unreachable_reason(qualname: str) -> str | None:
    """Say why a worker will not find `qualname` in `__main__`; None when it will, as far as the source tells."""
    description = describe_main()
    if description is None:
        return (
            "it is defined in __main__, which is a notebook, an interactive session, -c or stdin here: no worker can import it"
        )
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    names = _names_bound(path, os.stat(path).st_mtime_ns)
    name = qualname.partition(".")[0]
    if name in names.outside or (names.is_open and name not in names.guarded):
        return None
    return (
        f"it is defined in __main__, but not at module level of {path} outside the "
        '`if __name__ == "__main__":` guard, and a worker loads that file without running the guarded part'
    )


def _restore(before: Mapping[str, ModuleType | None]) -> None:
    for name, module in before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


def _prepare(description: MainModule) -> tuple[ModuleType, CodeType]:
    module = ModuleType(MAIN_ALIAS)
    if description.kind == "path":
        module.__file__ = description.where
        # Not through a file loader: that one refuses scripts without ".py" and leaves a cache file beside them.
        with io.open_code(description.where) as source:
            return module, compile(source.read(), description.where, "exec", dont_inherit=True)
    spec = importlib.util.find_spec(description.where)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module named {description.where!r}, which the main program was started as with -m")
    code = spec.loader.get_code(description.where)  # type: ignore[attr-defined]  # a method of every loader runpy accepts
    if code is None:
        raise ImportError(f"{description.where} has no code object to run")
    module.__file__ = spec.origin
    module.__package__ = spec.parent
    return module, code


@functools.lru_cache(maxsize=4)
def _names_bound(path: str, mtime_ns: int) -> _BoundNames:
    """Read which names a script binds; the time of its last change is part of the cache's key."""
    names = _BoundNames()
    try:
        with open(path, "rb") as source:
            tree = ast.parse(source.read(), path)
    except (OSError, SyntaxError, ValueError):  # an archive or compiled: it cannot be told
        names.is_open = True
        return names
    names.visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names.outside.update(node.names)
        elif isinstance(node, ast.Name) and node.id in ("globals", "exec"):
            names.is_open = True
    return names


class _BoundNames(ast.NodeVisitor):
    """Collects the names that module-level statements bind, apart for the part guarded by `__name__ == "__main__"`.

    `is_open`: there may be more than the source tells (a star import, `globals()`, `exec`).
    """

    def __init__(self) -> None:
        self.outside: set[str] = set()
        self.guarded: set[str] = set()
        self.is_open = False
        self._current = self.outside

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._current.add(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  (names that ast.NodeVisitor looks for)
    visit_ClassDef = visit_FunctionDef  # noqa: N815

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._current.add(node.id)

    def visit_alias(self, node: ast.alias) -> None:
        self.is_open |= node.name == "*"
        self._current.add(node.asname or node.name.partition(".")[0])

    def visit_If(self, node: ast.If) -> None:
        before = self._current
        self._current = self.guarded if _is_main_guard(node.test) else before
        for statement in node.body:
            self.visit(statement)
        self._current = before
        for statement in node.orelse:
            self.visit(statement)


def _is_main_guard(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_is_main_guard(part) for part in test.values)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = [test.left, test.comparators[0]]
    names = [side.id for side in sides if isinstance(side, ast.Name)]
    texts = [side.value for side in sides if isinstance(side, ast.Constant)]
    return names == ["__name__"] and texts == ["__main__"]
