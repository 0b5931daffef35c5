"""Read from many kinds of loaders at once while faults are injected at random, and check everything.

Every batch is held against an undisturbed run: each once, in order, the same to the last byte. The process is watched for
descriptors, threads, mappings, memory, zombies and names in /dev/shm that grow. Ends with a report; exit code 1 when anything
was lost, repeated, changed or left behind, or fewer faults were survived than `--least-kills` and `--least-hangs` ask for.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import soak_datasets as data
from rich.console import Console
from rich.live import Live
from rich.table import Table
from soak_faults import Injector
from soak_readers import Crew, Reader, jobs

_SAMPLE_S = 1.0
# Longer than any fault takes: a reader that has had no batch for so long hangs.
_STUCK_S = 60.0
# What counts as the beginning, after which nothing may grow: a minute, or a third of a short run.
_SETTLE_S = 60.0
_NAMES_ON_MAIN = ("map", "together", "resumed", "stream", "threads")
# What a run may end with beyond what it began with. Memory: what the allocator's arenas and the report itself take.
_ALLOWED_NBYTES = 8 << 20


@dataclass(frozen=True)
class Usage:
    """What the process holds at one moment."""

    at_s: float
    descriptors: int
    threads: int
    mappings: int
    private_nbytes: int
    shm_names: int
    zombies: int


def usage(began_s: float) -> Usage:
    """Look at this process."""
    process = psutil.Process()
    status = Path("/proc/self/status").read_text()
    children = process.children(recursive=True)
    return Usage(
        time.monotonic() - began_s,
        process.num_fds(),
        process.num_threads(),
        Path("/proc/self/maps").read_text().count("\n"),
        int(status.split("RssAnon:")[1].split()[0]) << 10,
        len([name for name in os.listdir("/dev/shm") if name.startswith("rl-")]),
        sum(_is_zombie(child) for child in children),
    )


def _is_zombie(child: psutil.Process) -> bool:
    try:
        return bool(child.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Soak:
    """One run."""

    def __init__(self, seconds: float, seed: int, folder: str) -> None:
        self.seconds, self.seed = seconds, seed
        self.folder = folder
        self.began_s = time.monotonic()
        self.usages: list[Usage] = []
        self.num_printed = 0
        made = jobs(folder)
        data.Control.create(folder, len(made))
        self.readers = [Reader(job, number, seed * 100 + number) for number, job in enumerate(made)]
        main = [reader for reader in self.readers if reader.job.name in _NAMES_ON_MAIN]
        others = [reader for reader in self.readers if reader not in main]
        self.crews = [Crew(main, 0.02), Crew(others, 0.02)]
        controls = [data.Control(folder, number) for number in range(len(made))]
        self.injector = Injector(self.readers, main, controls, seed)

    def run(self) -> None:
        """Learn what is right, then read and inject for the time given, then read every epoch to its end."""
        for reader in self.readers:
            reader.learn()
        self.began_s = time.monotonic()
        thread = threading.Thread(target=self.crews[1].run, name="readers", daemon=True)
        watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self.injector.start()
        thread.start()
        watcher.start()
        self.crews[0].run()  # until the watcher ends it
        self.crews[1].end()
        thread.join(60)
        watcher.join(10)
        if thread.is_alive():
            self.crews[1].failure = self.crews[1].failure or TimeoutError("the second crew does not come to an end")

    def close(self) -> None:
        """Close every loader, and look once more."""
        for reader in self.readers:
            reader.close()
        self.usages.append(usage(self.began_s))

    def _watch(self) -> None:
        while time.monotonic() - self.began_s < self.seconds:
            time.sleep(_SAMPLE_S)
            self.usages.append(usage(self.began_s))
            self._check_progress()
            if any(crew.failure is not None for crew in self.crews) or self.injector.failure is not None:
                break
        self.crews[0].end()

    def _check_progress(self) -> None:
        """End everything when a reader has had nothing for a long time: it may sit in a `next` that never returns."""
        for reader in self.readers:
            waited_s = time.monotonic() - max(reader.latest_s, self.began_s)
            if waited_s > _STUCK_S:
                sys.stderr.write(f"{reader.job.name} has had no batch for {waited_s:.0f} s\n")
                faulthandler.dump_traceback(all_threads=True)
                self.injector.end()
                os._exit(3)

    @property
    def failures(self) -> list[BaseException]:
        """What ended a crew or the injector."""
        found = [crew.failure for crew in self.crews]
        return [failure for failure in [*found, self.injector.failure] if failure is not None]


def growth(soak: Soak) -> dict[str, Any]:
    """What is more at the end than after the beginning: medians over a tenth of the run, for all of it comes and goes."""
    steady = [one for one in soak.usages if one.at_s >= min(_SETTLE_S, soak.seconds / 3)][:-1]
    num = max(3, len(steady) // 10)
    if len(steady) < 2 * num:
        return {}
    found: dict[str, Any] = {}
    for name in ("descriptors", "threads", "mappings", "private_nbytes"):
        first, last = (np.median([getattr(one, name) for one in part]) for part in (steady[:num], steady[-num:]))
        found[name] = float(last - first)
    times = np.array([one.at_s for one in steady]) / 60
    memory = np.array([one.private_nbytes for one in steady]) / 1024
    found["memory_kib_per_minute"] = float(np.polyfit(times, memory, 1)[0])
    return found


def judge(soak: Soak, least_kills: int, least_hangs: int) -> list[str]:
    """Every reason why this run is no good."""
    reasons = [f"{type(failure).__name__}: {failure}" for failure in soak.failures]
    last = soak.usages[-1]
    claimed = data.count_claimed(soak.folder)
    grown = growth(soak)
    for name, allowed in (("descriptors", 16), ("threads", 6), ("mappings", 60), ("private_nbytes", _ALLOWED_NBYTES)):
        if grown.get(name, 0) > allowed:
            reasons.append(f"{grown[name]:.0f} {name} more at the end than after the beginning")
    if last.zombies or last.shm_names:
        reasons.append(f"{last.zombies} zombies and {last.shm_names} names in /dev/shm are left")
    if psutil.Process().children():
        reasons.append(f"processes are left: {psutil.Process().children()}")
    num_kills = soak.injector.done["kill"] + sum(claimed[kind] for kind in ("exit", "abort", "garbage", "torn"))
    idle = [reader.job.name for reader in soak.readers if not reader.num_batches]
    if idle:
        reasons.append(f"nothing was read by {', '.join(idle)}")
    if num_kills < least_kills or claimed["hang"] < least_hangs:
        reasons.append(f"{num_kills} kills and {claimed['hang']} hangs only, of {least_kills} and {least_hangs} asked for")
    return reasons


def reader_table(soak: Soak) -> Table:
    """What every loader has been through."""
    table = Table(title=f"{time.monotonic() - soak.began_s:.0f} s, seed {soak.seed}")
    table.add_column("loader")
    for name in (
        "epochs",
        "batches checked",
        "kept, abandoned, resumed, interrupted",
        "restarts",
        "made again",
        "retries",
        "changes",
    ):
        table.add_column(name, justify="right")
    for reader in soak.readers:
        stats, counts = reader.stats(), reader.counts
        done = ", ".join(str(counts[name]) for name in ("kept", "abandoned", "resumed", "interrupted"))
        numbers = [stats.get(name, 0) for name in ("num_restarts", "num_refilled", "num_retried", "num_recycled")]
        table.add_row(reader.job.name, str(reader.num_epochs), f"{reader.num_batches:,}", done, *map(str, numbers))
    return table


def report(soak: Soak, console: Console, reasons: list[str]) -> None:
    """The tables, then a sentence."""
    console.print(reader_table(soak))
    table = Table(title="faults")
    for name in ("fault", "asked for", "happened"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    claimed = data.count_claimed(soak.folder)
    for kind, number in sorted(soak.injector.done.items()):
        happened = claimed.get(kind, number)
        if kind == "interrupt":
            happened = sum(reader.counts["interrupted"] for reader in soak.readers)
        table.add_row(kind, str(number), str(happened))
    console.print(table)
    grown = growth(soak)
    words = ", ".join(f"{name} {value:+,.1f}" for name, value in grown.items()) or "too short to tell"
    console.print(f"growth after the beginning: {words}")
    last = soak.usages[-1]
    console.print(f"at the end: {last.zombies} zombies, {last.shm_names} names in /dev/shm, {soak.num_printed:,} bytes printed")
    total = sum(reader.num_batches for reader in soak.readers)
    verdict = "; ".join(reasons) if reasons else f"{total:,} batches, none lost, repeated, out of order or changed"
    console.print(verdict, style="red" if reasons else "green", markup=False)


def drain(fd: int, soak: Soak) -> None:
    """Take what workers print, and count it."""
    while chunk := os.read(fd, 1 << 16):
        soak.num_printed += len(chunk)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to read")
    parser.add_argument("--seed", type=int, default=1, help="of every draw of the injector")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--log", type=Path, help="write the loaders' warnings to this file")
    parser.add_argument("--least-kills", type=int, default=0, help="fail if fewer workers were killed")
    parser.add_argument("--least-hangs", type=int, default=0, help="fail if fewer workers hung")
    options = parser.parse_args()
    os.environ[data.SOAK_PID] = str(os.getpid())
    # Workers print on our stdout, as much as they like: the report goes to a copy of it.
    console = Console(file=os.fdopen(os.dup(1), "w"), width=None if sys.stdout.isatty() else 150)
    read_fd, write_fd = os.pipe()
    os.dup2(write_fd, 1)
    os.close(write_fd)
    logging.basicConfig(filename=options.log or os.devnull, level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and clean up
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(options.minutes * 60, options.seed, folder)
        threading.Thread(target=drain, args=(read_fd, soak), daemon=True).start()
        with Live(get_renderable=lambda: reader_table(soak), console=console, refresh_per_second=1, transient=True):
            try:
                soak.run()
            finally:
                soak.injector.end()
            soak.close()
        reasons = judge(soak, options.least_kills, options.least_hangs)
        report(soak, console, reasons)
        if options.json is not None:
            numbers = {"seconds": soak.seconds, "seed": soak.seed, "faults": dict(soak.injector.done), "growth": growth(soak)}
            numbers |= {
                "claimed": data.count_claimed(folder),
                "reasons": reasons,
                "usage": [asdict(one) for one in soak.usages],
            }
            numbers["loaders"] = {one.job.name: {"batches": one.num_batches, **one.stats()} for one in soak.readers}
            options.json.write_text(json.dumps(numbers, indent=1))
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
