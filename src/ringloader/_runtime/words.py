"""Exceptions of the user's code in words that can travel, whatever they carry.

Owns their bounds. Must import light: workers start with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# How a worker that leaves by itself says why, before its stack.
LAST_WORDS = "last words: "
# What of an exception's text and traceback travels: enough to read, whatever an exception carries.
_MAX_TEXT = 64 << 10
_CUT = "\n... cut, {size:,} characters in all ...\n"


def type_name(error: BaseException) -> str:
    """Return the qualified name of an exception's type, without "builtins."."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def safe_text(error: BaseException) -> str:
    """Return `str(error)`, cut to a bounded length; a placeholder when the exception's own code fails."""
    try:
        text = str(error)
    except Exception as failure:
        return f"<its text could not be had: {type_name(failure)}>"
    return cut(text)


def run_user_code(body: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call code of the user's; a debugger that finds no terminal raises `bdb.BdbQuit` there, in every Python."""
    try:
        return body(*args, **kwargs)
    except SystemExit as left:
        quit_debugger = _debugger_quit(left)
        if quit_debugger is None:
            raise
        raise quit_debugger from None


def _debugger_quit(left: SystemExit) -> BaseException | None:
    """Return the `bdb.BdbQuit` that a debugger without a terminal ends with; from Python 3.14 on pdb leaves by `sys.exit`."""
    trace = left.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_globals.get("__name__") != "pdb":
        return None
    import bdb

    return bdb.BdbQuit().with_traceback(left.__traceback__)


def format_traceback(error: BaseException) -> str:
    """Return the formatted traceback, cut to a bounded length."""
    import traceback  # only when something failed: workers start lighter without it

    try:
        return cut("".join(traceback.format_exception(error)))
    except Exception:
        return cut("".join(traceback.format_tb(error.__traceback__)) + type_name(error))


def cut(text: str) -> str:
    """Shorten a text in its middle to about 64 Ki characters."""
    if len(text) <= _MAX_TEXT:
        return text
    return text[: _MAX_TEXT // 2] + _CUT.format(size=len(text)) + text[-_MAX_TEXT // 2 :]
