"""Measurements in turn, each in a process of its own: the command line that several benchmarks have in common.

Owns the rounds, the table and the JSON; a benchmark owns its measurements, functions that take whether to be quick and return
numbers by name. Must not know what is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from benchmarks import report

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 300

Measures = Mapping[str, Callable[[bool], dict[str, float]]]


def main(
    name: str, title: str, doc: str | None, measures: Measures, *, once: Collection[str] = (), argv: Sequence[str] | None = None
) -> int:
    """Run the command line of `benchmarks.<name>`; those of `once` are measured in the first round alone."""
    module = f"benchmarks.{name}"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (5)")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--one", choices=measures, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(measures[args.one](args.quick)))
        return 0
    found: dict[str, dict[str, list[float]]] = {each: {} for each in measures}
    for number in range(1 if args.quick else args.rounds):
        for each in measures:
            if number and each in once:
                continue
            command = [sys.executable, "-m", module, "--one", each, *(["--quick"] if args.quick else [])]
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
            for quantity, value in json.loads(done.stdout).items():
                found[each].setdefault(quantity, []).append(value)
    rows = [
        {"measurement": each, "quantity": quantity, **report.summary(values)}
        for each, columns in found.items()
        for quantity, values in columns.items()
    ]
    cells = [(str(row["measurement"]), str(row["quantity"]), report.with_range(row)) for row in rows]
    report.show(title, ("measurement", "quantity", "median (range)"), cells)
    facts = report.machine()
    print(report.machine_line(facts))
    if args.json is not None:
        report.write_json(args.json, {"machine": facts, "rows": rows})
    return 0
