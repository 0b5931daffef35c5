"""The benchmarks run and write what they promise. How fast anything was is never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.long


def test_bench_throughput_quick_writes_a_row_for_each_contender(tmp_path: Path) -> None:
    """A smoke run measures both loaders and both limits, and its JSON has medians, ranges and ratios."""
    path = tmp_path / "throughput.json"
    options = ["--quick", "--workloads", "tiny", "--sections", "throughput", "--json", str(path)]
    command = [sys.executable, "-m", "benchmarks.bench_throughput", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    report = json.loads(path.read_text())
    assert report["failures"] == []
    assert {"cpu", "cores", "python", "torch", "numpy"} <= report["machine"].keys()
    assert str(report["machine"]["cpu"]) in done.stdout
    rows = {row["contender"]: row for row in report["throughput"]}
    assert {"ringloader", "DataLoader", "memcpy", "getitem"} <= rows.keys()
    for row in rows.values():
        assert row["workload"] == "tiny"
        assert row["rate"]["min"] <= row["rate"]["median"] <= row["rate"]["max"]
        assert len(row["rate"]["values"]) == 1
    for name in ("ratio_to_dataloader_workers", "ratio_to_dataloader", "ratio_to_limit"):
        assert rows["ringloader"][name] > 0
        assert rows["memcpy"][name] is None


def _run(module: str, path: Path, *options: str) -> dict[str, object]:
    command = [sys.executable, "-m", f"benchmarks.{module}", "--json", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, object] = json.loads(path.read_text())
    return report


def test_bench_recovery_quick_measures_every_recovery(tmp_path: Path) -> None:
    """Workers were killed and replaced, parents killed and their workers gone: each has a time."""
    report = _run("bench_recovery", tmp_path / "recovery.json", "--quick")
    rows: list[dict[str, Any]] = report["rows"]  # type: ignore[assignment]
    assert {row["measurement"] for row in rows} == {"kill to next batch", "one kill per second", "parent killed", "watching"}
    assert all(row["median"] >= 0 for row in rows)


def test_bench_memory_small_counts_what_every_worker_has_touched(tmp_path: Path) -> None:
    """Each configuration was read by as many processes as it says."""
    options = ["--mib", "8", "--records", "2000", "--workers", "2", "--cases", "shared", "records"]
    report = _run("bench_memory", tmp_path / "memory.json", *options)
    rows: list[dict[str, Any]] = report["rows"]  # type: ignore[assignment]
    assert len(rows) == 3
    assert all(row["touched_by"] == row["num_workers"] == 2 for row in rows)
    costs: dict[str, float] = report["costs"]  # type: ignore[assignment]
    assert min(costs.values()) > 0
