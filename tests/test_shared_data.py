"""The script that shares one copy between ranks, on a small scale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_ranks_read_all_rows_of_one_copy_which_is_removed_at_the_end() -> None:
    """Three ranks, each row once, every label right, nothing left in /dev/shm."""
    name = f"test-shared-data-{os.getpid()}"
    command = [sys.executable, "scripts/shared_data.py", "--ranks", "3", "--rows", "3000", "--name", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert len(lines) == 3
    assert all("1000 rows read, 1000 labels right" in line for line in lines)
    assert f"removed: {name}-records {name}-rows" in done.stdout
    assert [entry for entry in os.listdir("/dev/shm") if name in entry] == []
