"""How many batches per second does ringloader deliver, beside torch's DataLoader and beside what the machine can do at all?

Method. Six workloads (benchmarks/workloads.py), the same dataset class for all. Every measurement is a process of its own
(benchmarks/measure.py): it loads one epoch that is not counted, then whole epochs for at least `--seconds`. All take turns
within each round, beginning with another one each time, so that a slow minute of the machine falls on all of them. Given are
the median and the range over the rounds, and ratios of medians.

Both are shown at their best: with the fastest of three settings for prefetch, DataLoader with one worker where that is faster
still, as a short first pass finds on each workload; the table names them. DataLoader's workers are persistent and started by
fork. Where no workers at all (`inline`) are its fastest, it has a row for each, and so has ringloader: inline nothing is
loaded while the training step runs, which a consumer that does nothing can't show. `memcpy` is as many processes copying as
many bytes per batch from memory into shared memory, row by row or as a block, whichever is faster, and `memcpy past caches` is
the same where batches are large and the C library is told to copy rows as large as theirs past the caches; `getitem` is as
many processes that only call `dataset[i]`. "of limit" compares with the lower of getitem and the better memcpy. `in place` is
the same samples out of our array datasets, which write whole batches into the ring. SPDL is measured too where it is
installed.

`start`: from making a loader with 4 workers on a small dataset, of numpy and of torch, to its first batch, and the memory of
workers (PSS without shared segments, the process that ours are split off included); imports are not part of it, their time is
in the JSON.
`epoch`: from `iter` to the first batch of a later epoch, less the time that one batch takes inline.

    python -m benchmarks.bench_throughput --json throughput.json
    python -m benchmarks.bench_throughput --workloads arrays jpeg --consume sum --rounds 7
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.measure import row_nbytes
from benchmarks.workloads import SMALL, SMALL_TORCH, WORKLOADS

_ROOT = Path(__file__).resolve().parent.parent
_SECTIONS = ("throughput", "start", "epoch")
_PAST_CACHES = "memcpy past caches"
_COPIES = ("memcpy", _PAST_CACHES)
_LIMITS = (*_COPIES, "getitem")
# What is larger is in no cache when it is read.
_LARGE_BATCH_NBYTES = 16 << 20
_RATIOS = ("ratio_to_dataloader_workers", "ratio_to_dataloader", "ratio_to_limit")
# A measurement takes seconds; one that takes this long hangs, and the others should still be made.
_TIMEOUT_S = 180
_NUM_START_WORKERS = 4
_QUICK_NUM_BATCHES = 8
# Prefetch as the loader does it by itself.
_DEFAULT = 0

Measured = dict[str, list[float]]


@dataclass(frozen=True)
class Contender:
    """A row of the table: what is measured, with which setting."""

    name: str
    workload: str
    num_workers: int
    prefetch_factor: int = _DEFAULT

    @property
    def setting(self) -> str:
        """The setting in words."""
        if self.name in _LIMITS:
            return f"{self.num_workers} processes"
        if self.name == "SPDL threads":
            return f"{self.num_workers} threads"
        prefetch = f"prefetch {self.prefetch_factor}" if self.prefetch_factor else "default prefetch"
        return f"{self.num_workers} workers, {prefetch}" if self.num_workers else "inline"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table per section, write JSON if asked. Returns 1 when a measurement failed."""
    args = _parse(argv)
    facts = report.machine()
    result: dict[str, Any] = {"machine": facts, "options": {**vars(args), "json": None}, "failures": []}
    for section in args.sections:
        result[section] = _SECTION_BODIES[section](args, result["failures"])
    print(report.machine_line(facts))
    if args.json is not None:
        report.write_json(args.json, result)
    for failure in result["failures"]:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if result["failures"] else 0


def throughput(args: argparse.Namespace, failures: list[str]) -> list[dict[str, Any]]:
    """Batches per second of every contender on every workload."""
    contenders = [contender for name in args.workloads for contender in _contenders(args, name, failures)]
    measured = _interleave(contenders, args.rounds, _asked(args, args.seconds), failures)
    rows = [_throughput_row(contender, values) for contender, values in measured]
    _add_ratios(rows)
    _show_throughput(rows, f"batches per second, median (range), {args.rounds} rounds, consumer: {args.consume}")
    return rows


def start(args: argparse.Namespace, failures: list[str]) -> list[dict[str, Any]]:
    """Time to the first batch and memory per worker."""
    names = ("ringloader", "DataLoader") if args.quick else ("ringloader", "DataLoader", "DataLoader spawn")
    contenders = [Contender(name, workload, _NUM_START_WORKERS) for workload in (SMALL.name, SMALL_TORCH) for name in names]
    rows = _section_rows(contenders, "start", args, failures)
    cells = [
        (
            *(row[name] for name in ("workload", "contender", "setting")),
            *(report.with_range(row[name]) for name in ("first_s", "worker_mib")),
        )
        for row in rows
    ]
    report.show("start", ("workload", "contender", "setting", "first batch, s", "MiB per worker"), cells)
    return rows


def epoch(args: argparse.Namespace, failures: list[str]) -> list[dict[str, Any]]:
    """What the start of an epoch costs when the workers are there already."""
    contenders = [Contender(name, SMALL.name, args.workers) for name in ("ringloader", "DataLoader")]
    rows = _section_rows(contenders, "epoch", args, failures)
    cells = [
        (
            row["contender"],
            row["setting"],
            *(report.with_range(row[name], 1e3) for name in ("first_s", "batch_s", "overhead_s")),
        )
        for row in rows
    ]
    report.show("start of an epoch, ms", ("contender", "setting", "first batch", "one batch inline", "difference"), cells)
    return rows


def _contenders(args: argparse.Namespace, workload: str, failures: list[str]) -> list[Contender]:
    # Rows of several lengths have no copy of a block to compare with.
    limits = _LIMITS if WORKLOADS[workload].is_copied else ("getitem",)
    peers = ("SPDL threads",) if importlib.util.find_spec("spdl") is not None else ()
    ours = ("ringloader", "ringloader in place") if WORKLOADS[workload].has_in_place else ("ringloader",)
    prefetches = (_DEFAULT, 4, 8)
    both = [(args.workers, prefetch_factor) for prefetch_factor in prefetches]
    dataloaders = _at_their_best(args, "DataLoader", workload, [*both, (1, _DEFAULT), (0, _DEFAULT)], failures)
    has_inline = len(dataloaders) > 1
    return [
        *(best for name in ours for best in _at_their_best(args, name, workload, both, failures)),
        *([Contender("ringloader", workload, 0)] if has_inline else []),
        *dataloaders,
        *(Contender(name, workload, args.workers) for name in (*peers, *limits) if name != _PAST_CACHES or _tunables(workload)),
    ]


@functools.cache
def _tunables(workload: str) -> dict[str, str]:
    """What tells the C library to copy the rows of this workload past the caches, if that is worth it."""
    nbytes = row_nbytes(WORKLOADS[workload])
    if os.uname().machine != "x86_64" or nbytes * WORKLOADS[workload].batch_size < _LARGE_BATCH_NBYTES:
        return {}
    return {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={nbytes // 2:#x}"}


def _at_their_best(
    args: argparse.Namespace, name: str, workload: str, settings: Sequence[tuple[int, int]], failures: list[str]
) -> list[Contender]:
    """Measure settings (workers, prefetch) once each, shortly; return the fastest with workers, and inline if that is faster
    still."""
    candidates = [Contender(name, workload, *setting) for setting in dict.fromkeys(settings)]
    if args.quick:
        return candidates[:1]
    measured = _interleave(candidates, 1, _asked(args, args.seconds / 2), failures)
    rates = {contender: max(columns.get("rate", [0.0])) for contender, columns in measured}
    best = max((one for one in candidates if one.num_workers), key=rates.__getitem__)
    return [best, *(one for one in candidates if not one.num_workers and rates[one] > rates[best])]


def _asked(args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    num_batches = _QUICK_NUM_BATCHES if args.quick else 0
    return {
        "kind": "rate",
        "samples": args.samples,
        "consume": args.consume,
        "seconds": seconds,
        "num_batches": num_batches,
    }


def _section_rows(
    contenders: Sequence[Contender], kind: str, args: argparse.Namespace, failures: list[str]
) -> list[dict[str, Any]]:
    measured = _interleave(contenders, args.rounds, {"kind": kind, "samples": args.samples}, failures)
    return [
        {
            "workload": contender.workload,
            "contender": contender.name,
            "setting": contender.setting,
            **{name: report.summary(values) for name, values in columns.items()},
        }
        for contender, columns in measured
        if columns
    ]


def _interleave(
    contenders: Sequence[Contender], num_rounds: int, asked: dict[str, Any], failures: list[str]
) -> list[tuple[Contender, Measured]]:
    """Measure each contender once per round, each round beginning with another one."""
    measured: list[tuple[Contender, Measured]] = [(contender, {}) for contender in contenders]
    for number in range(num_rounds):
        shift = number % len(measured)
        for contender, columns in measured[shift:] + measured[:shift]:
            try:
                values = _measure(contender, asked)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                failures.append(f"{asked['kind']} of {contender.name} on {contender.workload}: {_reason(error)}")
                continue
            for name, value in values.items():
                columns.setdefault(name, []).append(value)
    return measured


def _measure(contender: Contender, asked: dict[str, Any]) -> dict[str, float]:
    job = {
        **asked,
        "contender": contender.name,
        "workload": contender.workload,
        "num_workers": contender.num_workers,
        "prefetch_factor": contender.prefetch_factor,
    }
    # Warnings are off: DataLoader has one about more workers than cores, which is what is asked for here.
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.measure", json.dumps(job)]
    tunables = _tunables(contender.workload) if contender.name == _PAST_CACHES else {}
    done = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, env={**os.environ, **tunables}
    )
    values: dict[str, float] = json.loads(done.stdout)
    return values


def _reason(error: Exception) -> str:
    lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _throughput_row(contender: Contender, columns: Measured) -> dict[str, Any]:
    rates = columns.get("rate")
    return {
        "workload": contender.workload,
        "contender": contender.name,
        "setting": contender.setting,
        "is_inline": contender.num_workers == 0,
        "rate": report.summary(rates) if rates else None,
        **dict.fromkeys(_RATIOS),
    }


def _add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Compare with DataLoader's fastest setting with workers, with its fastest of all, and with the lower limit."""
    measured = [row for row in rows if row["rate"]]
    for row in measured:
        if row["contender"] in _LIMITS:
            continue
        peers = [other for other in measured if other["workload"] == row["workload"]]
        dataloaders = [other for other in peers if other["contender"] == "DataLoader"]
        copies = _medians(other for other in peers if other["contender"] in _COPIES)
        rivals = (
            _medians(other for other in dataloaders if not other["is_inline"]),
            _medians(dataloaders),
            [*([max(copies)] if copies else []), *_medians(other for other in peers if other["contender"] == "getitem")],
        )
        for name, medians, choose in zip(_RATIOS, rivals, (max, max, min), strict=True):
            row[name] = row["rate"]["median"] / choose(medians) if medians else None


def _medians(rows: Iterable[dict[str, Any]]) -> list[float]:
    return [row["rate"]["median"] for row in rows]


def _show_throughput(rows: Sequence[dict[str, Any]], title: str) -> None:
    cells = []
    for row in rows:
        ratios = [report.significant(row[name]) if row[name] else "" for name in _RATIOS]
        rate = report.with_range(row["rate"]) if row["rate"] else "failed"
        cells.append((row["workload"], row["contender"], row["setting"], rate, *ratios))
    report.show(title, ("workload", "contender", "setting", "batches/s", "× with workers", "× fastest", "of limit"), cells)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_throughput", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each contender (5)")
    parser.add_argument("--seconds", type=float, default=1.5, help="least time counted per measurement (1.5)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (2)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--sections", nargs="+", choices=_SECTIONS, default=list(_SECTIONS), metavar="NAME")
    parser.add_argument("--samples", choices=("numpy", "torch"), default="numpy", help="what datasets return (numpy)")
    parser.add_argument("--consume", choices=("none", "sum"), default="none", help="sum: read every byte of each batch")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    parser.add_argument("--quick", action="store_true", help="one short round, no search for the best settings")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.workers < 1 or args.seconds <= 0:
        parser.error("--rounds and --workers are at least 1, --seconds is above 0")
    return argparse.Namespace(**{**vars(args), "rounds": 1, "seconds": 0.1}) if args.quick else args


_SECTION_BODIES = {"throughput": throughput, "start": start, "epoch": epoch}


if __name__ == "__main__":
    sys.exit(main())
