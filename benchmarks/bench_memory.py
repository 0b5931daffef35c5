"""What does a large dataset cost in memory, with one worker and with eight?

Method. Each configuration is a process of its own: it makes the dataset, reads epochs until every worker has touched every row
(each sample touches all of them), and sums the proportional set size (PSS) of itself, its workers and what they are split
off, all shared memory included. Then it reads two more epochs (of dicts and records one) and sums again, for what grows by
being read. Datasets:
`plain`, a user's class with an array; `tensors`, torch's `TensorDataset` of rows of 4 KiB, of which one in 64 KiB is read, the
kernel mapping those around it, until the RSS of each worker is as large as the data; `shared`, the class over `SharedArrays`;
`file`, over a memory-mapped `.npy`; `dicts`, a list of small dicts, which ringloader refuses to send, and `records`, the same
as `SharedRecords`. What would not fit into three quarters of the memory available is left out and says so. What the process
took before it made the dataset, torch imported, is taken off: a training program has that anyway. `costs` are times: making a
`SharedArrays` against copying into new memory, attaching one by name, and reading one record.

    python -m benchmarks.bench_memory --json memory.json --plot memory.png
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.measure import helpers_of

_ROOT = Path(__file__).resolve().parent.parent
_ROW_NBYTES = 64 << 10
_TENSOR_ROW_NBYTES = 4 << 10
_RECORD_NBYTES = 700  # of a dict of five, as Python keeps it
_TIMEOUT_S = 600
_STYLES = {"ringloader": "C0o-", "fork": "C1s-", "spawn": "C2^-"}
_CASES = {
    "plain": ("ringloader", "fork", "spawn"),
    "tensors": ("ringloader", "fork", "spawn"),
    "shared": ("ringloader",),
    "file": ("ringloader", "fork", "spawn"),
    "dicts": ("fork", "spawn"),
    "records": ("ringloader", "fork"),
}


class Touches:
    """Each sample touches every row; returned is the process that did."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return np.array([os.getpid(), int(float(self.rows[:, ::512].sum()) * 0)])


class EachRange:
    """A sampler: of each `step` samples one, shuffled, a few times over."""

    def __init__(self, num_samples: int, step: int, num_passes: int) -> None:
        self.places = np.arange(0, num_samples, step)
        self.num_passes = num_passes
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.places) * self.num_passes

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.num_passes):
            yield from self.rng.permutation(self.places).tolist()


class TouchesRecords:
    """The same over records: fewer samples, for each takes seconds."""

    def __init__(self, records: Any, num_samples: int) -> None:
        self.records = records
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        total = 0
        for record in self.records:
            total += record["label"]
        return np.array([os.getpid(), total * 0])


@dataclass(frozen=True)
class Job:
    """One configuration. data_nbytes: of the arrays; num_records: of the dicts."""

    case: str
    contender: str
    num_workers: int
    data_nbytes: int
    num_records: int
    num_epochs: int = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print two tables, write JSON and a plot if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of workers (1 2 4 8)")
    parser.add_argument("--mib", type=int, default=2048, help="MiB of the arrays (2048)")
    parser.add_argument("--records", type=int, default=3_000_000, help="how many dicts (3,000,000)")
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=list(_CASES), help="which datasets")
    parser.add_argument("--loaders", nargs="+", choices=_STYLES, default=list(_STYLES), help="which loaders")
    parser.add_argument("--json", type=Path, help="write all measurements here, after each")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one is not None:
        given = json.loads(args.one)
        print(json.dumps(measure_costs(given["mib"]) if "mib" in given else measure(Job(**given))))
        return 0
    rows = []
    for case in args.cases:
        for contender in [one for one in _CASES[case] if one in args.loaders]:
            for num_workers in args.workers:
                job = Job(case, contender, num_workers, args.mib << 20, args.records)
                rows.append({**vars(job), **_run(job)})
                if args.json is not None:
                    report.write_json(args.json, {"rows": rows})
    columns = (
        "dataset",
        "loader",
        "workers",
        "data, MiB",
        "touched by all, MiB",
        "after two more epochs, MiB",
        "beyond the data, per worker",
    )
    report.show("proportional memory of all processes", columns, [_cells(row) for row in rows])
    costs = _child({"mib": args.mib})
    report.show("costs", ("what", "value"), [(name, report.significant(value)) for name, value in costs.items()])
    facts = report.machine()
    print(report.machine_line(facts))
    if args.json is not None:
        report.write_json(args.json, {"machine": facts, "rows": rows, "costs": costs})
    if args.plot is not None:
        plot(rows, args.plot)
    return 0


def _run(job: Job) -> dict[str, Any]:
    from ringloader._runtime.memory import available_nbytes

    needed = _estimate(job)
    if needed > available_nbytes() * 3 // 4:
        return {"skipped": f"would take {needed >> 20:,} MiB"}
    return _child(vars(job))


def _child(given: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bench_memory", "--one", json.dumps(given)]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"skipped": f"took more than {_TIMEOUT_S} s"}
    if done.returncode:
        return {"skipped": done.stderr.strip().splitlines()[-1][:120] if done.stderr.strip() else f"code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _estimate(job: Job) -> int:
    """What a configuration takes at its worst."""
    size = job.num_records * _RECORD_NBYTES if job.case in ("dicts", "records") else job.data_nbytes
    copies = 2
    if job.contender == "spawn" and job.case not in ("file", "tensors"):  # torch moves tensors into shared memory
        copies = job.num_workers + 3  # each its own, and what is on its way
    if job.case == "dicts":
        copies = max(copies, job.num_workers + 1)
    return size * copies


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = (row["case"], row["contender"], str(row["num_workers"]))
    if "skipped" in row:
        return (*head, "", str(row["skipped"]), "", "")
    per_worker = (row["later_mib"] - row["data_mib"] * row["kept"]) / row["num_workers"]
    return (*head, f"{row['data_mib']:,.0f}", f"{row['first_mib']:,.0f}", f"{row['later_mib']:,.0f}", f"{per_worker:,.0f}")


def measure(job: Job) -> dict[str, Any]:
    """Sum the memory of one configuration, after all workers have touched everything, and after two more epochs."""
    import torch  # noqa: F401  # what a training program has anyway

    if job.contender == "ringloader":
        import ringloader.loader  # noqa: F401

    base = _pss(set())
    with (
        tempfile.TemporaryDirectory() as folder,
        _dataset(job, Path(folder)) as (dataset, data_nbytes, kept),
        _loader(job, dataset) as loader,
    ):
        pids: set[int] = set()
        for _ in range(10):
            pids |= _read(job, loader, data_nbytes)
            if len(pids) >= job.num_workers:
                break
        num_more = job.num_epochs - 1 if job.case not in ("dicts", "records") else 1
        first = _pss(pids | helpers_of(loader))
        for _ in range(num_more):
            pids |= _read(job, loader, data_nbytes)
        later = _pss(pids | helpers_of(loader))
    mib = 1 << 20
    return {
        "base_mib": base / mib,
        "first_mib": (first - base) / mib,
        "later_mib": (later - base) / mib,
        "data_mib": data_nbytes / mib,
        "kept": kept,
        "touched_by": len(pids),
    }


def _read(job: Job, loader: Any, data_nbytes: int) -> set[int]:
    """Read an epoch; returns the workers that have touched everything."""
    if job.case != "tensors":
        return {int(batch[0, 0]) for batch in loader}
    for _ in loader:
        pass
    workers = loader.stats().worker_pids if job.contender == "ringloader" else [w.pid for w in loader._iterator._workers]
    return {pid for pid in workers if _value_of(f"/proc/{pid}/status", "VmRSS:") > data_nbytes}


def _value_of(path: str, name: str) -> int:
    """Bytes, of a file of the kernel's that says them in kB."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


def _pss(pids: set[int]) -> int:
    return sum(_value_of(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in {os.getpid(), *pids})


@contextlib.contextmanager
def _dataset(job: Job, folder: Path) -> Iterator[tuple[Any, int, int]]:
    """The dataset, the bytes of its data, and how many times they are there with ringloader: a plain one twice."""
    if job.case in ("dicts", "records"):
        yield _records(job)
        return
    rows = np.ones((max(1, job.data_nbytes // _ROW_NBYTES), _ROW_NBYTES // 4), np.float32)
    if job.case == "plain":
        yield Touches(rows), rows.nbytes, 2
    elif job.case == "tensors":
        import torch
        from torch.utils.data import TensorDataset

        yield TensorDataset(torch.from_numpy(rows.reshape(-1, _TENSOR_ROW_NBYTES // 4))), rows.nbytes, 2
    elif job.case == "shared":
        from ringloader import SharedArrays

        shared = SharedArrays({"rows": rows})
        nbytes = rows.nbytes
        del rows
        yield Touches(shared["rows"]), nbytes, 1
    else:
        np.save(folder / "rows.npy", rows)
        nbytes = rows.nbytes
        del rows
        yield Touches(np.load(folder / "rows.npy", mmap_mode="r")), nbytes, 1


def _records(job: Job) -> tuple[Any, int, int]:
    def made() -> Iterator[dict[str, Any]]:
        for number in range(job.num_records):
            yield {
                "id": number,
                "path": f"train/image_{number}.jpg",
                "label": number % 1000,
                "weight": number / 7,
                "tags": [number % 5],
            }

    if job.case == "dicts":
        return TouchesRecords(list(made()), 3 * job.num_workers), job.num_records * _RECORD_NBYTES, 1
    from ringloader import SharedRecords

    records = SharedRecords(made())
    return TouchesRecords(records, 3 * job.num_workers), records.nbytes, 1


@contextlib.contextmanager
def _loader(job: Job, dataset: Any) -> Iterator[Any]:
    read: dict[str, Any] = {"batch_size": 1}
    if job.case == "tensors":
        step = _ROW_NBYTES // _TENSOR_ROW_NBYTES
        read = {"batch_size": 32, "sampler": EachRange(len(dataset), step, 2 * job.num_workers)}
    if job.contender == "ringloader":
        from ringloader import Loader

        # Out of order all workers get batches; in order such quick ones would be made by few.
        with Loader(dataset, num_workers=job.num_workers, in_order=job.case != "tensors", **read) as loader:
            loader.start()
            yield loader
        return
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    options: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": job.contender}
    yield DataLoader(dataset, num_workers=job.num_workers, **read, **options)


def measure_costs(mib: int) -> dict[str, float]:
    """Times of making, attaching and reading."""
    from ringloader import SharedArrays, SharedRecords
    from ringloader.sharing import remove_leftovers

    rows = np.ones((mib << 20) // 8)
    made_s, copied_s = [], []
    for _ in range(3):
        began_s = time.perf_counter()
        shared = SharedArrays({"rows": rows})
        made_s.append(time.perf_counter() - began_s)
        shared.close()
        began_s = time.perf_counter()
        copied = np.empty_like(rows)
        copied[...] = rows
        copied_s.append(time.perf_counter() - began_s)
        del copied
    found = {
        "make SharedArrays, GB/s": rows.nbytes / float(np.median(made_s)) / 1e9,
        "copy into new memory, GB/s": rows.nbytes / float(np.median(copied_s)) / 1e9,
    }
    found["ratio"] = found["make SharedArrays, GB/s"] / found["copy into new memory, GB/s"]
    name = f"bench-{uuid.uuid4().hex[:8]}"
    del rows
    with SharedArrays.attach_or_build(name, lambda: SharedArrays.empty({"rows": (((5 * mib) << 20,), "uint8")})):
        source = f"import time; import ringloader.sharing as s; b = time.perf_counter(); a = s.SharedArrays.attach({name!r}); "
        source += "x = a['rows'][-1]; print(time.perf_counter() - b)"
        done = subprocess.run([sys.executable, "-c", source], cwd=_ROOT, capture_output=True, text=True, check=True)
        found[f"attach {5 * mib / 1024:g} GiB by name, ms"] = float(done.stdout) * 1e3
    remove_leftovers(name)
    records = SharedRecords(
        {"id": k, "path": f"image_{k}.jpg", "label": k % 10, "w": 0.5, "t": [k % 5]} for k in range(100_000)
    )
    began_s = time.perf_counter()
    for number in range(len(records)):
        records[number]
    found["reading one record, us"] = (time.perf_counter() - began_s) / len(records) * 1e6
    return found


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw memory over the number of workers, one panel per dataset."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure, axes = pyplot.subplots(1, len(cases), figsize=(3 * len(cases), 3), squeeze=False)
    for panel, case in zip(axes[0], cases, strict=True):
        for contender in dict.fromkeys(row["contender"] for row in rows):
            points = [row for row in rows if row["case"] == case and row["contender"] == contender and "later_mib" in row]
            label = contender if contender == "ringloader" else f"DataLoader, {contender}"
            if points:
                heights = [row["later_mib"] / 1024 for row in points]
                panel.plot([row["num_workers"] for row in points], heights, _STYLES[contender], label=label)
        panel.set(title=case, xlabel="workers", ylim=(0, None))
        panel.legend(fontsize="x-small")
        panel.set_xlim(0, max(row["num_workers"] for row in rows) + 1)
    axes[0][0].set_ylabel("GiB of all processes")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
