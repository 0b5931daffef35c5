"""A short soak: every kind of loader under random faults, every byte checked, nothing left."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
@pytest.mark.timeout(200)
def test_soak_of_a_minute_loses_repeats_and_leaves_nothing(tmp_path: Path) -> None:
    """Exit code 0, and enough went wrong for that to mean something."""
    path, log = tmp_path / "soak.json", tmp_path / "log"
    options = ["--minutes", "1", "--seed", "3", "--json", str(path), "--log", str(log)]
    command = ["scripts/soak", *options, "--least-kills", "50", "--least-hangs", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:] + log.read_text()[-4000:]
    report = json.loads(path.read_text())
    assert report["reasons"] == []
    assert len(report["loaders"]) == 11
    assert all(loader["batches"] > 100 for loader in report["loaders"].values())
    assert report["faults"]["kill"] >= 50
    assert sum(loader["num_restarts"] for loader in report["loaders"].values()) >= 50
