"""The quickstart does what it says, on a small scale."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
def test_quickstart_with_a_killed_worker_trains_and_delivers_each_window_once() -> None:
    """Training survives the kill: exit code 0, a restart, every window once per epoch, a lower loss."""
    command = [sys.executable, "scripts/quickstart_train.py", "--windows", "1024"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    assert "killed worker process" in done.stdout
    for epoch in (1, 2):
        assert _value(done.stdout, f"windows delivered once, epoch {epoch}") == "1024 of 1024"
    assert int(_value(done.stdout, "worker restarts")) >= 1
    first, last = map(float, _value(done.stdout, "loss, start → end").split(" → "))
    assert last < first
    for name in ("batches per second", "time the trainer waited for data"):
        assert float(_value(done.stdout, name).rstrip("%")) >= 0
    for loader in ("ringloader", "DataLoader"):
        assert float(_value(done.stdout, f"loading an epoch, {loader}").removesuffix(" s")) > 0


def _value(output: str, name: str) -> str:
    found = re.search(rf"{re.escape(name)}\s*│\s*(.*?)\s*│", output)
    assert found is not None, f"no line {name!r} in:\n{output}"
    return found[1]


def test_gpu_check_without_a_gpu_exits_with_3() -> None:
    """It says that nothing was checked, and does not pass for a check that did."""
    command = [sys.executable, "scripts/gpu_check.py"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, timeout=50, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing was checked" in done.stderr
