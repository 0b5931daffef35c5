"""Imports point down, the pure part is pure, and importing the package stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringloader

_SOURCE = Path(ringloader.__file__).parent
# Lower may not import higher. A module's level is its folder's, or its own at the top.
_LEVELS = {
    "errors": 0,
    "_core": 1,
    "_specs": 2,
    "_kernels": 1,
    "_collate": 2,
    "factory": 3,
    "collation": 3,
    "datasets": 4,
    "arrays": 5,
    "shared_records": 5,
    "sharing": 5,
    "samplers": 4,
    "_runtime": 5,
    "progress": 6,
    "orders": 6,
    "stats": 6,
    "iterators": 6,
    "leases": 6,
    "loader": 7,
    "__init__": 8,
}
_PURE_ALLOWED = {"numpy", "msgpack", "ringloader"}
# What reaches outside a computation; the pure part gets facts and the time from its caller.
_IMPURE = {
    "os",
    "socket",
    "subprocess",
    "threading",
    "time",
    "mmap",
    "multiprocessing",
    "select",
    "selectors",
    "tempfile",
    "io",
}
_MODULES = sorted(path.relative_to(_SOURCE) for path in _SOURCE.rglob("*.py"))


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((_SOURCE / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _level(dotted: str) -> int:
    return _LEVELS[dotted.split(".")[1]]


@pytest.mark.parametrize("path", _MODULES, ids=str)
def test_module_imports_nothing_above_it(path: Path) -> None:
    """Every import inside the package points to the same level or down."""
    own = _LEVELS[path.parts[0].removesuffix(".py")]
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "ringloader" and len(parts) > 1 and parts[1] in _LEVELS:
            assert _level(name) <= own, f"{path} imports {name}"


@pytest.mark.parametrize("path", [path for path in _MODULES if path.parts[0] in ("_core", "errors.py")], ids=str)
def test_core_module_touches_no_system(path: Path) -> None:
    """The core imports the standard library, numpy and msgpack, and nothing that waits, sleeps, opens or starts."""
    for name in _imports(path):
        root = name.split(".")[0]
        assert root in _PURE_ALLOWED or root in sys.stdlib_module_names, f"{path} imports {name}"
        assert root not in _IMPURE, f"{path} imports {name}"


def test_locks_are_taken_by_with_only_where_no_signal_is_handled() -> None:
    """On threads of our own. On the user's thread an interrupt would leave them held, from Python 3.14 on: see `locking`."""
    own_threads = {Path("_runtime/watch.py"), Path("_runtime/thread_worker.py")}
    found = set()
    for path in _MODULES:
        for node in ast.walk(ast.parse((_SOURCE / path).read_text())):
            for item in node.items if isinstance(node, ast.With) else []:
                held = ast.unparse(item.context_expr)
                if not isinstance(item.context_expr, ast.Call) and re.search("lock|bell|lending|sweeping", held, re.IGNORECASE):
                    found.add(path)
    assert found == own_threads


def test_torch_is_imported_where_it_may_be() -> None:
    """One module imports torch when it is imported; everything else asks it to."""
    importers = {str(path) for path in _MODULES if any(name.split(".")[0] == "torch" for name in _imports(path))}
    assert importers <= {"_collate/tensors.py"}


_LIGHT = """
import sys
sys.modules["torch"] = None
import ringloader, ringloader._core.scheduler, ringloader._runtime.worker, ringloader.loader
from ringloader import *
"""


def test_import_of_everything_works_without_torch() -> None:
    """With torch blocked, every module but the one for tensors can be imported."""
    subprocess.run([sys.executable, "-c", _LIGHT], check=True, timeout=60)


def test_worker_imports_no_more_than_it_needs() -> None:
    """A worker's start brings in neither torch nor the standard library's heavy parts."""
    heavy = ["torch", "subprocess", "logging", "tempfile", "importlib.abc", "pathlib", "_hashlib", "posix_ipc"]
    script = (
        "import sys, ringloader._runtime.worker, ringloader._runtime.building\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist_and_are_listed() -> None:
    """`__all__` names exactly what the package offers, and each can be had."""
    assert sorted(ringloader._HOMES) == sorted(ringloader.__all__)
    for name in ringloader.__all__:
        assert getattr(ringloader, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ringloader.nonsense  # noqa: B018
