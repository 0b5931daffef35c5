"""The benchmarks run and write what they promise. How fast anything was is never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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
