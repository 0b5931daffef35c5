"""What a benchmark says at its end: summaries of repeated measurements, one table, one line on the machine, JSON.

Must name no host, user or path: a report is made to be shown.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median and range beside the values themselves."""
    return {"values": list(values), "median": statistics.median(values), "min": min(values), "max": max(values)}


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "ringloader")},
    }


def machine_line(facts: dict[str, Any]) -> str:
    """The same facts on one line."""
    rest = ", ".join(f"{name} {value}" for name, value in facts.items() if name not in ("cpu", "cores"))
    return f"{facts['cpu']}, {facts['cores']} cores, {rest}"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: with rich where it is installed, else as plain text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _show_plain(title, columns, rows)
        return
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # A pipe or file has no width of its own, and rich would cut the columns to 80 characters.
    (console if console.is_terminal else Console(width=140)).print(table)


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write the report where the user asked for it."""
    path.write_text(json.dumps(report, indent=1) + "\n")


def significant(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def with_range(facts: dict[str, Any], scale: float = 1.0) -> str:
    """Median and range in one cell."""
    low, middle, high = (significant(facts[name] * scale) for name in ("min", "median", "max"))
    return f"{middle} ({low}–{high})"


def _show_plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    print(title)
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
