"""Programs of their own for tests: a script, its output, its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.runtime.conftest import UNIT_S

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Program:
    """How a script is run: options of the interpreter, words before it, changes of the environment."""

    flags: Sequence[str] = ()
    prefix: Sequence[str] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, script: Path, arguments: Sequence[str]) -> list[str]:
        return [*self.prefix, sys.executable, *self.flags, str(script), *arguments]


@contextmanager
def running(folder: Path, source: str, *arguments: str, program: Program = Program()) -> Iterator[subprocess.Popen[str]]:
    """Start `source` as a script, in a process group of its own; whatever is left of it at the end is killed."""
    script = folder / "script.py"
    script.write_text(source)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    process = subprocess.Popen(
        program.command(script, arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, **dict(program.environment)},
    )
    try:
        yield process
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(
    folder: Path, source: str, *arguments: str, program: Program = Program(), within_s: float = 20.0
) -> subprocess.CompletedProcess[str]:
    """Run `source` to its end. Raises subprocess.TimeoutExpired."""
    with running(folder, source, *arguments, program=program) as process:
        out, errors = process.communicate(timeout=within_s * UNIT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line a program prints; empty when it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def is_alive(pid: int) -> bool:
    """True for a process that has not ended; a zombie has."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def may(command: Sequence[str]) -> bool:
    """Whether this machine lets us run `command`, e.g. make a namespace."""
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
